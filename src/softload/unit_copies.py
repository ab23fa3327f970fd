"""The copies of one unit: landed bytes into its slots, in chunks, and the states of these slots meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

import anyio
import anyio.lowlevel
import structlog

from softload import events
from softload.admission import ask_again
from softload.config import Layout
from softload.context import Context
from softload.copies import Copy, chunks, copies_in, execute, wait_for, zeros
from softload.copying import Chunk, Copying
from softload.geometry.group import ResolvedComponent
from softload.geometry.layout import Fragment
from softload.landing import SegmentState
from softload.lent_copies import LentCopy, Refuted, copy_lent, keys_of, lent_batches, lent_copies, moved
from softload.native_calls import NativeCall, RefusedError
from softload.outcomes import PageStatus
from softload.planning import Column, needed_pages
from softload.slots import SlotState
from softload.transfer import Fence
from softload.unit_fetches import UnitFetches
from softload.unit_pages import UnitPages

__all__ = ["AnyCopy", "BegunCopies", "UnitCopies"]

_log = structlog.get_logger(__name__)


_TOGETHER_BYTES = 2 << 20
"""Fewer bytes are copied by one call: two lanes for them would take longer to start than to copy."""

AnyCopy = Copy | LentCopy
"""Of bytes that have landed, or from where the store has them."""


@dataclass(frozen=True, slots=True)
class BegunCopies:
    """Copies on their way, and those of them that are from where the store has its bytes."""

    copying: Copying
    lent: Sequence[LentCopy]


class WaitingUnit(Protocol):
    """The unit. All of it is called on the loop."""

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait for a condition; meanwhile what is left to plan is planned."""

    def wake(self) -> None:
        """The condition may have come true."""


