"""Saving pages: copied out of the slots first, then written from landing memory, each object in a put session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import anyio
import numpy as np
import structlog

from softload import events
from softload.admission import draft_parts
from softload.config import Layout
from softload.context import Context
from softload.copies import Copy, chunks, copies_out, execute, wait_for
from softload.geometry.group import ResolvedComponent
from softload.integrity import write_tail
from softload.landing import Segment, SegmentState, Share
from softload.native_calls import NativeCall, RefusedError
from softload.outcomes import PageSave, PageStatus, SaveOutcome, SaveReport, SaveStatus
from softload.planning import Column, columns
from softload.protocols import PutRefusal
from softload.transfer import Fence, TransferUnit

__all__ = ["Saver"]

_log = structlog.get_logger(__name__)

_ENDPOINT = "saves"
"""What quarantined memory of saves is counted under: only the store knows where a put goes."""

_GRANT_SECONDS = 0.05

_FULL_PAUSES = (0.02, 0.05)
"""Before an object that a full store refused is offered again."""

_WORST = (
    SaveStatus.REFUSED,
    SaveStatus.FAILED,
    SaveStatus.TIMED_OUT,
    SaveStatus.STORE_FULL,
    SaveStatus.SHED,
    SaveStatus.SUPPRESSED,
    SaveStatus.SAVED,
    SaveStatus.PRESENT,
)


@dataclass(slots=True, eq=False)
class _Object:
    """One object of one page that is to be saved."""

    column: Column
    page: int
    status: SaveStatus | None = None
    done: anyio.Event | None = None
    """Set once the status is known; ``None`` for what this call does not write."""

    @property
    def key(self) -> str:
        return self.column.keys[self.page]

    @property
    def size(self) -> int:
        return self.column.spec.size


class _FenceError(Exception):
    """The engine's fence raised."""


