"""Landing memory as loads see it: granted whole and in order, cut where it can never fit, given back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import anyio
import pytest

from softload import PageStatus, health
from softload.testing import HangingStore, RecordingStore

from .doubles import LyingStore
from .harness import (
    Pools,
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
    settle,
    store,
    timed_out,
)

pytestmark = pytest.mark.asyncio


def page_bytes(pools: Pools) -> int:
    return sum(view.shape[1] for view in pools.group.pools[0].page_views)


@modes
async def test_what_can_never_fit_is_cut(mode: dict[str, str]) -> None:
    pools = make_pools(width=1024)
    async with opened(store(), pools, **mode, landing_bytes=page_bytes(pools) * 8) as loader:
        for start in range(0, 16, 4):
            await put(loader, pools, keys(16)[start : start + 4])
        async with loader.load([pools.unit("a", keys(16), range(16))]) as handle:
            admission = await handle.admitted()
            assert admission.declined == {"a": PageStatus.SHED}
            outcome = (await handle.report()).outcomes["a"]
        assert 4 <= outcome.restored_pages < 8
        assert_outcome(outcome, admission["a"], PageStatus.SHED)
        pools.assert_restored(keys(outcome.restored_pages), range(outcome.restored_pages))
        pools.assert_rows_kept(range(outcome.restored_pages))
        # Nothing is wrong with the store or the request: it may look up again.
        assert (await loader.lookup(pools.unit("a", keys(16)))).pages == 16
        await settle(loader)


@pytest.mark.parametrize("kind", ["load", "prefetch"])
async def test_two_that_each_want_most_of_it_come_one_after_the_other(kind: str) -> None:
    pools = make_pools(width=1024)
    hanging = HangingStore(store())
    async with opened(hanging, pools, landing_bytes=page_bytes(pools) * 20) as loader:
        for prefix in ("a", "b"):
            for start in range(0, 10, 2):
                await put(loader, pools, keys(10, prefix)[start : start + 2])
        of_b = any_of(*keys(10, "b"))
        early: list[bool] = []
        done: list[str] = []

        def every(object_keys: Sequence[str]) -> bool:
            early.append(of_b(object_keys))
            return True

        hanging.hold("read", every)

        async def one(name: str, rows: range) -> None:
            if kind == "load":
                assert_outcome((await load(loader, pools.unit(name, keys(10, name), rows)))[name], 10)
            else:
                async with loader.prefetch([pools.unit(name, keys(10, name))]) as handle:
                    assert (await handle.landed())[name] == 10
                    await handle.place([pools.unit(name, keys(10, name), rows)])
            done.append(name)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one, "a", range(10))
                await arrived(hanging, "read")
                tasks.start_soon(one, "b", range(10, 20))
                await eventually(lambda: loader.statistics().waiting_grants == 1)
                assert early and not any(early)
                hanging.release()
        assert sorted(done) == ["a", "b"]
        if kind == "prefetch":  # a load gives its memory back layer by layer, so the second may overtake its end
            assert done == ["a", "b"]
        pools.assert_restored([*keys(10, "a"), *keys(10, "b")], range(20))
        await settle(loader)


async def test_nothing_to_read_waits_for_no_memory() -> None:
    """A miss, and a load of zero pages, are answered while others wait for room."""
    pools = make_pools(width=1024)
    hanging = HangingStore(store())
    async with opened(hanging, pools, landing_bytes=page_bytes(pools) * 20) as loader:
        for prefix in ("a", "b"):
            for start in range(0, 12, 2):
                await put(loader, pools, keys(12, prefix)[start : start + 2])
        hanging.hold("read")
        async with loader.load([pools.unit("a", keys(12, "a"), range(12))]) as first:
            await arrived(hanging, "read")
            async with loader.load([pools.unit("b", keys(12, "b"), range(12, 24))]):
                await eventually(lambda: loader.statistics().waiting_grants == 1)
                with anyio.fail_after(15):
                    outcomes = await load(loader, pools.unit("miss", keys(2, "x"), [30, 31]), pools.unit("0", (), ()))
                assert_outcome(outcomes["miss"], 0, PageStatus.NOT_FOUND)
            hanging.release()
            await first.report()
        await settle(loader)


async def test_waiting_for_memory_ends_at_the_deadline() -> None:
    pools = make_pools(width=1024)
    hanging = HangingStore(store())
    recording = RecordingStore(hanging)
    async with opened(recording, pools, landing_bytes=page_bytes(pools) * 20) as loader:
        for prefix in ("a", "b"):
            for start in range(0, 12, 2):
                await put(loader, pools, keys(12, prefix)[start : start + 2])
        hanging.hold("read")
        try:
            async with loader.load([pools.unit("a", keys(12, "a"), range(12))]) as first:
                await arrived(hanging, "read")
                recording.clear()
                outcome = (await load(loader, pools.unit("b", keys(12, "b"), range(12, 24), deadline=0.1)))["b"]
                assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
                assert not any(map(is_of(*keys(12, "b")), recording.keys_of("read")))
                assert loader.statistics().waiting_grants == 0
                hanging.release()
                assert_outcome((await first.report()).outcomes["a"], 12)
        finally:
            hanging.release()
        await settle(loader)


async def test_a_quarantined_endpoint_gets_no_more_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than an eighth of the memory is out with calls that nobody waits for: later pages there miss at once."""
    monkeypatch.setattr(health, "_SILENT_SECONDS", 60.0)  # else its breaker might open first
    pools = make_pools(width=1024)
    hanging = HangingStore(store())
    recording = RecordingStore(hanging)
    async with opened(recording, pools, landing_bytes=page_bytes(pools) * 16, layout="page") as loader:
        await put(loader, pools, keys(2, "a"))
        await put(loader, pools, keys(2, "b"))
        await put(loader, pools, keys(2, "c"))
        hanging.hold("read", any_of(*keys(2, "a"), *keys(2, "b")))
        try:
            for name in ("a", "b"):
                outcome = await timed_out(loader, hanging, "read", pools.unit(name, keys(2, name), range(2)))
                assert missed(outcome)[0] is PageStatus.TIMED_OUT
            now = loader.statistics()
            assert now.quarantined_bytes > now.landing_bytes // 8
            recording.clear()
            with anyio.fail_after(15):
                outcome = (await load(loader, pools.unit("c", keys(2, "c"), range(2))))["c"]
            assert_outcome(outcome, 0, PageStatus.SHED)
            assert recording.count("read") == 0
        finally:
            hanging.release()
        await settle(loader)


