"""What is restored and what is missed: each unit is cut on its own, at its first bad page."""

from __future__ import annotations

from typing import Any

import pytest

from softload import PageStatus, PoolName
from softload.protocols import Descriptor
from softload.testing import HangingStore, RecordingStore

from .doubles import LyingStore
from .harness import (
    MODE_IDS,
    MODES,
    arrived,
    assert_outcome,
    eventually,
    from_call,
    is_of,
    keys,
    load,
    make_pools,
    missed,
    modes,
    opened,
    put,
    settle,
    store,
)

pytestmark = pytest.mark.asyncio


def resized(by: int) -> Any:
    return lambda _, truth: Descriptor(truth.size + by, truth.endpoint, truth.address)


@modes
async def test_whole_prefix(mode: dict[str, str]) -> None:
    pools = make_pools(family="mha")
    async with opened(store(), pools, **mode) as loader:
        await put(loader, pools, keys(10))
        rows = [7, 3, 5, 1, 9, 11, 0, 2, 20, 14]
        async with loader.load([pools.unit("a", keys(10), rows)]) as handle:
            admission = await handle.admitted()
            assert (admission["a"], admission.declined) == (10, {})
            for layer in range(pools.group.num_layers):
                ready = await handle.layer(layer)
                assert ready.layer == layer
                assert ready.live == {"a"}
                assert not ready.failed
            report = await handle.report()
        assert_outcome(report.outcomes["a"], 10)
        pools.assert_restored(keys(10), rows)
        pools.assert_rows_kept(rows)
        assert report.bytes_loaded == loader.statistics().bytes_loaded > 0
        await settle(loader)


@modes
@pytest.mark.parametrize(
    "status",
    [
        PageStatus.NOT_FOUND,
        PageStatus.NO_MEMORY_REPLICA,
        PageStatus.NOT_READY,
        PageStatus.TRANSFER_FAILED,
        PageStatus.STORE_UNREACHABLE,
    ],
)
@pytest.mark.parametrize("bad", [(0,), (5, 20), (30, 31), (31,)], ids=str)
async def test_bad_descriptors_cut_the_unit(mode: dict[str, str], status: PageStatus, bad: tuple[int, ...]) -> None:
    pools = make_pools(pages=80)
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    async with opened(recording, pools, **mode) as loader:
        await put(loader, pools, keys(32))
        recording.clear()
        lying.lie("descriptors", is_of(*(f"k{page}" for page in bad)), status)
        rows = range(32)
        async with loader.load([pools.unit("a", keys(32), rows)]) as handle:
            admission = await handle.admitted()
            assert admission["a"] == bad[0]
            assert admission.declined == {"a": status}
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, bad[0], status)
        expected = [status if page in bad else PageStatus.AFTER_MISS for page in range(bad[0], 32)]
        assert missed(outcome) == expected
        assert outcome.pages[bad[0]].component is PoolName.KV
        assert outcome.late_failure is None
        pools.assert_restored(keys(bad[0]), rows[: bad[0]])
        pools.assert_rows_kept(rows[: bad[0]])
        await settle(loader)
        read = {*recording.keys_of("read"), *recording.keys_of("read_ranges"), *recording.keys_of("session_start")}
        assert not any(map(is_of(*keys(32)[bad[0] :]), read)), "a page after the cut was read"
        assert loader.statistics().missed_pages[status] == len(bad)


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("by", [-1, 1, 1 << 20])
async def test_wrong_size_is_a_miss_and_nothing_else(mode: dict[str, str], by: int) -> None:
    # Another layout or another model's page: nobody else's object is removed for that.
    pools = make_pools()
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    async with opened(recording, pools, **mode) as loader:
        await put(loader, pools, keys(4))
        lying.lie("descriptors", is_of("k2"), resized(by))
        outcome = (await load(loader, pools.unit("a", keys(4), range(4))))["a"]
        assert_outcome(outcome, 2, PageStatus.WRONG_SIZE)
        assert recording.count("remove") == 0
        lying.be_honest()
        assert_outcome((await load(loader, pools.unit("b", keys(4), range(4))))["b"], 4)