class Saver:
    """All saves of one loader."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._under_way: dict[str, _Object] = {}

    async def save(
        self, units: Sequence[TransferUnit], staged: Callable[[TransferUnit], object] = lambda _: None
    ) -> SaveReport:
        """See `PageLoader.save`."""
        plans = []
        for unit in units:
            await self._context.pacer.turn()
            plans.append(self._plan(unit))
        for unit, _, objects in plans:
            await self._save_unit(unit, [item for item in objects if item.status is None], staged)
        await self._context.pacer.turn()
        outcomes = {unit.request_id: _outcome(unit, components, objects) for unit, components, objects in plans}
        for outcome in outcomes.values():
            self._context.counters.saves.update(page.status for page in outcome.pages)
        saved = sum(
            item.size
            for _, _, objects in plans
            for item in objects
            if item.status is SaveStatus.SAVED and item.done is not None
        )
        return SaveReport(outcomes, saved)

    def _plan(self, unit: TransferUnit) -> tuple[TransferUnit, list[ResolvedComponent], list[_Object]]:
        context = self._context
        target = context.pools.resolve(unit.target, allow_partial=unit.partial, allow_missing_kv=unit.partial)
        draft, draft_columns = draft_parts(context, unit, target)
        all_columns = [
            *columns(target, dict(context.pools.specs(context.config.layout)), context.keys, draft=False),
            *draft_columns,
        ]
        components = [*target, *(draft if unit.draft else ())]
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
            _Object(column, page, shortcut if good else SaveStatus.REFUSED)
            for column in all_columns
            for page, good in enumerate(allowed[column.pool.name, any(f.draft for f in column.spec.fragments)])
            if column.rows is not None and column.rows[page] >= 0  # pages before a trailing window may have no slots
        ]
        # Prefix order: if the store is full half-way, what is in it is a prefix.
        objects.sort(key=lambda item: item.page)
        return unit, components, objects

    def _shortcut(self) -> SaveStatus | None:
        context = self._context
        if context.pools.rank_replicated and context.config.tp_rank:
            return SaveStatus.SAVED  # rank 0 writes the same bytes under the same key
        if context.health.master.refuses:
            return SaveStatus.SUPPRESSED
        if context.landing.sheds or context.landing.refuses(_ENDPOINT):
            return SaveStatus.SHED
        return None

    async def _save_unit(
        self, unit: TransferUnit, objects: Sequence[_Object], staged: Callable[[TransferUnit], object]
    ) -> None:
        if not objects:
            staged(unit)
            return
        context = self._context
        seconds = context.config.save_deadline if unit.deadline is None else unit.deadline
        mine, shared = [], []
        done = anyio.Event()
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
            with context.wait_until(anyio.current_time() + seconds):
                if mine and unit.ready is not None:
                    fence = unit.ready
                    await self._wait_for_engine(unit.request_id, fence)
                batches = list(self._batches(mine))
                for batch in batches:
                    await self._save_batch(batch, lambda last=batch is batches[-1]: last and staged(unit))  # type: ignore[misc]
                for item, other in shared:
                    if other.status is None and other.done is not None:
                        await other.done.wait()
                    item.status = SaveStatus.PRESENT if other.status is SaveStatus.SAVED else other.status
        except RefusedError:
            otherwise = SaveStatus.SHED
        except _FenceError:
            otherwise = SaveStatus.FAILED
        finally:
            for item in objects:
                if item.status is None:
                    item.status = otherwise
            for item in mine:
                del self._under_way[item.key]
            done.set()
            staged(unit)
        skipped = [item for item in objects if item.status in (SaveStatus.SHED, SaveStatus.STORE_FULL)]
        if skipped:
            _log.info(events.SAVE_SKIPPED, request_id=unit.request_id, objects=len(skipped), status=skipped[0].status)

    async def _wait_for_engine(self, request_id: str, fence: Fence) -> None:
        try:
            await self._context.fences.run(lambda: wait_for(fence))
        except RefusedError:
            raise
        except Exception as error:  # the engine's own fault: it costs this save
            _log.error(events.FENCE_RAISED, request_id=request_id, error=repr(error))
            raise _FenceError from error

    def _batches(self, objects: Sequence[_Object]) -> Iterable[list[_Object]]:
        config = self._context.config
        limit = max(1, min(config.read_batch_bytes, self._context.landing.limit(Share.SAVE) // 4))
        batch: list[_Object] = []
        total = 0
        for item in objects:
            if batch and (total + item.size > limit or len(batch) >= config.read_batch_objects):
                yield batch
                batch, total = [], 0
            batch.append(item)
            total += item.size
        if batch:
            yield batch

    async def _save_batch(self, batch: list[_Object], staged: Callable[[], object]) -> None:
        landing = self._context.landing
        await self._context.pacer.turn()
        by_column: dict[Column, list[_Object]] = {}
        for item in batch:
            by_column.setdefault(item.column, []).append(item)
        ordered = [item for items in by_column.values() for item in items]
        sizes = [(items[0].size, len(items)) for items in by_column.values()]
        segments = None
        with anyio.move_on_after(_GRANT_SECONDS):
            segments = await landing.grant(sizes, Share.SAVE)
        if segments is None:
            for item in batch:
                item.status = SaveStatus.SHED
            return
        try:
            await self._stage(by_column, segments)
        except BaseException:
            for segment in segments:
                landing.release(segment)
            raise
        staged()
        await self._write(ordered, segments)

    async def _stage(self, by_column: dict[Column, list[_Object]], segments: Sequence[Segment]) -> None:
        """STAGING: copy out of the slots; once it is done they are the engine's again."""
        copies: list[Copy] = []
        tails: list[tuple[str, Segment]] = []
        first = 0
        for column, items in by_column.items():
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

        with anyio.CancelScope(shield=True):
            for chunk in chunks(copies, self._context.config.copy_chunk_bytes):
                await self._context.compute.run(lambda chunk=chunk: execute(chunk))  # type: ignore[misc]
            await self._context.compute.run(digest)

    async def _write(self, batch: Sequence[_Object], segments: Sequence[Segment]) -> None:
        context = self._context
        keys = [item.key for item in batch]
        returned = anyio.Event()

        def started() -> bool:
            for segment in segments:
                segment.state = SegmentState.IN_FLIGHT
            return True

        def release(call: NativeCall[tuple[list[SaveStatus], list[PageStatus]]]) -> None:
            for segment in segments:
                context.landing.release(segment)
            statuses, failures = call.value or ([SaveStatus.FAILED] * len(batch), [])
            if call.value is not None:
                context.health.record_master(failures)
            for item, status in zip(batch, statuses, strict=True):
                item.status = status if item.status is None else item.status
                if status is SaveStatus.SAVED:
                    context.health.negative.discard(item.key)
                    context.counters.bytes_saved += item.size
            returned.set()

        call = NativeCall(lambda: self._put(keys, segments), release, prepare=started)
        try:
            context.writes.submit(call)
            await returned.wait()
        finally:
            if not call.finished:
                if call.group is None or call.withdraw():
                    for segment in segments:
                        context.landing.release(segment)
                else:
                    call.abandon()
                    for item, segment in zip(batch, segments, strict=True):
                        item.status = SaveStatus.TIMED_OUT
                        context.landing.quarantine(segment, _ENDPOINT)

    def _put(self, keys: Sequence[str], segments: Sequence[Segment]) -> tuple[list[SaveStatus], list[PageStatus]]:
        """On a thread: start, one range, end. What does not get through is revoked.

        Returns:
            what became of each object, and how the master answered the start where it did not take an object.
        """
        calls = self._context.calls
        answers = calls.put_start(keys, [segment.nbytes for segment in segments])
        for pause in _FULL_PAUSES:
            # A refusal is what makes the store evict: a moment later there is room.
            full = [index for index, answer in enumerate(answers) if answer is PutRefusal.FULL]
            if not full:
                break
            time.sleep(pause)
            again = calls.put_start([keys[index] for index in full], [segments[index].nbytes for index in full])
            for index, answer in zip(full, again, strict=True):
                answers[index] = answer
        failures = [answer for answer in answers if isinstance(answer, PageStatus)]
        statuses = [_PUT_STATUSES.get(answer, SaveStatus.FAILED) for answer in answers]
        started = [index for index, status in enumerate(statuses) if status is SaveStatus.SAVED]
        written = calls.put_write(
            [keys[index] for index in started],
            [segments[index].pointer for index in started],
            [segments[index].nbytes for index in started],
        )
        good = [index for index, answer in zip(started, written, strict=True) if answer is PageStatus.LOADED]
        ended = dict(zip(good, calls.put_end([keys[index] for index in good]), strict=True))
        failed = [index for index in started if ended.get(index) is not PageStatus.LOADED]
        calls.put_revoke([keys[index] for index in failed])
        for index in failed:
            statuses[index] = SaveStatus.FAILED
        return statuses, failures


