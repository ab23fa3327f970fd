"""The fetches that one unit holds: landing memory, joins, and what has landed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from softload.config import Layout, ReadMode
from softload.context import Context
from softload.fetches import Fetch, FetchListener, Part, Turn
from softload.geometry.layout import layer_groups, ranges_of
from softload.landing import Segment, Share
from softload.outcomes import PageStatus
from softload.planning import Column
from softload.protocols import Descriptor
from softload.unit_pages import UnitPages, Wanted

__all__ = ["UnitFetches"]

_PAGES_PER_TURN = 128
"""Pages that are planned in one turn of the event loop: about a millisecond."""


class UnitFetches:
    """The fetches that one unit holds.

    Args:
        context: the loader's parts.
        pages: what the unit wants; told what cannot be had.
        listener: told when a fetch changes.
        share: whose landing memory it uses.
    """

    def __init__(self, context: Context, pages: UnitPages, listener: FetchListener, share: Share) -> None:
        self._context = context
        self._pages = pages
        self._listener = listener
        self._share = share
        self._fetches: dict[Wanted, Fetch] = {}
        self._wants: dict[Fetch, list[Wanted]] = {}
        self._replaced: list[Fetch] = []
        self.descriptors: dict[str, Descriptor | None] = {}
        self.bytes_read = 0

    def __iter__(self) -> Iterator[Fetch]:
        return iter(list(self._wants))

    def of(self, fetch: Fetch) -> tuple[Wanted, ...]:
        """What the unit wants a fetch for."""
        return tuple(self._wants.get(fetch, ()))

    def get(self, wanted: Wanted) -> Fetch | None:
        """The fetch of an object, if it is held."""
        return self._fetches.get(wanted)

    def segment(self, column: Column, page: int) -> Segment:
        """Where an object's bytes are."""
        return self._fetches[Wanted(column, page)].segment

    def landed(self, columns: Iterable[Column], layers: range | None = None) -> bool:
        """Whether the bytes that the unit's good pages need, for `layers` or for all, are here and checked.

        The unit itself asks, between its copies: so it does not copy any more from what was replaced meanwhile.
        """
        self._leave_replaced()
        for column in columns:
            for page in self._pages.pages_of(column):
                fetch = self._fetches.get(Wanted(column, page))
                if fetch is None or not (fetch.landed if layers is None else fetch.landed_for(layers)):
                    return False
        return True

    async def read(self, turn: Turn) -> None:
        """Join what is on its way, be granted landing memory for the rest, whole and in turn, then queue its reads."""
        landing = self._context.landing
        await self._context.pacer.turn()
        wanted = self._objects()
        while landing.cost(_runs(wanted)) > landing.limit(self._share):
            pages = self._pages.pages
            self._pages.limit(pages - max(1, pages // 8), PageStatus.SHED)
            wanted = self._objects()
        self._pages.restrict_windows()
        self._join()  # before asking for room: room is made by freeing what nobody holds
        new = [(item, size) for item, size in wanted if item not in self._fetches]
        if new and landing.sheds:
            self._pages.limit(0, PageStatus.SHED)
            self.prune()
            new = []
        # Nothing to read waits for nobody: a miss is told at once, whoever queues for room.
        segments = landing.try_grant(_runs(new), self._share) if new else []
        if segments is None:
            # Who waits holds nothing, and what is here now need not be here when there is room: so room for all of it.
            self.let_go_all(keep=True)
            new = wanted
            segments = await landing.grant(_runs(new), self._share) or []
            self._join()
        await self._assign(new, segments, turn)

    def take_over(self, source: UnitFetches) -> None:
        """Hold what another unit's run landed, for this one's own columns.

        Raises:
            ValueError: other page keys than the source's.
        """
        theirs = {(c.spec, c.component): c for c in source._pages.all_columns()}
        for column in self._pages.all_columns():
            match = theirs.get((column.spec, column.component))
            if match is None or match.keys[: len(column.keys)] != column.keys:
                raise ValueError(
                    f"request {self._pages.request_id!r}, pool {column.pool.name}: expected the prefetched page keys "
                    f"or the first of them, got others"
                )
            for page in range(len(column.keys)):
                fetch = source.get(Wanted(match, page))
                if fetch is not None:
                    self._hold(Wanted(column, page), fetch)

    def replace(self, old: Fetch, new: Fetch) -> None:
        """Hold `new`, which has landed, for all that `old` was held for. `old` is held until the running copy ends."""
        for wanted in self._wants.pop(old, ()):
            self._hold(wanted, new)
            self._replaced.append(old)

    def prune(self, *, timed_out: bool = False) -> None:
        """Let go of what the unit's good pages do not need any more."""
        for wanted in [w for w in self._fetches if w.page not in self._pages.pages_of(w.column)]:
            self._let_go(wanted, timed_out=timed_out)

    def let_go(self, columns: Iterable[Column], *, keep: bool) -> None:
        """Let go of whole columns, which are copied."""
        for column in columns:
            for page in self._pages.pages_of(column):
                self._let_go(Wanted(column, page), keep=keep)

    def let_go_all(self, *, keep: bool) -> None:
        """Let go of everything; landed bytes may serve later units with `keep`."""
        for wanted in list(self._fetches):
            self._let_go(wanted, keep=keep)
        self._leave_replaced()

    def _objects(self) -> list[tuple[Wanted, int]]:
        """The objects that are needed, with their sizes; each key once."""
        keys: set[str] = set()
        objects = []
        for wanted in self._pages.needed():
            if wanted.key not in keys:
                keys.add(wanted.key)
                objects.append((wanted, self._size(wanted)))
        return objects

    def _join(self) -> None:
        """Hold what is here or on its way, all at once: it may be gone after the next await."""
        for wanted in self._pages.needed():
            if wanted not in self._fetches:
                self._join_one(wanted)

    async def _assign(self, new: list[tuple[Wanted, int]], segments: list[Segment], turn: Turn) -> None:
        """Join or start every fetch, column by column: the first layers' reads are out before the last are planned."""
        spare = {wanted.key: segment for (wanted, _), segment in zip(new, segments, strict=True)}
        parts: list[Part] = []
        try:
            for column in list(self._pages.all_columns()):
                for first in range(0, len(column.keys), _PAGES_PER_TURN):
                    await self._context.pacer.turn()
                    parts += self._assign_column(column, first, spare)
                if not self._is_ranged:
                    self._context.reader.read(parts, turn)
                    parts = []
            parts.sort(key=lambda part: 0 if part.layers is None else part.layers.start)
        except BaseException:  # this unit ends here; whoever has joined what it was about to read has not
            parts = [part for part in parts if part.fetch.joiners]
            raise
        finally:
            self._context.reader.read(parts, turn)
            for segment in spare.values():
                self._context.landing.release(segment)
        self._pages.recut()
        self.prune()

    def _assign_column(self, column: Column, first: int, spare: dict[str, Segment]) -> list[Part]:
        tailed = self._context.config.layout is Layout.GROUPED
        parts: list[Part] = []
        for page in self._pages.pages_of(column)[first : first + _PAGES_PER_TURN]:
            wanted, key = Wanted(column, page), column.keys[page]
            if wanted in self._fetches or self._join_one(wanted):
                continue
            if key in spare:
                size = self._size(wanted)
                ranges = self._ranges(wanted, size) if self._is_ranged else ()
                fetch = self._context.reader.add(
                    key,
                    spare.pop(key),
                    self.descriptors.get(key),
                    self._listener,
                    size=size,
                    tailed=tailed,
                    ranges=ranges,
                )
                parts += fetch.parts
                self.bytes_read += size
                self._fetches[wanted] = fetch
                self._wants[fetch] = [wanted]
            else:  # it was here before this unit waited for memory, and is no longer
                self._pages.mark_bad(column, page, PageStatus.SHED)
        return parts

    def _join_one(self, wanted: Wanted) -> bool:
        """Hold an object that is here or on its way, if it is."""
        fetch = self._context.reader.find(wanted.key)
        if fetch is None:
            return False
        self._context.counters.shared_objects += 1
        self._hold(wanted, fetch)
        return True

    def _leave_replaced(self) -> None:
        while self._replaced:
            self._context.reader.leave(self._replaced.pop(), self._listener)

    def _hold(self, wanted: Wanted, fetch: Fetch) -> None:
        if fetch.size != self._size(wanted):  # another object under the same key than the one that was admitted
            self._adopt_size(wanted, fetch.size)
        self._context.reader.join(fetch, self._listener)
        self._fetches[wanted] = fetch
        self._wants.setdefault(fetch, []).append(wanted)

    def _let_go(self, wanted: Wanted, *, timed_out: bool = False, keep: bool = False) -> None:
        fetch = self._fetches.pop(wanted, None)
        if fetch is None:  # leaving another made room for a queued read that was shed, and that pruned this one
            return
        self._wants[fetch].remove(wanted)
        if not self._wants[fetch]:
            del self._wants[fetch]
        self._context.reader.leave(fetch, self._listener, timed_out=timed_out, keep=keep)

    def _adopt_size(self, wanted: Wanted, size: int) -> None:
        spec = wanted.column.spec
        if size not in (spec.size, spec.target_size):
            self._pages.mark_bad(wanted.column, wanted.page, PageStatus.WRONG_SIZE)
        elif self._pages.draft_rides and size < spec.size:
            self._pages.mark_without_draft(wanted.column, wanted.page)

    def _size(self, wanted: Wanted) -> int:
        descriptor = self.descriptors.get(wanted.key)
        return descriptor.size if descriptor is not None else wanted.column.spec.size

    @property
    def _is_ranged(self) -> bool:
        config = self._context.config
        return config.layout is Layout.PAGE and config.read_mode is ReadMode.RANGES

    def _ranges(self, wanted: Wanted, size: int) -> list[tuple[range, list[tuple[int, int]]]]:
        found = []
        # A draft of its own may have more layers than the target.
        for layers in layer_groups(max(self._context.pools.num_layers, wanted.column.spec.layers[-1] + 1)):
            # A range past the end of an object without the packed draft would fail the whole key.
            pairs = [
                (offset, min(nbytes, size - offset))
                for offset, nbytes in ranges_of(wanted.column.spec, layers)
                if offset < size
            ]
            if pairs:
                found.append((layers, pairs))
        return found


def _runs(new: list[tuple[Wanted, int]]) -> list[tuple[int, int]]:
    """Neighbours of equal size as `(bytes, count)`."""
    runs: list[tuple[int, int]] = []
    for _, size in new:
        if runs and runs[-1][0] == size:
            runs[-1] = (size, runs[-1][1] + 1)
        else:
            runs.append((size, 1))
    return runs
