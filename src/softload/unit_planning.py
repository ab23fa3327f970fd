"""What one unit still has to plan: the reads of its objects, the landing memory granted for them, their order."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import anyio

from softload.config import Layout
from softload.context import Context
from softload.fetches import FetchListener, Part, Turn, leaves
from softload.geometry.layout import PartRanges, layer_groups, range_groups
from softload.grants import Grant
from softload.landing import Share
from softload.outcomes import PageStatus
from softload.planning import Column, alike, chunks_of, pages_of_chunk, sizes_in_runs
from softload.protocols import Descriptor
from softload.read_choice import parts_to_read
from softload.unit_fetches import UnitFetches
from softload.unit_pages import UnitPages, Wanted

__all__ = ["UnitPlanning"]

_CHUNKS_AHEAD = 8
"""Chunks of it are planned before the unit is admitted."""
_WORTH_PAGES = 64
_WORTH_BYTES = 1 << 20
"""Less of a column is planned, and read, together with the next: a call of its own takes longer than its bytes."""


class UnitPlanning:
    """Which objects of one unit are read next, and into what memory, until all are held or being read.

    Args:
        context: the loader's parts.
        pages: what the unit wants; told what cannot be had.
        fetches: what it holds; joins what others have had read, and is given what is started here.
        listener: told when a fetch changes.
        share: whose landing memory it uses.
        layer_seconds: what the forward takes for a layer, as far as the engine says.
    """

    def __init__(
        self,
        context: Context,
        pages: UnitPages,
        fetches: UnitFetches,
        listener: FetchListener,
        share: Share,
        layer_seconds: float = 0.0,
    ) -> None:
        self._context = context
        self._pages = pages
        self._fetches = fetches
        self._held = fetches.held
        self._listener = listener
        self._share = share
        self._layer_seconds = layer_seconds
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
        self.bytes_read = 0

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
        self._fetches.loans.take(columns, found)
        is_read = any(self._held.lacks_any(column, self._pages.pages_of(column)) for column in columns)
        is_wanted = is_read or self._context.admits_early
        if not self.is_granted and not (is_wanted and self.reserve()):
            return
        self._fetches.descriptors.update(found)
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
        """Whether nothing but first layers is read before all of it is planned, as where objects are read in parts."""
        return bool(self._parts and self._unplanned)

    def announce(self) -> None:
        """It is about to plan its pages: what others have copied of them may serve it."""
        self._context.planned.add(self, self._pages.page_keys())

    async def begin(self) -> None:
        """Join what is on its way, and be granted landing memory for the rest, whole and in turn; `plan` comes next."""
        self.announce()
        await self._context.pacer.turn()
        if self._known is None:
            self._fetches.loans.take(self._pages.all_columns())
        if self.is_granted:
            self._fetches.prune()
            self._fetches.join(self._spare)
        else:
            await self._be_granted()
        self._fetches.conclude()
        waits = None if self._share is Share.PREFETCH else self._layer_seconds
        self._parts = PartRanges(
            parts_to_read(self._context, self._pages, self._fetches.descriptors, self._spare, waits)
        )
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
        self._fetches.descriptors.update(descriptors)
        if self._is_lined_up:
            self._fetches.loans.take(column for column in self._pages.all_columns() if column not in known)
            self._pass_over_held()

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
        elif self._parts:  # they wait for the rest: first layers of all objects before the last of any
            self._queue_first()
        else:
            self._queue()
        self._fetches.conclude()
        return True

    def unplanned(self) -> Iterator[Wanted]:
        """What is wanted, and has neither been joined nor started yet."""
        for column, first in self._unplanned:
            for page in pages_of_chunk(self._pages.pages_of(column), first):
                yield Wanted(column, page)

    def let_go(self, columns: Iterable[Column], *, keep: bool) -> None:
        """Whole columns are copied: let go of them, and plan no more of them."""
        # An object that several units want at a time is read once, however far ahead of the others one of them is.
        planned = self._context.planned
        for column in columns:
            self._fetches.let_go_column(column, keep=keep or planned.other_wants(self, self._pages.keys_of(column)))
            # All of it may have been here when the unit began: nobody brings it again.
            if any(each is column for each, _ in self._unplanned):
                self._unplanned = deque((each, first) for each, first in self._unplanned if each is not column)
                if not self._unplanned:
                    self._finish_planning()

    def let_go_all(self, *, keep: bool) -> None:
        """Plan nothing more, and let go of everything; landed bytes may serve later units with `keep`."""
        self._unplanned.clear()
        self._context.planned.discard(self)
        # This unit ends here; whoever has joined what it was about to read has not.
        self._unqueued = [part for part in leaves(self._unqueued) if part.fetch.joiners]
        self._queue()
        self._fetches.let_go_all(keep=keep)
        self._release_spare()

    def _sizes(self) -> dict[str, int]:
        """The objects that landing memory is needed for, first layers first: the bytes of each key."""
        sizes: dict[str, int] = {}
        descriptors = self._fetches.descriptors
        for column in self._pages.all_columns():
            otherwise = column.spec.size
            for pages in self._held.unlent(column, self._pages.pages_of(column)):
                keys = column.keys[pages.start : pages.stop]
                if not descriptors:  # none is known yet
                    sizes.update(dict.fromkeys(keys, otherwise))
                    continue
                found = map(descriptors.get, keys)
                sizes.update(zip(keys, [otherwise if each is None else each.size for each in found], strict=True))
        return sizes

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
            self._context.lender.lent_all = bool(self._fetches.loans.nbytes) and not self._unplanned and not self._ahead
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
        joined = self._fetches.join(wanted)  # before asking for room: room is made by freeing what nobody holds
        new = {key: size for key, size in wanted.items() if key not in joined} if joined else wanted
        if new and landing.sheds:
            self._shed()
            new = {}
        # Nothing to read waits for nobody: a miss is told at once, whoever queues for room.
        segments = landing.try_grant_runs(sizes_in_runs(new), self._share) if new else []
        if segments is None:
            # Who waits holds nothing, and what is here now need not be here when there is room: so room for all of it.
            # Not for what is lent: that is held, for it takes no memory, and might not be lent once more.
            self._fetches.let_go_landing()
            new = wanted
            segments = await landing.grant_runs(sizes_in_runs(new), self._share) or []
            self._fetches.join(wanted)
            self._fetches.loans.take(self._pages.all_columns())
        self._spare = Grant(new, segments)

    def _shed(self) -> None:
        """Nothing more can be read: what is here, or lent, before the first page that lacks something stays."""
        while lacking := [wanted for wanted in self._pages.needed() if self._held.at(*wanted) is None]:
            for column, page in lacking:
                self._pages.mark_bad(column, page, PageStatus.SHED)
            self._pages.recut()
        self._fetches.prune()

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
            elif not as_one and (count := self._fetches.join_some(column, page, pages.stop)):
                page += count
            else:
                page += self._start(column, page, pages.stop - page if as_one else 1, parts)
        return parts

    def _start(self, column: Column, page: int, most: int, parts: list[Part]) -> int:
        """Have objects read, `most` from this page on, as far as they are alike and their memory lies side by side."""
        config = self._context.config
        keys = column.keys[page : page + most]
        descriptors = list(map(self._fetches.descriptors.get, keys))
        size = column.spec.size if descriptors[0] is None else descriptors[0].size
        most = min(alike(descriptors), config.read_batch_objects, max(1, config.read_batch_bytes // size))
        segment = self._spare.take(keys[0], most)
        if segment is None:  # it was here before this unit waited for memory, and is no longer
            self._fetches.mark_bad(Wanted(column, page), PageStatus.SHED)
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

    def _queue_first(self) -> None:
        """Have the first layers' parts read that are planned, where they fill calls of their own."""
        first = min(column.spec.layers[0] for column in self._pages.columns)
        parts = [part for part in self._unqueued if part.layers is not None and first in part.layers]
        if len(parts) >= self._context.config.read_batch_objects:
            queued = set(parts)
            self._unqueued = [part for part in self._unqueued if part not in queued]
            self._context.reader.read(parts, self._turn)

    def _queue(self) -> None:
        parts, self._unqueued = self._unqueued, []
        started, self._started = self._started, None
        self._context.reader.read(parts, self._turn, started)

    def _release_spare(self) -> None:
        """Give back what was granted for objects that somebody else brought, or that nobody needs any more."""
        self._context.landing.release_all(self._spare.take_rest())


def _first_layer(part: Part) -> int:
    return 0 if part.layers is None else part.layers.start
