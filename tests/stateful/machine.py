"""Random requests against a loader whose store fails, hangs, forgets and lies; what must hold is checked after each step.

The loader runs on a loop whose clock only the machine moves, so that every deadline, lease and cool-down is a step. A
step ends when nothing is left to run but calls that are held on purpose. The machine plays the engine: it hands out
rows, overwrites those that come back, computes what is missing, and knows what every page must hold.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import structlog
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from softload import (
    Integrity,
    Layout,
    LoaderConfig,
    LoadReport,
    Lookup,
    PageLoader,
    PageStatus,
    ReadMode,
    SaveReport,
    SaveStatus,
    Statistics,
    TransferUnit,
    UnitOutcome,
    events,
    native_calls,
)
from softload.context import Context
from softload.copies import Copy
from softload.geometry import DraftMode
from softload.handles import Load, Prefetch
from softload.landing import LandingMemory
from softload.slots import SlotState
from softload.stores import MemoryStore
from softload.testing import HangingStore

from .engine import GUARDS, PAGE_SIZE, ROWS, Engine, content
from .manual_time import ManualClock, ManualLoop

HELD = ("exists", "descriptors", "read", "session_start", "session_end", "read_ranges", "put_start", "put_write")
LENGTHS = st.integers(1, 6)
CHAINS = st.integers(0, 2)
NUMBER = st.integers(0, 1 << 16)
DEADLINE, LOOKUP_DEADLINE, SAVE_DEADLINE, HOLD_LIMIT = 5.0, 1.0, 4.0, 8.0


def page_keys(chain: int, length: int) -> tuple[str, ...]:
    """The first pages of a conversation; all conversations share their first two."""
    return tuple(f"s{page}" if page < 2 else f"c{chain}-{page}" for page in range(length))


@dataclass(slots=True, eq=False)
class Fence:
    """The engine's word that slots are free, given when the machine says so."""

    gate: Any
    entered: bool = False

    def __call__(self) -> None:
        self.entered = True
        self.gate.wait()
        self.entered = False


@dataclass(slots=True, eq=False)
class Request:
    """One unit of one load or prefetch, as its user sees it."""

    name: str
    keys: tuple[str, ...]
    rows: list[int] | None
    unit: TransferUnit
    due: float
    fence: Fence | None = None
    clean: int | None = None
    """Pages that a load without any fault in sight must restore."""
    admitted: int | None = None
    layers_given: int = 0
    landed: int | None = None
    outcome: UnitOutcome | None = None
    settled: bool = False
    """Whether the engine was told of its end."""


@dataclass(slots=True, eq=False)
class User:
    """A task that holds a load or a prefetch."""

    requests: list[Request]
    task: asyncio.Task[None] | None = None
    handle: Load | Prefetch | None = None
    failed: dict[str, PageStatus] = field(default_factory=dict)
    report: LoadReport | None = None
    landed_at: float | None = None
    proceed: asyncio.Event = field(default_factory=asyncio.Event)
    placing: bool = False
    cancelled: bool = False

    @property
    def streams(self) -> bool:
        return isinstance(self.handle, Load)


@dataclass(slots=True, eq=False)
class Held:
    """Pages that the engine holds: computed, or restored and completed."""

    name: str
    keys: tuple[str, ...]
    rows: list[int]
    zero_draft: range = range(0)
    saving: int = 0


@dataclass(slots=True, eq=False)
class Pending:
    """A save or a lookup that may be held up."""

    task: asyncio.Task[Any]
    due: float
    check: Callable[[Any], None]


