"""Ranged reads: sessions are counted, started once and ended once, and started again where that helps."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from functools import partialmethod
from typing import Any

import anyio
import pytest

from softload import PageStatus, fetches, read_queue, reading, sessions, unit_layers
from softload.protocols import Answer
from softload.stores.wrapper import WrapperStore
from softload.testing import HangingStore, RecordingStore, ScriptedStore

from .doubles import LyingStore
from .harness import (
    any_of,
    arrived,
    assert_outcome,
    busy_lane,
    eventually,
    from_call,
    is_of,
    keys,
    load,
    make_pools,
    nth_of,
    opened,
    put,
    settle,
    store,
)

pytestmark = pytest.mark.asyncio

RANGES = {"layout": "page", "read_mode": "ranges"}


class AnswersSeen(LyingStore):
    """Remembers every answer to a ranged read."""

    def __init__(self, inner: RecordingStore) -> None:
        super().__init__(inner)
        self.answers: list[Any] = []

    def _told(self, method: str, keys: Sequence[str], truths: Sequence[Any]) -> list[Any]:
        answers = super()._told(method, keys, truths)
        if method == "read_ranges":
            self.answers += answers
        return answers


class Meeting(WrapperStore):
    """A ranged read waits a moment for another one to be there too."""

    def __init__(self, inner: RecordingStore) -> None:
        super().__init__(inner)
        self.most = self.running = 0
        self._changed = threading.Condition()

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        with self._changed:
            self.running += 1
            self.most = max(self.most, self.running)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.running > 1, 0.02)
        answers = super().read_ranges(keys, pointers, sizes, offsets)
        with self._changed:
            self.running -= 1
        return answers


async def test_ranges_of_an_endpoint_come_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_queue, "_SMALL", 0)
    monkeypatch.setattr(fetches, "_JOIN_SECONDS", 60.0)  # none is late
    pools, meeting = make_pools(), Meeting(RecordingStore(store()))
    async with opened(meeting, pools, **RANGES) as loader:
        await put(loader, pools, keys(4))
        assert_outcome((await load(loader, pools.unit("a", keys(4), range(4))))["a"], 4)
        await settle(loader)
    assert meeting.most == 1


@pytest.mark.parametrize(("lanes", "small"), [(2, 1 << 20), (4, 0)], ids=["small", "lanes to spare"])
async def test_ranges_come_two_at_a_time_where_they_are_small_or_there_are_lanes_to_spare(
    lanes: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the first ones, of layer 0."""
    monkeypatch.setattr(read_queue, "_SMALL", small)
    monkeypatch.setattr(fetches, "_JOIN_SECONDS", 60.0)  # what is held is not late
    pools, hanging = make_pools(), HangingStore(store())
    async with opened(hanging, pools, **RANGES, endpoint_lanes=lanes) as loader:
        await put(loader, pools, keys(4))
        hanging.hold("read_ranges", from_call(1))
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            await arrived(hanging, "read_ranges", 2)
            hanging.release()
            assert_outcome((await handle.report()).outcomes["a"], 4)
        pools.assert_restored(keys(4), range(4))
        await settle(loader)


async def test_first_layers_of_many_objects_are_asked_for_before_the_others_of_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More of them than are planned at a time, and than sessions are started at a time."""
    monkeypatch.setattr(read_queue, "_SMALL", 0)  # one call at a time, so that their order is seen
    count = 600
    pools = make_pools(pages=count)
    recording = RecordingStore(store())
    async with opened(recording, pools, **RANGES, read_batch_objects=100) as loader:
        await put(loader, pools, keys(count))
        recording.clear()
        assert_outcome((await load(loader, pools.unit("a", keys(count), range(count))))["a"], count)
        pools.assert_restored(keys(count), range(count))
        asked = recording.keys_of("read_ranges")
        assert len(set(asked[:count])) == count and len(asked) > 2 * count
        await settle(loader)
    assert set(Counter(recording.keys_of("session_start")).values()) == {1}
    assert Counter(recording.keys_of("session_start")) == Counter(recording.keys_of("session_end"))


async def test_one_question_that_fails_beside_others_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions of the others count as from before an outage; they were never read from."""
    monkeypatch.setattr(reading, "SESSIONS_AT_A_TIME", 3)
    pools, scripted = make_pools(), ScriptedStore(store())
    async with opened(scripted, pools, **RANGES) as loader:
        await put(loader, pools, keys(12))
        scripted.script("session_start", lambda truth: [PageStatus.STORE_UNREACHABLE] * len(truth))
        assert_outcome((await load(loader, pools.unit("a", keys(12), range(12))))["a"], 12)
        pools.assert_restored(keys(12), range(12))
        await settle(loader)


