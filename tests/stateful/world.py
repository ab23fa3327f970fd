"""A loader, its store, its engine and its users, on a loop whose time only the test moves.

A step ends when nothing is left to run but calls that are held on purpose.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

import numpy as np

from softload import (
    DraftPolicy,
    Integrity,
    Layout,
    LoaderConfig,
    PageLoader,
    PageStatus,
    ReadMode,
)
from softload.context import Context
from softload.cost_model import SharedTime
from softload.geometry import DraftMode
from softload.native_calls import CallGroup
from softload.slots import SlotState
from softload.stores import MemoryStore
from softload.testing import HangingStore, ScriptedStore

from .busy_memory import BusyMemory, LendingBusyMemory
from .engine import Engine, content
from .manual_time import ManualClock, ManualLoop, Ticks
from .users import Fence, Held, Pending, Request, User, page_keys

HELD = (
    "exists",
    "descriptors",
    "read",
    "session_start",
    "session_end",
    "read_ranges",
    "put_start",
    "put_write",
    "put_end",
    "remove",
)
LYING = ("exists", "descriptors", "read", "read_ranges", "put_write", "put_end")
"""Methods that may answer with a failure after the fact without leaving anything behind in the store."""

DEADLINE, LOOKUP_DEADLINE, SAVE_DEADLINE, HOLD_LIMIT = 5.0, 1.0, 4.0, 8.0


class World:
    """Everything around the loader; subclasses choose what is loaded how."""

    layout: ClassVar[Layout] = Layout.GROUPED
    read_mode: ClassVar[ReadMode] = ReadMode.AUTO
    draft: ClassVar[DraftMode] = DraftMode.NONE
    draft_policy: ClassVar[DraftPolicy] = DraftPolicy.DROP
    integrity: ClassVar[Integrity] = Integrity.SAMPLE
    landing_bytes: ClassVar[int] = 2 << 20
    read_lanes: ClassVar[int] = 2
    store_bytes: ClassVar[int] = 8 << 20
    lends: ClassVar[bool] = False
    """Whether objects are copied from where the store has them."""
    freezes: ClassVar[bool] = True
    """Whether questions where objects are may be held."""
    single_groups: ClassVar[bool] = False
    """Whether groups of layers are copied, and proven, one after another, however few bytes they have."""
    copy_chunk_bytes: ClassVar[int] = 16 << 10
    """A few copies: deadlines and cancels fall between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.loop = ManualLoop(self.clock)
        asyncio.set_event_loop(self.loop)
        self.engine = Engine(self.draft)
        self.users: list[User] = []
        self.ended: list[Request] = []
        self.cache: list[Held] = []
        self.pending: list[Pending] = []
        self.fences: list[Fence] = []
        self.corrupt: set[str] = set()
        self.violations: list[str] = []
        self.names = 0
        self.touchable: set[int] = set()
        self.expected: Counter[str] = Counter()
        self.unseen = False
        self.never_landed = 0
        """Whether a request ended without its user learning how."""

    # -- opening and closing

    def open(self) -> None:
        self.memory = MemoryStore(
            capacity=self.store_bytes, lease=2.0, eviction_ratio=0.2, clock=self.clock, lends=self.lends
        )
        self.script = ScriptedStore(self.memory)
        self.store = HangingStore(self.script)
        self.busy_memory = LendingBusyMemory(self.store, self.memory) if self.lends else BusyMemory(self.store)
        self.lies = 0
        loader = self.loader = PageLoader(
            self.busy_memory,
            self.engine.pools,
            config=LoaderConfig(
                layout=self.layout,
                read_mode=self.read_mode,
                integrity=self.integrity,
                draft_policy=self.draft_policy,
                truncate_pages=2,
                landing_bytes=self.landing_bytes,
                deadline=DEADLINE,
                lookup_deadline=LOOKUP_DEADLINE,
                save_deadline=SAVE_DEADLINE,
                hold_limit=HOLD_LIMIT,
                prefetch_ttl=3.0,
                stuck_threads=3,
                read_lanes=self.read_lanes,
                write_lanes=1,
                control_lanes=2,
                read_batch_objects=4,
                copy_chunk_bytes=self.copy_chunk_bytes,
            ),
        )
        self.stop = asyncio.Event()
        self.owner = self.loop.create_task(self._own(loader, self.stop))
        while loader._context is None:
            self.loop.run_until_complete(asyncio.sleep(0))
            if self.owner.done():
                self.owner.result()
        self.context: Context = loader._context
        self.context.health._clock = self.context.health.negative._clock = self.clock
        self.context.lender.clock = self.context.reader.costs._clock = self.clock
        self.context.reader._health._work = SharedTime(self.clock)
        self.context.pacer._clock = Ticks(0.0003)  # a few pieces of work a turn
        self.context.reader._clock = self.context.sessions._clock = self.clock
        self.expected.clear()
        self.unseen = False
        self.never_landed = 0
        self.corrupt.clear()
        self.settle()

    async def _own(self, loader: PageLoader, stop: asyncio.Event) -> None:
        async with loader:
            await stop.wait()

    def groups(self) -> list[CallGroup]:
        return [*self.context.groups(), self.context.reader._removals]

    def held_calls(self) -> int:
        return sum(self.store.held(method) for method in HELD) + sum(fence.entered for fence in self.fences)

    def busy(self) -> bool:
        return sum(group.statistics().running for group in self.groups()) != self.held_calls()

    def settle(self) -> None:
        self.loop.settle(self.busy)

    def advance(self, seconds: float) -> None:
        self.loop.advance(seconds, self.busy)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(coroutine)

    def close(self, released: bool) -> None:
        if released:
            self._release(HELD)
            self._open_fences()
        self.stop.set()
        self.advance(4 * 2.0)
        assert self.owner.done(), "closing is bounded"
        self.owner.result()
        for user in self.users:
            user.proceed.set()
        self.settle()
        for user in self.users:
            assert user.task is not None and user.task.done(), "closing answers every waiter"
            user.task.cancelled() or user.task.exception()
            for request in user.requests:
                self.engine.give(request.rows or ())
        for pending in self.pending:
            assert pending.task.done(), "closing answers every waiter"
            pending.task.result()
        self._release(HELD)
        self._open_fences()
        assert not any(group.statistics().running for group in self.groups())
        assert not any(group.statistics().threads for group in self.groups()), self.groups()
        assert self.context.landing.quarantined() == 0
        assert not self.context.slots.count(SlotState.RESERVED, SlotState.FILLING, SlotState.ZEROING)
        assert self.context.landing.statistics().in_use == 0
        for request in self.ended:
            self.engine.give(request.rows or ())
        for held in self.cache:
            held.saving = 0
        self.users, self.pending, self.ended = [], [], []
        self.touchable.clear()
        self.engine.changed_rows()
        assert not self.loop.errors, self.loop.errors
        assert not self.violations, self.violations

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight, nothing is held."""
        return not self.users and not self.pending and not self.held_calls()

    @property
    def is_well(self) -> bool:
        """Nothing is or was wrong that a lookup or load would have to reckon with."""
        health = self.context.health.statistics()
        return not (
            self.store._holding
            or self.script.pending
            or self.fences
            or self.corrupt
            or health.open_breakers
            or health.negative_keys
            or self.context.landing.quarantined()
        )

    @property
    def can_forge(self) -> bool:
        """Whether a removal now could hide from the comparison of descriptors: documented, and digests find it."""
        if self.layout is not Layout.PAGE or not self.freezes:
            return False
        # What was copied before it is asked for once more may have been removed, and brought back by then.
        may_be_copied = self.lends and any(user.handle is not None for user in self.users)
        return may_be_copied or "descriptors" in self.store._holding

    def placeable(self) -> list[User]:
        return [user for user in self.users if user.landed_at is not None and not user.placing]

    def object_keys(self, page_key: str, *, draft: bool) -> list[str]:
        """The keys of one page's objects that are the target's, or all the draft's."""
        return [
            self.context.keys.object_key(page_key, name, spec.part)
            for name, specs in self.engine.pools.specs(self.layout).items()
            for spec in specs
            if spec.draft is draft
        ]

    def stored_prefix(self, keys: Sequence[str]) -> int:
        """How many pages the store has, the target's objects."""
        for page, key in enumerate(keys):
            if any(each not in self.memory._objects for each in self.object_keys(key, draft=False)):
                return page
        return len(keys)

    # -- users

    async def _stream(self, user: User) -> None:
        async with self.loader.load([request.unit for request in user.requests]) as load:
            user.handle = load
            admission = await load.admitted()
            for request in user.requests:
                request.admitted = admission[request.name]
            for layer in range(self.engine.pools.num_layers):
                ready = await load.layer(layer)
                assert ready.layer == layer
                assert ready.live | ready.failed.keys() == {request.name for request in user.requests}
                assert not ready.live & ready.failed.keys()
                assert user.failed.keys() <= ready.failed.keys(), "who failed stays failed"
                user.failed = dict(ready.failed)
                for request in user.requests:
                    if request.name in ready.live:
                        request.layers_given = layer + 1
                        self._check_layer(request, layer)
            drafts = await load.draft()
            user.report = await load.report()
            for request in user.requests:
                outcome = user.report.outcomes[request.name]
                assert drafts[request.name] >= outcome.draft_pages

    async def _prefetch(self, user: User) -> None:
        async with self.loader.prefetch([request.unit for request in user.requests]) as prefetch:
            user.handle = prefetch
            landed = await prefetch.landed()
            for request in user.requests:
                request.landed = landed[request.name]
                if landed.missed.get(request.name) is not PageStatus.CANCELLED:
                    self.never_landed += len(request.keys) - request.landed
                assert 0 <= request.landed <= len(request.keys)
                assert (request.landed < len(request.keys)) == (request.name in landed.missed)
            user.landed_at = min(self.clock.now, min(request.due for request in user.requests)) + HOLD_LIMIT
            await user.proceed.wait()
            units = [request.unit for request in user.requests if request.rows is not None]
            user.report = await prefetch.place(units)

    def _use(self, user: User, story: Callable[[User], Coroutine[Any, Any, None]]) -> None:
        self.users.append(user)
        for request in user.requests:
            self.touchable.update(request.rows or ())
        user.task = self.spawn(story(user))
        self.settle()

    def _check_layer(self, request: Request, layer: int) -> None:
        """A layer that was given out holds the bytes of every page that was admitted."""
        assert request.admitted is not None and request.rows is not None
        for pool in self.engine.pools.target_pools:
            for buffer in pool.layer_buffers(layer):
                view = pool.page_views[buffer].numpy()
                for page in range(request.admitted):
                    expected = content(request.keys[page], pool.name, buffer)
                    if not np.array_equal(view[request.rows[page]], expected):
                        self.violations.append(f"layer {layer} was given out without page {page} of {request.name}")

    # -- small helpers

    def _name(self) -> str:
        self.names += 1
        return f"r{self.names}"

    def _request(
        self, chain: int, length: int, rows: list[int] | None, deadline: float | None, fenced: bool
    ) -> Request:
        name, keys = self._name(), page_keys(chain, length)
        fence = self._fence() if fenced else None
        unit = self.engine.unit(name, keys, rows, deadline, fence)
        return Request(name, keys, rows, unit, self.clock.now + (DEADLINE if deadline is None else deadline), fence)

    def _fence(self) -> Fence:
        fence = Fence()
        self.fences.append(fence)
        return fence

    def _open_fences(self) -> None:
        for fence in self.fences:
            fence.gate.set()
        while any(fence.entered for fence in self.fences):
            pass
        self.fences.clear()
        self.settle()

    def _release(self, methods: Sequence[str]) -> None:
        for method in methods:
            self.store.release(method)
        while any(self.store.held(method) for method in methods):
            pass
        self.settle()

    def _stored(self, key: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert self.memory._arena is not None
        found = self.memory._objects[key]
        return self.memory._arena[found.offset : found.offset + found.size]
