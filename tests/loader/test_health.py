"""Misses are a cache's normal life; outages open breakers; stale answers are not believed twice."""

from __future__ import annotations

import anyio
import pytest

from softload import PageStatus, SaveStatus, health
from softload.health import Health
from softload.protocols import Descriptor
from softload.testing import HangingStore, RecordingStore

from .doubles import LyingStore
from .harness import (
    any_of,
    arrived,
    assert_outcome,
    eventually,
    is_of,
    keys,
    load,
    make_pools,
    missed,
    modes,
    opened,
    put,
    second_tries,
    settle,
    store,
    timed_out,
)

pytestmark = pytest.mark.asyncio


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The health's clock: a list of one time, in seconds."""
    now = [0.0]
    original = Health.__init__

    def init(self: Health, **options: object) -> None:
        original(self, **{**options, "clock": lambda: now[0]})  # type: ignore[arg-type]

    monkeypatch.setattr(Health, "__init__", init)
    return now


def matches_all(_: str) -> bool:
    return True


@pytest.mark.parametrize("method", ["descriptors", "exists"])
async def test_dead_master_opens_the_breaker_and_one_probe_closes_it(method: str, clock: list[float]) -> None:
    pools = make_pools()
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(4))
        lying.lie(method, matches_all, PageStatus.STORE_UNREACHABLE)
        for request in range(5):
            unit = pools.unit(f"r{request}", keys(4), range(4))
            if method == "exists":
                assert (await loader.lookup(unit)).pages == 0
            else:
                outcome = (await load(loader, unit))[f"r{request}"]
                assert_outcome(outcome, 0, [PageStatus.STORE_UNREACHABLE, PageStatus.SUPPRESSED][request >= 3])
        assert loader.statistics().open_breakers == ("master",)
        recording.clear()
        found = await loader.lookup(pools.unit("x", keys(4)))
        assert (found.boundaries, found.status) == ((), PageStatus.SUPPRESSED)
        assert missed((await load(loader, pools.unit("y", keys(4), range(4))))["y"])[0] is PageStatus.SUPPRESSED
        report = await loader.save([pools.unit("z", keys(2, "z"), range(8, 10))])
        assert {page.status.value for page in report.outcomes["z"].pages} == {"suppressed"}
        assert recording.calls == ()
        clock[0] += 1.5  # the cool-down is a second, with jitter
        assert (await loader.lookup(pools.unit("probe", keys(4)))).pages == (4 if method == "descriptors" else 0)
        assert recording.count("exists") == 1
        if method == "exists":  # it failed: open for twice as long
            clock[0] += 1.4
            await loader.lookup(pools.unit("early", keys(4)))
            assert recording.count("exists") == 1
            clock[0] += 1.2
            lying.be_honest()
            assert (await loader.lookup(pools.unit("second", keys(4)))).pages == 4
        assert loader.statistics().open_breakers == ()
        await settle(loader)


async def test_saves_find_out_that_the_master_is_dead() -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools) as loader:
        lying.lie("put_start", matches_all, PageStatus.STORE_UNREACHABLE)
        for request in range(3):
            report = await loader.save([pools.unit(f"r{request}", keys(2, f"r{request}"), range(2))])
            assert {page.status for page in report.outcomes[f"r{request}"].pages} == {SaveStatus.FAILED}
        assert loader.statistics().open_breakers == ("master",)


@modes
async def test_transport_failures_suspend_the_endpoint_and_one_probe_brings_it_back(
    mode: dict[str, str], clock: list[float]
) -> None:
    method = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    async with opened(recording, pools, **mode) as loader:
        for request in range(6):
            await put(loader, pools, [f"r{request}"])
        await put(loader, pools, ["fresh"])
        lying.lie(method, matches_all, PageStatus.TRANSFER_FAILED)
        for request in range(5):
            outcome = (await load(loader, pools.unit(f"r{request}", [f"r{request}"], [0])))[f"r{request}"]
            assert outcome.restored_pages == 0
        assert loader.statistics().open_breakers == ("memory",)
        recording.clear()
        assert_outcome((await load(loader, pools.unit("x", ["r5"], [0])))["x"], 0, PageStatus.SUPPRESSED)
        assert recording.count(method) == recording.count("session_start") == 0
        lying.be_honest()
        clock[0] += 1.5
        assert_outcome((await load(loader, pools.unit("y", ["fresh"], [0])))["y"], 1)
        assert loader.statistics().open_breakers == ()
        await settle(loader)


