"""The connector's half in a worker: carries orders out on the loader's loop, and tells what became of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import anyio
import structlog

from softload.adapters._bridge import LoaderBridge
from softload.adapters.vllm.layerwise import StepLoads
from softload.adapters.vllm.messages import (
    BlockIds,
    LoadOrder,
    Orders,
    PlaceOrder,
    PrefetchOrder,
    SaveOrder,
    Ticket,
)
from softload.adapters.vllm.options import ConnectorOptions, LoadMode
from softload.adapters.vllm.outbox import Outbox
from softload.adapters.vllm.units import UnitMaker
from softload.errors import LoaderClosedError
from softload.outcomes import LoadReport
from softload.transfer import Fence

__all__ = ["WorkerSide"]

_log = structlog.get_logger(__name__)

_Job: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

_STAGING_SECONDS = 0.5
"""How long a step may wait for saves to have read the blocks that it writes; then they are given up."""

_GIVE_UP_SECONDS = 5.0
"""A save that was given up ends after at most one chunk of copies; longer than this only if the device hangs."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    """Bytes that land, and wait for blocks."""

    order: PrefetchOrder
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    placed: anyio.Event = field(default_factory=anyio.Event)
    place: PlaceOrder | None = None
    ready: Fence | None = None


@dataclass(slots=True, eq=False)
class _Save:
    """One save order on its way."""

    number: int
    parts: int
    staged: threading.Event = field(default_factory=threading.Event)
    given_up: bool = False
    scopes: list[anyio.CancelScope] = field(default_factory=list)
    """Of its parts. Used on the loop only, as is `given_up`."""


class WorkerSide:
    """See the module. Methods are called on the engine's thread and return at once, unless they say otherwise.

    Args:
        options: the connector's settings.
        bridge: the loader, on its loop.
        units: makes transfer units of pages and blocks.
        outbox: what is to be told.
        fence: answers with what the device has to reach before blocks may be read or written; ``None`` for nothing.
        layers: the transfer layer of each of the target's layers, by the engine's name.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        bridge: LoaderBridge,
        units: UnitMaker,
        outbox: Outbox,
        fence: Callable[[], Fence | None],
        layers: Mapping[str, int],
    ) -> None:
        self._options = options
        self._bridge = bridge
        self._units = units
        self._outbox = outbox
        self._fence = fence
        self._layers = layers
        self._step_loads: StepLoads | None = None
        self._prefetches: dict[Ticket, _Prefetch] = {}
        self._loads: dict[Ticket, anyio.CancelScope] = {}
        self._saves: dict[int, _Save] = {}
        self._saving: set[Future[None]] = set()

    def make_way(self, numbers: Iterable[int]) -> None:
        """Wait, bounded, until these save orders have read their blocks, which are about to be written."""
        jobs = [job for number in numbers if (job := self._saves.get(number)) is not None]
        until = time.monotonic() + _STAGING_SECONDS
        late = [job for job in jobs if not job.staged.wait(max(0.0, until - time.monotonic()))]
        if late:
            self._spawn([lambda: self._give_up(late)])
        for job in late:
            if not job.staged.wait(_GIVE_UP_SECONDS):
                _log.error("save.not_given_up", number=job.number)

    def start_loads(self, orders: Orders) -> None:
        """Prefetches, placements and loads. After the forward was launched, or before one that waits for its loads."""
        fence = self._fence() if orders.places or orders.loads else None
        layerwise = self._options.mode is LoadMode.LAYERWISE
        jobs: list[_Job] = [partial(self._cancel, ticket) for ticket in orders.cancelled]
        jobs += [partial(self._prefetch, order) for order in orders.prefetches]
        jobs += [partial(self._place, order, fence) for order in orders.places]
        into_blocks = [*orders.places, *(() if layerwise else orders.loads)]
        if not layerwise:
            jobs += [partial(self._load, order, fence) for order in orders.loads]
        for order in into_blocks:
            self._outbox.expect(order.ticket)
        if jobs and not self._spawn(jobs):
            for prefetch in orders.prefetches:
                self._outbox.landed(prefetch.ticket, 0)
            for order in into_blocks:
                self._fail(order.ticket, order.block_ids)
        if layerwise and orders.loads:
            num_layers = max(self._layers.values()) + 1
            self._step_loads = StepLoads(self._bridge, self._units, orders.loads, self._layers, num_layers)
            self._step_loads.start(fence)

    def wait_for_layer(self, name: str) -> None:
        """In the forward: wait for what this step loads of a layer, until the deadline at most."""
        if self._step_loads is not None:
            self._step_loads.wait_layer(name)

    def end_step_loads(self) -> None:
        """After the forward: wait for the end of what it waited for, and tell which blocks did not come."""
        if self._step_loads is not None:
            self._outbox.bad_blocks(self._step_loads.bad_blocks())
            self._step_loads = None

    def start_saves(self, orders: Orders) -> None:
        """After the forward was launched: saves of what it computes."""
        if not orders.saves:
            return
        fence = self._fence()
        parts = []
        for order in orders.saves:
            ranges = list(self._units.save_parts(len(order.keys)))
            self._saves[order.number] = job = _Save(order.number, len(ranges))
            parts += [partial(self._save, order, job, part, fence) for part in ranges]
        future = self._spawn(parts)
        if future is None:
            for order in orders.saves:
                self._read(self._saves[order.number])
            return
        self._saving.add(future)
        future.add_done_callback(self._saving.discard)

    def drain(self, timeout: float) -> bool:
        """Wait until the saves that were ordered so far have ended; False where that takes longer."""
        return not wait(list(self._saving), timeout).not_done

    # -- on the loop

    async def _prefetch(self, order: PrefetchOrder) -> None:
        job = _Prefetch(order)
        until = anyio.current_time() + order.deadline
        self._prefetches[order.ticket] = job
        answered = False
        try:
            with job.scope:
                loader = self._bridge.loader
                pages = 0 if loader is None else (await loader.lookup(self._units.lookup(order))).pages
                if loader is None or not pages or order.lookup_only:
                    answered = True
                    self._outbox.landed(order.ticket, pages)
                    return
                unit = self._units.prefetch(order, pages, max(0.0, until - anyio.current_time()))
                async with loader.prefetch([unit]) as prefetch:
                    landed = (await prefetch.landed())[unit.request_id]
                    answered = True
                    self._outbox.landed(order.ticket, landed)
                    if not landed:
                        return
                    await job.placed.wait()
                    assert job.place is not None
                    # From here on nothing ends it but its own end: the engine waits for it to let go of the blocks.
                    with anyio.CancelScope(shield=True):
                        placed = self._units.place(order, job.place, job.ready)
                        self._finish(job.place.ticket, job.place.block_ids, await prefetch.place([placed]))
        except LoaderClosedError:
            pass  # told below
        except Exception:
            _log.exception("prefetch.raised", request_id=order.ticket[0])
        finally:
            del self._prefetches[order.ticket]
            if not answered:
                self._outbox.landed(order.ticket, 0)
            self._bridge.forget([self._units.name(order.ticket)])
            if job.place is not None:
                self._fail(job.place.ticket, job.place.block_ids)

    async def _cancel(self, ticket: Ticket) -> None:
        job = self._prefetches.get(ticket)
        if job is not None and job.place is None:
            job.scope.cancel()
        load = self._loads.get(ticket)
        if load is not None:
            load.cancel()

    async def _place(self, order: PlaceOrder, fence: Fence | None) -> None:
        job = self._prefetches.get(order.ticket)
        if job is None:  # what had landed was given up meanwhile
            self._fail(order.ticket, order.block_ids)
            return
        job.place, job.ready = order, fence
        job.placed.set()

    async def _load(self, order: LoadOrder, fence: Fence | None) -> None:
        restored = 0
        until = anyio.current_time() + order.deadline
        self._loads[order.ticket] = scope = anyio.CancelScope()
        try:
            with scope:
                for part in self._units.load_parts(len(order.keys)):
                    loader = self._bridge.loader
                    if loader is None:
                        break
                    unit = self._units.load(order, part, max(0.0, until - anyio.current_time()), fence)
                    async with loader.load([unit]) as load:
                        restored += (await load.report()).outcomes[unit.request_id].restored_pages
                    if restored < part.stop:
                        break
        except LoaderClosedError:
            pass  # told below
        except Exception:
            _log.exception("load.raised", request_id=order.ticket[0])
        finally:
            del self._loads[order.ticket]
            parts = self._units.load_parts(len(order.keys))
            self._bridge.forget(self._units.load_name(order, part) for part in parts)
            self._received(order.ticket, order.block_ids, restored)

    async def _save(self, order: SaveOrder, job: _Save, part: range, fence: Fence | None) -> None:
        staged = False

        def on_staged() -> None:
            nonlocal staged
            if not staged:
                staged = True
                self._part_staged(job)

        try:
            with anyio.CancelScope() as scope:
                job.scopes.append(scope)
                loader = self._bridge.loader
                unit = None if loader is None or job.given_up else self._units.save(order, part, fence)
                if loader is not None and unit is not None:
                    loader.computed(unit)
                    await loader.save([unit], staged=lambda _: on_staged())
        except LoaderClosedError:
            pass
        except Exception:
            _log.exception("save.raised", request_id=order.request_id)
        finally:
            on_staged()

    async def _give_up(self, jobs: Sequence[_Save]) -> None:
        for job in jobs:
            job.given_up = True
            for scope in job.scopes:
                scope.cancel()

    # -- telling

    def _spawn(self, jobs: Sequence[_Job]) -> Future[None] | None:
        """``None`` where the loop has ended."""
        try:
            return self._bridge.spawn_all(jobs)
        except LoaderClosedError:
            return None

    def _finish(self, ticket: Ticket, block_ids: BlockIds, report: LoadReport) -> None:
        (outcome,) = report.outcomes.values()
        self._received(ticket, block_ids, outcome.restored_pages)

    def _fail(self, ticket: Ticket, block_ids: BlockIds) -> None:
        self._received(ticket, block_ids, 0)

    def _received(self, ticket: Ticket, block_ids: BlockIds, restored: int) -> None:
        """Never for a draft's sake: what is told as bad is what the target lacks."""
        bad = [block for ids in block_ids for block in ids[restored:]]
        self._outbox.received(ticket, bad, failed=restored < len(block_ids[0]))

    def _part_staged(self, job: _Save) -> None:
        job.parts -= 1
        if not job.parts:
            self._read(job)

    def _read(self, job: _Save) -> None:
        """A save order's blocks are not read any more."""
        self._saves.pop(job.number, None)
        self._outbox.staged(job.number)
        job.staged.set()
