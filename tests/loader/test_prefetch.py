"""Prefetch: whole pages land without slots, are pinned until they are placed, and placing asks the store nothing."""

from __future__ import annotations

import anyio
import pytest

from softload import PageStatus, SaveStatus
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
    settle,
    store,
)

pytestmark = pytest.mark.asyncio


@modes
@pytest.mark.parametrize("placed", [0, 1, 5, 6])
async def test_land_and_place(mode: dict[str, str], placed: int) -> None:
    pools = make_pools()
    recording = RecordingStore(store())
    async with opened(recording, pools, **mode) as loader:
        await put(loader, pools, keys(6))
        async with loader.prefetch([pools.unit("a", keys(6))]) as handle:
            assert (await handle.admitted())["a"] == 6
            landed = await handle.landed()
            assert (landed["a"], landed.missed) == (6, {})
            assert loader.statistics().held_slots == 0
            pools.assert_rows_kept()
            await eventually(lambda: not loader.statistics().open_sessions)
            recording.clear()
            rows = range(10, 10 + placed)
            report = await handle.place([pools.unit("a", keys(6)[:placed], rows)])
            assert_outcome(report.outcomes["a"], placed)
            assert recording.calls == ()
        pools.assert_restored(keys(placed), rows)
        pools.assert_rows_kept(rows)
        await settle(loader)


@modes
@pytest.mark.parametrize("bad", [0, 3])
async def test_lands_up_to_the_first_bad_page(mode: dict[str, str], bad: int) -> None:
    method = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools, **mode) as loader:
        await put(loader, pools, keys(6))
        lying.lie(method, is_of(f"k{bad}"), PageStatus.TRANSFER_FAILED)
        async with loader.prefetch([pools.unit("a", keys(6))]) as handle:
            landed = await handle.landed()
            assert landed["a"] == bad
            assert landed.missed == {"a": PageStatus.TRANSFER_FAILED}
            outcome = (await handle.place([pools.unit("a", keys(6), range(6))])).outcomes["a"]
        assert_outcome(outcome, bad, PageStatus.TRANSFER_FAILED)
        assert outcome.late_failure is None
        pools.assert_rows_kept(range(bad))
        await settle(loader)


@pytest.mark.parametrize("page", [0, 2])
async def test_lands_what_came_by_the_deadline(page: int) -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, layout="page", read_batch_objects=1) as loader:
        await put(loader, pools, keys(4))
        hanging.hold("read", any_of(f"k{page}"))
        async with loader.prefetch([pools.unit("a", keys(4), deadline=1.0)]) as handle:
            landed = await handle.landed()
            assert landed["a"] == page
            assert landed.missed == {"a": PageStatus.TIMED_OUT}
            outcome = (await handle.place([pools.unit("a", keys(4)[:page], range(page))])).outcomes["a"]
            assert_outcome(outcome, page)
        hanging.release()
        await settle(loader)


async def test_each_request_of_a_prefetch_is_placed_once_and_when_it_likes() -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, [*keys(3, "a"), *keys(3, "b")])
        async with loader.prefetch([pools.unit("A", keys(3, "a")), pools.unit("B", keys(3, "b"))]) as handle:
            first = await handle.place([pools.unit("B", keys(3, "b"), range(3))])
            second = await handle.place([pools.unit("A", keys(3, "a"), range(3, 6))])
            assert set(first.outcomes) == {"B"}
            assert set(second.outcomes) == {"A"}
            with pytest.raises(ValueError, match="expected a prefetched request that waits for its slots .none."):
                await handle.place([pools.unit("A", keys(3, "a"), range(6, 9))])
        pools.assert_restored([*keys(3, "b"), *keys(3, "a")], range(6))
        await settle(loader)


async def test_placing_what_was_not_prefetched_is_an_error_and_touches_nothing() -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(4))
        async with loader.prefetch([pools.unit("a", keys(4))]) as handle:
            await handle.landed()
            with pytest.raises(ValueError, match="expected a prefetched request"):
                await handle.place([pools.unit("b", keys(4), range(4))])
            with pytest.raises(ValueError, match="expected the prefetched page keys"):
                await handle.place([pools.unit("a", ("k0", "other"), range(2))])
            with pytest.raises(ValueError, match="expected slots"):
                await handle.place([pools.unit("a", keys(4))])
            assert loader.statistics().held_slots == 0
            pools.assert_rows_kept()
            assert_outcome((await handle.place([pools.unit("a", keys(4), range(4))])).outcomes["a"], 4)
        await settle(loader)


async def test_pinned_no_longer_than_the_hold_limit() -> None:
    pools = make_pools()
    async with opened(store(), pools, hold_limit=0.05) as loader:
        await put(loader, pools, keys(4))
        async with loader.prefetch([pools.unit("a", keys(4))]) as handle:
            assert (await handle.landed())["a"] == 4
            await eventually(lambda: loader.statistics().active_units == 0)
            outcome = (await handle.place([pools.unit("a", keys(4), range(4))])).outcomes["a"]
            assert_outcome(outcome, 0, PageStatus.SHED)
            pools.assert_rows_kept()
        await settle(loader)