@pytest.mark.parametrize("at_once", [True, False], ids=["held-until-all-wait", "as-they-come"])
async def test_loads_that_share_pages_start_and_end_each_session_once(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 loads at once share their first 8 pages."""
    monkeypatch.setattr(sessions, "_LATE_START", 60.0)  # here starts do not hang, they are held
    pools = make_pools(pages=32 * 12 + 48)
    recording = RecordingStore(store())
    seen = AnswersSeen(recording)
    hanging = HangingStore(seen)
    async with opened(hanging, pools, **RANGES) as loader:
        shared = keys(8, "shared")
        for request in range(32):
            await put(loader, pools, [*shared, *keys(4, f"own{request}_")])
        recording.clear()
        if at_once:
            hanging.hold("session_start")

        async def one(request: int) -> None:
            rows = range(request * 12, request * 12 + 12)
            page_keys = [*shared, *keys(4, f"own{request}_")]
            outcomes = await load(loader, pools.unit(f"r{request}", page_keys, rows))
            assert_outcome(outcomes[f"r{request}"], 12)
            pools.assert_restored(page_keys, rows)

        async with anyio.create_task_group() as tasks:
            for request in range(32):
                tasks.start_soon(one, request)
            if at_once:
                await eventually(lambda: loader.statistics().shared_objects == 31 * 8, 20)
                hanging.release()
        await settle(loader)
        started = Counter(recording.keys_of("session_start"))
        ended = Counter(recording.keys_of("session_end"))
        assert set(started.values()) == {1}
        assert started == ended
        assert len(started) == 8 + 32 * 4
        assert PageStatus.LEASE_EXPIRED not in seen.answers
        assert all(isinstance(answer, int) for answer in seen.answers)


@pytest.mark.parametrize("mode", [{"layout": "page", "read_mode": "whole"}, {"layout": "grouped"}], ids=str)
async def test_whole_objects_that_loads_share_are_read_once(mode: dict[str, str]) -> None:
    pools = make_pools(pages=32 * 8 + 9)
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    async with opened(hanging, pools, **mode, read_lanes=1) as loader:
        await put(loader, pools, keys(8))
        objects = 8 * len(pools.group.specs(loader.config.layout)[pools.group.pools[0].name])
        async with anyio.create_task_group() as tasks:
            async with busy_lane(loader, pools, hanging, "read"):
                for request in range(32):
                    rows = range(request * 8, request * 8 + 8)
                    tasks.start_soon(load, loader, pools.unit(f"r{request}", keys(8), rows))
                await eventually(lambda: loader.statistics().shared_objects == 31 * objects, 20)
        reads = Counter(key for key in recording.keys_of("read") if is_of(*keys(8))(key))
        assert set(reads.values()) == {1}
        assert len(reads) == objects
        pools.assert_restored(keys(8) * 32, range(32 * 8))
        await settle(loader)


async def test_session_ends_after_its_last_holder() -> None:
    """A and B share k0; A ends while B still reads: B's next layers are good."""
    pools = make_pools()
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    async with opened(hanging, pools, **RANGES, read_lanes=1) as loader:
        await put(loader, pools, keys(2))
        recording.clear()
        hanging.hold("read_ranges")
        async with loader.load([pools.unit("B", keys(2), range(4, 6))]) as b:
            await arrived(hanging, "read_ranges")
            async with loader.load([pools.unit("A", ("k0",), [0])]) as a:
                await a.admitted()
            assert recording.count("session_end") == 0
            hanging.release()
            assert_outcome((await b.report()).outcomes["B"], 2)
        await settle(loader)
        assert Counter(recording.keys_of("session_start")) == Counter(recording.keys_of("session_end"))


@pytest.mark.parametrize("status", [None, PageStatus.NO_MEMORY_REPLICA, PageStatus.NOT_FOUND])
async def test_later_layers_that_are_due_while_sessions_start_share_them(
    status: PageStatus | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layers have their head start; that is over before the sessions are there, and one of them fails."""
    monkeypatch.setattr(unit_layers, "_HEAD_START", 0.0)
    pools = make_pools()
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    hanging = HangingStore(recording)
    async with opened(hanging, pools, **RANGES) as loader:
        await put(loader, pools, keys(3))
        recording.clear()
        if status is not None:
            lying.lie("session_start", is_of("k1"), status)
        hanging.hold("session_start")
        async with loader.load([pools.unit("a", keys(3), range(3))]) as handle:
            await arrived(hanging, "session_start")
            await anyio.wait_all_tasks_blocked()
            hanging.release()
            outcome = (await handle.report()).outcomes["a"]
        if status is PageStatus.NOT_FOUND:
            assert_outcome(outcome, 1, status)
        else:
            assert_outcome(outcome, 3)
            pools.assert_restored(keys(3), range(3))
        assert len(recording.keys_of("read")) == (status is PageStatus.NO_MEMORY_REPLICA)
        await settle(loader)


async def test_two_reads_of_one_key_share_its_session() -> None:
    """A's read is late, so B reads anew, in A's session; B ends first, and A's read is good all the same."""
    pools = make_pools()
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    async with opened(hanging, pools, **RANGES, read_batch_objects=1) as loader:
        await put(loader, pools, keys(1))
        first = iter([True])
        hanging.hold("read_ranges", lambda _: next(first, False))
        async with loader.load([pools.unit("A", keys(1), [0])]) as a:
            await arrived(hanging, "read_ranges")
            await anyio.sleep(0.06)  # a read can be joined for 50 ms
            assert_outcome((await load(loader, pools.unit("B", keys(1), [1])))["B"], 1)
            await anyio.wait_all_tasks_blocked()
            assert recording.count("session_end") == 0
            hanging.release()
            assert_outcome((await a.report()).outcomes["A"], 1)
        await settle(loader)
        assert len(recording.keys_of("session_start")) == len(recording.keys_of("session_end")) == 1
        assert loader.statistics().retries == 0
        pools.assert_restored(["k0", "k0"], [0, 1])


@pytest.mark.parametrize("status", [PageStatus.NOT_FOUND, PageStatus.NO_MEMORY_REPLICA, PageStatus.NOT_READY])
@pytest.mark.parametrize("bad", [(0,), (5, 20), (30, 31)], ids=str)
async def test_failed_starts_cut_the_unit_and_end_the_others(status: PageStatus, bad: tuple[int, ...]) -> None:
    pools = make_pools(pages=80)
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    async with opened(recording, pools, **RANGES) as loader:
        await put(loader, pools, keys(32))
        recording.clear()
        lying.lie("session_start", is_of(*(f"k{page}" for page in bad)), status)
        lying.lie("read", is_of(*(f"k{page}" for page in bad)), status)  # the second chance of -702
        outcome = (await load(loader, pools.unit("a", keys(32), range(32))))["a"]
        assert_outcome(outcome, bad[0], status)
        pools.assert_restored(keys(bad[0]), range(bad[0]))
        await settle(loader)
        started, ended = set(recording.keys_of("session_start")), Counter(recording.keys_of("session_end"))
        assert set(ended) == {key for key in started if not is_of(*(f"k{page}" for page in bad))(key)}
        assert set(ended.values()) <= {1}


async def test_first_layers_wait_for_no_byte_of_later_ones() -> None:
    """A call brings one part of its objects: layers 0, 1, 2-3, 4."""
    pools = make_pools()
    recording = RecordingStore(store())
    async with opened(recording, pools, **RANGES, read_lanes=1) as loader:
        await put(loader, pools, keys(4))
        recording.clear()
        assert_outcome((await load(loader, pools.unit("a", keys(4), range(4))))["a"], 4)
        calls = [call.keys for call in recording.calls if call.method == "read_ranges"]
        assert (
            [len(set(object_keys)) for object_keys in calls] == [len(object_keys) for object_keys in calls] == [4] * 4
        )
        await settle(loader)


async def test_no_memory_replica_gets_a_whole_read() -> None:
    """No session without a memory replica, but a whole read may bring it in."""
    pools = make_pools()
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    async with opened(recording, pools, **RANGES) as loader:
        await put(loader, pools, keys(4))
        lying.lie("session_start", is_of("k1"), PageStatus.NO_MEMORY_REPLICA)
        assert_outcome((await load(loader, pools.unit("a", keys(4), range(4))))["a"], 4)
        pools.assert_restored(keys(4), range(4))
        assert len(recording.keys_of("read")) == 1
        await settle(loader)


@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("page", [0, 3])
async def test_expired_session_is_started_again_once(call: int, page: int) -> None:
    pools = make_pools()
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    async with opened(recording, pools, **RANGES, read_lanes=1, read_batch_objects=4) as loader:
        await put(loader, pools, keys(4))
        lying.lie("read_ranges", is_of(f"k{page}"), PageStatus.LEASE_EXPIRED, times=1, skip=call)
        assert_outcome((await load(loader, pools.unit("a", keys(4), range(4))))["a"], 4)
        pools.assert_restored(keys(4), range(4))
        await settle(loader)
        assert loader.statistics().sessions_restarted == loader.statistics().retries == 1
        assert Counter(recording.keys_of("session_end")) == Counter(set(recording.keys_of("session_start")))


async def test_session_that_stays_expired_cuts_the_unit() -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools, **RANGES) as loader:
        await put(loader, pools, keys(4))
        lying.lie("read_ranges", is_of("k2"), PageStatus.LEASE_EXPIRED)
        assert_outcome((await load(loader, pools.unit("a", keys(4), range(4))))["a"], 2, PageStatus.LEASE_EXPIRED)
        await settle(loader)


class Slow(WrapperStore):
    """Ranged reads take their time, on a clock that they turn themselves."""

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(store(clock=self.clock, **options))
        self.now = 0.0
        self._seconds = seconds

    def clock(self) -> float:
        return self.now

    def time_sessions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have sessions look at this clock."""
        for name in ("_SLOW_START", "_LATE_START"):  # those are measured in real time, of which there may be little
            monkeypatch.setattr(sessions, name, 60.0)
        init = partialmethod(sessions.SessionTable.__init__, clock=self.clock)
        monkeypatch.setattr(sessions.SessionTable, "__init__", init)

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        self.now += self._seconds
        return super().read_ranges(keys, pointers, sizes, offsets)


async def test_sessions_are_started_again_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """43 layers that take several leases to come: nothing fails, nothing is even read twice."""
    pools = make_pools(layers=43)
    slow = Slow(0.03, lease=0.3)
    slow.time_sessions(monkeypatch)
    async with opened(slow, pools, **RANGES, read_lanes=1, read_batch_objects=1) as loader:
        await put(loader, pools, keys(4))
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            assert_outcome((await handle.report()).outcomes["a"], 4)
        pools.assert_restored(keys(4), range(4))
        await settle(loader)
        now = loader.statistics()
        assert now.sessions_restarted >= 4
        assert (now.retries, now.late_failures) == (0, 0)


async def test_failed_restart_costs_its_pages_only() -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools, **RANGES, read_batch_objects=4) as loader:
        await put(loader, pools, keys(4))
        lying.lie("read_ranges", is_of("k2"), PageStatus.LEASE_EXPIRED, times=1)
        lying.lie("session_start", is_of("k2"), PageStatus.NOT_FOUND, skip=1)
        outcome = (await load(loader, pools.unit("a", keys(4), range(4))))["a"]
        assert_outcome(outcome, 2)
        pools.assert_restored(keys(2), range(2))
        await settle(loader)


async def test_sessions_from_before_an_outage_are_void() -> None:
    """The master restarts between two reads of a load: old sessions may read other objects with a full count."""
    pools = make_pools()
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    hanging = HangingStore(recording)
    async with opened(hanging, pools, **RANGES, read_lanes=1, read_batch_objects=4) as loader:
        await put(loader, pools, keys(4))
        hanging.hold("read_ranges", from_call(1))
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            await arrived(hanging, "read_ranges")
            lying.lie("exists", is_of("x"), PageStatus.STORE_UNREACHABLE, times=1)
            assert (await loader.lookup(pools.unit("x", ["x"]))).status is PageStatus.STORE_UNREACHABLE
            assert (await loader.lookup(pools.unit("y", ["y"]))).status is None  # it is back
            lying.lie("read_ranges", is_of(*keys(4)), PageStatus.LEASE_EXPIRED, times=4)
            hanging.release()
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 0, PageStatus.REPLICA_CHANGED)
        await settle(loader)
        assert loader.statistics().sessions_restarted == 0
        # Sessions of the master that is back are good.
        assert_outcome((await load(loader, pools.unit("b", ("n0",), [7])))["b"], 0, PageStatus.NOT_FOUND)
        await put(loader, pools, ["n1"])
        assert_outcome((await load(loader, pools.unit("c", ("n1",), [8])))["c"], 1)


async def test_slow_start_makes_the_master_suspect() -> None:
    """A failed start erases a live session: while a start is out for too long nothing is started again."""
    pools = make_pools()
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    hanging = HangingStore(recording)
    async with opened(hanging, pools, **RANGES, read_batch_objects=4) as loader:
        await put(loader, pools, [*keys(2, "a"), *keys(2, "b")])
        hanging.hold("read_ranges", any_of("a0"))
        async with loader.load([pools.unit("a", keys(2, "a"), range(2))]) as a:
            await arrived(hanging, "read_ranges")
            hanging.hold("session_start", any_of("b0"))
            async with loader.load([pools.unit("b", keys(2, "b"), range(2, 4))]):
                await arrived(hanging, "session_start")
                await anyio.sleep(0.12)  # past the 0.1 s after which a start is slow
                recording.clear()
                lying.lie("read_ranges", is_of("a0"), PageStatus.LEASE_EXPIRED, times=1)
                hanging.release("read_ranges")
                await a.report()
                assert recording.count("session_start") == 0
                # Their sessions live: a read may be tried again, but not with a session that was started again.
                assert loader.statistics().sessions_restarted == 0
        hanging.release()
        await settle(loader)


async def test_an_end_does_not_wait_behind_a_start_that_hangs() -> None:
    pools = make_pools()
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    async with opened(hanging, pools, **RANGES) as loader:
        await put(loader, pools, [*keys(2, "a"), *keys(2, "b")])
        hanging.hold("session_start", any_of("b0"))
        async with loader.load([pools.unit("b", keys(2, "b"), range(2, 4))]):
            await arrived(hanging, "session_start")
            assert_outcome((await load(loader, pools.unit("a", keys(2, "a"), range(2))))["a"], 2)
            await eventually(lambda: len(recording.keys_of("session_end")) == 2)
        hanging.release()
        await settle(loader)


async def test_a_lease_shorter_than_any_queue_is_a_miss_and_not_an_endless_restart() -> None:
    pools = make_pools()
    async with opened(store(lease=1e-6), pools, **RANGES, deadline=10.0) as loader:
        await put(loader, pools, keys(4))
        with anyio.fail_after(15):
            outcome = (await load(loader, pools.unit("a", keys(4), range(4))))["a"]
        assert_outcome(outcome, 0, PageStatus.LEASE_EXPIRED)
        # Each of the 16 parts is put off twice, read, put off twice more, and read for the last time.
        assert loader.statistics().sessions_restarted <= 16 * 6
        pools.assert_rows_kept()
        await settle(loader)


async def test_a_master_lost_in_mid_load_is_told_by_the_proof_of_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs are questions to the master: what they find out counts, and no live session is risked for a new one."""
    pools = make_pools(pages=16, layers=20)  # six reads, the last of them when a third of the lease is left
    slow = Slow(0.21, lease=1.5)
    slow.time_sessions(monkeypatch)
    lying = LyingStore(slow)
    async with opened(lying, pools, **RANGES, read_lanes=1, read_batch_objects=1) as loader:
        await put(loader, pools, keys(1))
        lying.lie("descriptors", is_of(*keys(1)), PageStatus.STORE_UNREACHABLE, skip=1)  # from the first proof on
        lying.lie("session_start", is_of(*keys(1)), PageStatus.STORE_UNREACHABLE, skip=1)
        assert_outcome((await load(loader, pools.unit("a", keys(1), [0])))["a"], 1)
        pools.assert_restored(keys(1), [0])
        now = loader.statistics()
        assert now.sessions_restarted == 0
        assert now.open_breakers == ("master",)
        await settle(loader)


async def test_a_session_start_that_hangs_takes_no_load_along() -> None:
    """The load that asked for it and one that wants the same page have it started once more."""
    pools = make_pools()
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    async with opened(hanging, pools, **RANGES) as loader:
        await put(loader, pools, keys(3))
        hanging.hold("session_start", nth_of(0, *keys(3)))
        async with anyio.create_task_group() as tasks:

            async def one(name: str, first: int) -> None:
                assert_outcome((await load(loader, pools.unit(name, keys(3), range(first, first + 3))))[name], 3)

            with anyio.fail_after(30):
                tasks.start_soon(one, "a", 0)
                await arrived(hanging, "session_start")
                tasks.start_soon(one, "b", 3)
        pools.assert_restored(keys(3) * 2, range(6))
        assert hanging.held("session_start") == 1
        assert loader.statistics().stuck_threads == 1
        hanging.release()
        await eventually(lambda: not loader.statistics().stuck_threads)
        await settle(loader)
    assert Counter(recording.keys_of("session_start")) == Counter(recording.keys_of("session_end"))