class UnitCopies:
    """The copies of one unit.

    Args:
        context: the loader's parts.
        wants: what of the unit is good so far.
        fetches: where its bytes have landed.
        fence: the engine's; slots are not written before it returned.
    """

    def __init__(self, context: Context, wants: UnitPages, fetches: UnitFetches, fence: Fence | None) -> None:
        self._context = context
        self._wants = wants
        self._fetches = fetches
        self._fence = fence
        self._refuted: list[Refuted] = []
        self._integrity = context.config.integrity if context.config.layout is Layout.GROUPED else None
        """How what is lent is proven; ``None`` where objects have no digests."""

    @property
    def may_write(self) -> bool:
        """Whether the engine has let go of the slots."""
        return self._fence is None

    async def wait_for_engine(self, unit: WaitingUnit) -> PageStatus | None:
        """Wait for the engine's fence, as the unit waits. A status where the slots may never be written."""
        fence = self._fence
        if fence is None:
            return None
        call: NativeCall[None] = NativeCall(lambda: wait_for(fence), lambda _: unit.wake())
        try:
            self._context.fences.submit(call)
        except RefusedError:
            return PageStatus.SHED
        try:
            await unit.until(lambda: call.finished)
        finally:
            if not call.finished and not call.withdraw():
                call.abandon()
        if isinstance(call.error, RefusedError):  # closed before it had a thread
            return PageStatus.SHED
        if call.error is not None:  # the engine's own fault: it costs this unit, not the loader
            self._failed(events.FENCE_RAISED, call.error)
            return PageStatus.CANCELLED
        self._fence = None
        return None

    async def copy(self, copies: Sequence[AnyCopy], layer: int, until: float) -> bool:
        """Copy in chunks; the deadline may pass between two, never within one. False once one has failed.

        What is not proven after it was copied is no failure: `take_refuted` must follow.

        Args:
            copies: what to copy.
            layer: the first that waits for it; lower ones, of whatever unit, go first.
            until: when it is too late for the store to say what it alone can prove.
        """
        return await self.end(self.begin(copies, layer), until)

    def begin(self, copies: Sequence[AnyCopy], layer: int) -> BegunCopies:
        """Begin what `copy` does; `end`, or that of its `copying`, must follow."""
        if copies:
            self._move_slots(SlotState.FILLING)
        context, most = self._context, self._context.config.copy_chunk_bytes
        lent = [copy for copy in copies if isinstance(copy, LentCopy)]
        landed = [copy for copy in copies if not isinstance(copy, LentCopy)] if lent else copies
        prove = partial(copy_lent, context.calls, integrity=self._integrity, clock=context.lender.clock)
        parts = [partial(execute, part) for part in chunks(landed, most)]  # type: ignore[arg-type]  # no lent ones
        direct = [partial(prove, part) for part in lent_batches(lent, most)]
        calls: list[Chunk] = [*direct, *parts]
        if len(calls) > 1 and sum(copy.nbytes for copy in copies) <= min(most, _TOGETHER_BYTES):
            calls = [partial(_all_of, calls)]
        return BegunCopies(Copying(context.compute, calls, float(layer), direct=len(direct)), lent)

    async def end(self, begun: BegunCopies, until: float, following: BegunCopies | None = None) -> bool:
        """Wait until all is copied and, if it can be, proven; see `copy`.

        If copying is cancelled, what is `following` does not start any more.
        """
        if not await self._wait(begun.copying, None if following is None else following.copying):
            return False
        if begun.lent:
            lent, refuted, counters = begun.lent, begun.copying.refuted, self._context.counters
            if self._integrity is None:
                refuted += await self._moved(lent, refuted, until)
            # Of an object that holds several groups of layers, with the first of them.
            nbytes = sum(
                copy.segment.nbytes * copy.segment.count for copy in begun.lent if not copy.fragments[0].offset
            )
            nbytes -= sum(each.size for each in refuted if not each.fragments[0].offset)
            counters.bytes_loaded += nbytes
            counters.bytes_direct += nbytes
            self._fetches.loans.proven(lent, refuted)
            self._refuted += refuted
        return True

    async def _moved(self, lent: Sequence[LentCopy], refuted: Sequence[Refuted], until: float) -> list[Refuted]:
        """Of objects without a digest: those besides `refuted` that may have left while they were copied, or before."""
        if len(refuted) == sum(copy.segment.count for copy in lent):
            return []
        now = await ask_again(self._context, keys_of(lent), until)
        known = {(each.column, each.page, id(each.fragments)) for each in refuted}
        return [
            each
            for each in moved(lent, now, self._fetches.is_lent)
            if (each.column, each.page, id(each.fragments)) not in known
        ]

    def take_refuted(self) -> list[Refuted]:
        """What was not proven by the copies since the last time: its slots hold anybody's bytes."""
        refuted, self._refuted = self._refuted, []
        refuted.sort(key=lambda each: each.page)  # lanes end as they like; the first pages are worth most
        return refuted

    async def _wait(self, copying: Copying, following: Copying | None = None) -> bool:
        is_good = await copying.wait(following)
        if not is_good:
            self._context.log.tell(
                _log.error, events.COPY_FAILED, request_id=self._wants.request_id, error=repr(copying.error)
            )
        return is_good

    async def run_chunk(self, chunk: Sequence[Copy]) -> bool:
        """Copy one chunk to its end. False where the device could not: that costs this unit, not the loader."""
        is_good = False
        with anyio.CancelScope(shield=True):
            copying = Copying(self._context.compute, [partial(execute, chunk)], float(self._context.pools.num_layers))
            is_good = await self._wait(copying)
        return is_good

    def again(self, refuted: Iterable[Refuted]) -> list[AnyCopy]:
        """What was not proven and is still wanted, now that it was read."""
        return [
            copy
            for each in refuted
            if each.page in self._wants.pages_of(each.column)
            for copy in self._column_copies(each.column, each.fragments, range(each.page, each.page + 1))
        ]

    def of_layers(self, step: Iterable[Column], layers: range) -> list[AnyCopy]:
        """The target's bytes of these columns that belong to `layers`, for the pages that are good so far."""
        return [
            copy
            for column in step
            for copy in self._column_copies(
                column,
                [fragment for fragment in column.spec.fragments if fragment.layer in layers and not fragment.draft],
                self._wants.pages_of(column),
            )
        ]

    def of_draft(self) -> list[AnyCopy]:
        """The draft's bytes, for its pages that are good so far."""
        return [
            copy
            for column in self._draft_holders()
            for copy in self._column_copies(column, _draft_fragments(column), self._draft_pages_of(column))
        ]

    def zeros(self, copied: int, draft_copied: int) -> Iterator[list[Copy]]:
        """Chunks of zeros for draft slots without their bytes, so that they do not hold what was there before."""

        def draftless(component: ResolvedComponent) -> range:
            # Restored pages were copied, after the engine's fence: their slots are ours to write. All others are
            # computed by the engine, draft and all.
            restored = needed_pages(copied, component.hit_policy, component.window)
            return range(max(draft_copied, restored.start), restored.stop)

        for component in self._wants.draft if not self._wants.draft_is_packed else ():
            assert component.rows is not None
            pages = draftless(component)
            self._context.slots.move(component.pool, component.rows[pages.start : pages.stop], SlotState.ZEROING)
        copies = (
            copy
            for column in self._draft_holders()
            for copy in zeros(column, draftless(self._draft_component(column)), _draft_fragments(column))
        )
        yield from chunks(copies, self._context.config.copy_chunk_bytes)

    def release_slots(self, restored: int, drafted: int) -> None:
        """The end: COMMITTED where all of a page was copied, RELEASED elsewhere."""
        for component in self._wants.own_components():
            assert component.rows is not None
            good = min(drafted, restored) if component.pool.name.is_draft else restored
            written = needed_pages(good, component.hit_policy, component.window)
            self._context.slots.move(component.pool, component.rows, SlotState.RELEASED)
            self._context.slots.move(component.pool, component.rows[written.start : written.stop], SlotState.COMMITTED)
        for component in self._wants.draft if self._wants.draft_is_packed else ():
            assert component.rows is not None
            self._context.slots.lack_draft(component.pool, component.rows[drafted:restored])

    def _failed(self, event: str, error: Exception) -> None:
        self._context.log.tell(_log.error, event, request_id=self._wants.request_id, error=repr(error))

    def _move_slots(self, state: SlotState) -> None:
        for component in self._wants.own_components():
            assert component.rows is not None
            self._context.slots.move(component.pool, component.rows[: self._wants.pages], state)

    def _draft_holders(self) -> Sequence[Column]:
        """The columns whose objects hold the draft's bytes."""
        if not self._wants.draft_rides:
            return self._wants.draft_columns
        return [column for column in self._wants.columns if _draft_fragments(column)]

    def _draft_pages_of(self, column: Column) -> range:
        component = self._draft_component(column)
        return needed_pages(self._wants.draft_pages, component.hit_policy, component.window)

    def _draft_component(self, column: Column) -> ResolvedComponent:
        """The component of a column whose objects hold the draft's bytes."""
        return (self._wants.target if self._wants.draft_rides else self._wants.draft)[column.component]

    def _column_copies(self, column: Column, fragments: Sequence[Fragment], pages: range) -> list[AnyCopy]:
        found: list[AnyCopy] = []
        first = pages.start
        until = self._fetches.loans.until
        for is_lent, some in groupby(
            self._fetches.segments(column, pages), lambda each: each.state is SegmentState.LENT
        ):
            segments = list(some)
            span = range(first, first + sum(segment.count for segment in segments))
            if is_lent:
                found += lent_copies(column, fragments, segments, span, until)
            else:
                found += copies_in(column, fragments, segments, span)
            first = span.stop
        return found


def _all_of(chunks: Sequence[Chunk]) -> list[Refuted]:
    """One after another, on one thread."""
    return [refuted for chunk in chunks for refuted in chunk() or ()]


def _draft_fragments(column: Column) -> Sequence[Fragment]:
    return [fragment for fragment in column.spec.fragments if fragment.draft or column.spec.draft]
