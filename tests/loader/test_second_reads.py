"""A read that hangs takes nobody along who only joined it: they are served by a second one."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from softload import PageLoader, PageStatus, TransferUnit, UnitOutcome, fetches, health
from softload.testing import HangingStore, RecordingStore

from .doubles import LyingStore
from .harness import (
    MODE_IDS,
    MODES,
    Pools,
    any_of,
    arrived,
    assert_outcome,
    config,
    end_time_of,
    eventually,
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

modes = pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)


def method_of(mode: dict[str, Any]) -> str:
    return "read_ranges" if mode.get("read_mode") == "ranges" else "read"


class Loads:
    """Loads that run until the block ends, and what became of them."""

    def __init__(self, loader: PageLoader, tasks: anyio.abc.TaskGroup) -> None:
        self._loader = loader
        self._tasks = tasks
        self.reading: set[str] = set()
        self.outcomes: dict[str, UnitOutcome] = {}
        self.scopes: dict[str, anyio.CancelScope] = {}

    def start(self, *units: TransferUnit) -> None:
        """Load each on its own."""
        for unit in units:
            self._tasks.start_soon(self._one, unit)

    async def read(self, *requests: str) -> None:
        """Wait until these have joined what is on its way, and queued their reads of the rest."""
        await eventually(lambda: self.reading >= set(requests))

    async def ended(self, *requests: str) -> None:
        """Wait until these have their outcomes."""
        await eventually(lambda: self.outcomes.keys() >= set(requests), 10)

    async def _one(self, unit: TransferUnit) -> None:
        with anyio.CancelScope() as self.scopes[unit.request_id]:
            async with self._loader.load([unit]) as handle:
                await handle.admitted()
                self.reading.add(unit.request_id)
                self.outcomes.update((await handle.report()).outcomes)


async def second_read_is_due(loader: PageLoader) -> None:
    """Wait until a read has been found to hang, and was queued once more; that may be over before anybody looks."""
    assert loader._context is not None
    reader = loader._context.reader
    await eventually(lambda: bool(reader._seconds) or loader.statistics().second_reads > 0)


@asynccontextmanager
async def held_up(
    loader: PageLoader, pools: Pools, hanging: HangingStore, method: str, calls: int
) -> AsyncIterator[Loads]:
    """Within, reads queue up behind `calls` others, so that they can be joined; another `hold` lets those go."""
    blockers = keys(calls, "blocker")
    await put(loader, pools, blockers)
    rows = range(pools.group.pools[0].num_pages - calls, pools.group.pools[0].num_pages)
    hanging.hold(method, any_of(*blockers))
    async with anyio.create_task_group() as tasks:
        loads = Loads(loader, tasks)
        loads.start(pools.unit("blocker", blockers, rows))
        await loads.read("blocker")
        await arrived(hanging, method, calls)
        yield loads
        await loads.ended("blocker")
    assert_outcome(loads.outcomes["blocker"], calls)


@modes
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("nth", [0, 2])
async def test_loads_that_joined_a_read_that_hangs_restore_everything(
    mode: dict[str, str], lanes: int, nth: int
) -> None:
    """The first load times out with its read; four others joined it: theirs are read once more, and nothing else."""
    method = method_of(mode)
    if method == "read" and mode["layout"] == "page" and nth:
        pytest.skip("one call reads the whole page")
    pools = make_pools()
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    async with opened(hanging, pools, **mode, read_lanes=lanes, read_batch_objects=1) as loader:
        objects = len(pools.group.specs(loader.config.layout)[pools.group.pools[0].name])
        parts = 4 if method == "read_ranges" else 1
        others = [keys(2) + keys(2, f"own{request}_") for request in range(4)]
        for page_keys in others:
            await put(loader, pools, page_keys)
        recording.clear()
        async with held_up(loader, pools, hanging, method, lanes) as loads:
            loads.start(pools.unit("stuck", keys(2), range(2)))
            await loads.read("stuck")
            for request, page_keys in enumerate(others):
                loads.start(pools.unit(f"r{request}", page_keys, range(4 * request + 4, 4 * request + 8)))
            await loads.read(*(f"r{request}" for request in range(4)))
            assert loader.statistics().shared_objects == 4 * 2 * objects
            hanging.hold(method, nth_of(nth, "k0"))
            await second_read_is_due(loader)
            end_time_of(loader, "stuck")
            await loads.ended("stuck", *(f"r{request}" for request in range(4)))
            assert hanging.held(method) == 1
            assert_outcome(loads.outcomes["stuck"], 0, PageStatus.TIMED_OUT)
            for request, page_keys in enumerate(others):
                rows = range(4 * request + 4, 4 * request + 8)
                assert_outcome(loads.outcomes[f"r{request}"], 4)
                pools.assert_restored(page_keys, rows)
            now = loader.statistics()
            assert (now.second_reads, now.timed_out_calls, now.retries) == (1, 1, 0)
            assert sum(now.missed_pages.values()) == 2
            assert now.quarantined_bytes > 0
            hanging.release()
        await settle(loader)
        reads = Counter(recording.keys_of(method))
        hung = {key for key, count in reads.items() if parts < count <= 2 * parts}
        assert len(hung) == 1 and is_of("k0")(next(iter(hung)))
        assert {count for key, count in reads.items() if key not in hung} == {parts}
        assert set(Counter(recording.keys_of("session_start")).values()) <= {1}
        assert Counter(recording.keys_of("session_start")) == Counter(recording.keys_of("session_end"))
        for request, page_keys in enumerate(others):  # nothing was written late
            pools.assert_restored(page_keys, range(4 * request + 4, 4 * request + 8))


@modes
async def test_prefetches_are_served_too_and_later_loads_by_what_they_left(mode: dict[str, str]) -> None:
    method = method_of(mode)
    pools = make_pools()
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    async with opened(hanging, pools, **mode, read_lanes=2, read_batch_objects=1) as loader:
        await put(loader, pools, keys(1))
        async with held_up(loader, pools, hanging, method, 2) as loads:
            loads.start(pools.unit("stuck", keys(1), [0]))
            await loads.read("stuck")
            objects = len(pools.group.specs(loader.config.layout)[pools.group.pools[0].name])
            async with loader.prefetch([pools.unit("next", keys(1))]) as prefetch:
                await eventually(lambda: loader.statistics().shared_objects == objects)
                hanging.hold(method, nth_of(0, "k0"))
                assert (await prefetch.landed())["next"] == 1
                report = await prefetch.place([pools.unit("next", keys(1), [1])])
                assert_outcome(report.outcomes["next"], 1)
            end_time_of(loader, "stuck")
            await loads.ended("stuck")
            hung = next(
                key for key in recording.keys_of(method) if is_of("k0")(key) and not key.endswith(("1", "2", "3"))
            )
            recording.clear()
            assert_outcome((await load(loader, pools.unit("later", keys(1), [2])))["later"], 1)
            assert hung not in recording.keys_of(method)
            hanging.release()
        pools.assert_restored(["k0", "k0"], [1, 2])
        await settle(loader)


@dataclass(slots=True)
class Joined:
    """Load "first" reads page k0 and load "joiner" has joined it; what is held of that is up to the test."""

    pools: Pools
    outer: HangingStore
    inner: HangingStore
    """Holds what has passed `outer`: second reads, for example."""
    lying: LyingStore
    recording: RecordingStore
    loader: PageLoader
    loads: Loads

    @property
    def outcomes(self) -> dict[str, UnitOutcome]:
        return self.loads.outcomes

    def assert_served(self, *requests: str) -> None:
        """These have got the page, each into its own row."""
        for request in requests:
            assert_outcome(self.outcomes[request], 1)
            self.pools.assert_restored(["k0"], [("first", "joiner", "newcomer").index(request)])


@asynccontextmanager
async def joined(
    deadline: float = 20.0, joiner_deadline: float = 20.0, *, inner_holds: int | None = None, **options: Any
) -> AsyncIterator[Joined]:
    """The first read of k0 is held at `outer`, read `inner_holds` of those that get so far at `inner`.

    Args:
        deadline: of the first load.
        joiner_deadline: of the other.
        inner_holds: a number from 0, or none.
        options: of the loader's configuration.
    """
    pools = make_pools()
    recording = RecordingStore(store())
    lying = LyingStore(recording)
    inner = HangingStore(lying)
    outer = HangingStore(inner)
    async with opened(outer, pools, layout="page", read_lanes=2, read_batch_objects=1, **options) as loader:
        await put(loader, pools, keys(1))
        await put(loader, pools, keys(3, "bad"))
        try:
            async with held_up(loader, pools, outer, "read", 2) as loads:
                loads.start(pools.unit("first", keys(1), [0], deadline=deadline))
                await loads.read("first")
                loads.start(pools.unit("joiner", keys(1), [1], deadline=joiner_deadline))
                await loads.read("joiner")
                recording.clear()
                if inner_holds is not None:
                    inner.hold("read", nth_of(inner_holds, "k0"))
                outer.hold("read", nth_of(0, "k0"))
                await arrived(outer, "read")
                yield Joined(pools, outer, inner, lying, recording, loader, loads)
                await loads.ended("first", "joiner")
        finally:
            inner.release()
        await settle(loader)


async def test_the_first_read_serves_all_if_it_comes_first_after_all() -> None:
    async with joined(inner_holds=0) as it:
        await arrived(it.inner, "read")
        it.outer.release()
        await it.loads.ended("first", "joiner")
        it.assert_served("first", "joiner")
        assert it.loader.statistics().quarantined_bytes > 0  # of the second one, which nobody wants any more
        it.inner.release()


async def test_a_second_read_is_joined_by_later_loads() -> None:
    async with joined(inner_holds=0) as it:
        await arrived(it.inner, "read")
        it.loads.start(it.pools.unit("newcomer", keys(1), [2]))
        await it.loads.read("newcomer")
        it.inner.release()
        await it.loads.ended("joiner", "newcomer")
        it.assert_served("joiner", "newcomer")
        assert it.loader.statistics().second_reads == 1
        it.outer.release()
        await it.loads.ended("first")
        it.assert_served("first")
        assert it.recording.keys_of("read").count(it.recording.keys_of("read")[-1]) == 2


@pytest.mark.parametrize("status", [PageStatus.TRANSFER_FAILED, PageStatus.LEASE_EXPIRED, PageStatus.CORRUPT], ids=str)
async def test_a_first_read_that_fails_is_made_up_for_by_the_second(status: PageStatus) -> None:
    """Nothing is a miss, nothing is read a third time, nothing is removed."""
    async with joined(inner_holds=0) as it:
        await arrived(it.inner, "read")
        it.lying.lie("read", is_of("k0"), status, times=1)
        it.outer.release()  # the second is held still
        await eventually(lambda: it.recording.count("read") >= 3)
        await anyio.wait_all_tasks_blocked()
        assert not it.outcomes.keys() & {"first", "joiner"}
        it.inner.release()
        await it.loads.ended("first", "joiner")
        it.assert_served("first", "joiner")
        now = it.loader.statistics()
        assert not now.missed_pages
        assert (now.second_reads, now.retries, now.removed_corrupt, now.negative_keys) == (1, 0, 0, 0)
        assert len([key for key in it.recording.keys_of("read") if is_of("k0")(key)]) == 2


async def test_two_reads_that_fail_are_told_once() -> None:
    async with joined(inner_holds=0) as it:
        await arrived(it.inner, "read")
        it.lying.lie("read", is_of("k0"), PageStatus.TRANSFER_FAILED)
        it.outer.release()
        it.inner.release()
        await it.loads.ended("first", "joiner")
        for request in ("first", "joiner"):
            assert_outcome(it.outcomes[request], 0, PageStatus.TRANSFER_FAILED)
        now = it.loader.statistics()
        assert now.missed_pages == {PageStatus.TRANSFER_FAILED: 2}
        assert (now.retries, now.negative_keys, now.open_breakers, now.timed_out_calls) == (0, 1, (), 0)
        assert len([key for key in it.recording.keys_of("read") if is_of("k0")(key)]) == 2


async def test_a_second_read_that_fails_leaves_all_with_the_first() -> None:
    async with joined() as it:
        it.lying.lie("read", is_of("k0"), PageStatus.TRANSFER_FAILED, times=1)
        await eventually(lambda: it.recording.count("read") >= 3)
        await anyio.wait_all_tasks_blocked()
        assert not it.outcomes.keys() & {"first", "joiner"}
        it.outer.release()
        await it.loads.ended("first", "joiner")
        it.assert_served("first", "joiner")
        now = it.loader.statistics()
        assert (now.second_reads, now.retries) == (1, 0)
        assert not now.missed_pages


async def test_there_is_no_third_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hang: that is one time-out per load and page, two calls, and one outcome of their endpoint."""
    monkeypatch.setattr(health, "_SILENT_SECONDS", 60.0)  # outcomes alone
    async with joined(1.0, 1.5, inner_holds=0) as it:
        await arrived(it.inner, "read")
        await it.loads.ended("first", "joiner")
        for request in ("first", "joiner"):
            assert_outcome(it.outcomes[request], 0, PageStatus.TIMED_OUT)
        now = it.loader.statistics()
        assert now.missed_pages == {PageStatus.TIMED_OUT: 2}
        assert (now.second_reads, now.timed_out_calls, now.open_breakers) == (1, 2, ())
        assert (it.outer.held("read"), it.inner.held("read")) == (1, 1)
        assert now.stuck_threads == 2
        it.inner.release()
        it.outer.release()
    it.pools.assert_rows_kept(range(46, 48))