class LoaderMachine(RuleBasedStateMachine):
    """The machine; subclasses choose what is loaded how."""

    layout: ClassVar[Layout] = Layout.GROUPED
    read_mode: ClassVar[ReadMode] = ReadMode.AUTO
    draft: ClassVar[DraftMode] = DraftMode.NONE
    integrity: ClassVar[Integrity] = Integrity.SAMPLE
    landing_bytes: ClassVar[int] = 2 << 20
    store_bytes: ClassVar[int] = 8 << 20

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
        """Whether a request ended without its user learning how."""
        self._logs = structlog.testing.capture_logs()
        self.logs = self._logs.__enter__()
        self._patches = [
            patch.object(native_calls, "time", SimpleNamespace(monotonic=self.clock)),
            patch.object(Copy, "run", self._checked(Copy.run)),
        ]
        for each in self._patches:
            each.start()
        self.sound = False
        """Whether the last check found nothing: what comes after a failure would only hide it."""

    # -- opening and closing

    @initialize(stored=st.lists(st.tuples(CHAINS, LENGTHS), max_size=3))
    def start(self, stored: list[tuple[int, int]]) -> None:
        self.open()
        for chain, length in stored:
            self.compute(chain, length)
            self.save(len(self.cache) - 1)
            self.check()

    def open(self) -> None:
        self.memory = MemoryStore(capacity=self.store_bytes, lease=2.0, eviction_ratio=0.2, clock=self.clock)
        self.store = HangingStore(self.memory)
        self.loader = PageLoader(
            self.store,
            self.engine.pools,
            config=LoaderConfig(
                layout=self.layout,
                read_mode=self.read_mode,
                integrity=self.integrity,
                landing_bytes=self.landing_bytes,
                deadline=DEADLINE,
                lookup_deadline=LOOKUP_DEADLINE,
                save_deadline=SAVE_DEADLINE,
                hold_limit=HOLD_LIMIT,
                prefetch_ttl=3.0,
                stuck_threads=3,
                read_lanes=2,
                write_lanes=1,
                control_lanes=2,
                read_batch_objects=4,
                copy_chunk_bytes=16 << 10,
            ),
        )
        self.stop = asyncio.Event()
        self.owner = self.loop.create_task(self._own(self.loader, self.stop))
        while self.loader._context is None:
            self.loop.run_until_complete(asyncio.sleep(0))
            if self.owner.done():
                self.owner.result()
        self.context: Context = self.loader._context
        self.context.health._clock = self.context.health.negative._clock = self.clock
        self.context.reader._clock = self.context.sessions._clock = self.clock
        self.expected.clear()
        self.unseen = False
        self.corrupt.clear()

    async def _own(self, loader: PageLoader, stop: asyncio.Event) -> None:
        async with loader:
            await stop.wait()

    def groups(self) -> list[Any]:
        return [*self.loader._groups(self.context), self.context.reader._removals]

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

    # -- what the engine does

    @rule(chain=CHAINS, length=LENGTHS)
    def compute(self, chain: int, length: int) -> None:
        keys = page_keys(chain, length)
        rows = self.engine.take(length)
        if rows is None:
            return
        self.engine.compute(rows, keys)
        name = self._name()
        self.loader.computed(self.engine.unit(name, keys, rows))
        self.cache.append(Held(name, keys, rows))

    @precondition(lambda self: self.cache)
    @rule(which=NUMBER)
    def save(self, which: int) -> None:
        held = self.cache[which % len(self.cache)]
        held.saving += 1
        unit = self.engine.unit(held.name, held.keys, held.rows)

        def check(report: SaveReport) -> None:
            held.saving -= 1
            outcome = report.outcomes[held.name]
            assert outcome.saved_pages <= len(held.keys)
            of_target = [page for page in outcome.pages if not page.component.is_draft]
            assert [page.page for page in of_target] == list(range(len(held.keys)))
            assert not any(page.status is SaveStatus.REFUSED for page in of_target)
            if self.is_well and not self.corrupt and self.store_bytes > 4 << 20:
                assert {page.status for page in of_target} <= {
                    SaveStatus.SAVED,
                    SaveStatus.PRESENT,
                    SaveStatus.SHED,
                }, outcome

        self.pending.append(Pending(self.spawn(self.loader.save([unit])), self.clock.now + SAVE_DEADLINE, check))
        self.settle()

    @precondition(lambda self: any(not held.saving for held in self.cache))
    @rule(which=NUMBER)
    def forget(self, which: int) -> None:
        idle = [held for held in self.cache if not held.saving]
        held = idle[which % len(idle)]
        self.cache.remove(held)
        self.engine.give(held.rows)

    @rule(
        parts=st.lists(st.tuples(CHAINS, LENGTHS), min_size=1, max_size=3),
        deadline=st.sampled_from([None, None, None, 0.3, 2.0, 0.0]),
        fenced=st.sampled_from([False, False, False, True]),
    )
    def load(self, parts: list[tuple[int, int]], deadline: float | None, fenced: bool) -> None:
        clean = self.is_well and self.is_idle and not fenced and deadline is None and len(parts) == 1
        requests = []
        for chain, length in parts:
            rows = self.engine.take(length)
            if rows is None:
                break
            requests.append(self._request(chain, length, rows, deadline, fenced))
            if clean:
                requests[-1].clean = self.stored_prefix(requests[-1].keys)
        if requests:
            self._use(User(requests), self._stream)

    @rule(parts=st.lists(st.tuples(CHAINS, LENGTHS), min_size=1, max_size=3), deadline=st.sampled_from([None, 0.3, 2.0]))
    def prefetch(self, parts: list[tuple[int, int]], deadline: float | None) -> None:
        requests = [self._request(chain, length, None, deadline, False) for chain, length in parts]
        self._use(User(requests), self._prefetch)

    @precondition(lambda self: self.placeable())
    @rule(which=NUMBER, fewer=st.sampled_from([0, 0, 1]), fenced=st.sampled_from([False, False, True]), drop=st.booleans())
    def place(self, which: int, fewer: int, fenced: bool, drop: bool) -> None:
        users = self.placeable()
        user = users[which % len(users)]
        for index, request in enumerate(user.requests):
            assert request.landed is not None
            pages = max(0, request.landed - fewer)
            rows = None if drop and index else self.engine.take(pages)
            if rows is None:
                continue
            request.rows = rows
            request.keys = request.keys[:pages]
            request.fence = self._fence() if fenced else None
            request.unit = self.engine.unit(request.name, request.keys, rows, ready=request.fence)
            request.due = self.clock.now + DEADLINE
            assert user.landed_at is not None
            if not fenced and self.clock.now < user.landed_at:
                request.clean = pages
            self.touchable.update(rows)
        user.placing = True
        user.proceed.set()
        self.settle()

    @precondition(lambda self: self.users)
    @rule(which=NUMBER)
    def cancel(self, which: int) -> None:
        user = self.users[which % len(self.users)]
        assert user.task is not None
        user.cancelled = True
        user.task.cancel()
        self.settle()
        assert user.task.done(), "leaving a load takes no longer than a chunk"

    @precondition(lambda self: self.ended)
    @rule(which=NUMBER, keep=st.booleans())
    def finish(self, which: int, keep: bool) -> None:
        """The engine computes what is missing, or drops the request."""
        request = self.ended.pop(which % len(self.ended))
        assert request.rows is not None and request.outcome is not None
        if keep and request.rows:
            restored, drafted = request.outcome.restored_pages, request.outcome.draft_pages
            self.engine.compute(request.rows[restored:], request.keys[restored:])
            self.loader.computed(request.unit, range(restored, len(request.keys)))
            self.cache.append(Held(request.name, request.keys, request.rows, range(drafted, restored)))
        else:
            self.engine.give(request.rows)

    @precondition(lambda self: any(request.outcome.restored_pages < len(request.keys) for request in self.ended))
    @rule(which=NUMBER)
    def offer_what_failed(self, which: int) -> None:
        """Slots that failed to load and were not computed are not stored."""
        missed = [request for request in self.ended if _outcome(request).restored_pages < len(request.keys)]
        request = missed[which % len(missed)]
        if any(request.keys == other.keys and request is not other for other in missed):
            return
        task = self.spawn(self.loader.save([request.unit]))
        self.advance(SAVE_DEADLINE)
        restored = _outcome(request).restored_pages
        for page in task.result().outcomes[request.name].pages:
            if page.page >= restored:
                assert page.status is SaveStatus.REFUSED, page

    @rule(chain=CHAINS, length=LENGTHS)
    def lookup(self, chain: int, length: int) -> None:
        keys = page_keys(chain, length)
        stored = self.stored_prefix(keys)
        exact = self.is_well

        def check(found: Lookup) -> None:
            assert list(found.boundaries) == list(range(1, found.pages + 1))
            assert found.draft_pages <= found.pages
            if exact:
                assert found.pages == stored and found.status is None, found

        task = self.spawn(self.loader.lookup(self.engine.unit(self._name(), keys)))
        self.pending.append(Pending(task, self.clock.now + LOOKUP_DEADLINE, check))
        self.settle()

    @precondition(lambda self: self.ended)
    @rule(which=NUMBER)
    def look_up_what_failed(self, which: int) -> None:
        """A request that failed is a miss until it was computed."""
        request = self.ended[which % len(self.ended)]
        outcome = _outcome(request)
        task = self.spawn(self.loader.lookup(self.engine.unit(request.name, request.keys)))
        self.advance(LOOKUP_DEADLINE)
        missed = outcome.pages[outcome.restored_pages :]
        if missed and missed[0].status not in (PageStatus.CANCELLED, PageStatus.SHED, PageStatus.PEER_DECLINED):
            assert task.result() == Lookup(status=PageStatus.SUPPRESSED)

    # -- what happens to the store

    @rule(seconds=st.sampled_from([0.06, 0.3, 0.6, 1.5, 2.5, 6.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.advance(seconds)

    @precondition(lambda self: self.memory._objects and not self.can_forge)
    @rule(which=NUMBER, count=st.integers(1, 4), force=st.booleans())
    def evict(self, which: int, count: int, force: bool) -> None:
        keys = sorted(self.memory._objects)
        if keys:
            victims = [keys[(which + 7 * nth) % len(keys)] for nth in range(count)]
            for key, answer in zip(victims, self.memory.remove(victims, force=force), strict=True):
                if answer == 0:
                    self.corrupt.discard(key)

    @precondition(lambda self: self.memory._objects and not self.can_forge)
    @rule(which=NUMBER, count=st.integers(1, 4))
    def evict_and_reuse(self, which: int, count: int) -> None:
        """A forced removal, and another object in its place at once: with a valid tail, but another key's."""
        keys = sorted(key for key in self.memory._objects if not key.startswith("foreign"))
        for nth in range(min(count, len(keys))):
            key, donor = keys[(which + 5 * nth) % len(keys)], keys[(which + 11 * nth + 3) % len(keys)]
            if key not in self.memory._objects or donor not in self.memory._objects or key == donor:
                continue
            size, bytes_of_donor = self.memory._objects[key].size, self._stored(donor)
            self.memory.remove([key], force=True)
            self.corrupt.discard(key)
            foreign = np.resize(bytes_of_donor, size)
            name = f"foreign-{self._name()}"
            if self.memory.put_start([name], [size]) == [0]:
                self.memory.put_write([name], [foreign.ctypes.data], [size])
                self.memory.put_end([name])

    @precondition(lambda self: self.memory._objects and self.layout is Layout.GROUPED)
    @rule(which=NUMBER, kind=st.sampled_from(["flip", "torn", "foreign", "zeros"]), place=NUMBER)
    def spoil(self, which: int, kind: str, place: int) -> None:
        """Bad bytes under a good key."""
        keys = sorted(key for key in self.memory._objects if not key.startswith("foreign"))
        if not keys:
            return
        key, donor = keys[which % len(keys)], keys[(which + 1) % len(keys)]
        memory, other = self._stored(key), self._stored(donor).copy()
        if kind == "flip" and self.integrity is Integrity.FULL:
            memory[place % (memory.size - 32)] ^= 1 + place % 255
        elif kind == "torn" and key != donor and memory.size > 4096:
            memory[4096:] = np.resize(other, memory.size)[4096:]
        elif kind == "foreign" and key != donor:
            memory[:] = np.resize(other, memory.size)
        elif kind == "zeros":
            memory[:64] = 0
        else:
            return
        self.corrupt.add(key)

    @rule(method=st.sampled_from(HELD))
    def hold(self, method: str) -> None:
        self.store.hold(method)

    @precondition(lambda self: self.store._holding)
    @rule(method=st.sampled_from(HELD))
    def release(self, method: str) -> None:
        self._release([method])

    @precondition(lambda self: self.store._holding)
    @rule()
    def release_all(self) -> None:
        self._release(HELD)

    @precondition(lambda self: self.fences)
    @rule()
    def engine_lets_go(self) -> None:
        self._open_fences()

    @precondition(lambda self: len(self.cache) > 1)
    @rule(released=st.booleans())
    def reopen(self, released: bool) -> None:
        """Closing answers every waiter and ends, also while calls hang; then another loader begins."""
        self.close(released)
        self.open()

    # -- what must hold

    @invariant()
    def check(self) -> None:
        if self.loader._context is not None:
            self.sound = False
            self._check()
            self.sound = True

    def _check(self) -> None:
        self.settle()
        self._collect()
        assert not self.loop.errors, self.loop.errors
        assert not self.violations, self.violations
        assert not self.owner.done(), self.owner
        raised = [entry for entry in self.logs if entry["event"] == events.STORE_RAISED]
        assert not raised, raised
        self._check_rows()
        self._check_segments()
        self._check_deadlines()
        self._check_store()
        statistics = self.loader.statistics()
        assert statistics.requested_pages == statistics.restored_pages + sum(statistics.missed_pages.values())
        assert statistics.sessions_ended <= statistics.sessions_opened
        assert statistics.quarantined_bytes <= statistics.quarantined_bytes_peak
        if not self.unseen:
            for name in ("requested_pages", "restored_pages", "late_failures"):
                assert getattr(statistics, name) == self.expected[name], name
            missed = {str(status): pages for status, pages in statistics.missed_pages.items()}
            assert missed == {name: count for name, count in self.expected.items() if name in list(PageStatus)}
        if self.is_idle:
            self._check_idle(statistics)

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
            or self.fences
            or self.corrupt
            or health.open_breakers
            or health.negative_keys
            or self.context.landing.quarantined()
        )

    @property
    def can_forge(self) -> bool:
        """Whether a removal now could hide from the comparison of descriptors: documented, and digests find it."""
        return self.layout is Layout.PAGE and "descriptors" in self.store._holding

    def placeable(self) -> list[User]:
        return [user for user in self.users if user.landed_at is not None and not user.placing]

    def stored_prefix(self, keys: Sequence[str]) -> int:
        """How many pages the store has, the target's objects."""
        specs = self.engine.pools.specs(self.layout)
        for page, key in enumerate(keys):
            for pool in self.engine.pools.target_pools:
                for spec in specs[pool.name]:
                    if not spec.draft and self.context.keys.object_key(key, pool.name, spec.part) not in self.memory._objects:
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

    def _collect(self) -> None:
        """Learn what has ended."""
        for user in [user for user in self.users if user.task is not None and user.task.done()]:
            self.users.remove(user)
            assert user.task is not None
            if not user.task.cancelled():
                user.task.result()
            if user.report is None and isinstance(user.handle, Load):
                user.report = self.loop.run_until_complete(user.handle.report())
            for request in user.requests:
                self._end(user, request)
        for pending in [pending for pending in self.pending if pending.task.done()]:
            self.pending.remove(pending)
            pending.check(pending.task.result())

    def _end(self, user: User, request: Request) -> None:
        if request.rows is None:
            return
        if user.report is None:  # cancelled while it was placed
            self.unseen = self.unseen or user.placing or user.handle is None
            self.engine.give(request.rows)
            return
        outcome = user.report.outcomes[request.name]
        request.outcome = outcome
        self._check_outcome(user, request, outcome)
        self.expected["requested_pages"] += outcome.requested_pages
        self.expected["restored_pages"] += outcome.restored_pages
        self.expected["late_failures"] += outcome.late_failure is not None
        for page in outcome.pages[outcome.restored_pages :]:
            self.expected[str(page.status)] += 1
        self.ended.append(request)

    def _check_outcome(self, user: User, request: Request, outcome: UnitOutcome) -> None:
        restored = outcome.restored_pages
        assert outcome.request_id == request.name
        assert outcome.requested_pages == len(request.keys) == len(outcome.pages)
        assert outcome.prefill_from_page == restored
        assert [page.page for page in outcome.pages] == list(range(len(request.keys)))
        assert [page.status is PageStatus.LOADED for page in outcome.pages] == [
            page < restored for page in range(len(request.keys))
        ]
        assert outcome.draft_pages <= restored
        if request.admitted is not None:
            assert restored <= request.admitted
            if restored < request.admitted and request.layers_given:
                assert outcome.late_failure is not None
                assert outcome.late_failure.page == restored or restored == 0
            if outcome.late_failure is not None:
                assert restored < request.admitted
        if not user.cancelled:
            assert PageStatus.CANCELLED not in {page.status for page in outcome.pages}, outcome
        if self.draft is DraftMode.NONE:
            assert outcome.draft_pages == 0
        if request.clean is not None and not user.cancelled:
            assert restored >= request.clean, (outcome, request.clean)
        assert request.rows is not None
        for page in range(restored):
            draft = "any"
            if self.draft is not DraftMode.NONE:
                draft = "good" if page < outcome.draft_pages else "zero"
            self.engine.check_page(request.rows[page], request.keys[page], draft)
        for pool in self.engine.pools.pools:
            good = outcome.draft_pages if pool.name.is_draft else restored
            states = [self.context.slots.state(pool, row) for row in request.rows]
            assert states == [SlotState.COMMITTED] * good + [SlotState.RELEASED] * (len(states) - good), pool.name

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

    # -- checks

    def _checked(self, run: Callable[[Copy], None]) -> Callable[[Copy], None]:
        """Copies into pools go to rows that are being filled, from their first byte to their last."""

        def checked(copy: Copy) -> None:
            if copy.outward:
                return run(copy)
            pool = next(
                pool for pool in self.engine.pools.pools for view in pool.page_views if view is copy.pages
            )
            for _ in range(2):
                states = {self.context.slots.state(pool, int(row)) for row in copy.rows}
                if not states <= {SlotState.FILLING, SlotState.ZEROING}:
                    self.violations.append(f"wrote rows of {pool.name} in {states}")
                if _ == 0:
                    run(copy)
            return None

        return checked

    def _check_rows(self) -> None:
        active: set[int] = set()
        for user in self.users:
            for request in user.requests:
                active.update(request.rows or ())
        for name, rows in self.engine.changed_rows().items():
            assert not rows & set(GUARDS), f"{name}: guard rows changed"
            assert rows <= self.touchable, f"{name}: rows {sorted(rows - self.touchable)} changed, which nobody fills"
        self.touchable = active
        for held in self.cache:
            for page, (row, key) in enumerate(zip(held.rows, held.keys, strict=True)):
                draft = "any" if self.draft is DraftMode.NONE else "zero" if page in held.zero_draft else "good"
                self.engine.check_page(row, key, draft)

    def _check_segments(self) -> None:
        landing: LandingMemory = self.context.landing
        for arena in landing.arenas:
            free = list(zip(arena._offsets, arena._lengths, strict=True))
            assert free == sorted(free) and all(length > 0 for _, length in free)
            assert all(a + n < b for (a, n), (b, _) in zip(free, free[1:], strict=False)), "free neighbours are joined"
            assert sum(length for _, length in free) == arena.free_bytes
        statistics = landing.statistics()
        taken = sum(arena.nbytes - arena.free_bytes for arena in landing.arenas)
        assert taken == statistics.in_use + statistics.quarantined
        assert all(0 <= used <= landing.limit(share) for share, used in landing._used.items())
        assert statistics.quarantined == sum(landing._quarantined.values())
        assert statistics.replaced <= landing.capacity // 2 + landing._replacement

    def _check_deadlines(self) -> None:
        for user in self.users:
            for request in user.requests:
                over = request.due < self.clock.now
                assert not (over and (user.streams or user.placing)), f"{request.name} waits past its deadline"
                assert not (over and user.landed_at is None), f"{request.name} waits past its deadline"
        for pending in self.pending:
            assert not pending.due < self.clock.now, "a save or a lookup waits past its deadline"

    def _check_store(self) -> None:
        """What is stored under a good key is good: whatever hung, was given up, or was written late."""
        specs = self.engine.pools.specs(self.layout)
        for pool in self.engine.pools.pools:
            for chain in range(3):
                for page_key in page_keys(chain, 6):
                    for spec in specs[pool.name]:
                        key = self.context.keys.object_key(page_key, pool.name, spec.part)
                        if key in self.memory._objects and key not in self.corrupt:
                            payload = np.concatenate([content(page_key, pool.name, f.buffer) for f in spec.fragments])
                            stored = self._stored(key)
                            assert stored.size == spec.size
                            assert np.array_equal(stored[: spec.payload], payload), f"bad bytes were stored: {key}"

    def _check_idle(self, statistics: Statistics) -> None:
        assert statistics.active_units == 0
        assert statistics.held_slots == 0
        assert statistics.landing_bytes_in_use == statistics.kept_bytes
        assert statistics.quarantined_bytes == 0
        assert statistics.waiting_grants == 0
        assert statistics.queued_calls == 0
        assert statistics.stuck_threads == 0
        assert statistics.open_sessions == 0
        assert statistics.sessions_opened == statistics.sessions_ended
        store = self.memory.statistics()
        assert store.sessions == 0
        assert store.reservations == 0

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
        import threading

        fence = Fence(threading.Event())
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

    def teardown(self) -> None:
        try:
            if self.sound:
                self._release(HELD)
                self._open_fences()
                self.advance(60)
                self.check()
                for user in list(self.users):
                    assert user.task is not None
                    user.cancelled = True
                    user.task.cancel()
                self.settle()
                self.advance(4)
                self.check()
                assert self.is_idle
                self.close(released=True)
        finally:
            for each in self._patches:
                each.stop()
            self._logs.__exit__(None, None, None)
            if hasattr(self, "store"):
                self.store.release()
            for fence in self.fences:
                fence.gate.set()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()
            asyncio.set_event_loop(None)


def _outcome(request: Request) -> UnitOutcome:
    assert request.outcome is not None
    return request.outcome
