"""What a caller holds while a load or a prefetch is under way."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import anyio
import structlog

from softload import events
from softload.admission import Answers, Endpoints, Steps, ask_descriptors
from softload.callbacks import wait_out
from softload.context import Context
from softload.fetches import Turn
from softload.health import Permit
from softload.layer_gate import LayerGate
from softload.outcomes import Admission, Landed, LayerReady, LoadReport, PageStatus
from softload.pipeline import Mode, UnitRun
from softload.planning import check_distinct
from softload.protocols import SoloConsensus
from softload.transfer import TransferUnit

__all__ = ["Load", "Prefetch"]

_log = structlog.get_logger(__name__)

_HEAD_START = 0.02
"""Seconds that the first layers have the interpreter and the processors for themselves; see `UnitLayers`."""


class _Handle:
    """Units under way: started on entering, ended on leaving, whatever happens in between.

    It can be entered once. Before that nothing is under way, and what asks for it raises instead of waiting for ever.
    """

    def __init__(self, context: Context, units: Sequence[TransferUnit], mode: Mode, layer_seconds: float = 0.0) -> None:
        check_distinct(units)
        self._context = context
        self._gate = LayerGate(context.pools.num_layers, [unit.request_id for unit in units])
        # A turn per unit: in one load too, the first layers of all units come before the last layers of any.
        self._runs = [UnitRun(context, unit, mode, Turn(), self._gate.passed, layer_seconds) for unit in units]
        self._asking = anyio.CancelScope()
        self._is_entered = False
        self._has_ended = False
        self._entered_at = 0.0
        self._admitted_at: float | None = None

    def __repr__(self) -> str:
        state = "ended" if self._has_ended else "entered" if self._is_entered else "not entered"
        return f"<{type(self).__name__} of {len(self._runs)} units: {state}>"

    async def __aenter__(self) -> Self:
        """Start.

        Raises:
            RuntimeError: it was entered before; or the pools' buffers have moved.
            ValueError: slots that another unit holds. Nothing has been touched then, and it may be entered later.
            LoaderClosedError: the loader has been closed.
        """
        submitted_at = anyio.current_time()
        if not self._is_entered:
            await self._context.pacer.turn()  # many that start at once hold nobody up
        if self._is_entered:
            raise RuntimeError(f"expected to be entered once, got {self!r}: make another from the loader")
        self._context.check_open()
        self._context.pools.check_alive()
        reserve_all(self._context, self._runs, submitted_at)
        self._is_entered = True
        self._entered_at = submitted_at
        self._context.counters.loads += 1
        self._context.spawn(self._admit)  # first: the question is out while the units begin
        for run in self._runs:
            self._context.active.add(run)
            self._context.spawn(run.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._check_entered()
        self._has_ended = True
        self._asking.cancel()
        for run in self._runs:
            run.end()
        await finish(self._runs)

    async def admitted(self) -> Admission:
        """Pages per request that were revalidated and have landing memory, before any slot is written.

        Of a large unit in layout `grouped` it is enough that all of its objects are there and leased: what its later
        layers' objects are is told before they are read. What is wrong with them then is a late failure.

        Raises:
            RuntimeError: the handle was not entered; all methods of a handle do that.
        """
        self._check_entered()
        for run in self._runs:
            await run.progress.admitted.wait()
        return Admission(
            {run.request_id: run.progress.admitted_pages for run in self._runs},
            {
                run.request_id: status
                for run in self._runs
                if run.progress.admitted_pages < run.wants.requested
                and (status := run.wants.status_of(run.progress.admitted_pages)) is not None
            },
        )

    async def _admit(self) -> None:
        endpoints: Endpoints = {}
        try:
            await self._decide(endpoints)
            self._admitted_at = self._admitted_at or anyio.current_time()
        except Exception:  # a bug: it costs these units, not the loader
            self._context.log.tell(_log.exception, events.TASK_RAISED, task="admission")
            for run in self._runs:
                run.cancel()
        await self._give_back([permit for permit in endpoints.values() if isinstance(permit, Permit)])

    def _check_entered(self) -> None:
        if not self._is_entered:
            raise RuntimeError(f"expected a handle inside its `async with`, got {self!r}")

    async def _decide(self, endpoints: Endpoints) -> None:
        """Cut every unit to what it may read, and let it go on. Adds what was decided about endpoints."""
        with self._asking:  # who left wants no answer: the lane and the permits go to others
            await self._ask(endpoints)
        # Also after that, for the other ranks count on this one's answer.
        if not isinstance(self._context.consensus, SoloConsensus):
            for run, pages in zip(self._runs, await self._agreed(), strict=True):
                run.wants.limit(pages, PageStatus.PEER_DECLINED)
        for run in self._runs:
            run.admission.go.set()

    async def _ask(self, endpoints: Endpoints) -> None:
        waiting = [run for run in self._runs if not run.admission.decided.is_set() and not run.is_cancelled]
        answers: Answers = {}
        if waiting:
            await self._context.pacer.turn()
            first = [column for run in waiting for column in run.admission.first_columns()]
            apart = set(first)
            rest = [column for run in waiting for column in run.wants.all_columns() if column not in apart]

            def on_there() -> None:
                if all([run.admission.admit_early() for run in waiting]):
                    self._admitted_at = anyio.current_time()

            def on_ahead(answers: Answers) -> None:
                for run in waiting:
                    run.admission.read_ahead(answers, endpoints)

            async def before_rest() -> None:
                if all(run.admission.starts_early for run in waiting):  # else some wait for the answers
                    with anyio.move_on_after(_HEAD_START):
                        for run in waiting:
                            await run.progress.begun.wait()

            steps = Steps(
                len(first),
                on_ahead,
                on_there if self._context.admits_early else None,
                # Layers without bytes are ready once the unit is admitted.
                not any(column.spec.has_any(range(1)) for column in first),
                before_rest,
            )
            until = max(run.deadline for run in waiting)
            answers = await ask_descriptors(self._context, [*first, *rest], until, steps)
        for run in waiting:
            await self._context.pacer.turn()
            run.admission.decide(answers, endpoints)

    async def _agreed(self) -> list[int]:
        """Pages that every rank can restore, by unit; none where the ranks cannot agree."""
        values = [run.pages for run in self._runs]
        try:
            agreed = [max(0, int(pages)) for pages in await self._context.consensus.minimum(values)]
            if len(agreed) != len(values):
                raise ValueError(f"expected {len(values)} answers of the ranks, got {len(agreed)}")
        except Exception as error:  # another rank's end, or a bug there: these units are misses
            self._context.log.tell(_log.error, events.CONSENSUS_FAILED, units=len(values), error=repr(error))
            return [0] * len(values)
        return agreed

    async def _give_back(self, permits: Sequence[Permit]) -> None:
        """A half-open breaker let this admission through as its probe: it may be that nothing was read there."""
        probes = [permit for permit in permits if permit.is_probe]
        for run in self._runs if probes else ():
            await run.landed.wait()
        for probe in probes:
            probe.give_back()


class Load(_Handle):
    """A streaming load. Use it as an async context manager; leaving it without a report cancels it."""

    def __init__(self, context: Context, units: Sequence[TransferUnit], layer_seconds: float = 0.0) -> None:
        super().__init__(context, units, Mode.STREAM, layer_seconds)
        self._first_layer_at: float | None = None
        self._report: LoadReport | None = None

    async def layer(self, layer: int) -> LayerReady:
        """Wait until every unit has `layer` in its slots or has failed. Never raises for what a store does.

        Raises:
            IndexError: no such layer.
            RuntimeError: the handle was not entered.
        """
        self._check_entered()
        await self._gate.wait(layer)
        if self._first_layer_at is None:
            self._first_layer_at = anyio.current_time()
        failed = {run.request_id: run.progress.failure for run in self._runs if run.progress.failure is not None}
        live = [run for run in self._runs if run.progress.failure is None]
        for run in live:
            run.progress.layers_given = max(run.progress.layers_given, layer + 1)
        return LayerReady(layer, frozenset(run.request_id for run in live), failed)

    async def draft(self) -> dict[str, int]:
        """Wait until every restored page's draft slots hold the draft's bytes or zeros; draft pages per request.

        Of a unit whose deadline passed meanwhile, slots beyond its draft pages may hold anything.
        """
        self._check_entered()
        for run in self._runs:
            await run.draft_ready.wait()
        return {run.request_id: run.wants.draft_pages for run in self._runs}

    async def report(self) -> LoadReport:
        """Wait for the end: one outcome per request. The same report however often it is asked for."""
        self._check_entered()
        for run in self._runs:
            await run.finished.wait()
        if self._report is None:
            now = anyio.current_time()
            self._report = LoadReport(
                outcomes={run.request_id: run.outcome for run in self._runs if run.outcome is not None},
                bytes_loaded=sum(run.bytes_read for run in self._runs),
                admission_s=(self._admitted_at or now) - self._entered_at,
                first_layer_s=(self._first_layer_at or now) - self._entered_at,
                load_s=now - self._entered_at,
            )
        return self._report


class Prefetch(_Handle):
    """Units without slots: their pages land, and are held until they are placed or the handle ends."""

    def __init__(self, context: Context, units: Sequence[TransferUnit]) -> None:
        super().__init__(context, units, Mode.PREFETCH)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._context.spawn(self._limit_hold)
        return self

    async def landed(self) -> Landed:
        """Wait until each unit's pages are here and checked, or cut; they stay until `place` or the end."""
        self._check_entered()
        for run in self._runs:
            await run.landed.wait()
        return Landed(
            {run.request_id: run.pages for run in self._runs},
            {run.request_id: run.wants.draft_pages for run in self._runs},
            {
                run.request_id: status
                for run in self._runs
                if run.pages < run.wants.requested and (status := run.wants.status_of(run.pages)) is not None
            },
        )

    async def place(self, units: Sequence[TransferUnit]) -> LoadReport:
        """Copy what landed into slots; the store is not asked. Waits for `landed` first.

        Args:
            units: of the same requests, with slots, for the pages that landed or fewer.

        Raises:
            ValueError: a request twice, one that was not prefetched or was placed already, other keys, or slots that do
                not fit. Nothing has been touched then.
            RuntimeError: the handle was not entered, or has ended, also while this waited for `landed`; or the pools'
                buffers have moved.
            LoaderClosedError: the loader has been closed, also while this waited for `landed`.
        """
        check_distinct(units)
        entered_at = anyio.current_time()
        self._check_placeable()
        await self.landed()
        self._check_placeable()
        sources = {run.request_id: run for run in self._runs}
        placements = []
        for unit in units:
            source = sources.get(unit.request_id)
            if source is None or source.is_placed:
                known = ", ".join(repr(name) for name, run in sources.items() if not run.is_placed) or "none"
                raise ValueError(
                    f"expected a prefetched request that waits for its slots ({known}), got {unit.request_id!r}"
                )
            placements.append((UnitRun(self._context, unit, Mode.PLACE, Turn()), source))
        try:
            for run, source in placements:
                run.take_over(source)
            reserve_all(self._context, [run for run, _ in placements], anyio.current_time())
        except ValueError:
            for run, _ in placements:
                run.abandon()
            raise
        for run, source in placements:
            source.placed()
            self._context.active.add(run)
            self._context.spawn(run.run)
        runs = [run for run, _ in placements]
        try:
            for run in runs:
                await run.finished.wait()
        finally:
            for run in runs:
                run.cancel()
            await finish(runs)
        now = anyio.current_time()
        return LoadReport(
            outcomes={run.request_id: run.outcome for run in runs if run.outcome is not None},
            bytes_loaded=sum(source.bytes_read for _, source in placements),
            admission_s=0.0,
            first_layer_s=now - entered_at,
            load_s=now - entered_at,
        )

    async def _limit_hold(self) -> None:
        """None of the units can be placed before all have landed: until then the limit does not run."""
        for run in self._runs:
            await run.landed.wait()
        until = anyio.current_time() + self._context.config.hold_limit
        for run in self._runs:
            run.hold_until(until)

    def _check_placeable(self) -> None:
        self._context.check_open()
        self._check_entered()
        if self._has_ended:
            raise RuntimeError(f"expected `place` inside the handle's `async with`, got {self!r}")
        self._context.pools.check_alive()


def reserve_all(context: Context, runs: Sequence[UnitRun], submitted_at: float) -> None:
    """Take every unit's slots, or none's. Deadlines run from `submitted_at`, on the event loop's clock."""
    context.slots.reserve([claim for run in runs for claim in run.claims()])
    for run in runs:
        run.begin(submitted_at)


async def finish(runs: Sequence[UnitRun]) -> None:
    """Wait for runs that were cancelled: at most one copy chunk each."""
    await wait_out(*(run.finished for run in runs))