async def test_whoever_leaves_the_first_read_leaves_the_second_to_the_others() -> None:
    async with joined(inner_holds=0) as it:
        await arrived(it.inner, "read")
        it.loads.scopes["first"].cancel()
        await eventually(lambda: it.loader.statistics().stuck_threads == 1)  # its lane is somebody else's
        it.inner.release()
        await it.loads.ended("joiner")
        it.assert_served("joiner")
        it.outcomes["first"] = it.outcomes["joiner"]
        it.outer.release()


async def test_who_joined_the_second_read_is_served_by_the_first_too() -> None:
    async with joined(inner_holds=0) as it:
        await arrived(it.inner, "read")
        it.loads.start(it.pools.unit("newcomer", keys(1), [2]))
        await it.loads.read("newcomer")
        it.outer.release()
        await it.loads.ended("first", "joiner", "newcomer")
        it.assert_served("first", "joiner", "newcomer")
        assert it.inner.held("read") == 1
        it.inner.release()


async def test_a_second_read_that_nobody_wants_is_given_up() -> None:
    async with joined(inner_holds=0) as it:
        await arrived(it.inner, "read")
        it.loads.scopes["joiner"].cancel()
        await eventually(lambda: it.loader.statistics().stuck_threads == 1)
        assert it.loader.statistics().quarantined_bytes > 0
        it.outer.release()
        await it.loads.ended("first")
        it.assert_served("first")
        it.outcomes["joiner"] = it.outcomes["first"]
        it.inner.release()


