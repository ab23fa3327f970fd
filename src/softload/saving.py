"""Saving pages: copied out of the slots first, then written from landing memory, each object in a put session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.lowlevel
import numpy as np
import structlog

from softload import events
from softload.config import Layout
from softload.context import Context
from softload.copies import Copy, chunks, copies_out, execute, wait_for
from softload.geometry.group import ResolvedComponent
from softload.integrity import write_tail
from softload.landing import Segment, SegmentState, Share
from softload.native_calls import NativeCall, RefusedError
from softload.outcomes import SaveReport, SaveStatus
from softload.placing import Placement, Places
from softload.planning import Column, check_distinct, unit_parts
from softload.puts import Puts, put, write
from softload.request_log import RequestLog
from softload.save_objects import SaveObject, by_column, first_pages, outcome_of, slices
from softload.transfer import Fence, TransferUnit

__all__ = ["Saver"]

_log = structlog.get_logger(__name__)

_ENDPOINT = "saves"
"""What quarantined memory of saves is counted under: only the store knows where a put goes."""

_GRANT_SECONDS = 0.05

_PLACED_BYTES = 128 << 20
_PLACED_OBJECTS = 1024
"""Of a unit, for which places are asked for at a time: pages enough for copies that take longer than to begin them."""


class _EngineError(Exception):
    """The engine's fence raised, or its device could not copy: it costs this save."""


class _Staging:
    """Tells the engine once per unit that its slots are its own again."""

    def __init__(
        self, units: Sequence[TransferUnit], staged: Callable[[TransferUnit], object], log: RequestLog
    ) -> None:
        self._staged = staged
        self._log = log
        self._untold = {unit.request_id: unit for unit in units}

    def tell(self, request_id: str) -> None:
        unit = self._untold.pop(request_id, None)
        if unit is not None:
            try:
                self._staged(unit)
            except Exception:  # the engine's own fault: the save goes on
                self._log.tell(_log.exception, events.STAGED_RAISED, request_id=request_id)

    def tell_all(self) -> None:
        for request_id in list(self._untold):
            self.tell(request_id)


@dataclass(frozen=True, slots=True, eq=False)
class _UnitSave:
    """One unit of a save; `until` is on the event loop's clock."""

    unit: TransferUnit
    components: Sequence[ResolvedComponent]
    objects: Sequence[SaveObject]
    until: float