_PUT_STATUSES: dict[PutRefusal | PageStatus, SaveStatus] = {
    PageStatus.LOADED: SaveStatus.SAVED,
    PutRefusal.PRESENT: SaveStatus.PRESENT,
    PutRefusal.FULL: SaveStatus.STORE_FULL,
}


def _outcome(unit: TransferUnit, components: Sequence[ResolvedComponent], objects: Sequence[_Object]) -> SaveOutcome:
    worst: dict[tuple[str, int], SaveStatus] = {}
    drafted: dict[int, bool] = {}
    for item in objects:
        assert item.status is not None
        where = (item.column.pool.name, item.page)
        if item.column.spec.draft:
            drafted[item.page] = drafted.get(item.page, True) and item.status is SaveStatus.SAVED
            if not item.column.pool.name.is_draft:
                continue  # a packed draft's loss is not its target's
        known = worst.get(where, item.status)
        worst[where] = min(known, item.status, key=_WORST.index)
    pages = tuple(
        PageSave(page, worst[component.pool.name, page], component.pool.name)
        for component in components
        for page in range(len(component.keys))
        if (component.pool.name, page) in worst
    )
    lost = {
        page.page
        for page in pages
        if not page.component.is_draft and page.status not in (SaveStatus.SAVED, SaveStatus.PRESENT)
    }
    saved = {page.page for page in pages if page.status is SaveStatus.SAVED and not page.component.is_draft} - lost
    return SaveOutcome(unit.request_id, pages, len(saved), sum(drafted.values()))
