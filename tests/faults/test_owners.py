"""Owners of memory that die or freeze while pages are on their way from them."""

from __future__ import annotations

import statistics
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from softload import PageStatus, health
from softload.testing import Moment

from ..loader.harness import assert_outcome, eventually, keys, load, make_pools, missed, put, settle
from .rig import MODE_IDS, MODES, Rig, Watch, cluster, recovered

pytestmark = [pytest.mark.asyncio, pytest.mark.mooncake]
pytest.importorskip("mooncake")

QUICK = {("kill", "grouped"), ("freeze", "page-ranges")}
LOST = {PageStatus.TIMED_OUT, PageStatus.TRANSFER_FAILED, PageStatus.NOT_FOUND}
REFUSED = {PageStatus.SUPPRESSED, PageStatus.SHED, PageStatus.TRANSFER_FAILED, PageStatus.NOT_FOUND}


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        pytest.param(how, mode, id=f"{how}-{name}", marks=() if (how, name) in QUICK else pytest.mark.long)
        for how in ("kill", "freeze")
        for name, mode in zip(MODE_IDS, MODES, strict=True)
    ],
)
async def test_an_owner_lost_in_mid_stream_costs_its_own_pages(
    how: str, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch, report: Callable[..., None]
) -> None:
    monkeypatch.setattr(health, "_NEGATIVE_DEFAULT", 0.5)
    pools = make_pools(pages=144, layers=2, width=4096)
    async with cluster(pools=pools, deadline=20.0, store={"client_ttl": 1.0}, read_batch_objects=2, **mode) as rig:
        loader = rig.loader
        await put(loader, pools, keys(64))
        lost, well = await rig.where(keys(64))
        mixed, healthy = [*well[:2], *lost[:2]], well[2:4]
        assert len(mixed) == 4 and len(healthy) == 2, (lost, well)

        # Layer 0 is in the engine's hands before the owner is struck; ranges of layers have one key, so not there.
        given = threading.Event()
        layered = "read_mode" not in mode
        last_layer = [rig.object_keys(page)[-1] for page in lost[:2]]

        def strike() -> None:
            given.wait(10)
            getattr(rig.owners[0], how)()

        struck = rig.moments.at(Moment.READ, strike, when=lambda read: not set(read).isdisjoint(last_layer))
        watch = Watch()
        async with loader.load([pools.unit("mixed", mixed, range(4), deadline=3.0)]) as handle:
            if layered:
                assert "mixed" in (await handle.layer(0)).live
            given.set()
            await rig.in_thread(struck.wait, 10)
            struck_watch = Watch()
            other = (await load(loader, pools.unit("healthy", healthy, range(8, 10), deadline=20.0)))["healthy"]
            other_seconds = struck_watch.seconds
            outcome = (await handle.report()).outcomes["mixed"]
            answered, calls_out = watch.seconds, rig.embedded.calls_out
        report(f"owner {how}", answered_s=answered, healthy_load_s=other_seconds, calls_out=calls_out)
        assert answered < 15.0
        assert other_seconds < 2.5, "the healthy owner's pages did not wait for the other's"
        if how == "freeze":
            assert calls_out > 0, "answered before the native call returned"
            assert answered >= 3.0
        assert_outcome(outcome, 2)
        assert missed(outcome)[0] in LOST
        assert (outcome.late_failure is not None) is layered
        pools.assert_restored(mixed[:2], range(2))
        assert_outcome(other, 2)
        pools.assert_restored(healthy, range(8, 10))

        # The slots are the engine's again, whatever the call still does.
        pools.scramble(seed=5)
        await _answered_from_memory(rig, lost, report)
        if how == "freeze":
            rig.owners[0].thaw()
        else:
            await rig.in_thread(rig.embedded.cluster.restart_owner, 0)
        watch = Watch()
        await _all_returned(rig)
        await recovered(rig, keys(64), range(80, 144))
        report(f"owner {how}", recovered_s=watch.seconds)
        pools.assert_rows_kept(range(80, 144))
        await settle(loader)
        await eventually(lambda: loader.statistics().stuck_threads == 0)


