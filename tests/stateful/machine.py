"""Random requests against a loader whose store fails, hangs, forgets and lies.

The machine plays the engine: it hands out rows, overwrites those that come back, computes what is missing, and knows
what every page must hold. What it checks after each step is in `checks`.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import structlog
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from softload import (
    DraftPolicy,
    Integrity,
    Layout,
    Lookup,
    PageStatus,
    ReadMode,
    SaveReport,
    SaveStatus,
    lending,
    native_calls,
    unit_layers,
    unit_loans,
)
from softload.copies import Copy
from softload.geometry import DraftMode

from .checks import CheckedWorld
from .users import Held, Pending, User, page_keys
from .world import DEADLINE, HELD, LOOKUP_DEADLINE, LYING, SAVE_DEADLINE

LENGTHS = st.sampled_from([6, 5, 4, 3, 2, 1])
CHAINS = st.integers(0, 2)
NUMBER = st.integers(0, 1 << 16)
LIES = (
    PageStatus.TRANSFER_FAILED,
    PageStatus.STORE_UNREACHABLE,
    PageStatus.LEASE_EXPIRED,
    PageStatus.NO_MEMORY_REPLICA,
    PageStatus.NOT_FOUND,
)
PARTS = st.lists(st.tuples(CHAINS, LENGTHS), min_size=1, max_size=3)


class LoaderMachine(CheckedWorld, RuleBasedStateMachine):
    """The rules."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self.logs = self._stack.enter_context(structlog.testing.capture_logs())
        clock = SimpleNamespace(monotonic=self.clock)
        self._stack.enter_context(patch.object(native_calls, "time", clock))
        self._stack.enter_context(patch.object(lending, "_WORTH_BYTES", 1))
        self._stack.enter_context(patch.object(unit_loans, "_WORTH_ASKING", 1))
        if self.single_groups:
            self._stack.enter_context(patch.object(unit_layers, "_COPIED_ALONG", 0))
        self._stack.enter_context(patch.object(Copy, "run", self.checked_run(Copy.run)))
        self.open()

    @initialize(stored=st.lists(st.tuples(CHAINS, st.sampled_from([6, 6, 3])), min_size=1, max_size=3))
    def start(self, stored: list[tuple[int, int]]) -> None:
        """Something to load, which the engine does not hold any more."""
        for chain, length in stored:
            self.compute(chain, length, stored=True)
            self.check()
            self.forget(len(self.cache) - 1)

    # -- what the engine does

    @rule(chain=CHAINS, length=LENGTHS, stored=st.sampled_from([True, True, False]))
    def compute(self, chain: int, length: int, stored: bool) -> None:
        keys = page_keys(chain, length)
        rows = self.engine.take(length)
        if rows is None:
            return
        self.engine.compute(rows, keys)
        name = self._name()
        self.loader.computed(self.engine.unit(name, keys, rows))
        self.cache.append(Held(name, keys, rows))
        if stored:
            self.save(len(self.cache) - 1)

    @precondition(lambda self: self.cache)
    @rule(which=NUMBER)
    def save(self, which: int) -> None:
        held = self.cache[which % len(self.cache)]
        held.saving += 1
        well, lies = self.is_well, self.lies
        unit = self.engine.unit(held.name, held.keys, held.rows)

        def check(report: SaveReport) -> None:
            held.saving -= 1
            outcome = report.outcomes[held.name]
            assert outcome.saved_pages <= len(held.keys)
            of_target = [page for page in outcome.pages if not page.component.is_draft]
            assert [page.page for page in of_target] == list(range(len(held.keys)))
            assert not any(page.status is SaveStatus.REFUSED for page in of_target)
            if well and self.is_well and lies == self.lies and self.store_bytes > 4 << 20:
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
        parts=PARTS,
        deadline=st.sampled_from([None, None, None, 0.3, 2.0, 0.0]),
        fenced=st.sampled_from([False, False, False, True]),
    )
    def load(self, parts: list[tuple[int, int]], deadline: float | None, fenced: bool) -> None:
        clean = self.is_well and self.is_idle and not fenced and deadline is None and len(parts) == 1
        clean = clean and self.draft_policy is DraftPolicy.DROP
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

    @rule(parts=PARTS, deadline=st.sampled_from([None, 0.3, 2.0]))
    def prefetch(self, parts: list[tuple[int, int]], deadline: float | None) -> None:
        requests = [self._request(chain, length, None, deadline, False) for chain, length in parts]
        self._use(User(requests), self._prefetch)

    @precondition(lambda self: self.placeable())
    @rule(
        which=NUMBER, fewer=st.sampled_from([0, 0, 1]), fenced=st.sampled_from([False, False, True]), drop=st.booleans()
    )
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

    @precondition(lambda self: len(self.store._holding) < 2)
    @rule(
        parts=PARTS,
        only=st.sampled_from([".g2", "", ".g2", ".d", "draft"]),
        skip=st.integers(0, 3),
        streams=st.booleans(),
        end=st.sampled_from(["reuse", "time", "cancel", "time", "release", "nothing"]),
        which=NUMBER,
    )
    def hang_in_a_read(
        self, parts: list[tuple[int, int]], only: str, skip: int, streams: bool, end: str, which: int
    ) -> None:
        """What single steps seldom add up to: a load whose reads hang, and something that happens to it meanwhile."""
        self.hold("read_ranges" if self.read_mode is ReadMode.RANGES else "read", only, skip)
        self.load(parts, None, False) if streams else self.prefetch(parts, None)
        self.check()
        if end == "cancel" and self.users:
            self.cancel(len(self.users) - 1)
        elif end == "time":
            self.pass_time(6.0)
        elif end == "reuse" and self.memory._objects and not self.can_forge:
            self.evict_and_reuse(which, 2)
        self.check()
        if end in ("release", "reuse"):
            self.release_all()

    @precondition(lambda self: self.ended)
    @rule(which=NUMBER, keep=st.booleans())
    def finish(self, which: int, keep: bool) -> None:
        """The engine computes what is missing, or drops the request."""
        request = self.ended.pop(which % len(self.ended))
        assert request.rows is not None
        if keep and request.rows:
            restored, drafted = request.result.restored_pages, request.result.draft_pages
            self.engine.compute(request.rows[restored:], request.keys[restored:])
            self.loader.computed(request.unit, range(restored, len(request.keys)))
            lacking = range(drafted, restored)
            self.cache.append(Held(request.name, request.keys, request.rows, lacking, request.draftless))
        else:
            self.engine.give(request.rows)

    @precondition(lambda self: any(request.result.restored_pages < len(request.keys) for request in self.ended))
    @rule(which=NUMBER)
    def offer_what_failed(self, which: int) -> None:
        """Slots that failed to load and were not computed are not stored."""
        missed = [request for request in self.ended if request.result.restored_pages < len(request.keys)]
        request = missed[which % len(missed)]
        if any(request.keys == other.keys and request is not other for other in missed):
            return
        task = self.spawn(self.loader.save([request.unit]))
        self.advance(SAVE_DEADLINE)
        restored = request.result.restored_pages
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
        outcome = request.result
        task = self.spawn(self.loader.lookup(self.engine.unit(request.name, request.keys)))
        self.advance(LOOKUP_DEADLINE)
        missed = outcome.pages[outcome.restored_pages :]
        if missed and missed[0].status not in (PageStatus.CANCELLED, PageStatus.SHED, PageStatus.PEER_DECLINED):
            assert task.result() == Lookup(status=PageStatus.SUPPRESSED)

    # -- what happens to the store

    @rule(seconds=st.sampled_from([0.06, 0.3, 0.6, 1.5, 2.5, 6.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.advance(seconds)

    @precondition(lambda self: len(self.memory._objects) > 9 and not self.can_forge)
    @rule(which=NUMBER, count=st.integers(1, 2), force=st.booleans())
    def evict(self, which: int, count: int, force: bool) -> None:
        keys = sorted(self.memory._objects)
        if keys:
            victims = [keys[(which + 7 * nth) % len(keys)] for nth in range(count)]
            for key, answer in zip(victims, self.memory.remove(victims, force=force), strict=True):
                if answer == 0:
                    self.corrupt.discard(key)

    @precondition(lambda self: self.memory._objects and not self.can_forge)
    @rule(which=NUMBER, count=st.integers(1, 2))
    def evict_and_reuse(self, which: int, count: int) -> None:
        """A forced removal, and another object in its place at once: with a valid tail, but another key's."""
        keys = sorted(key for key in self.memory._objects if not key.startswith("foreign"))
        keys = [key for key in keys if key in self.memory._sessions] or keys  # rather those that are being read
        donors = sorted(key for key in self.memory._objects if not key.startswith("foreign"))
        for nth in range(min(count, len(keys))):
            key, donor = keys[(which + 5 * nth) % len(keys)], donors[(which + 11 * nth + 3) % len(donors)]
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

    @precondition(lambda self: self.memory._objects and self.draft is not DraftMode.NONE and not self.can_forge)
    @rule(chain=CHAINS, page=st.integers(0, 5))
    def lose_draft(self, chain: int, page: int) -> None:
        """The draft of one page goes, its target stays."""
        page_key = page_keys(chain, page + 1)[page]
        self.memory.remove(self.object_keys(page_key, draft=True), force=True)

    @precondition(lambda self: len(self.store._holding) < 2)
    @rule(
        method=st.sampled_from([*HELD, *["read", "read_ranges"] * 5]),
        only=st.sampled_from(["", "", ".g2", ".g2", ".d", "draft"]),
        skip=st.integers(0, 3),
    )
    def hold(self, method: str, only: str, skip: int) -> None:
        """Calls hang: all of a kind, those for a later group of layers or for the draft, or from the nth on."""
        if method == "descriptors" and not self.freezes:
            return
        self._release([method])
        if self.layout is Layout.PAGE:  # one object holds all layers, and a packed draft
            only = only if only == "draft" and self.draft is DraftMode.SIDECAR else ""
        passing = iter(range(skip if method == "read_ranges" else 0))
        self.store.hold(method, lambda keys: any(only in key for key in keys) and next(passing, None) is None)

    @precondition(lambda self: not self.script.pending)
    @rule(method=st.sampled_from(LYING), lie=st.sampled_from([*LIES, None]))
    def answer_wrongly(self, method: str, lie: PageStatus | None) -> None:
        """The next call of a kind fails for all keys, or answers for too few of them."""
        self.lies += 1
        self.script.script(method, lambda true: [lie] * len(true) if lie else true[:-1])

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
        """Closing answers every waiter and ends, also while calls hang; then another loader begins.

        That knows of no page without its draft: the engine computes those again before it offers them.
        """
        self.close(released)
        self.open()
        for held in [held for held in self.cache if held.without_draft]:
            self.cache.remove(held)
            self.engine.give(held.rows)
        self.compute(0, 6, stored=True)

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.check()

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
            self.store.release()
            for fence in self.fences:
                fence.gate.set()
            if not self.owner.done():  # after a failure
                self.stop.set()
                with suppress(Exception):
                    self.advance(20)
            self._stack.close()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()
            asyncio.set_event_loop(None)
