"""Deadlines answer waiters in time; what landed by then counts, what did not is a miss."""

from __future__ import annotations

import threading

import anyio
import pytest

from softload import LateFailure, PageStatus, SaveStatus, health
from softload.testing import HangingStore

from .harness import (
    LAYERS,
    MODES,
    any_of,
    arrived,
    assert_outcome,
    end_time_of,
    eventually,
    from_call,
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


@modes
@pytest.mark.parametrize("page", [0, 2, 3])
async def test_a_page_that_hangs_costs_the_pages_from_it_on(mode: dict[str, str], page: int) -> None:
    method = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, **mode, read_batch_objects=1, read_lanes=16, endpoint_lanes=16) as loader:
        await put(loader, pools, keys(4))
        hanging.hold(method, any_of(f"k{page}"))
        started = anyio.current_time()
        outcome = (await load(loader, pools.unit("a", keys(4), range(4), deadline=1.0)))["a"]
        assert 1.0 <= anyio.current_time() - started < 10.0
        assert_outcome(outcome, page, PageStatus.TIMED_OUT)
        assert outcome.late_failure is None
        pools.assert_restored(keys(page), range(page))
        now = loader.statistics()
        assert now.quarantined_bytes > 0
        assert now.held_slots == 0
        assert now.timed_out_calls >= 1
        pools.scramble(seed=3)
        hanging.release()
        await settle(loader)
        pools.assert_rows_kept()
        assert loader.statistics().quarantined_bytes_peak > 0


@pytest.mark.parametrize("mode", [MODES[0], MODES[2]], ids=["grouped", "page-ranges"])
async def test_time_out_after_layers_were_given_is_late(mode: dict[str, str]) -> None:
    method = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, **mode, read_lanes=1, read_batch_objects=4) as loader:
        await put(loader, pools, keys(4))
        hanging.hold(method, from_call(2))
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            assert (await handle.layer(1)).live == {"a"}
            end_time_of(loader, "a")
            with anyio.fail_after(15):
                ready = await handle.layer(LAYERS - 1)
            assert ready.failed == {"a": PageStatus.TIMED_OUT}
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
        assert outcome.late_failure == LateFailure(0, 2, PageStatus.TIMED_OUT)
        hanging.release()
        await settle(loader)


@pytest.mark.parametrize("kind", ["load", "prefetch"])
async def test_waiting_for_a_turn_to_start_is_a_part_of_the_deadline(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(2))
        assert loader._context is not None
        turn = loader._context.pacer.turn

        async def late_turn() -> None:
            monkeypatch.undo()
            await anyio.sleep(0.2)  # others start at once, and plan before it
            await turn()

        monkeypatch.setattr(loader._context.pacer, "turn", late_turn)
        if kind == "load":
            outcome = (await load(loader, pools.unit("a", keys(2), range(2), deadline=0.1)))["a"]
            assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
        else:
            async with loader.prefetch([pools.unit("a", keys(2), deadline=0.1)]) as handle:
                landed = await handle.landed()
            assert landed["a"] == 0 and landed.missed["a"] is PageStatus.TIMED_OUT
        await settle(loader)


async def test_deadline_zero_is_a_miss_at_once() -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(2))
        outcome = (await load(loader, pools.unit("a", keys(2), range(2), deadline=0.0)))["a"]
        assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
        assert loader.statistics().open_breakers == ()
        await settle(loader)


@pytest.mark.parametrize("short_first", [True, False])
async def test_each_unit_has_its_own_deadline(short_first: bool) -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(4))
        hanging.hold("descriptors")
        short = pools.unit("short", keys(4), range(4), deadline=0.1)
        long = pools.unit("long", keys(4), range(4, 8))
        async with loader.load([short, long] if short_first else [long, short]) as handle:
            await eventually(lambda: loader.statistics().active_units == 1)
            hanging.release()
            outcomes = (await handle.report()).outcomes
        assert_outcome(outcomes["short"], 0, PageStatus.TIMED_OUT)
        assert_outcome(outcomes["long"], 4)
        pools.assert_rows_kept(range(4, 8))


async def test_fence_that_never_opens_leaves_the_slots_alone() -> None:
    pools = make_pools()
    opens = threading.Event()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(2))
        outcome = (await load(loader, pools.unit("a", keys(2), range(2), deadline=0.15, ready=opens.wait)))["a"]
        assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
        pools.assert_rows_kept()
        opens.set()
        await settle(loader)
        pools.assert_rows_kept()


