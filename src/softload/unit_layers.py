"""The layers of one unit go into its slots in order, each once all of it has landed; the draft goes last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

import anyio.lowlevel

from softload.context import Context
from softload.fetches import Turn
from softload.outcomes import PageStatus
from softload.planning import Column
from softload.unit_copies import AnyCopy, BegunCopies, UnitCopies
from softload.unit_fetches import UnitFetches
from softload.unit_pages import UnitPages
from softload.unit_planning import UnitPlanning
from softload.unit_progress import UnitProgress

__all__ = ["UnitLayers"]

_HEAD_START = 0.02
"""Seconds that each read of the first layers has the interpreter, and its endpoint, for itself.

A thread whose call is over gets the interpreter once the event loop has nothing left to do: all that is planned
meanwhile, it waits for. No longer than that, so that a first layer that hangs costs nothing but itself.
"""

_COPIED_ALONG = 1 << 20
"""Fewer bytes are copied together with the next layers', where those have landed too; nobody waits for no bytes."""


class LayeredUnit(Protocol):
    """The unit. All of it is called on the loop."""

    deadline: float
    """When its waiters are answered, on the event loop's clock."""

    async def until(self, ready: Callable[[], bool], idle: float = 0.0) -> None:
        """Wait for a condition on what has landed; see `UnitRun.until`."""

    def wake(self) -> None:
        """The condition may have come true."""

    def give_up(self, status: PageStatus) -> None:
        """All of it is a miss."""

    def cut(self) -> None:
        """Some of what it wants was marked: draw the conclusion."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Layers whose copies have begun."""

    layers: range
    begun: BegunCopies