async def _answered_from_memory(rig: Rig, lost: list[str], report: Callable[..., None]) -> None:
    """After some time-outs its endpoint is known to be bad, and what it held costs nothing."""
    loader, pools = rig.loader, rig.pools
    for attempt in range(3):
        unit = pools.unit(f"learn{attempt}", lost[:2], range(20, 22), deadline=0.3)
        assert_outcome((await load(loader, unit))[unit.request_id], 0)
    seconds = []
    probes = 0
    for attempt in range(20):
        watch = Watch()
        name = f"again{attempt}"
        found = await loader.lookup(pools.unit(name, lost[:2]))
        if found.pages:
            outcome = (await load(loader, pools.unit(name, lost[:2], range(20, 22), deadline=1.0)))[name]
            assert_outcome(outcome, 0)
            probes += missed(outcome)[0] is PageStatus.TIMED_OUT
            assert missed(outcome)[0] in REFUSED | {PageStatus.TIMED_OUT}
        seconds.append(watch.seconds)
    report("lookups of what it held", p50_ms=statistics.median(seconds) * 1e3, max_ms=max(seconds) * 1e3)
    assert statistics.median(seconds) < 0.1
    assert probes <= 3, "less and less often, if a busy machine takes seconds for all of that"


async def _all_returned(rig: Rig) -> None:
    with anyio.fail_after(90):
        await rig.loader.drain()


async def test_stuck_threads_are_replaced_up_to_a_bound_and_then_loads_are_shed(
    report: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_SILENT_SECONDS", 60.0)  # else only one load would be lost to the owner
    pools = make_pools(pages=96, layers=1, width=1024)
    async with cluster(owners=1, pools=pools, deadline=1.5, read_batch_objects=1, stuck_threads=3, read_lanes=2) as rig:
        loader = rig.loader
        await put(loader, pools, keys(16))
        rig.owners[0].freeze()
        outcome = (await load(loader, pools.unit("a", keys(8), range(8))))["a"]
        assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
        outcome = (await load(loader, pools.unit("b", keys(8), range(8))))["b"]
        assert loader.statistics().stuck_threads == 4
        watch = Watch()
        outcome = (await load(loader, pools.unit("c", keys(16), range(16))))["c"]
        report("load with every thread stuck", ms=watch.seconds * 1e3)
        assert_outcome(outcome, 0, PageStatus.SHED)
        assert watch.seconds < 1.0
        rig.owners[0].thaw()
        await _all_returned(rig)
        outcome = (await load(loader, pools.unit("d", keys(16), range(16), deadline=20.0)))["d"]
        assert_outcome(outcome, 16)
        pools.assert_restored(keys(16), range(16))
        await settle(loader)


@asynccontextmanager
async def kept_open(rig: Rig) -> AsyncIterator[None]:
    """Time stands still for the one breaker that opens: on a busy machine its cool-down, of a second, may be over."""
    assert rig.loader._context is not None
    breakers = rig.loader._context.health._endpoints
    await eventually(lambda: any(breaker.is_open for breaker in breakers.values()))
    (breaker,) = (breaker for breaker in breakers.values() if breaker.is_open)
    clock, opened_at = breaker._clock, breaker._opened_at
    breaker._clock = lambda: opened_at
    yield
    breaker._clock = clock


async def test_the_next_load_from_a_frozen_owner_does_not_wait_and_a_thawed_one_is_used_again(
    report: Callable[..., None],
) -> None:
    # Mooncake places each object at random: a page's two are both with one owner for a quarter of the pages.
    pools = make_pools(pages=256, layers=2, width=4096)
    async with cluster(pools=pools) as rig:
        loader = rig.loader
        await put(loader, pools, keys(192))
        frozen, well = await rig.where(keys(192))
        assert len(frozen) >= 8 and len(well) >= 2
        assert_outcome((await load(loader, pools.unit("warm", frozen[:2], range(2))))["warm"], 2)
        rig.owners[0].freeze()
        first = (await load(loader, pools.unit("first", frozen[2:4], range(2), deadline=3.0)))["first"]
        assert_outcome(first, 0, PageStatus.TIMED_OUT)
        async with kept_open(rig):
            watch = Watch()
            second = (await load(loader, pools.unit("second", frozen[4:6], range(2))))["second"]
            seconds = watch.seconds
        assert_outcome(second, 0, PageStatus.SUPPRESSED)
        assert seconds < 5.0, "it has 20 s"
        assert_outcome((await load(loader, pools.unit("well", well[:2], range(2))))["well"], 2)
        rig.owners[0].thaw()
        watch = Watch()
        wanted = frozen[2:8]

        async def restored() -> bool:
            unit = pools.unit("again", wanted, range(6))
            return (await load(loader, unit))["again"].restored_pages == 6

        with anyio.fail_after(30):
            while not await restored():  # noqa: ASYNC110  # nothing signals the end of a cool-down
                await anyio.sleep(0.01)
        report("load after a frozen owner's first time-out", ms=seconds * 1e3, restored_after_thaw_s=watch.seconds)
        assert watch.seconds < 10.0
        pools.assert_restored(wanted, range(6))
        assert loader.statistics().open_breakers == ()
        await settle(loader)
        await eventually(lambda: loader.statistics().stuck_threads == 0)