async def test_one_dead_owner_leaves_the_others_in_use() -> None:
    """Keys of owner `bad` fail; those of `good` are served all the while."""
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools) as loader:
        await put(loader, pools, [*keys(6, "bad"), *keys(6, "good")])
        for owner in ("bad", "good"):

            def placed(_: str, truth: Descriptor, owner: str = owner) -> Descriptor:
                return Descriptor(truth.size, owner, truth.address)

            lying.lie("descriptors", is_of(*keys(6, owner)), placed)
        lying.lie("read", is_of(*keys(6, "bad")), PageStatus.TRANSFER_FAILED)
        for page in range(6):
            units = [pools.unit("b", [f"bad{page}"], [0]), pools.unit("g", [f"good{page}"], [1])]
            outcomes = await load(loader, *units)
            assert_outcome(outcomes["b"], 0)
            assert_outcome(outcomes["g"], 1)
        assert loader.statistics().open_breakers == ("bad",)
        mixed = await load(loader, pools.unit("m", ["good0", "good1", "bad0", "good2"], range(4)))
        assert_outcome(mixed["m"], 2, PageStatus.SUPPRESSED)


@modes
@pytest.mark.parametrize("status", [PageStatus.NO_MEMORY_REPLICA, PageStatus.NOT_FOUND])
async def test_a_hundred_misses_open_nothing(mode: dict[str, str], status: PageStatus) -> None:
    method = "session_start" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools, **mode) as loader:
        await put(loader, pools, keys(40))
        lying.lie(method, matches_all, status)
        lying.lie("read", matches_all, status)
        for request in range(100):
            point = request % 3
            page = [f"k{request % 40}", f"absent{request}", f"k{(request + 7) % 40}"][point]
            outcomes = await load(loader, pools.unit(f"r{request}", [page], [0]))
            assert outcomes[f"r{request}"].restored_pages == 0
        assert loader.statistics().open_breakers == ()
        lying.be_honest()
        await put(loader, pools, ["after"])
        assert_outcome((await load(loader, pools.unit("after", ["after"], [0])))["after"], 1)


@modes
async def test_stale_hit_is_suppressed_for_a_short_time(mode: dict[str, str], clock: list[float]) -> None:
    method = "session_start" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    async with opened(recording, pools, **mode) as loader:
        await put(loader, pools, keys(3))
        lying.lie(method, is_of("k1"), PageStatus.NOT_FOUND)
        assert (await loader.lookup(pools.unit("a", keys(3)))).pages == 3
        assert_outcome((await load(loader, pools.unit("a", keys(3), range(3))))["a"], 1, PageStatus.NOT_FOUND)
        assert loader.statistics().negative_keys >= 1
        recording.clear()
        # For every request, not only the one that failed; and nobody asks about it.
        assert (await loader.lookup(pools.unit("b", keys(3)))).pages == 1
        assert_outcome((await load(loader, pools.unit("b", keys(3), range(3))))["b"], 1, PageStatus.SUPPRESSED)
        assert not any(map(is_of("k1"), recording.keys_of(method)))
        clock[0] += 11.0
        lying.be_honest()
        assert (await loader.lookup(pools.unit("c", keys(3)))).pages == 3
        assert_outcome((await load(loader, pools.unit("c", keys(3), range(3))))["c"], 3)
        assert loader.statistics().negative_keys == 0


async def test_a_good_save_clears_a_refuted_key_at_once() -> None:
    pools = make_pools()
    inner = store()
    lying = LyingStore(inner)
    recording = RecordingStore(lying)
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(2))
        lying.lie("read", is_of("k1"), PageStatus.NOT_FOUND)
        unit = pools.unit("a", keys(2), range(2))
        assert_outcome((await load(loader, unit))["a"], 1)
        lying.be_honest()
        gone = [key for key in recording.keys_of("put_start") if is_of("k1")(key)]
        inner.remove(gone, force=True)
        pools.fill(["k1"], [1])
        loader.computed(unit)
        assert (await loader.save([unit])).outcomes["a"].saved_pages == 1
        assert loader.statistics().negative_keys == 0
        assert (await loader.lookup(pools.unit("b", keys(2)))).pages == 2


async def test_plain_absence_is_not_remembered() -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        for request in range(20):
            await load(loader, pools.unit(f"r{request}", [f"absent{request}"], [0]))
        assert loader.statistics().negative_keys == 0


async def test_negative_cache_is_bounded() -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools, layout="page", negative_entries=5) as loader:
        await put(loader, pools, keys(20))
        lying.lie("read", matches_all, PageStatus.NOT_FOUND)
        for page in range(20):
            await load(loader, pools.unit(f"r{page}", [f"k{page}"], [0]))
        await loader.lookup(pools.unit("found", keys(20)[5:10]))
        now = loader.statistics()
        assert (now.negative_keys, now.suppressed_requests, now.promised_keys) == (5, 5, 5)


