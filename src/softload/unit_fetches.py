"""The fetches that one unit holds: landing memory, joins, and what has landed."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

import anyio

from softload.config import Layout
from softload.context import Context
from softload.fetches import Fetch, FetchListener, Part, Turn, leaves
from softload.geometry.layout import PartRanges, layer_groups, range_groups
from softload.grants import Grant
from softload.landing import Segment, Share
from softload.lent_copies import Refuted
from softload.outcomes import PageStatus
from softload.planning import Column, alike, chunks_of, pages_of_chunk, sizes_in_runs
from softload.protocols import Descriptor
from softload.read_choice import parts_to_read
from softload.unit_holdings import UnitHoldings
from softload.unit_loans import UnitLoans
from softload.unit_pages import UnitPages, Wanted

__all__ = ["UnitFetches"]

_CHUNKS_AHEAD = 8
"""Chunks of it are planned before the unit is admitted."""
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
        self._held = UnitHoldings()
        self.loans = UnitLoans(context, pages, self._held, listener)
        self._replaced: list[Fetch] = []
        self._spare = Grant()
        self._unplanned: deque[tuple[Column, int]] = deque()
        self._unqueued: list[Part] = []
        self._turn = Turn()
        self._ahead: frozenset[tuple[Column, int]] = frozenset()
        """Planned before it was known where all of the unit is."""
        self._begun: frozenset[Column] = frozenset()
        """What its first layers need: it is being read, or lies here, before that is known."""
        self.is_granted = False
        """Whether there was memory for all of it before it was admitted."""
        self._known: frozenset[Column] | None = None
        """Where nothing but these is known to be, although the unit was admitted."""
        self._is_lined_up = False
        self._parts = PartRanges()
        """What objects are read in; none where they are read whole."""
        self._started: anyio.Event | None = None
        """Goes with the next parts that are queued: sessions were started for them."""
        self._is_marked = False
        """Whether what was found while joining costs pages, or their draft."""
        self.descriptors: dict[str, Descriptor | None] = {}
        self.bytes_read = 0

    def __iter__(self) -> Iterator[Fetch]:
        return iter(self._held)

    def of(self, fetch: Fetch) -> tuple[Wanted, ...]:
        """What the unit wants a fetch for."""
        return self._held.of(fetch)

    def segments(self, column: Column, pages: range) -> list[Segment]:
        """Where the objects' bytes are, page after page."""
        return self._held.segments(column, pages)

    def landed(self, columns: Iterable[Column], layers: range | None = None, *, is_copying: bool = False) -> bool:
        """Whether the bytes that the unit's good pages need, for `layers` or for all, are here and checked.

        Args:
            columns: those that hold them.
            layers: all by default.
            is_copying: whether the unit, which asks, copies meanwhile. Else it copies no more from what was replaced.
        """
        if not is_copying:
            self.leave_replaced()
        for column in columns:
            for _, _, fetch in self._held.spans(column, self._pages.pages_of(column)):
                if fetch is None or not (fetch.landed if layers is None else fetch.landed_for(layers)):
                    return False
        return True

    def reserve(self) -> bool:
        """Before the unit is admitted: whether there is memory for all of it, which it has then.

        Only where nothing of it is here or on its way, so that there is nothing to join.
        """
        landing, lender, wanted = self._context.landing, self._context.lender, self._sizes()
        sizes = sizes_in_runs(wanted)
        if self._context.reader.knows_any(wanted) or landing.sheds or landing.cost(sizes) > landing.limit(self._share):
            return False
        # What is likely to be lent needs no memory in the end: nothing is thrown away for it.
        segments = landing.try_grant_runs(sizes, self._share, may_reclaim=not lender.lent_all)
        if segments is None:
            return False
        self.announce()
        self.is_granted = True
        self._spare = Grant(wanted, segments)
        return True

    def read_ahead(self, columns: Sequence[Column], found: Mapping[str, Descriptor | None], turn: Turn) -> None:
        """Before it is known where all of the unit is: start the reads of whole columns, if there is memory for all."""
        self.loans.take(columns, found)
        is_read = any(self._held.lacks_any(column, self._pages.pages_of(column)) for column in columns)
        is_wanted = is_read or self._context.admits_early
        if not self.is_granted and not (is_wanted and self.reserve()):
            return
        self.descriptors.update(found)
        self._turn = turn
        if is_read:
            ahead = list(islice(chunks_of(columns), _CHUNKS_AHEAD))
            for column, first in ahead:
                self._unqueued += self._assign(column, first)
            self._ahead = frozenset(ahead)
            self._queue()
        self._begun = frozenset(columns)
        if self._known is not None:
            self._known = self._begun
            self._pass_over_held()

    @property
    def has_begun(self) -> bool:
        """Whether what its first layers need is being read, or lies here."""
        return bool(self._begun)

    @property
    def groups(self) -> tuple[range, ...]:
        """The layers that are copied at a time, as they come; known once `begin` has returned."""
        return (range_groups if self._parts else layer_groups)(self._context.pools.num_layers)

    @property
    def has_head_start(self) -> bool:
        """Whether the first layers' reads are out, and no others will be before the next `plan`."""
        return self.is_granted or bool(self._unqueued)

    @property
    def must_plan(self) -> bool:
        """Whether nothing is read before all of it is planned, as where objects are read in parts."""
        return bool(self._parts and self._unplanned)

    def announce(self) -> None:
        """It is about to plan its pages: what others have copied of them may serve it."""
        self._context.planned.add(self, self._pages.page_keys())

    async def begin(self) -> None:
        """Join what is on its way, and be granted landing memory for the rest, whole and in turn; `plan` comes next."""
        self.announce()
        await self._context.pacer.turn()
        if self._known is None:
            self.loans.take(self._pages.all_columns())
        if self.is_granted:
            self.prune()
            self._join(self._spare)
        else:
            await self._be_granted()
        self._conclude()
        waits = None if self._share is Share.PREFETCH else self._layer_seconds
        self._parts = PartRanges(parts_to_read(self._context, self._pages, self.descriptors, self._spare, waits))
        if self._parts and self._spare:
            self._started = self._context.reader.start_sessions(self._spare)
        self._unplanned.extend(chunks_of(self._pages.all_columns()))
        self._is_lined_up = True
        self._pass_over_held()

    def admit_early(self) -> None:
        """The unit goes on, although it is not known where its objects are."""
        self._known = self._begun

    def learn(self, descriptors: Mapping[str, Descriptor | None]) -> None:
        """Where all of it is: what is left to read can be planned."""
        known, self._known = self._known or frozenset(), None
        self.descriptors.update(descriptors)
        if self._is_lined_up:
            self.loans.take(column for column in self._pages.all_columns() if column not in known)
            self._pass_over_held()

    def _pass_over_held(self) -> None:
        """What is held already needs no plan."""
        self._unplanned = deque(
            (column, first)
            for column, first in self._unplanned
            if (column, first) not in self._ahead
            and self._held.lacks_any(column, pages_of_chunk(self._pages.pages_of(column), first))
        )
        if self._known is not None or not self._is_lined_up:
            return
        if self._share is Share.STREAMING and self._pages.pages:
            self._context.lender.lent_all = bool(self.loans.nbytes) and not self._unplanned and not self._ahead
        if not self._unplanned:
            self._finish_planning()

    def _may_plan(self) -> bool:
        return bool(self._unplanned) and (self._known is None or self._unplanned[0][0] in self._known)

    async def _be_granted(self) -> None:
        landing = self._context.landing
        wanted = self._sizes()
        while landing.cost(sizes_in_runs(wanted)) > landing.limit(self._share):
            pages = self._pages.pages
            self._pages.limit(pages - max(1, pages // 8), PageStatus.SHED)
            wanted = self._sizes()
        self._pages.restrict_windows()
        joined = self._join(wanted)  # before asking for room: room is made by freeing what nobody holds
        new = {key: size for key, size in wanted.items() if key not in joined} if joined else wanted
        if new and landing.sheds:
            self._shed()
            new = {}
        # Nothing to read waits for nobody: a miss is told at once, whoever queues for room.
        segments = landing.try_grant_runs(sizes_in_runs(new), self._share) if new else []
        if segments is None:
            # Who waits holds nothing, and what is here now need not be here when there is room: so room for all of it.
            # Not for what is lent: that is held, for it takes no memory, and might not be lent once more.
            self._let_go_landing()
            new = wanted
            segments = await landing.grant_runs(sizes_in_runs(new), self._share) or []
            self._join(wanted)
            self.loans.take(self._pages.all_columns())
        self._spare = Grant(new, segments)

    def _shed(self) -> None:
        """Nothing more can be read: what is here, or lent, before the first page that lacks something stays."""
        while lacking := [wanted for wanted in self._pages.needed() if self._held.at(*wanted) is None]:
            for column, page in lacking:
                self._pages.mark_bad(column, page, PageStatus.SHED)
            self._pages.recut()
        self.prune()

    async def plan(self, turn: Turn) -> bool:
        """Join or start the next few fetches, in the order in which they are wanted. False where none are, by now.

        Of objects that are read in parts the first are started when all is planned, and the others by the next call.

        Little by little, so that what has landed can be copied while later layers are planned.
        """
        if not self._unplanned:
            has_others = bool(self._unqueued)
            self._queue()
            return has_others
        if not self._may_plan():
            return False
        await self._context.pacer.turn()
        if not self._may_plan():  # all was let go meanwhile
            return False
        self._turn = turn
        pages = nbytes = 0
        while self._may_plan() and pages < _WORTH_PAGES and nbytes < _WORTH_BYTES:
            column, first = self._unplanned.popleft()
            self._unqueued += self._assign(column, first)
            planned = len(pages_of_chunk(self._pages.pages_of(column), first))
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
            for page in pages_of_chunk(self._pages.pages_of(column), first):
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
            for first, end, fetch in source._held.spans(match, range(len(column.keys))):
                if fetch is not None:
                    wanted = self._context.reader.piece(fetch, 0, min(end, len(column.keys)) - first)
                    self._hold(Wanted(column, first), wanted)

    def read_refuted(self, refuted: Sequence[Refuted], turn: Turn) -> None:
        """What was copied from where it lay was not proven: read it, unless that is done, or under way, already."""

        def join(column: Column, page: int) -> bool:
            return self._join_some(column, page, page + 1) > 0

        self._is_marked |= self.loans.read(refuted, turn, self._share, join)
        self._conclude()

    def split(self, old: Fetch, new: Sequence[Fetch]) -> None:
        """`old` goes on in pieces."""
        self._held.split(old, new)

    def replace(self, old: Fetch, new: Fetch) -> None:
        """Hold `new`, which has landed, for all that `old` was held for. `old` is held until the running copy ends."""
        for wanted in self._held.take_all(old):
            self._hold(wanted, new)
            self._replaced.append(old)

    def leave_replaced(self) -> None:
        """Nothing is copied from what was replaced any more."""
        while self._replaced:
            self._context.reader.leave(self._replaced.pop(), self._listener)

    def prune(self, *, timed_out: bool = False) -> None:
        """Let go of what the unit's good pages do not need any more."""
        for column in self._held.columns():
            needed, count = self._pages.pages_of(column), len(column.keys)
            for pages in (range(min(needed.start, count)), range(needed.stop, count)):
                for first, end, fetch in self._held.spans(column, pages):
                    if fetch is not None:
                        start, stop = max(first, pages.start), min(end, pages.stop)
                        self._context.reader.piece(fetch, start - first, stop - first)
                        self._let_go(Wanted(column, start), timed_out=timed_out)

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
        self._unqueued = [part for part in leaves(self._unqueued) if part.fetch.joiners]
        self._queue()
        for column in self._held.columns():
            self._let_go_column(column, keep=keep)
        self.leave_replaced()
        self._release_spare()

    def _sizes(self) -> dict[str, int]:
        """The objects that landing memory is needed for, first layers first: the bytes of each key."""
        sizes: dict[str, int] = {}
        descriptors = self.descriptors
        for column in self._pages.all_columns():
            otherwise = column.spec.size
            for pages in self._held.unlent(column, self._pages.pages_of(column)):
                keys = column.keys[pages.start : pages.stop]
                found = map(descriptors.get, keys)
                sizes.update(zip(keys, [otherwise if each is None else each.size for each in found], strict=True))
        return sizes

    def _join(self, keys: Collection[str]) -> set[str]:
        """Hold what is here or on its way, all at once: it may be gone after the next await. Which these are."""
        joined: set[str] = set()
        if not self._context.reader.knows_any(keys):
            return joined
        for column in self._pages.all_columns():
            pages = self._pages.pages_of(column)
            page = pages.start
            while page < pages.stop:
                count = 0 if self._held.at(column, page) is not None else self._join_some(column, page, pages.stop)
                joined.update(column.keys[page : page + count])
                page += count or 1
        return joined

    def _assign(self, column: Column, first: int) -> list[Part]:
        pages = pages_of_chunk(self._pages.pages_of(column), first)
        keys = column.keys[pages.start : pages.stop]
        # The common case, without a look at each: all of them are new, and lie side by side.
        as_one = not (
            self._parts
            or not keys
            or self._held.has_any(column, pages)
            or self._context.reader.knows_any(keys)
            or len(set(keys)) < len(keys)
            or not self._spare.are_neighbours(keys)
        )
        parts: list[Part] = []
        page = pages.start
        while page < pages.stop:
            if not as_one and self._held.at(column, page) is not None:
                page += 1
            elif not as_one and (count := self._join_some(column, page, pages.stop)):
                page += count
            else:
                page += self._start(column, page, pages.stop - page if as_one else 1, parts)
        return parts

    def _start(self, column: Column, page: int, most: int, parts: list[Part]) -> int:
        """Have objects read, `most` from this page on, as far as they are alike and their memory lies side by side."""
        config = self._context.config
        keys = column.keys[page : page + most]
        descriptors = list(map(self.descriptors.get, keys))
        size = column.spec.size if descriptors[0] is None else descriptors[0].size
        most = min(alike(descriptors), config.read_batch_objects, max(1, config.read_batch_bytes // size))
        segment = self._spare.take(keys[0], most)
        if segment is None:  # it was here before this unit waited for memory, and is no longer
            self._pages.mark_bad(column, page, PageStatus.SHED)
            self._is_marked = True
            return 1
        fetch = self._context.reader.add(
            keys[: segment.count],
            segment,
            descriptors[: segment.count],
            self._listener,
            size=size,
            tailed=config.layout is Layout.GROUPED,
            ranges=self._parts.of(column.spec, size),
        )
        parts += fetch.parts
        self.bytes_read += size * fetch.count
        self._held.put(column, page, fetch)
        return fetch.count

    def _finish_planning(self) -> None:
        self._context.planned.discard(self)
        self._unqueued.sort(key=_first_layer)
        later = bisect_right(self._unqueued, _first_layer(self._unqueued[0]), key=_first_layer) if self._unqueued else 0
        waiting = self._unqueued[later:] if self._parts and self._share is Share.STREAMING else []
        self._unqueued = self._unqueued[: len(self._unqueued) - len(waiting)]
        self._queue()
        self._unqueued = waiting
        self._release_spare()

    def _queue(self) -> None:
        parts, self._unqueued = self._unqueued, []
        started, self._started = self._started, None
        self._context.reader.read(parts, self._turn, started)

    def _join_some(self, column: Column, page: int, stop: int) -> int:
        """Hold what is here or on its way of the pages from this one on, as far as one fetch brings it; how many."""
        reader = self._context.reader
        fetch = reader.find(column.keys[page])
        if fetch is None:
            return 0
        first = fetch.keys.index(column.keys[page]) if fetch.count > 1 else 0
        end = first + 1
        while end < fetch.count and page + end - first < stop:
            at = page + end - first
            if column.keys[at] != fetch.keys[end] or self._held.at(column, at) is not None:
                break
            end += 1
        self._context.counters.shared_objects += end - first
        self._hold(Wanted(column, page), reader.piece(fetch, first, end))
        return end - first

    def _release_spare(self) -> None:
        """Give back what was granted for objects that somebody else brought, or that nobody needs any more."""
        self._context.landing.release_all(self._spare.take_rest())

    def _hold(self, wanted: Wanted, fetch: Fetch) -> None:
        column, first = wanted
        for page in range(first, first + fetch.count):
            descriptor = self.descriptors.get(column.keys[page])
            if fetch.size != (column.spec.size if descriptor is None else descriptor.size):
                self._adopt_size(Wanted(column, page), fetch.size)  # another object under the key than was admitted
        self._context.reader.join(fetch, self._listener)
        self._held.put(column, first, fetch)

    def _let_go_column(self, column: Column, *, keep: bool) -> None:
        alone: list[Fetch] = []
        for first, _, fetch in self._held.spans(column, range(len(column.keys))):
            if fetch is not None and self._held.serves_once(fetch):
                self._held.take(column, first)
                if not fetch.is_lent:
                    alone.append(fetch)
            elif fetch is not None:
                self._let_go(Wanted(column, first), keep=keep)
        self._held.drop(column)
        self._context.reader.leave_all(alone, self._listener, keep=keep)

    def _let_go_landing(self) -> None:
        """Let go of all that holds landing memory."""
        for column in self._held.columns():
            for first, _, fetch in self._held.spans(column, range(len(column.keys))):
                if fetch is not None and not fetch.is_lent:
                    self._let_go(Wanted(column, first), keep=True)

    def _let_go(self, wanted: Wanted, *, timed_out: bool = False, keep: bool = False) -> None:
        fetch = self._held.take(*wanted)
        # None where leaving another made room for a queued read that was shed, and that pruned this one.
        if fetch is not None and not fetch.is_lent:
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


def _first_layer(part: Part) -> int:
    return 0 if part.layers is None else part.layers.start
