"""A master that freezes, dies and comes back, with a new memory, under a loader that is in use."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from softload import PageStatus, SaveStatus
from softload.testing import Moment

from ..loader.harness import assert_outcome, eventually, keys, load, make_pools, missed, put, settle
from .rig import MODE_IDS, MODES, Watch, cluster, fill_store, recovered

pytestmark = [pytest.mark.asyncio, pytest.mark.mooncake]
pytest.importorskip("mooncake")

AWAY = {PageStatus.TIMED_OUT, PageStatus.STORE_UNREACHABLE, PageStatus.SUPPRESSED}


async def test_a_frozen_master_is_asked_until_it_was_silent_for_half_a_second_and_found_again(
    report: Callable[..., None],
) -> None:
    pools = make_pools()
    async with cluster(owners=1, pools=pools, lookup_deadline=0.3, deadline=0.6) as rig:
        loader = rig.loader
        await put(loader, pools, keys(8))
        rig.master.freeze()
        asked: list[float] = []
        while not loader.statistics().open_breakers:  # of 0.3 s each, or more where the machine is busy
            watch = Watch()
            found = await loader.lookup(pools.unit(f"first{len(asked)}", keys(8)))
            asked.append(watch.seconds)
            assert (found.boundaries, found.status) == ((), PageStatus.TIMED_OUT)
        assert len(asked) <= 2 and sum(asked) >= 0.5 and max(asked) < 5.0
        assert loader.statistics().open_breakers == ("master",)
        quick = []
        for index in range(50):
            watch = Watch()
            found = await loader.lookup(pools.unit(f"then{index}", keys(8)))
            quick.append(watch.seconds)
            if found.status is PageStatus.TIMED_OUT:  # the probe
                quick.pop()
        pools.fill(keys(4, "new"), range(4))
        watch = Watch()
        for attempt in range(5):  # one of them may come when the next probe is due
            unit = pools.unit(f"save{attempt}", keys(4, "new"), range(4), deadline=0.6)
            saved = {page.status for page in (await loader.save([unit])).outcomes[unit.request_id].pages}
            if saved == {SaveStatus.SUPPRESSED}:
                break
        assert saved == {SaveStatus.SUPPRESSED}
        outcome = (await load(loader, pools.unit("load", keys(8), range(8))))["load"]
        assert_outcome(outcome, 0)
        assert missed(outcome)[0] in AWAY
        save_and_load = watch.seconds
        rig.master.thaw()
        watch = Watch()
        tries = 0
        with anyio.fail_after(30):
            while not (await loader.lookup(pools.unit(f"back{tries}", keys(8)))).pages:
                tries += 1
                await anyio.sleep(0.01)
        report(
            "master frozen",
            lookup_s=max(asked),
            open_p50_ms=statistics.median(quick) * 1e3,
            save_and_load_ms=save_and_load * 1e3,
            closed_again_s=watch.seconds,
        )
        assert statistics.median(quick) < 0.1
        assert loader.statistics().open_breakers == ()
        pools.scramble(seed=2)
        assert_outcome((await load(loader, pools.unit("good", keys(8), range(8), deadline=20.0)))["good"], 8)
        pools.assert_restored(keys(8), range(8))
        await settle(loader)
        await eventually(lambda: loader.statistics().stuck_threads == 0)


async def test_ranges_of_open_sessions_end_a_load_whose_master_has_died(report: Callable[..., None]) -> None:
    pools = make_pools(pages=96)
    async with cluster(pools=pools, layout="page", read_mode="ranges", deadline=10.0, read_batch_objects=4) as rig:
        loader = rig.loader
        await put(loader, pools, keys(8))
        killed = rig.moments.at(Moment.LANDED, rig.master.kill)
        watch = Watch()
        outcome = (await load(loader, pools.unit("a", keys(8), range(8))))["a"]
        report("page load whose master died after its first read", seconds=watch.seconds)
        assert killed.is_set()
        assert_outcome(outcome, 8)
        pools.assert_restored(keys(8), range(8))


async def test_landed_pages_are_placed_without_a_master() -> None:
    pools = make_pools()
    async with cluster(owners=1, pools=pools, lookup_deadline=0.5) as rig:
        loader = rig.loader
        await put(loader, pools, keys(8))
        async with loader.prefetch([pools.unit("a", keys(8))]) as prefetch:
            assert (await prefetch.landed())["a"] == 8
            rig.master.kill()
            placed = await prefetch.place([pools.unit("a", keys(8), range(8))])
        assert_outcome(placed.outcomes["a"], 8)
        pools.assert_restored(keys(8), range(8))
        watch = Watch()
        assert (await loader.lookup(pools.unit("b", keys(8, "other")))).status in AWAY
        outcome = (await load(loader, pools.unit("b", keys(8, "other"), range(8, 16))))["b"]
        assert_outcome(outcome, 0)
        assert watch.seconds < 15.0  # the load has 20


@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.long) for mode in MODES[:2]), MODES[2]], ids=MODE_IDS
)
async def test_a_restarted_master_is_found_and_its_old_sessions_are_not_read(
    mode: dict[str, Any], report: Callable[..., None]
) -> None:
    """The master comes back in mid-load with its memory given to others: what old sessions read is foreign bytes."""
    pools = make_pools(pages=96, layers=5, width=2048)
    async with cluster(
        owners=1,
        segment=16 << 20,
        pools=pools,
        deadline=25.0,
        lookup_deadline=1.0,
        read_batch_objects=4,
        read_lanes=1,
        **mode,
    ) as rig:
        loader = rig.loader
        await put(loader, pools, keys(12))
        filled: list[int] = []

        def restart() -> None:
            rig.embedded.cluster.restart_master()
            filled.append(fill_store(rig.embedded, seconds=20.0))

        restarted = rig.moments.at(Moment.READ, restart, nth=2)
        outcome = (await load(loader, pools.unit("a", keys(12), range(12))))["a"]
        assert restarted.is_set()
        assert filled and filled[0] > 0
        assert outcome.restored_pages < 12
        pools.assert_restored(keys(outcome.restored_pages), range(outcome.restored_pages))
        watch = Watch()
        await recovered(rig, keys(12, "after"), range(40, 52))
        report("after a master's restart", works_again_s=watch.seconds)
        await settle(loader)