class Saver:
    """All saves of one loader."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._under_way: dict[str, SaveObject] = {}
        self._running: set[anyio.Event] = set()
        self._places = Places(context.calls, context.writes, context.health)

    async def save(
        self, units: Sequence[TransferUnit], staged: Callable[[TransferUnit], object] = lambda _: None
    ) -> SaveReport:
        """See `PageLoader.save`."""
        check_distinct(units)
        staging = _Staging(units, staged, self._context.log)
        ended = anyio.Event()
        self._running.add(ended)
        try:
            submitted_at = anyio.current_time()
            plans = []
            for unit in units:
                await self._context.pacer.turn()
                plans.append(self._plan(unit, submitted_at))
            for plan in plans:
                await self._save_unit(plan, staging)
            await self._context.pacer.turn()
            return self._report(plans)
        finally:
            staging.tell_all()
            self._running.discard(ended)
            ended.set()

    async def drain(self) -> None:
        """Wait for the saves that are under way."""
        for ended in list(self._running):
            await ended.wait()
        await self._places.wait_idle()

    def _report(self, plans: Sequence[_UnitSave]) -> SaveReport:
        outcomes = {plan.unit.request_id: outcome_of(plan.unit, plan.components, plan.objects) for plan in plans}
        for outcome in outcomes.values():
            self._context.counters.saves.update(page.status for page in outcome.pages)
        saved = sum(
            item.size
            for plan in plans
            for item in plan.objects
            if item.status is SaveStatus.SAVED and item.done is not None
        )
        return SaveReport(outcomes, saved)

    def _plan(self, unit: TransferUnit, submitted_at: float) -> _UnitSave:
        context = self._context
        seconds = context.config.save_deadline if unit.deadline is None else unit.deadline
        parts = unit_parts(unit, context.pools, context.config.layout, context.keys)
        all_columns = [*parts.columns, *parts.draft_columns]
        components = [*parts.target, *(parts.draft if unit.draft else ())]
        allowed: dict[tuple[str, bool], np.ndarray] = {}
        for component in components:
            if component.rows is None:
                raise ValueError(f"request {unit.request_id!r}, pool {component.pool.name}: expected slots, got none")
            for with_draft in (False, True):
                allowed[component.pool.name, with_draft] = context.slots.may_save(
                    component.pool, component.rows, component.keys, with_draft=with_draft
                )
        shortcut = self._shortcut()
        objects = [
            SaveObject(column, page, shortcut if good else SaveStatus.REFUSED)
            for column in all_columns
            for page, good in enumerate(allowed[column.pool.name, any(f.draft for f in column.spec.fragments)])
            if column.rows is not None and column.rows[page] >= 0  # pages before a trailing window may have no slots
        ]
        # Prefix order: if the store is full half-way, what is in it is a prefix.
        objects.sort(key=lambda item: item.page)
        return _UnitSave(unit, components, objects, submitted_at + seconds)

    def _shortcut(self) -> SaveStatus | None:
        context = self._context
        if context.pools.rank_replicated and context.config.tp_rank:
            return SaveStatus.SAVED  # rank 0 writes the same bytes under the same key
        if context.health.master.refuses:
            return SaveStatus.SUPPRESSED
        if context.landing.sheds or context.landing.refuses(_ENDPOINT):
            return SaveStatus.SHED
        return None

    async def _save_unit(self, plan: _UnitSave, staging: _Staging) -> None:
        unit = plan.unit
        objects = [item for item in plan.objects if item.status is None]
        if not objects:
            staging.tell(unit.request_id)
            return
        context = self._context
        mine, shared = [], []
        done = anyio.Event()
        placement = Placement(self._places)
        otherwise = SaveStatus.TIMED_OUT
        for item in objects:
            other = self._under_way.get(item.key)
            if other is None:
                item.done = done
                self._under_way[item.key] = item
                mine.append(item)
            else:
                shared.append((item, other))
        try:
            with context.wait_until(plan.until):
                if mine and unit.ready is not None:
                    fence = unit.ready
                    await self._wait_for_engine(unit.request_id, fence)
                left = await self._clear(mine)
                while left:
                    some = await self._place(left, placement)
                    left = left[len(some) :]
                    batches = self._batches([item for item in some if item.status is None])
                    for batch in batches:
                        is_last = not left and batch is batches[-1]
                        staged = partial(staging.tell, unit.request_id) if is_last else lambda: None
                        await self._save_batch(batch, placement, staged)
                for item, other in shared:
                    if other.status is None and other.done is not None:
                        await other.done.wait()
                    item.status = SaveStatus.PRESENT if other.status is SaveStatus.SAVED else other.status
        except RefusedError:
            otherwise = SaveStatus.SHED
        except _EngineError:
            otherwise = SaveStatus.FAILED
        finally:
            for item in objects:
                if item.status is None:
                    item.status = otherwise
            placement.end()
            for item in mine:
                del self._under_way[item.key]
            done.set()
            staging.tell(unit.request_id)
        skipped = [item for item in objects if item.status in (SaveStatus.SHED, SaveStatus.STORE_FULL)]
        if skipped:
            status = skipped[0].status
            context.log.tell(
                _log.info, events.SAVE_SKIPPED, request_id=unit.request_id, objects=len(skipped), status=status
            )

    async def _wait_for_engine(self, request_id: str, fence: Fence) -> None:
        try:
            await self._context.fences.run(lambda: wait_for(fence))
        except RefusedError:
            raise
        except Exception as error:  # the engine's own fault: it costs this save
            self._context.log.tell(_log.error, events.FENCE_RAISED, request_id=request_id, error=repr(error))
            raise _EngineError from error

    async def _clear(self, objects: Sequence[SaveObject]) -> Sequence[SaveObject]:
        """Those of which the store can tell whether they are there, by a moment from now."""
        keys = [item.key for item in objects]
        with anyio.move_on_after(_GRANT_SECONDS):
            await self._places.wait_clear(keys)
        for item in objects:
            if item.key in self._places.in_doubt:
                item.status = SaveStatus.SHED
        return [item for item in objects if item.status is None]

    async def _place(self, objects: Sequence[SaveObject], placement: Placement) -> Sequence[SaveObject]:
        """Take places for the first pages of these objects, where that is of use. Which objects these are.

        All of them, without a place, where there is none: what is then saved of them page after page is a prefix.
        """
        if placement.is_refused or not self._context.lender.is_wanted or len(self._batches(objects)) < 2:
            return objects
        some = first_pages(objects, _PLACED_BYTES, _PLACED_OBJECTS)
        placed = [item for items in by_column(some).values() for item in items]
        statuses = await placement.start([item.key for item in placed], [item.size for item in placed])
        if placement.is_refused:
            return objects
        for item, status in zip(placed, statuses, strict=True):
            item.status = None if status is SaveStatus.SAVED else status
        return some

    def _batches(self, objects: Sequence[SaveObject]) -> list[list[SaveObject]]:
        config = self._context.config
        limit = max(1, min(config.read_batch_bytes, self._context.landing.limit(Share.SAVE) // 4))
        return slices(objects, limit, config.read_batch_objects)

    async def _save_batch(self, batch: list[SaveObject], placement: Placement, staged: Callable[[], object]) -> None:
        landing = self._context.landing
        await anyio.lowlevel.checkpoint_if_cancelled()
        await self._context.pacer.turn()
        columns = by_column(batch)
        ordered = [item for items in columns.values() for item in items]
        sizes = [(items[0].size, len(items)) for items in columns.values()]
        segments = None
        with anyio.move_on_after(_GRANT_SECONDS):
            segments = await landing.grant(sizes, Share.SAVE)
        if segments is None:
            for item in batch:
                item.status = SaveStatus.SHED
            return
        is_staged = False
        try:
            await self._stage(columns, segments)
            staged()
            is_staged = True
        finally:
            if not is_staged:
                for segment in segments:
                    landing.release(segment)
        await self._write(ordered, segments, placement)

    async def _stage(self, columns: dict[Column, list[SaveObject]], segments: Sequence[Segment]) -> None:
        """STAGING: copy out of the slots; once it is done they are the engine's again."""
        copies: list[Copy] = []
        tails: list[tuple[str, Segment]] = []
        first = 0
        for column, items in columns.items():
            mine = segments[first : first + len(items)]
            first += len(items)
            copies += copies_out(column, mine, [item.page for item in items])
            tails += [(item.key, segment) for item, segment in zip(items, mine, strict=True)]
        for segment in segments:
            segment.state = SegmentState.STAGING

        def digest() -> None:
            if self._context.config.layout is Layout.GROUPED:
                for key, segment in tails:
                    write_tail(key, segment.memory)

        try:
            for chunk in chunks(copies, self._context.config.copy_chunk_bytes):
                await self._context.compute.run(partial(execute, chunk), to_its_end=True)
            await self._context.compute.run(digest, to_its_end=True)
        except RefusedError:
            raise
        except Exception as error:  # out of memory, an accelerator's fault
            self._context.log.tell(_log.error, events.COPY_FAILED, objects=len(tails), error=repr(error))
            raise _EngineError from error

    async def _write(self, batch: Sequence[SaveObject], segments: Sequence[Segment], placement: Placement) -> None:
        context = self._context
        keys = [item.key for item in batch]
        is_placed = keys[0] in placement
        returned = anyio.Event()

        def started() -> bool:
            placement.take(keys)
            for segment in segments:
                segment.state = SegmentState.IN_FLIGHT
            return True

        def run() -> Puts:
            return (write if is_placed else put)(context.calls, keys, segments)

        def release(call: NativeCall[Puts]) -> None:
            for segment in segments:
                context.landing.release(segment)
            statuses, failures = call.value or ([SaveStatus.FAILED] * len(batch), None)
            if failures is not None:
                context.health.record_master(failures)
            for item, status in zip(batch, statuses, strict=True):
                item.status = status if item.status is None else item.status
                if status is SaveStatus.SAVED:
                    context.health.negative.discard((item.key,))
                    context.counters.bytes_saved += item.size
            if call.abandoned:
                self._places.clear(keys)
            returned.set()

        call = NativeCall(run, release, prepare=started)
        try:
            context.writes.submit(call)
            await returned.wait()
        finally:
            if not call.finished:
                if call.group is None or call.withdraw():
                    for segment in segments:
                        context.landing.release(segment)
                else:
                    self._places.doubt(keys)
                    call.abandon()
                    for item, segment in zip(batch, segments, strict=True):
                        item.status = SaveStatus.TIMED_OUT
                        context.landing.quarantine(segment, _ENDPOINT)
