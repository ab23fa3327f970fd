"""`PageLoader`: the public face, and the owner of everything below it."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from functools import partial
from typing import Any

import anyio
import anyio.abc
import numpy as np
import structlog
from anyio import AsyncContextManagerMixin

from softload import events
from softload.arena import Arena, aligned
from softload.callbacks import to_its_end
from softload.config import LoaderConfig
from softload.connection import Connection
from softload.context import Context
from softload.errors import LoaderClosedError, StoreSetupError
from softload.geometry.group import DevicePoolGroup
from softload.handles import Load, Prefetch
from softload.health import Health
from softload.keys import KeySpace
from softload.landing import LandingMemory, check_capacity
from softload.lookup import look_up
from softload.native_calls import CallGroup, CallSpan, RefusedError
from softload.outcomes import Lookup, SaveReport
from softload.protocols import PageStore, RankConsensus, SoloConsensus
from softload.reading import Reader
from softload.request_log import RequestLog, tell
from softload.saving import Saver
from softload.sessions import SessionTable
from softload.shared_lanes import SharedLanes
from softload.slots import SlotTable
from softload.snapshots import snapshot
from softload.telemetry import Counters, Statistics
from softload.transfer import TransferUnit

__all__ = ["PageLoader"]

_log = structlog.get_logger(__name__)

_CLOSE_SECONDS = 2.0
"""How long closing waits for native calls, each time that it does."""

_HOUSEKEEPING_SECONDS = 0.5


class _Phase(Enum):
    NEW = "new"
    OPENING = "being opened"
    OPEN = "open"
    CLOSED = "closed"


class PageLoader(AsyncContextManagerMixin):
    """Brings pages from a store into an engine's device pools, fail-soft.

    Use it as an async context manager: entering opens the store and starts the loader, leaving answers every waiter and
    closes both. Whatever the store does, its methods answer; only misuse raises.

    It can be entered once; where opening failed, again. Entering raises `StoreSetupError` for a store that cannot be
    set up, or not within `LoaderConfig.open_deadline`, `LandingMemoryError` where the machine lacks the landing
    memory, `ValueError` where that is too small for one page, and `RuntimeError` for a store that another loader has
    open. Nothing stays open, allocated or running then but a call that hangs, which tidies up when it returns.

    Args:
        store: where pages come from: the loader's own, opened on entering and closed on leaving.
        pools: the engine's pools.
        config: settings; the defaults suit a local store.
        consensus: how the ranks of one engine agree; alone by default.
        on_call: told on the event loop of every blocking call that has returned, for traces.
    """

    def __init__(
        self,
        store: PageStore,
        pools: DevicePoolGroup,
        *,
        config: LoaderConfig | None = None,
        consensus: RankConsensus | None = None,
        on_call: Callable[[CallSpan], object] | None = None,
    ) -> None:
        self.store = store
        self.pools = pools
        self.config = config or LoaderConfig()
        self._consensus = consensus or SoloConsensus()
        self._on_call = on_call
        self._context: Context | None = None
        self._saver: Saver | None = None
        self._phase = _Phase.NEW
        self._replacing: anyio.CancelScope | None = None

    def __repr__(self) -> str:
        if self._context is None:
            return f"<PageLoader of {self.pools!r}: {self._phase.value}>"
        return f"<PageLoader of {self.pools!r}: {len(self._context.active)} units, {self._context.landing!r}>"

    async def lookup(self, unit: TransferUnit) -> Lookup:
        """Which prefixes of a unit the store has now: a hint, which a load revalidates.

        Asks for no longer than the config's `lookup_deadline`; late is a miss. While the master's breaker is open, and
        for a request that failed before, it answers no boundary and does not touch the store.

        Args:
            unit: its components need no slots.

        Raises:
            ValueError: keys or pools that do not fit.
            LoaderClosedError: the loader is not open.
        """
        return await look_up(self._opened(), unit)

    def load(self, units: Sequence[TransferUnit], *, layer_seconds: float = 0.0) -> Load:
        """A streaming load, layer by layer, of units with slots. It starts when the returned handle is entered.

        Args:
            units: with slots.
            layer_seconds: what the forward that waits for these units takes for a layer, where the engine knows: of
                layout `page`, `ReadMode.AUTO` then reads first layers first where that lets it wait less. 0: all is
                wanted as soon as possible.

        Raises:
            ValueError: keys, slots or pools that do not fit; a request twice; `layer_seconds` below 0. Entering raises
                it for slots that another unit holds.
            LoaderClosedError: the loader is not open.
        """
        context = self._opened()
        self.pools.check_alive()
        if not (math.isfinite(layer_seconds) and layer_seconds >= 0):
            raise ValueError(f"layer_seconds: expected 0 or more, got {layer_seconds}")
        return Load(context, units, layer_seconds)

    def prefetch(self, units: Sequence[TransferUnit]) -> Prefetch:
        """A prefetch of whole pages, of units without slots. It starts when the returned handle is entered.

        Raises:
            ValueError: keys or pools that do not fit; a request twice.
            LoaderClosedError: the loader is not open.
        """
        context = self._opened()
        self.pools.check_alive()
        return Prefetch(context, units)

    async def save(
        self, units: Sequence[TransferUnit], *, staged: Callable[[TransferUnit], object] = lambda _: None
    ) -> SaveReport:
        """Store pages that the engine has computed. Slots that failed to load are refused until they were computed.

        Args:
            units: with slots.
            staged: called on the event loop, exactly once for each unit, when its slots are not read any more: they are
                the engine's again while the bytes are still on their way. Also where the save fails, is cancelled, or
                raises for bad input; what it raises itself is logged.

        Returns:
            what became of every page; a store that is full, slow or away costs the save, nothing else.

        Raises:
            ValueError: keys, slots or pools that do not fit. A request that comes twice, and pools whose buffers moved,
                are refused before anybody is told by `staged`.
            LoaderClosedError: the loader is not open; `staged` is not called.
        """
        self._opened()
        self.pools.check_alive()
        assert self._saver is not None
        return await self._saver.save(units, staged)

    def computed(self, unit: TransferUnit, pages: int | Iterable[int] | None = None) -> None:
        """The engine has computed missed pages of a unit: they may be saved, and its request may look up again.

        Slots that another page has failed to load into since stay refused: this says nothing about them.

        Args:
            unit: with slots.
            pages: how many pages from the start are computed now, or which; all by default. Pages past a component's
                last are passed over.

        Raises:
            ValueError: a page or a number of pages below 0, or components that do not fit the pools.
            LoaderClosedError: the loader is not open.
        """
        context = self._opened()
        which = range(pages) if isinstance(pages, int) else None if pages is None else tuple(pages)
        lowest = pages if isinstance(pages, int) else min(which or (0,))
        if lowest < 0:
            raise ValueError(f"request {unit.request_id!r}: expected computed pages of 0 or more, got {lowest}")
        context.health.unsuppress(unit.request_id)
        target = self.pools.resolve(unit.target, allow_partial=unit.partial, allow_missing_kv=unit.partial)
        components = [*target, *(self.pools.resolve_draft(unit.draft) if unit.draft else ())]
        for component in components:
            if component.rows is None:
                continue
            count = len(component.keys)
            chosen = range(count) if which is None else [page for page in which if page < count]
            rows = component.rows[np.asarray(chosen, np.int64)]
            context.slots.computed(component.pool, rows, [component.keys[page] for page in chosen])

    def forget(self, request_id: str) -> None:
        """A request has ended: what failed for it does not count against a later one of the same name.

        Raises:
            LoaderClosedError: the loader is not open.
        """
        self._opened().health.unsuppress(request_id)

    async def drain(self) -> None:
        """Wait for the loads and saves that are under way, and for native calls that still hold memory.

        Closing the loader ends the wait.
        """
        context = self._opened()
        assert self._saver is not None
        with context.wait_until(math.inf):
            await self._saver.drain()
            for run in list(context.active):
                await run.finished.wait()
            await context.landing.wait_none_quarantined()

    def statistics(self) -> Statistics:
        """The loader's state and totals."""
        return snapshot(self._opened())

    @asynccontextmanager
    async def __asynccontextmanager__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204
        if self._phase is _Phase.CLOSED:
            raise LoaderClosedError("this PageLoader was closed, and its store with it: make another of both")
        if self._phase is not _Phase.NEW:
            raise RuntimeError(
                f"expected a PageLoader that was not entered, got one that is {self._phase.value} already"
            )
        self._phase = _Phase.OPENING
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            try:
                context = await self._open(tasks)
                self._phase = _Phase.OPEN
                self._context = context
                self._saver = Saver(context)
                try:
                    yield self
                finally:
                    self._phase = _Phase.CLOSED
                    await to_its_end(self._close(context))
            except Exception as error:  # raised below as it came: the task group would wrap it
                failure = error
            finally:
                if self._phase is _Phase.OPENING:  # nothing is left of it
                    self._phase = _Phase.NEW
            tasks.cancel_scope.cancel()
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it refers to this frame, and so to the landing memory: no circle for the collector

    async def _open(self, tasks: anyio.abc.TaskGroup) -> Context:
        """What is wrong with the settings shows before the store is touched."""
        config = self.config
        keys = KeySpace.create(
            config, self.pools.fingerprint(config.layout), rank_replicated=self.pools.rank_replicated
        )
        check_capacity(config.landing_bytes, self._object_sizes())
        connection = Connection(self.store)
        context = None
        try:
            with anyio.move_on_after(config.open_deadline) as scope:
                arena = await connection.allocate(aligned(config.landing_bytes), pinned=self._is_pinned)
                await connection.open()
                if not await connection.register(arena):
                    raise StoreSetupError(f"the store refused to register {arena.nbytes} bytes of landing memory")
                context = self._assemble(tasks, connection, keys, arena)
            if context is None:
                assert scope.cancelled_caught
                raise StoreSetupError(
                    f"expected {self.store!r} to be open, with {config.landing_bytes} bytes registered, within "
                    f"{config.open_deadline} s (`open_deadline`), got no answer"
                )
        finally:
            if context is None:
                await connection.close(_CLOSE_SECONDS)
        tasks.start_soon(self._keep_house, context)
        return context

    @property
    def _is_pinned(self) -> bool:
        return self.pools.device.type != "cpu"

    def _object_sizes(self) -> list[int]:
        return [spec.size for specs in self.pools.specs(self.config.layout).values() for spec in specs]

    def _assemble(self, tasks: anyio.abc.TaskGroup, connection: Connection, keys: KeySpace, arena: Arena) -> Context:
        config, calls = self.config, connection.calls
        health = Health(negative_entries=config.negative_entries, seed=config.seed)
        counters, log = Counters(), RequestLog()
        sessions = SessionTable(calls, health, ttl=connection.lease_ttl, max_stuck=config.stuck_threads)
        health.on_master_back = sessions.void

        def spawn(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
            tasks.start_soon(function)

        def retire(arena: Arena) -> None:
            if not tasks.cancel_scope.cancel_called:  # a call that returns after closing: the store is gone too
                spawn(partial(connection.unregister, arena))

        landing = LandingMemory(
            config.landing_bytes,
            pinned=self._is_pinned,
            reclaim=lambda nbytes: reader.reclaim(nbytes),
            retire=retire,
            arena=arena,
        )
        reader = Reader(calls, landing, sessions, health, counters, config, spawn, log)
        context = Context(
            config=config,
            pools=self.pools,
            keys=keys,
            calls=calls,
            connection=connection,
            landing=landing,
            reader=reader,
            sessions=sessions,
            health=health,
            slots=SlotTable(),
            counters=counters,
            consensus=self._consensus,
            control=CallGroup("control", width=config.control_lanes, max_stuck=config.stuck_threads),
            compute=CallGroup("compute", width=2, max_stuck=0, shared=SharedLanes.of_loop()),
            fences=CallGroup("fence", width=config.stuck_threads + 1, max_stuck=config.stuck_threads),
            writes=CallGroup("write", width=config.write_lanes, max_stuck=config.stuck_threads),
            spawn=spawn,
            log=log,
        )
        for group in context.groups():
            group.on_span = self._on_call
        return context

    async def _close(self, context: Context) -> None:
        """Answer every waiter, then let go in reverse order of opening."""
        self._context = None
        context.end_waits()
        runs = list(context.active)
        for run in runs:
            run.end()
        for run in runs:
            await run.finished.wait()
        with anyio.move_on_after(_CLOSE_SECONDS):
            if self._saver is not None:
                await self._saver.drain()
            await context.landing.wait_none_quarantined()
            await context.sessions.wait_none_open()
        context.reader.close()
        context.sessions.close()
        for group in context.groups():
            if group not in context.connection.groups():
                group.close()
        if self._replacing is not None:
            self._replacing.cancel()
        with anyio.move_on_after(_CLOSE_SECONDS):
            for arena in context.landing.close():
                await context.connection.unregister(arena)
        await context.connection.close(_CLOSE_SECONDS)

    async def _keep_house(self, context: Context) -> None:
        """Now and then: free what prefetches left behind, replace quarantined memory."""
        while True:
            await anyio.sleep(_HOUSEKEEPING_SECONDS)
            try:
                context.reader.expire()
                if self._replacing is None and context.landing.missing_replacement():
                    # A task of its own: registering may hang, and housekeeping goes on.
                    self._replacing = anyio.CancelScope()
                    context.spawn(partial(self._replace_quarantined, context, self._replacing))
            except Exception:  # a bug: it costs this round, not the loader
                tell(_log.exception, events.TASK_RAISED, task="housekeeping")

    async def _replace_quarantined(self, context: Context, scope: anyio.CancelScope) -> None:
        landing, connection = context.landing, context.connection
        lacking = landing.missing_replacement()
        try:
            with scope:
                arena = await connection.allocate(lacking, pinned=self._is_pinned)
                if await connection.register(arena):
                    landing.add_arena(arena)
        except RefusedError:
            pass
        except Exception as error:
            tell(_log.warning, events.MEMORY_FAILED, nbytes=lacking, error=repr(error))
        finally:
            self._replacing = None

    def _opened(self) -> Context:
        if self._context is None:
            raise LoaderClosedError("this PageLoader is not open: use it inside `async with`")
        return self._context
