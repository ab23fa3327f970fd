"""One unit of one load: admitted, granted memory, read, checked, copied, reported. Fails alone.

Every unit runs as a task of its own under its own deadline, so that what hangs for one holds no other up.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from enum import Enum

import anyio
import structlog

from softload import events
from softload.accounting import count_misses, count_unit
from softload.context import Context
from softload.fetches import Fetch, Turn
from softload.landing import Share
from softload.outcomes import PageStatus, UnitOutcome
from softload.slots import SlotClaim
from softload.transfer import TransferUnit
from softload.unit_admission import UnitAdmission
from softload.unit_copies import UnitCopies
from softload.unit_fetches import UnitFetches
from softload.unit_layers import UnitLayers
from softload.unit_pages import UnitPages
from softload.unit_planning import UnitPlanning
from softload.unit_progress import UnitProgress

__all__ = ["Mode", "UnitRun"]

_log = structlog.get_logger(__name__)


class Mode(Enum):
    """What a unit's run is for."""

    STREAM = "stream"
    """Admit, read, and copy layer by layer."""

    PREFETCH = "prefetch"
    """Admit, read, and hold what landed."""

    PLACE = "place"
    """Copy what a prefetch holds."""


class UnitRun:
    """One unit on its way.

    Args:
        context: the loader's parts.
        unit: what is asked for.
        mode: see `Mode`.
        turn: the load's place among others.
        on_layers: told how many layers the unit has in its slots, or that it holds no layer up any more.
        layer_seconds: what the forward takes for a layer, as far as the engine says.

    Raises:
        ValueError: keys, slots or pools that do not fit; nothing has been touched.
    """

    def __init__(
        self,
        context: Context,
        unit: TransferUnit,
        mode: Mode,
        turn: Turn,
        on_layers: Callable[[str, int], None] = lambda _request, _layers: None,
        layer_seconds: float = 0.0,
    ) -> None:
        self._context = context
        self._mode = mode
        self._turn = turn
        self.unit = unit
        self.request_id = unit.request_id
        self.wants = UnitPages(context, unit)
        self.progress = UnitProgress(context, unit.request_id, on_layers)
        share = Share.PREFETCH if mode is Mode.PREFETCH else Share.STREAMING
        self._fetches = UnitFetches(context, self.wants, self, share, layer_seconds)
        self._planning = UnitPlanning(context, self.wants, self._fetches, self, share, layer_seconds)
        self.admission = UnitAdmission(
            context, self.wants, self._fetches, self._planning, self, turn, is_streaming=mode is Mode.STREAM
        )
        self._copies = UnitCopies(context, self.wants, self._fetches, unit.ready)
        self._layers = UnitLayers(
            context,
            self.wants,
            self._fetches,
            self._planning,
            self._copies,
            self.progress,
            self,
            turn,
            keep=mode is Mode.PLACE,
        )
        self.landed_pages = 0
        """PREFETCH and PLACE: pages that had landed in time; the others are counted as misses already."""
        self.deadline = math.inf
        """When its waiters are answered, on the event loop's clock."""
        self._scope = anyio.CancelScope()
        self._hold = anyio.CancelScope()
        self._reason = PageStatus.TIMED_OUT
        self.is_cancelled = False
        self._reserved = False
        self.outcome: UnitOutcome | None = None
        self.landed = asyncio.Event()
        self.draft_ready = asyncio.Event()
        self.finished = asyncio.Event()
        self._changed = asyncio.Event()
        self._placed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<UnitRun {self.request_id}: {self._mode.value}, {self.pages} of {self.wants.requested} pages>"

    @property
    def pages(self) -> int:
        """Pages that are good so far."""
        return self.wants.pages

    @property
    def bytes_read(self) -> int:
        """Bytes that this unit had read; what it shared with others is theirs."""
        return self._planning.bytes_read + self._fetches.loans.nbytes

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or ends: its deadline has passed, or it was cancelled."""
        return self.is_cancelled or self._scope.cancel_called or self.finished.is_set()

    @property
    def is_placed(self) -> bool:
        """PREFETCH: whether another run holds its bytes, or nobody wants them any more."""
        return self._placed.is_set()

    # -- before it runs

    def claims(self) -> list[SlotClaim]:
        """The slots that are to be RESERVED for it.

        Raises:
            ValueError: a unit without slots where they are needed.
        """
        claims: list[SlotClaim] = []
        for component in self.wants.own_components() if self._mode is not Mode.PREFETCH else ():
            if component.rows is None:
                raise ValueError(f"request {self.request_id!r}, pool {component.pool.name}: expected slots, got none")
            claims.append(SlotClaim(self.request_id, component.pool, component.rows, component.keys))
        return claims

    def begin(self, submitted_at: float) -> None:
        """Its slots are RESERVED: start its deadline, as of when it was submitted."""
        self._reserved = self._mode is not Mode.PREFETCH
        seconds = self._context.config.deadline if self.unit.deadline is None else self.unit.deadline
        self.deadline = submitted_at + seconds
        if self._mode is not Mode.PREFETCH:  # what has landed may be held for longer
            self._scope.deadline = self.deadline
        self._fetches.loans.begin()
        if not self.wants.requested:
            self.admission.decided.set()

    def abandon(self) -> None:
        """Give bytes back although nothing has begun."""
        self._planning.let_go_all(keep=True)

    def cancel(self, reason: PageStatus = PageStatus.CANCELLED) -> None:
        """End it; what is not committed by now is a miss with this status."""
        if not self.finished.is_set() and not self._placed.is_set():
            self._reason = reason
            self.is_cancelled = True
            self._scope.cancel()

    def hold_until(self, moment: float) -> None:
        """PREFETCH: what has landed is given up then, unless it was placed."""
        self._hold.deadline = moment

    def placed(self) -> None:
        """PREFETCH: its bytes are held by a PLACE run now."""
        self._placed.set()

    def end(self) -> None:
        """Its handle has ended: what a prefetch landed stays for later units, anything else is cancelled."""
        if self._mode is Mode.PREFETCH and self.landed.is_set():
            self._placed.set()
        self.cancel()

    def take_over(self, source: UnitRun) -> None:
        """PLACE: hold what a prefetch landed.

        Raises:
            ValueError: other keys than the prefetch's.
        """
        self._fetches.take_over(source._fetches)
        self.wants.continue_from(source.wants)
        self.landed_pages = source.landed_pages
        self.admission.decided.set()
        self.admission.go.set()
        self.progress.admit(self.pages)

    # -- the run

    async def run(self) -> None:
        """Everything from admission to the outcome. Ends within the deadline and one copy chunk."""
        try:
            with self._scope:
                await (self._prefetch() if self._mode is Mode.PREFETCH else self._stream())
            if self._scope.cancelled_caught:
                with anyio.CancelScope(shield=True):
                    await self._wind_up()
        except Exception:  # a bug: it costs this unit, not the loader
            self._context.log.tell(_log.exception, events.TASK_RAISED, task="unit", request_id=self.request_id)
            self._reason = PageStatus.CANCELLED
            self.wants.draft_pages = self._layers.draft_restored
            if not self._layers.restored:
                self.wants.limit(0, PageStatus.CANCELLED)
                if self.progress.admitted_pages:
                    self._fail_after_admission()
        finally:
            self._finish()

    # -- what its fetches tell it

    def fetch_failed(self, fetch: Fetch) -> None:
        """A fetch cannot be had: the unit ends before it."""
        for wanted in self._fetches.of(fetch):
            self.wants.mark_bad(wanted.column, wanted.page, fetch.status)
        self._recut()

    def fetch_split(self, old: Fetch, new: Sequence[Fetch]) -> None:
        """A fetch goes on in pieces."""
        self._fetches.split(old, new)

    def fetch_replaced(self, old: Fetch, new: Fetch) -> None:
        """Another read of the same object has landed."""
        self._fetches.replace(old, new)

    def cut(self) -> None:
        """Some of what is wanted cannot be had."""
        self._recut()

    def wake(self) -> None:
        """Some fetches have landed or failed."""
        self._changed.set()

    # -- what its layers ask of it

    async def until(self, ready: Callable[[], bool], idle: float = 0.0) -> None:
        """Wait for a condition on what has landed; meanwhile plan what is left to plan, once nothing came for `idle` s.

        So the first layers are copied before the reads of the last ones are planned, where they are here by then.
        """
        while idle and not ready():
            self._changed = asyncio.Event()
            with anyio.move_on_after(idle) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                break
        while not ready():
            self._changed = asyncio.Event()
            if not await self._planning.plan(self._turn):
                await self._changed.wait()

    def give_up(self, status: PageStatus) -> None:
        """All of it is a miss."""
        self.wants.limit(0, status)
        self._recut(timed_out=status is PageStatus.TIMED_OUT)

    # -- the steps of the run

    async def _prefetch(self) -> None:
        """Land what lands by the deadline, then hold it."""
        with anyio.move_on_at(self.deadline) as scope:
            await self._read()
            await self.until(lambda: self._fetches.landed(self.wants.all_columns()))
        if scope.cancelled_caught:
            self._give_up_unlanded()
        self.landed_pages = self.pages
        # What has not landed is never placed, so it is counted here; placing counts what it restores, and loses.
        missed = tuple(self.wants.outcomes(self.pages, self._reason))[self.pages :]
        count_misses(self._context, self.request_id, missed, kept=self.pages, requested=self.wants.requested)
        self.landed.set()
        with self._hold:
            await self._placed.wait()
        if not self._placed.is_set():
            self.give_up(PageStatus.SHED)

    async def _stream(self) -> None:
        """Copy layer by layer what lands, or has landed."""
        if self._mode is Mode.STREAM:
            await self._read()
        await self._layers.copy_target()
        await self._layers.copy_draft()
        self.draft_ready.set()

    async def _read(self) -> None:
        await self.admission.decided.wait()
        await self.admission.go.wait()
        await self._planning.begin()
        if self._mode is Mode.PREFETCH:
            while await self._planning.plan(self._turn):
                pass
        self.progress.admit(self.pages)

    async def _wind_up(self) -> None:
        """After the deadline or a cancel. What has landed is still worth one chunk of copies, but no more."""
        timed_out = self._reason is PageStatus.TIMED_OUT
        if self._mode is Mode.PREFETCH:
            self._planning.let_go_all(keep=True)
        self._give_up_unlanded()
        if not self._layers.restored:
            if timed_out and self._mode is not Mode.PREFETCH:
                await self._layers.salvage_target()
            if not self._layers.restored:
                self.give_up(self._reason)
        # Nobody who waits for the target waits for the draft's zeros.
        if not self.progress.admitted.is_set():
            self.progress.admit(self.pages)
        self.progress.end()
        await self._layers.leave_draft()

    def _finish(self) -> None:
        """Account for every page and slot, once."""
        restored = self._layers.restored
        late = self.progress.late
        if restored or not self.is_over:  # else all was let go: why it failed before says more
            late = self.progress.late_failure(restored, self.wants.status_of(restored) or self._reason)
        self.progress.end()
        self._planning.let_go_all(keep=self._mode is not Mode.STREAM)
        if self._reserved:
            self._reserved = False
            self._copies.release_slots(restored, self._layers.draft_restored)
        self.outcome = UnitOutcome(
            request_id=self.request_id,
            requested_pages=self.wants.requested,
            restored_pages=restored,
            draft_pages=min(self._layers.draft_restored, restored),
            prefill_from_page=restored,
            pages=tuple(self.wants.outcomes(restored, self._reason)),
            late_failure=late,
        )
        if self._mode is not Mode.PREFETCH:
            landed = self.landed_pages if self._mode is Mode.PLACE else self.outcome.requested_pages
            count_unit(self._context, self.outcome, landed=landed, has_draft=bool(self.wants.draft))
        self._context.active.discard(self)
        for event in (
            self.admission.decided,
            self.admission.go,
            self.progress.admitted,
            self.landed,
            self.draft_ready,
            self.finished,
        ):
            event.set()

    # -- cutting

    def _give_up_unlanded(self) -> None:
        """What has not landed by now is a miss. The running copy, if there was one, has ended."""
        self._fetches.leave_replaced()
        if not self.progress.admitted.is_set():
            self.give_up(self._reason)
            return
        for wanted in self._planning.unplanned():
            self.wants.mark_bad(wanted.column, wanted.page, self._reason)
        for fetch in self._fetches:
            if not fetch.landed:
                for wanted in self._fetches.of(fetch):
                    self.wants.mark_bad(wanted.column, wanted.page, self._reason)
        self._recut(timed_out=self._reason is PageStatus.TIMED_OUT)

    def _recut(self, *, timed_out: bool = False) -> None:
        self.wants.recut()
        if self.progress.is_short(self.pages):
            self._fail_after_admission()
        self._fetches.prune(timed_out=timed_out)

    def _fail_after_admission(self) -> None:
        # A prefetch has given the engine nothing to compute with.
        if self._mode is not Mode.PREFETCH and self.progress.failure is None:
            self.progress.fail(self.pages, self.wants.status_of(self.pages) or self._reason)