async def test_the_hold_limit_begins_when_all_of_a_prefetch_has_landed() -> None:
    """None of it can be placed before."""
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, hold_limit=0.05, prefetch_ttl=600.0) as loader:
        await put(loader, pools, [*keys(3, "a"), *keys(3, "b")])
        async with loader.prefetch([pools.unit("first", keys(3, "a"))]) as handle:  # A shares no call with B then
            await handle.landed()
        hanging.hold("read", any_of("b0", "b1", "b2"))
        async with loader.prefetch(
            [pools.unit("A", keys(3, "a")), pools.unit("B", keys(3, "b"), deadline=0.3)]
        ) as handle:
            landed = await handle.landed()
            assert landed.pages == {"A": 3, "B": 0}
            assert landed.missed == {"B": PageStatus.TIMED_OUT}
        hanging.release()
        await settle(loader)


async def test_bytes_of_an_ended_prefetch_serve_later_units() -> None:
    pools = make_pools()
    recording = RecordingStore(store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(4))
        async with loader.prefetch([pools.unit("a", keys(4))]) as handle:
            await handle.landed()
        await settle(loader)
        assert loader.statistics().kept_bytes > 0
        recording.clear()
        assert_outcome((await load(loader, pools.unit("b", keys(4), range(4))))["b"], 4)
        pools.assert_restored(keys(4), range(4))
        assert recording.calls == ()  # landed bytes never expire


@pytest.mark.parametrize("ttl", [0.0, 0.01])
async def test_kept_bytes_go_after_their_time(ttl: float) -> None:
    pools = make_pools()
    async with opened(store(), pools, prefetch_ttl=ttl) as loader:
        await put(loader, pools, keys(4))
        async with loader.prefetch([pools.unit("a", keys(4))]) as handle:
            await handle.landed()
        await eventually(lambda: loader.statistics().kept_bytes == 0)
        await settle(loader)


async def test_kept_bytes_go_when_room_is_needed() -> None:
    pools = make_pools(width=2048)
    page_bytes = sum(view.shape[1] for view in pools.group.pools[0].page_views)
    async with opened(store(), pools, landing_bytes=page_bytes * 20) as loader:
        for name in ("a", "b", "c", "d"):
            await put(loader, pools, keys(8, name))
            async with loader.prefetch([pools.unit(name, keys(8, name))]) as handle:
                with anyio.fail_after(15):
                    assert (await handle.landed())[name] == 8
        assert 0 < loader.statistics().kept_bytes <= page_bytes * 20
        await settle(loader)


async def test_failed_place_slots_are_free_again() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(4))
        async with loader.prefetch([pools.unit("a", keys(4))]) as handle:
            await handle.landed()
            unit = pools.unit("a", keys(4), range(4), deadline=0.05, ready=lambda: hanging.wait_held("read", 1, 0.3))
            outcome = (await handle.place([unit])).outcomes["a"]
        assert missed(outcome)[0] is PageStatus.TIMED_OUT
        pools.assert_rows_kept()
        await settle(loader)


@modes
async def test_leaving_before_it_landed(mode: dict[str, str]) -> None:
    method = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, **mode) as loader:
        await put(loader, pools, keys(4))
        hanging.hold(method)
        with anyio.fail_after(15):
            async with loader.prefetch([pools.unit("a", keys(4))]):
                await arrived(hanging, method)
        hanging.release()
        await settle(loader)


async def test_request_twice_in_one_place_is_refused_and_touches_nothing() -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(4))
        async with loader.prefetch([pools.unit("a", keys(4))]) as handle:
            await handle.landed()
            with pytest.raises(ValueError, match="expected every request once, got 'a' twice"):
                await handle.place([pools.unit("a", keys(4), range(4)), pools.unit("a", keys(4), range(8, 12))])
            pools.assert_rows_kept()
            assert_outcome((await handle.place([pools.unit("a", keys(4), range(4))])).outcomes["a"], 4)
        await settle(loader)


async def test_refused_place_leaves_slots_and_bytes_as_they_were() -> None:
    """Other keys than the prefetched ones: slots that hold good pages may still be saved, and bytes still be placed."""
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(4))
        assert_outcome((await load(loader, pools.unit("good", keys(4), range(4))))["good"], 4)
        async with loader.prefetch([pools.unit("a", keys(4))]) as handle:
            await handle.landed()
            with pytest.raises(ValueError, match="expected the prefetched page keys"):
                await handle.place([pools.unit("a", keys(4, "other"), range(4))])
            report = await loader.save([pools.unit("again", keys(4), range(4))])
            assert {page.status for page in report.outcomes["again"].pages} == {SaveStatus.PRESENT}
            assert_outcome((await handle.place([pools.unit("a", keys(4), range(8, 12))])).outcomes["a"], 4)
            pools.assert_restored(keys(4), range(8, 12))
        await settle(loader)