class UnitLayers:
    """The layers of one unit.

    Args:
        context: the loader's parts.
        wants: what of the unit is good so far.
        fetches: where its bytes land.
        planning: which of them come next; told which are copied.
        copies: how they get into its slots.
        progress: told of every layer that is there.
        unit: waits, and is told when all is lost.
        turn: the load's place among others.
        keep: whether copied bytes may serve later units.
    """

    def __init__(
        self,
        context: Context,
        wants: UnitPages,
        fetches: UnitFetches,
        planning: UnitPlanning,
        copies: UnitCopies,
        progress: UnitProgress,
        unit: LayeredUnit,
        turn: Turn,
        *,
        keep: bool,
    ) -> None:
        self._context = context
        self._wants = wants
        self._fetches = fetches
        self._planning = planning
        self._copies = copies
        self._progress = progress
        self._unit = unit
        self._turn = turn
        self._keep = keep
        self._columns: dict[range, list[Column]] = {}
        self._is_first = True
        """Whether nothing has been copied yet."""
        self._ahead: _Step | None = None
        """The next layers' copies, begun while those of the layers before run."""
        self._zeroed = False
        self.restored = 0
        """Pages whose slots hold all layers."""
        self.draft_restored = 0
        """Pages whose slots hold all of the draft."""

    async def copy_target(self) -> None:
        """Copy layer by layer. `restored` says how much of it is there."""
        left = deque(self._planning.groups)
        step: _Step | None = None
        try:
            while left or self._ahead is not None:
                step, self._ahead = self._ahead, None
                is_first = self._is_first
                if step is None:
                    await self._wait_for(left[0])
                    step = self._begin(left)
                if left and not is_first and self._wants.pages and self._is_here(left[0], is_copying=True):
                    self._ahead = self._begin(left)  # not beside the first layers: they have the interpreter alone
                if not await self._end(step.begun, step.layers.start, partial(self._is_here, step.layers)):
                    self._unit.give_up(PageStatus.CANCELLED)
                self._progress.copied(step.layers.stop)
                await anyio.lowlevel.cancel_shielded_checkpoint()  # who waits for these layers goes first
                if self._wants.pages and not self._wants.draft_rides:
                    await self._context.pacer.turn()
                    columns = (column for column in self._wants.columns if column.spec.layers[-1] in step.layers)
                    self._planning.let_go(columns, keep=self._keep)
        finally:
            for each in (step, self._ahead):
                if each is not None:
                    await each.begun.copying.end()
            self._ahead = None
        self.restored = self._wants.pages

    async def copy_draft(self) -> None:
        """The draft after the target: it has a gate of its own. Zeros where it is missing."""
        if not self._wants.draft:
            return
        if self._wants.draft_rides:
            is_good = await self._copy_riding_draft()
        else:
            here = partial(self._fetches.landed, self._wants.draft_columns)
            await self._unit.until(here)
            begun = self._copies.begin(self._copies.of_draft(), self._context.pools.num_layers)
            is_good = await self._end(begun, self._context.pools.num_layers, here)
        if not is_good:
            self._wants.draft_pages = 0
        self.draft_restored = self._wants.draft_pages
        for chunk in self._copies.zeros(self.restored, self.draft_restored):
            await anyio.lowlevel.checkpoint_if_cancelled()
            self._zeroed = True
            if not await self._copies.run_chunk(chunk):
                break

    async def _copy_riding_draft(self) -> bool:
        """Of the target's objects, which are here: what is not proven costs the draft alone, and is not read for it."""
        layer = self._context.pools.num_layers
        is_good = await self._copies.copy(self._copies.of_draft(), layer, self._unit.deadline)
        for each in self._copies.take_refuted():
            self._wants.mark_without_draft(each.column, each.page)
        self._unit.cut()
        return is_good

    async def salvage_target(self) -> None:
        """The deadline has passed: copy what landed in time, if it is no more than one chunk."""
        if not self._copies.may_write:
            return
        layers = range(self._progress.layers, self._context.pools.num_layers)
        left = [column for column in self._wants.columns if column.spec.layers[-1] >= layers.start]
        if self._fetches.loans.give_up_unprovable(left):
            self._unit.cut()
        copies = self._copies.of_layers(left, layers)
        if self._wants.pages and sum(copy.nbytes for copy in copies) <= self._context.config.copy_chunk_bytes:
            if not await self._copies.copy(copies, layers.start, self._unit.deadline):
                self._unit.give_up(PageStatus.CANCELLED)
            for each in self._copies.take_refuted():  # there is no time to read it
                self._wants.mark_bad(each.column, each.page, PageStatus.TIMED_OUT)
            self._unit.cut()
            self.restored = self._wants.pages

    async def leave_draft(self) -> None:
        """Nothing more of the draft is copied; of its zeros, a chunk, where there are none yet."""
        self._wants.draft_pages = self.draft_restored
        if self.restored and self._wants.draft and not self._zeroed:
            for chunk in islice(self._copies.zeros(self.restored, self.draft_restored), 1):
                await self._copies.run_chunk(chunk)

    async def _wait_for(self, layers: range) -> None:
        """Until these layers are here, and may be copied."""
        while self._planning.must_plan and self._columns_of(layers):
            await self._planning.plan(self._turn)
        has_head_start = self._is_first and self._planning.has_head_start and self._copies.may_write
        idle = _HEAD_START if has_head_start else 0.0
        await self._unit.until(partial(self._is_here, layers), idle)
        if self._wants.pages:
            refused = await self._copies.wait_for_engine(self._unit)
            if refused is not None:
                self._unit.give_up(refused)
            await self._context.pacer.turn()

    def _begin(self, left: deque[range]) -> _Step:
        """Begin the copies of the first layers of those left, and of more of them where these are few bytes."""
        layers = left.popleft()
        copies = self._copies_of(layers)
        nbytes = sum(copy.nbytes for copy in copies)
        self._is_first = self._is_first and not nbytes
        while left and 0 < nbytes < _COPIED_ALONG and self._is_here(left[0], is_copying=True):
            more = self._copies_of(left[0])
            nbytes += sum(copy.nbytes for copy in more)
            copies += more
            layers = range(layers.start, left.popleft().stop)
        return _Step(layers, self._copies.begin(copies, layers.start))

    async def _end(self, begun: BegunCopies, layer: int, here: Callable[[], bool]) -> bool:
        """Wait for copies; what was not proven is read, and copied from where it has landed. False where one failed."""
        until, following = self._unit.deadline, None if self._ahead is None else self._ahead.begun
        is_good = await self._copies.end(begun, until, following)
        while is_good and (refuted := self._copies.take_refuted()):
            self._fetches.read_refuted(refuted, self._turn)
            await self._unit.until(here)
            is_good = await self._copies.end(self._copies.begin(self._copies.again(refuted), layer), until, following)
        return is_good

    def _is_here(self, layers: range, *, is_copying: bool = False) -> bool:
        """Whether all that these layers need has landed."""
        is_copying = is_copying or self._ahead is not None
        return self._fetches.landed(self._columns_of(layers), layers, is_copying=is_copying)

    def _copies_of(self, layers: range) -> list[AnyCopy]:
        return self._copies.of_layers(self._columns_of(layers), layers)

    def _columns_of(self, layers: range) -> list[Column]:
        known = self._columns.get(layers)
        if known is None:
            known = [column for column in self._wants.columns if column.spec.has_any(layers)]
            self._columns[layers] = known
        return known