@modes
@pytest.mark.parametrize("endpoint", ["descriptors", "read"])
async def test_one_bad_unit_leaves_the_other_whole(mode: dict[str, str], endpoint: str) -> None:
    method = "read_ranges" if endpoint == "read" and mode.get("read_mode") == "ranges" else endpoint
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools, **mode) as loader:
        await put(loader, pools, keys(8, "a"))
        await put(loader, pools, keys(8, "b"))
        lying.lie(method, is_of("a3"), PageStatus.NO_MEMORY_REPLICA)
        units = [pools.unit("A", keys(8, "a"), range(8)), pools.unit("B", keys(8, "b"), range(8, 16))]
        async with loader.load(units) as handle:
            for layer in range(pools.group.num_layers):
                assert "B" in (await handle.layer(layer)).live
            outcomes = (await handle.report()).outcomes
        assert_outcome(outcomes["A"], 3, PageStatus.NO_MEMORY_REPLICA)
        assert_outcome(outcomes["B"], 8)
        pools.assert_restored([*keys(3, "a"), *keys(8, "b")], [0, 1, 2, *range(8, 16)])
        pools.assert_rows_kept([*range(16)])
        await settle(loader)


@modes
async def test_nothing_stored_touches_nothing(mode: dict[str, str]) -> None:
    pools = make_pools()
    recording = RecordingStore(store())
    async with opened(recording, pools, **mode) as loader:
        pools.remember()
        outcome = (await load(loader, pools.unit("a", keys(4), range(4))))["a"]
        assert_outcome(outcome, 0, PageStatus.NOT_FOUND)
        pools.assert_rows_kept()
        assert recording.count("read") == recording.count("read_ranges") == recording.count("session_start") == 0
        await settle(loader)


async def test_admission_asks_once_for_all_units() -> None:
    pools = make_pools()
    recording = RecordingStore(store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(8))
        recording.clear()
        outcomes = await load(
            loader, *(pools.unit(f"r{unit}", keys(8)[: unit + 1], range(8 * unit, 9 * unit + 1)) for unit in range(4))
        )
        assert [outcomes[f"r{unit}"].restored_pages for unit in range(4)] == [1, 2, 3, 4]
        assert recording.count("descriptors") == 1
        asked = recording.keys_of("descriptors")
        assert len(asked) == len(set(asked))


@modes
async def test_same_page_for_two_destinations(mode: dict[str, str]) -> None:
    pools = make_pools()
    recording = RecordingStore(store())
    async with opened(recording, pools, **mode) as loader:
        await put(loader, pools, keys(2))
        recording.clear()
        twice = ("k0", "k1", "k0", "k1")
        outcomes = await load(loader, pools.unit("a", twice, range(4)), pools.unit("b", ("k0",), [9]))
        assert_outcome(outcomes["a"], 4)
        assert_outcome(outcomes["b"], 1)
        pools.assert_restored([*twice, "k0"], [0, 1, 2, 3, 9])
        await settle(loader)
        for method in ("read", "session_start", "session_end"):
            assert sorted(recording.keys_of(method)) == sorted(set(recording.keys_of(method))), method


@modes
async def test_zero_pages_is_a_load_of_zero_pages(mode: dict[str, str]) -> None:
    pools = make_pools()
    recording = RecordingStore(store())
    async with opened(recording, pools, **mode) as loader:
        recording.clear()
        async with loader.load([pools.unit("a", (), ()), pools.unit("none", (), ())]) as handle:
            assert (await handle.admitted())["a"] == 0
            assert (await handle.layer(pools.group.num_layers - 1)).live == {"a", "none"}
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 0)
        assert outcome.pages == ()
        async with loader.load([]) as handle:
            assert (await handle.layer(0)).live == frozenset()
            assert (await handle.report()).outcomes == {}
        assert (await loader.lookup(pools.unit("a", ()))).boundaries == ()
        assert recording.calls == ()


async def test_a_load_that_was_given_up_asks_for_nothing_more() -> None:
    pools = make_pools(layers=1, pages=2200, width=1)
    hanging = HangingStore(store())
    recording = RecordingStore(hanging)
    async with opened(recording, pools, layout="page") as loader:
        hanging.hold("descriptors", from_call(1))
        try:
            async with loader.load([pools.unit("a", keys(2200), range(2200))]):
                await arrived(hanging, "descriptors")
        finally:
            hanging.release()
        await settle(loader)
        await eventually(lambda: not loader.statistics().stuck_threads)
        assert recording.count("descriptors") == 2