@modes
async def test_failed_request_looks_up_nothing_until_it_is_computed(mode: dict[str, str]) -> None:
    pools = make_pools()
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    async with opened(recording, pools, **mode) as loader:
        await put(loader, pools, keys(4))
        lying.lie("descriptors", is_of("k2"), PageStatus.NOT_READY)
        unit = pools.unit("a", keys(4), range(4))
        assert (await loader.lookup(unit)).pages == 4
        assert_outcome((await load(loader, unit))["a"], 2)
        recording.clear()
        for _ in range(3):
            found = await loader.lookup(unit)
            assert (found.pages, found.status) == (0, PageStatus.SUPPRESSED)
        assert recording.calls == ()
        assert (await loader.lookup(pools.unit("other", keys(4)))).pages == 4
        loader.computed(unit)
        assert (await loader.lookup(unit)).pages == 4


async def test_failed_prefetch_is_counted_once_and_looks_up_nothing() -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools) as loader:
        await put(loader, pools, keys(4))
        lying.lie("descriptors", is_of("k2"), PageStatus.NOT_READY)
        async with loader.prefetch([pools.unit("a", keys(4))]) as prefetch:
            assert (await prefetch.landed())["a"] == 2
            await prefetch.place([pools.unit("a", keys(2), range(2))])
        async with loader.prefetch([pools.unit("b", keys(4)[2:])]) as prefetch:
            assert (await prefetch.landed())["b"] == 0
        now = loader.statistics()
        assert (now.requested_pages, now.restored_pages) == (6, 2)
        assert dict(now.missed_pages) == {PageStatus.NOT_READY: 2, PageStatus.AFTER_MISS: 2}
        for request in ("a", "b"):
            assert (await loader.lookup(pools.unit(request, keys(4)))).status is PageStatus.SUPPRESSED


async def test_a_probe_that_is_not_sent_gives_its_permit_back(clock: list[float]) -> None:
    """The endpoint's one probe is admitted with a unit that then reads nothing: the next one may probe."""
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools, layout="page") as loader:
        await put(loader, pools, keys(8))
        lying.lie("read", matches_all, PageStatus.TRANSFER_FAILED, times=3)
        for page in range(3):
            await load(loader, pools.unit(f"r{page}", [f"k{page}"], [0]))
        assert loader.statistics().open_breakers == ("memory",)
        clock[0] += 1.5
        outcome = (await load(loader, pools.unit("cut", ["absent", "k4"], [0, 1])))["cut"]
        assert_outcome(outcome, 0, PageStatus.NOT_FOUND)
        async with loader.load([pools.unit("left", ["k5"], [0])]):
            pass
        assert_outcome((await load(loader, pools.unit("probe", ["k6"], [0])))["probe"], 1)
        assert loader.statistics().open_breakers == ()


async def test_slow_master_counts_when_its_waiter_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_SILENT_SECONDS", 60.0)  # outcomes alone
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, lookup_deadline=0.5) as loader:
        hanging.hold("exists")
        for request in range(3):
            assert (await loader.lookup(pools.unit(f"r{request}", keys(2)))).status is PageStatus.TIMED_OUT
        assert loader.statistics().open_breakers == ("master",)
        hanging.release()
        await eventually(lambda: not loader.statistics().stuck_threads)


async def test_an_old_read_that_misses_lets_no_second_probe_through(clock: list[float]) -> None:
    pools = make_pools(layers=1)
    lying = LyingStore(store())
    old_reads = HangingStore(lying)
    hanging = HangingStore(old_reads)
    recording = RecordingStore(hanging)
    async with opened(recording, pools) as loader:
        for page in ("old", "bad0", "bad1", "bad2", "probe", "second"):
            await put(loader, pools, [page])
        old_reads.hold("read", any_of("old"))
        hanging.hold("read", any_of("probe"))
        lying.lie("read", is_of("bad0", "bad1", "bad2"), PageStatus.TRANSFER_FAILED)
        lying.lie("read", is_of("old"), PageStatus.NOT_FOUND)
        try:
            async with loader.load([pools.unit("old", ["old"], [0])]) as old:
                await arrived(old_reads, "read")
                for request in range(3):
                    await load(loader, pools.unit(f"bad{request}", [f"bad{request}"], [1]))
                assert loader.statistics().open_breakers == ("memory",)
                clock[0] += 1.5
                async with loader.load([pools.unit("probe", ["probe"], [2])]) as probe:
                    await arrived(hanging, "read")
                    old_reads.release()
                    assert_outcome((await old.report()).outcomes["old"], 0, PageStatus.NOT_FOUND)
                    second = (await load(loader, pools.unit("second", ["second"], [3])))["second"]
                    assert_outcome(second, 0, PageStatus.SUPPRESSED)
                    hanging.release()
                    assert_outcome((await probe.report()).outcomes["probe"], 1)
            assert loader.statistics().open_breakers == ()
        finally:
            old_reads.release()
            hanging.release()
        await settle(loader)