async def test_fence_that_raises_costs_its_unit_and_its_save_alone() -> None:
    pools = make_pools()

    def fence() -> None:
        raise RuntimeError("device lost")

    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(2))
        units = [pools.unit("a", keys(2), range(2), ready=fence), pools.unit("b", keys(2), range(2, 4))]
        outcomes = await load(loader, *units)
        assert_outcome(outcomes["a"], 0, PageStatus.CANCELLED)
        assert_outcome(outcomes["b"], 2)
        pools.assert_rows_kept(range(2, 4))
        report = await loader.save([pools.unit("c", keys(2, "c"), range(4, 6), ready=fence)])
        assert {page.status for page in report.outcomes["c"].pages} == {SaveStatus.FAILED}
        assert (await loader.lookup(pools.unit("d", keys(2)))).pages == 2


async def test_many_calls_of_one_timed_out_load_are_one_outcome_of_their_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "_SILENT_SECONDS", 60.0)  # outcomes alone
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(
        hanging, pools, endpoint_lanes=4, read_batch_objects=2
    ) as loader:  # a call for each of four groups
        await put(loader, pools, keys(2))
        hanging.hold("read")
        outcome = await timed_out(loader, hanging, "read", pools.unit("a", keys(2), range(2)), calls=4)
        assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
        assert loader.statistics().timed_out_calls == 4
        assert loader.statistics().open_breakers == ()
        hanging.release()
        await settle(loader)
        assert_outcome((await load(loader, pools.unit("b", keys(2), range(2))))["b"], 2)


async def test_slots_are_written_after_the_fence() -> None:
    pools = make_pools()
    opens, asked = threading.Event(), threading.Event()

    def fence() -> None:
        asked.set()
        opens.wait(10)

    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(2))
        async with loader.load([pools.unit("a", keys(2), range(2), ready=fence)]) as handle:
            await eventually(asked.is_set)
            pools.assert_rows_kept()
            opens.set()
            assert_outcome((await handle.report()).outcomes["a"], 2)
        pools.assert_restored(keys(2), range(2))


async def test_time_out_counts_for_its_endpoint_and_not_for_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_SILENT_SECONDS", 60.0)  # outcomes alone
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, layout="page") as loader:
        for request in range(3):
            await put(loader, pools, keys(2, f"r{request}"))
        hanging.hold("read")
        for request in range(3):
            unit = pools.unit(f"r{request}", keys(2, f"r{request}"), range(2))
            assert missed(await timed_out(loader, hanging, "read", unit))[0] is PageStatus.TIMED_OUT
        now = loader.statistics()
        assert now.timed_out_calls == 3
        assert now.open_breakers == ("memory",)
        hanging.release()
        await settle(loader)


async def test_waiting_in_our_own_queue_counts_for_nothing() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, layout="page", read_lanes=1) as loader:
        await put(loader, pools, ["slow"])
        for request in range(4):
            await put(loader, pools, keys(2, f"r{request}"))
        hanging.hold("read", any_of("slow"))
        async with loader.load([pools.unit("slow", ["slow"], [9])]) as handle:
            await arrived(hanging, "read")
            for request in range(4):
                unit = pools.unit(f"r{request}", keys(2, f"r{request}"), range(2), deadline=0.08)
                assert missed((await load(loader, unit))[f"r{request}"])[0] is PageStatus.TIMED_OUT
            now = loader.statistics()
            assert (now.timed_out_calls, now.open_breakers, now.quarantined_bytes) == (0, (), 0)
            hanging.release()
            assert_outcome((await handle.report()).outcomes["slow"], 1)
        await settle(loader)


async def test_slots_reused_at_once_get_no_late_byte() -> None:
    """The slots of a timed-out load are loaded again for others while the first call is still out."""
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, layout="page") as loader:
        await put(loader, pools, [*keys(4, "a"), *keys(4, "b")])
        hanging.hold("read", any_of(*keys(4, "a")))
        outcome = await timed_out(loader, hanging, "read", pools.unit("A", keys(4, "a"), range(4)))
        assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
        assert_outcome((await load(loader, pools.unit("B", keys(4, "b"), range(4))))["B"], 4)
        assert loader.statistics().quarantined_bytes > 0
        hanging.release()
        await settle(loader)
        pools.assert_restored(keys(4, "b"), range(4))