async def test_reads_refused_together_are_told_once_each_where_one_costs_pages_of_the_next() -> None:
    """One call holds what an endpoint has of all layers, of the first layer's pages only the last: that costs those."""
    pools = make_pools(width=1024)
    hanging = HangingStore(store())
    lying = LyingStore(hanging)
    async with opened(lying, pools, landing_bytes=page_bytes(pools) * 16, read_lanes=1) as loader:
        await put(loader, pools, keys(3, "b"))
        await put(loader, pools, keys(4, "a"))
        first = is_of(*keys(2, "a"))
        lying.lie(
            "descriptors",
            lambda key: not (first(key) and key.endswith(".g0")),
            lambda _, truth: truth._replace(endpoint="elsewhere"),
        )
        hanging.hold("read", any_of(*keys(3, "b")))
        try:
            async with AsyncExitStack() as leaving:
                await leaving.enter_async_context(loader.load([pools.unit("b", keys(3, "b"), range(4, 7))]))
                await arrived(hanging, "read")
                async with loader.load([pools.unit("a", keys(4, "a"), range(4))]) as handle:
                    assert (await handle.admitted())["a"] == 4
                    await leaving.aclose()
                    assert loader.statistics().quarantined_bytes > loader.statistics().landing_bytes // 8
                    with anyio.fail_after(15):
                        outcome = (await handle.report()).outcomes["a"]
            assert_outcome(outcome, 0, PageStatus.SHED)
            assert loader.statistics().landing_bytes_in_use == 0
        finally:
            hanging.release()
        await settle(loader)
        lying.be_honest()
        assert_outcome((await load(loader, pools.unit("again", keys(4, "a"), range(4))))["again"], 4)
        pools.assert_restored(keys(4, "a"), range(4))


async def test_quarantined_memory_is_replaced() -> None:
    pools = make_pools(width=1024)
    hanging = HangingStore(store())
    recording = RecordingStore(hanging)
    async with opened(recording, pools, landing_bytes=page_bytes(pools) * 16, layout="page") as loader:
        await put(loader, pools, keys(2, "a"))
        hanging.hold("read")
        try:
            await timed_out(loader, hanging, "read", pools.unit("a", keys(2, "a"), range(2)))
            await eventually(lambda: loader.statistics().replaced_bytes > 0)
            assert recording.count("register") == 2
        finally:
            hanging.release()
        await eventually(lambda: loader.statistics().replaced_bytes == 0)
        await eventually(lambda: recording.count("unregister") == 1)
        await settle(loader)


@modes
async def test_copies_in_small_chunks(mode: dict[str, str]) -> None:
    pools = make_pools()
    async with opened(store(), pools, **mode, copy_chunk_bytes=50) as loader:
        await put(loader, pools, keys(6))
        assert_outcome((await load(loader, pools.unit("a", keys(6), range(3, 9))))["a"], 6)
        pools.assert_restored(keys(6), range(3, 9))
        pools.assert_rows_kept(range(3, 9))


@modes
async def test_fragmented_memory_serves_as_well(mode: dict[str, str]) -> None:
    pools = make_pools(width=512)
    async with opened(store(), pools, **mode, landing_bytes=page_bytes(pools) * 16, read_lanes=2) as loader:
        for start in range(0, 12, 3):
            await put(loader, pools, keys(12)[start : start + 3])
        for attempt in range(6):
            async with anyio.create_task_group() as tasks:
                for request in range(3):
                    pages = keys(12)[: 3 + (attempt + request) % 9]
                    rows = range(request * 12, request * 12 + len(pages))
                    tasks.start_soon(load, loader, pools.unit(f"{attempt}-{request}", pages, rows))
            for request in range(3):
                pages = keys(12)[: 3 + (attempt + request) % 9]
                pools.assert_restored(pages, range(request * 12, request * 12 + len(pages)))
            await settle(loader)
            pools.scramble(seed=attempt)