async def test_a_probe_that_fails_is_over_when_its_load_is(clock: list[float]) -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools) as loader:
        for request in range(5):
            await put(loader, pools, [f"r{request}"])
        lying.lie("read", matches_all, PageStatus.TRANSFER_FAILED)
        for request in range(4):
            await load(loader, pools.unit(f"r{request}", [f"r{request}"], [0]))
            clock[0] += 1.5 if request == 2 else 0
        lying.be_honest()
        clock[0] += 3
        assert_outcome((await load(loader, pools.unit("r4", ["r4"], [0])))["r4"], 1)
        assert loader.statistics().open_breakers == ()


@modes
async def test_reads_of_one_load_that_hang_at_their_second_try_are_one_outcome(
    mode: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that hang at their first."""
    monkeypatch.setattr(health, "_SILENT_SECONDS", 60.0)  # outcomes alone
    method = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    hanging = HangingStore(store())
    lying = LyingStore(hanging)
    async with opened(lying, pools, **mode, read_lanes=4, read_batch_objects=1) as loader:
        await put(loader, pools, keys(4))
        lying.lie(method, is_of(*keys(4)), PageStatus.LEASE_EXPIRED, times=4)
        hanging.hold(method, second_tries())
        try:
            outcome = await timed_out(loader, hanging, method, pools.unit("a", keys(4), range(4)), calls=4)
            assert outcome.restored_pages < 4
            now = loader.statistics()
            assert now.retries == now.timed_out_calls == 4
            assert now.open_breakers == ()
        finally:
            hanging.release()
        await settle(loader)


@modes
async def test_the_next_load_from_an_endpoint_that_is_silent_waits_for_nothing(mode: dict[str, str]) -> None:
    method = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, **mode) as loader:
        for name in ("a", "b", "c"):
            await put(loader, pools, keys(2, name))
        assert_outcome((await load(loader, pools.unit("warm", keys(2, "c"), range(2))))["warm"], 2)
        hanging.hold(method)
        unit = pools.unit("a", keys(2, "a"), range(2), deadline=2.0)  # its read is out for half a second of it at least
        assert_outcome((await load(loader, unit))["a"], 0, PageStatus.TIMED_OUT)
        assert loader.statistics().open_breakers == ("memory",)
        began = anyio.current_time()
        assert_outcome((await load(loader, pools.unit("b", keys(2, "b"), range(2))))["b"], 0, PageStatus.SUPPRESSED)
        assert anyio.current_time() - began < 5  # its own deadline is 20 s
        hanging.release()

        async def restored() -> bool:
            unit = pools.unit("again", [*keys(2, "a"), *keys(2, "b")], range(4))
            return (await load(loader, unit))["again"].restored_pages == 4

        with anyio.fail_after(15):  # a cool-down of 1.25 s at most, and a busy machine
            while not await restored():  # noqa: ASYNC110  # nothing signals the end of a cool-down
                await anyio.sleep(0.01)
        assert loader.statistics().open_breakers == ()
        await settle(loader)


async def test_a_call_that_hangs_beside_good_ones_suspends_nothing() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, layout="page", read_lanes=4, endpoint_lanes=4) as loader:
        await put(loader, pools, ["bad"])
        for page in range(40):
            await put(loader, pools, [f"good{page}"])
        hanging.hold("read", any_of("bad"))
        page = 0
        async with loader.load([pools.unit("bad", ["bad"], [0], deadline=0.7)]) as bad:
            await arrived(hanging, "read")
            began = anyio.current_time()
            while anyio.current_time() - began < 1.5:  # also past the moment of the last look
                page += 1
                name = f"r{page}"
                assert_outcome((await load(loader, pools.unit(name, [f"good{page % 40}"], [1])))[name], 1)
                await anyio.sleep(0.05)
            assert_outcome((await bad.report()).outcomes["bad"], 0, PageStatus.TIMED_OUT)
        assert loader.statistics().timed_out_calls == 1
        assert loader.statistics().open_breakers == ()
        hanging.release()
        await settle(loader)


async def test_a_master_that_is_silent_is_asked_once() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    recording = RecordingStore(hanging)
    async with opened(recording, pools, lookup_deadline=2.0) as loader:  # the call is out for half a second of it
        await put(loader, pools, keys(2))
        hanging.hold("exists")
        try:
            assert (await loader.lookup(pools.unit("a", keys(2)))).status is PageStatus.TIMED_OUT
            assert loader.statistics().open_breakers == ("master",)
            assert (await loader.lookup(pools.unit("b", keys(2)))).status is PageStatus.SUPPRESSED
            assert recording.count("exists") == 1
        finally:
            hanging.release()
        with anyio.fail_after(15):
            while (await loader.lookup(pools.unit("c", keys(2)))).pages < 2:  # noqa: ASYNC110  # as above
                await anyio.sleep(0.01)
        assert loader.statistics().open_breakers == ()
