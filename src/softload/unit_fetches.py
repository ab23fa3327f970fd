"""The fetches that one unit holds: landing memory, joins, and what has landed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from typing import Protocol

from softload.config import Layout
from softload.context import Context
from softload.fetches import Fetch, FetchListener, Part, Turn
from softload.geometry.layout import ranges_of
from softload.landing import Segment, Share
from softload.outcomes import PageStatus
from softload.planning import Column
from softload.protocols import Descriptor
from softload.read_choice import parts_to_read
from softload.unit_pages import UnitPages, Wanted

__all__ = ["UnitFetches"]

_PAGES_PER_TURN = 256
"""Pages that are planned in one turn of the event loop: about a millisecond."""


_CHUNKS_AHEAD = 2
"""As many of these are planned before the unit is admitted."""


_WORTH_PAGES = 64
_WORTH_BYTES = 1 << 20
"""Less of a column is planned, and read, together with the next: a call of its own takes longer than its bytes."""


class UnitListener(FetchListener, Protocol):
    """The unit."""

    def cut(self) -> None:
        """Some of what it wants cannot be had, and was marked: draw the conclusion. Called on the loop."""


class UnitFetches:
    """The fetches that one unit holds.

    Args:
        context: the loader's parts.
        pages: what the unit wants; told what cannot be had.
        listener: told when a fetch changes.
        share: whose landing memory it uses.
        layer_seconds: what the forward takes for a layer, as far as the engine says.
    """

    def __init__(
        self, context: Context, pages: UnitPages, listener: UnitListener, share: Share, layer_seconds: float = 0.0
    ) -> None:
        self._context = context
        self._pages = pages
        self._listener = listener
        self._share = share
        self._layer_seconds = layer_seconds
        self._held: dict[Column, list[Fetch | None]] = {}
        self._wants: dict[Fetch, list[Wanted]] = {}
        self._replaced: list[Fetch] = []
        self._spare: dict[str, Segment] = {}
        self._unplanned: deque[tuple[Column, int]] = deque()
        self._unqueued: list[Part] = []
        self._turn = Turn()
        self._ahead: tuple[tuple[Column, int], ...] = ()
        """Planned before the unit was admitted."""
        self._parts: tuple[range, ...] = ()
        """The layers of each part that objects are read in; none where they are read whole."""
        self._is_marked = False
        """Whether what was found while joining costs pages, or their draft."""
        self.descriptors: dict[str, Descriptor | None] = {}
        self.bytes_read = 0

    def __iter__(self) -> Iterator[Fetch]:
        return iter(list(self._wants))

    def of(self, fetch: Fetch) -> tuple[Wanted, ...]:
        """What the unit wants a fetch for."""
        return tuple(self._wants.get(fetch, ()))

    def segments(self, column: Column, pages: range) -> list[Segment]:
        """Where the objects' bytes are."""
        held = self._held.get(column, ())
        found = [fetch.segment for fetch in held[pages.start : pages.stop] if fetch is not None]
        if len(found) != len(pages):
            raise RuntimeError(f"pool {column.pool.name}: expected {len(pages)} fetches, got {len(found)}")
        return found

    def landed(self, columns: Iterable[Column], layers: range | None = None) -> bool:
        """Whether the bytes that the unit's good pages need, for `layers` or for all, are here and checked.

        The unit itself asks, between its copies: so it does not copy any more from what was replaced meanwhile.
        """
        self.leave_replaced()
        for column in columns:
            pages = self._pages.pages_of(column)
            held = self._held.get(column)
            if held is None:
                if pages:
                    return False
                continue
            for fetch in held[pages.start : pages.stop]:
                if fetch is None or not (fetch.landed if layers is None else fetch.landed_for(layers)):
                    return False
        return True

    def read_ahead(self, columns: Sequence[Column], found: Mapping[str, Descriptor | None], turn: Turn) -> None:
        """Before the unit is admitted: start the reads of whole columns, if there is memory for all of the unit.

        Only where nothing of it is here or on its way, so that there is nothing to join.
        """
        landing, wanted = self._context.landing, self._sizes()
        sizes = _runs(wanted)
        if self._context.reader.knows_any(wanted) or landing.sheds or landing.cost(sizes) > landing.limit(self._share):
            return
        segments = landing.try_grant(sizes, self._share)
        if segments is None:
            return
        self._context.planned.add(self, self._pages.page_keys())
        self._spare = dict(zip(wanted, segments, strict=True))
        self.descriptors.update(found)
        self._turn = turn
        self._ahead = tuple(islice(_chunks(columns), _CHUNKS_AHEAD))
        for column, first in self._ahead:
            self._unqueued += self._assign(column, first)
        self._queue()

    async def begin(self) -> None:
        """Join what is on its way, and be granted landing memory for the rest, whole and in turn; `plan` comes next."""
        self._context.planned.add(self, self._pages.page_keys())
        await self._context.pacer.turn()
        if self._ahead:
            self.prune()
            self._join(self._spare)
        else:
            await self._be_granted()
        self._conclude()
        waits = None if self._share is Share.PREFETCH else self._layer_seconds
        self._parts = parts_to_read(self._context, self._pages, self.descriptors, self._spare, waits)
        self._unplanned.extend(chunk for chunk in _chunks(self._pages.all_columns()) if chunk not in self._ahead)

    async def _be_granted(self) -> None:
        landing = self._context.landing
        wanted = self._sizes()
        while landing.cost(_runs(wanted)) > landing.limit(self._share):
            pages = self._pages.pages
            self._pages.limit(pages - max(1, pages // 8), PageStatus.SHED)
            wanted = self._sizes()
        self._pages.restrict_windows()
        joined = self._join(wanted)  # before asking for room: room is made by freeing what nobody holds
        new = {key: size for key, size in wanted.items() if key not in joined} if joined else wanted
        if new and landing.sheds:
            self._pages.limit(0, PageStatus.SHED)
            self.prune()
            new = {}
        # Nothing to read waits for nobody: a miss is told at once, whoever queues for room.
        segments = landing.try_grant(_runs(new), self._share) if new else []
        if segments is None:
            # Who waits holds nothing, and what is here now need not be here when there is room: so room for all of it.
            self.let_go_all(keep=True)
            self._context.planned.add(self, self._pages.page_keys())
            new = wanted
            segments = await landing.grant(_runs(new), self._share) or []
            self._join(wanted)
        self._spare = dict(zip(new, segments, strict=True))

    async def plan(self, turn: Turn) -> bool:
        """Join or start the next few fetches, in the order in which they are wanted. False where none are left.

        Little by little, so that what has landed can be copied while later layers are planned.
        """
        if not self._unplanned:
            return False
        await self._context.pacer.turn()
        if not self._unplanned:  # all was let go meanwhile
            return False
        self._turn = turn
        pages = nbytes = 0
        while self._unplanned and pages < _WORTH_PAGES and nbytes < _WORTH_BYTES:
            column, first = self._unplanned.popleft()
            self._unqueued += self._assign(column, first)
            planned = len(_part_of(self._pages.pages_of(column), first))
            pages += planned
            nbytes += planned * column.spec.size
            if self._unplanned and self._unplanned[0][0].spec.draft is not column.spec.draft:
                break  # nobody who waits for the target waits for the draft
        if not self._unplanned:
            self._finish_planning()
        elif not self._parts:  # ranges wait for the rest: first layers of all objects before the last of any
            self._queue()
        self._conclude()
        return True

    def unplanned(self) -> Iterator[Wanted]:
        """What is wanted, and has neither been joined nor started yet."""
        for column, first in self._unplanned:
            for page in _part_of(self._pages.pages_of(column), first):
                yield Wanted(column, page)

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
            for page, fetch in enumerate(source._held.get(match, ())[: len(column.keys)]):
                if fetch is not None:
                    self._hold(Wanted(column, page), fetch)

    def replace(self, old: Fetch, new: Fetch) -> None:
        """Hold `new`, which has landed, for all that `old` was held for. `old` is held until the running copy ends."""
        for wanted in self._wants.pop(old, ()):
            self._hold(wanted, new)
            self._replaced.append(old)

    def leave_replaced(self) -> None:
        """Nothing is copied from what was replaced any more."""
        while self._replaced:
            self._context.reader.leave(self._replaced.pop(), self._listener)

    def prune(self, *, timed_out: bool = False) -> None:
        """Let go of what the unit's good pages do not need any more."""
        for column, held in self._held.items():
            needed = self._pages.pages_of(column)
            for page in chain(range(min(needed.start, len(held))), range(needed.stop, len(held))):
                if held[page] is not None:
                    self._let_go(Wanted(column, page), timed_out=timed_out)

    def let_go(self, columns: Iterable[Column], *, keep: bool) -> None:
        """Let go of whole columns, which are copied."""
        # An object that several units want at a time is read once, however far ahead of the others one of them is.
        planned = self._context.planned
        for column in columns:
            self._let_go_column(column, keep=keep or planned.other_wants(self, self._pages.keys_of(column)))
            # All of it may have been here when the unit began: nobody brings it again.
            if any(each is column for each, _ in self._unplanned):
                self._unplanned = deque((each, first) for each, first in self._unplanned if each is not column)
                if not self._unplanned:
                    self._finish_planning()

    def let_go_all(self, *, keep: bool) -> None:
        """Let go of everything; landed bytes may serve later units with `keep`."""
        self._unplanned.clear()
        self._context.planned.discard(self)
        # This unit ends here; whoever has joined what it was about to read has not.
        self._unqueued = [part for part in self._unqueued if part.fetch.joiners]
        self._queue()
        for column in list(self._held):
            self._let_go_column(column, keep=keep)
        self.leave_replaced()
        self._release_spare()

    def _sizes(self) -> dict[str, int]:
        """The objects that are needed, first layers first: the bytes of each key."""
        sizes: dict[str, int] = {}
        descriptors = self.descriptors
        for column in self._pages.all_columns():
            pages, otherwise = self._pages.pages_of(column), column.spec.size
            for key in column.keys[pages.start : pages.stop]:
                found = descriptors.get(key)
                sizes[key] = otherwise if found is None else found.size
        return sizes

    def _join(self, keys: Collection[str]) -> set[str]:
        """Hold what is here or on its way, all at once: it may be gone after the next await. Which these are."""
        joined: set[str] = set()
        if not self._context.reader.knows_any(keys):
            return joined
        for wanted in self._pages.needed():
            if self._get(wanted) is None and self._join_one(wanted):
                joined.add(wanted.key)
        return joined

    def _assign(self, column: Column, first: int) -> list[Part]:
        tailed = self._context.config.layout is Layout.GROUPED
        reader, listener, spare, descriptors = self._context.reader, self._listener, self._spare, self.descriptors
        is_ranged, otherwise = bool(self._parts), column.spec.size
        held = self._of_column(column)
        parts: list[Part] = []
        for page in _part_of(self._pages.pages_of(column), first):
            if held[page] is not None:
                continue
            key = column.keys[page]
            wanted = Wanted(column, page)
            if self._join_one(wanted):
                continue
            segment = spare.pop(key, None)
            if segment is None:  # it was here before this unit waited for memory, and is no longer
                self._pages.mark_bad(column, page, PageStatus.SHED)
                self._is_marked = True
                continue
            found = descriptors.get(key)
            size = otherwise if found is None else found.size
            ranges = self._ranges(wanted, size) if is_ranged else ()
            fetch = reader.add(key, segment, found, listener, size=size, tailed=tailed, ranges=ranges)
            parts += fetch.parts
            self.bytes_read += size
            held[page] = fetch
            self._wants[fetch] = [wanted]
        return parts

    def _finish_planning(self) -> None:
        self._context.planned.discard(self)
        self._unqueued.sort(key=lambda part: 0 if part.layers is None else part.layers.start)
        self._queue()
        self._release_spare()

    def _queue(self) -> None:
        parts, self._unqueued = self._unqueued, []
        self._context.reader.read(parts, self._turn)

    def _join_one(self, wanted: Wanted) -> bool:
        """Hold an object that is here or on its way, if it is."""
        fetch = self._context.reader.find(wanted.key)
        if fetch is None:
            return False
        self._context.counters.shared_objects += 1
        self._hold(wanted, fetch)
        return True

    def _release_spare(self) -> None:
        """Give back what was granted for objects that somebody else brought, or that nobody needs any more."""
        spare, self._spare = self._spare, {}
        self._context.landing.release_all(list(spare.values()))

    def _of_column(self, column: Column) -> list[Fetch | None]:
        held = self._held.get(column)
        if held is None:
            held = self._held[column] = [None] * len(column.keys)
        return held

    def _get(self, wanted: Wanted) -> Fetch | None:
        held = self._held.get(wanted.column)
        return None if held is None else held[wanted.page]

    def _hold(self, wanted: Wanted, fetch: Fetch) -> None:
        if fetch.size != self._size(wanted):  # another object under the same key than the one that was admitted
            self._adopt_size(wanted, fetch.size)
        self._context.reader.join(fetch, self._listener)
        self._of_column(wanted.column)[wanted.page] = fetch
        self._wants.setdefault(fetch, []).append(wanted)

    def _let_go_column(self, column: Column, *, keep: bool) -> None:
        held = self._held.get(column)
        if held is None:
            return
        alone: list[Fetch] = []
        for page, fetch in enumerate(held):
            if fetch is None:
                continue
            if len(self._wants[fetch]) > 1:
                self._let_go(Wanted(column, page), keep=keep)
                continue
            held[page] = None
            del self._wants[fetch]
            alone.append(fetch)
        self._context.reader.leave_all(alone, self._listener, keep=keep)

    def _let_go(self, wanted: Wanted, *, timed_out: bool = False, keep: bool = False) -> None:
        held = self._held[wanted.column]
        fetch = held[wanted.page]
        if fetch is None:  # leaving another made room for a queued read that was shed, and that pruned this one
            return
        held[wanted.page] = None
        self._wants[fetch].remove(wanted)
        if not self._wants[fetch]:
            del self._wants[fetch]
        self._context.reader.leave(fetch, self._listener, timed_out=timed_out, keep=keep)

    def _conclude(self) -> None:
        if self._is_marked:
            self._is_marked = False
            self._listener.cut()

    def _adopt_size(self, wanted: Wanted, size: int) -> None:
        spec = wanted.column.spec
        self._is_marked = True
        if size not in (spec.size, spec.target_size):
            self._pages.mark_bad(wanted.column, wanted.page, PageStatus.WRONG_SIZE)
        elif self._pages.draft_rides and size < spec.size:
            self._pages.mark_without_draft(wanted.column, wanted.page)

    def _size(self, wanted: Wanted) -> int:
        descriptor = self.descriptors.get(wanted.key)
        return descriptor.size if descriptor is not None else wanted.column.spec.size

    def _ranges(self, wanted: Wanted, size: int) -> list[tuple[range, list[tuple[int, int]]]]:
        spec = wanted.column.spec
        parts = self._parts
        if spec.layers[-1] >= parts[-1].stop:  # a draft of its own may have more layers than the target
            parts = (*parts, range(parts[-1].stop, spec.layers[-1] + 1))
        found = []
        for layers in parts:
            # A range past the end of an object without the packed draft would fail the whole key.
            pairs = [
                (offset, min(nbytes, size - offset)) for offset, nbytes in ranges_of(spec, layers) if offset < size
            ]
            if pairs:
                found.append((layers, pairs))
        return found


def _chunks(columns: Iterable[Column]) -> Iterator[tuple[Column, int]]:
    """What is planned in one turn each: a column, and the first of its pages."""
    for column in columns:
        for first in range(0, len(column.keys), _PAGES_PER_TURN):
            yield column, first


def _part_of(pages: range, first: int) -> range:
    """The needed pages among those that one turn plans."""
    return range(max(pages.start, first), min(pages.stop, first + _PAGES_PER_TURN))


def _runs(sizes: dict[str, int]) -> list[tuple[int, int]]:
    """Neighbours of equal size as `(bytes, count)`."""
    return [(size, sum(1 for _ in same)) for size, same in groupby(sizes.values())]