async def test_closing_with_both_reads_out_answers_everybody(
    quick_close: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "_JOIN_SECONDS", 1.5)  # time to join
    pools = make_pools()
    hanging = HangingStore(store())
    try:
        async with anyio.create_task_group() as tasks:
            async with PageLoader(hanging, pools.group, config=config(layout="page")) as loader:
                await put(loader, pools, keys(1))
                hanging.hold("read")
                loads = Loads(loader, tasks)
                loads.start(pools.unit("first", keys(1), [0]))
                await arrived(hanging, "read")
                loads.start(pools.unit("joiner", keys(1), [1]))
                await loads.read("joiner")
                await arrived(hanging, "read", 2)
        for request in ("first", "joiner"):
            assert_outcome(loads.outcomes[request], 0, PageStatus.CANCELLED)
    finally:
        hanging.release()
    pools.assert_rows_kept()


async def test_without_memory_for_it_there_is_no_second_read() -> None:
    """Whoever joined waits for the first read, as without second reads."""
    pools = make_pools(width=1024)
    page = 5 * 4 * 1024
    hanging = HangingStore(store())
    # Streaming has seven eighths: enough for the page and the blockers, one page short of a second.
    async with opened(
        hanging, pools, layout="page", read_lanes=2, read_batch_objects=1, landing_bytes=page * 16, integrity="off"
    ) as loader:
        await put(loader, pools, keys(10))
        async with held_up(loader, pools, hanging, "read", 2) as loads:
            loads.start(pools.unit("first", keys(10), range(10)))
            await loads.read("first")
            loads.start(pools.unit("joiner", keys(10), range(10, 20)))
            await loads.read("joiner")
            hanging.hold("read", any_of(*keys(10)))
            await arrived(hanging, "read", 2)
            await anyio.sleep(0.06)  # a read is late after 50 ms
            hanging.release()
            await loads.ended("first", "joiner")
        pools.assert_restored(keys(10) * 2, range(20))
        await settle(loader)


async def test_a_second_read_that_is_refused_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads are stuck as there may be: whoever joined waits for the first read."""
    monkeypatch.setattr(fetches, "_JOIN_SECONDS", 1.5)
    async with joined(stuck_threads=0) as it:
        it.loads.scopes["first"].cancel()  # the call is stuck as soon as nobody relies on it
        await eventually(lambda: it.loader.statistics().refused_calls == 1)
        assert it.loader.statistics().stuck_threads == 1
        assert it.loader.statistics().second_reads == 0
        it.outer.release()
        await it.loads.ended("joiner")
        it.assert_served("joiner")
        it.outcomes["first"] = it.outcomes["joiner"]


async def test_a_prefetch_whose_time_is_up_as_the_second_read_comes_holds_one_of_the_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first read, which nobody waits for any more, goes to quarantine at once, and not when the handle ends."""
    loop = asyncio.get_running_loop()
    returned = threading.Event()
    call_soon_threadsafe = loop.call_soon_threadsafe
    pools = make_pools()
    inner = HangingStore(store())
    outer = HangingStore(inner)
    async with opened(outer, pools, layout="page", read_lanes=2, read_batch_objects=1) as loader:
        await put(loader, pools, keys(1))
        async with held_up(loader, pools, outer, "read", 2) as loads:
            loads.start(pools.unit("first", keys(1), [0], deadline=1.0))
            await loads.read("first")
            async with loader.prefetch([pools.unit("next", keys(1), deadline=2.5)]) as prefetch:
                await eventually(lambda: loader.statistics().shared_objects == 1)
                inner.hold("read", nth_of(0, "k0"))
                outer.hold("read", nth_of(0, "k0"))
                await arrived(inner, "read")
                await loads.ended("first")
                deadline = prefetch._runs[0].deadline

                def busy_past_the_deadline() -> None:
                    while loop.time() < deadline + 0.01:
                        pass

                def second_read_returns() -> None:
                    inner.release()
                    assert returned.wait(10)

                def told(*arguments: Any, **options: Any) -> Any:
                    handle = call_soon_threadsafe(*arguments, **options)
                    returned.set()
                    return handle

                monkeypatch.setattr(loop, "call_soon_threadsafe", told)
                # In one turn of the loop: what the second read brought is queued, then the time is over.
                loop.call_at(deadline - 0.05, busy_past_the_deadline)
                loop.call_at(deadline - 0.001, second_read_returns)
                await prefetch.landed()
                now = loader.statistics()
                assert now.stuck_threads == 1
                assert now.quarantined_bytes > 0
                outer.release()
                await eventually(lambda: not loader.statistics().quarantined_bytes)
        await settle(loader)


async def test_a_suspect_endpoint_gets_no_second_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "_JOIN_SECONDS", 2.0)  # the read is late only after the breaker has opened
    async with joined() as it:
        assert it.loader._context is not None
        await it.loads.ended("blocker")  # whose good reads would close the breaker
        for _ in range(3):  # other reads failed meanwhile: by hand, since those that start now wait for this one
            it.loader._context.health.endpoint("memory").record(False)
        assert it.loader.statistics().open_breakers == ("memory",)
        await anyio.sleep(2.2)
        assert it.loader.statistics().second_reads == 0
        it.outer.release()
        await it.loads.ended("first", "joiner")
        assert {it.outcomes[request].restored_pages for request in ("first", "joiner")} == {1}
