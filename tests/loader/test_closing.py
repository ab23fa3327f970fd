"""Who waits for what is in flight is answered: several at a time, and when the loader closes."""

from __future__ import annotations

import anyio
import pytest

from softload import PageLoader, PageStatus, SaveReport, SaveStatus
from softload.testing import HangingStore

from .harness import arrived, assert_outcome, config, eventually, keys, load, make_pools, opened, put, settle, store

pytestmark = pytest.mark.asyncio


async def test_two_who_drain_are_both_answered() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, deadline=0.1) as loader:
        await put(loader, pools, keys(3))
        hanging.hold("read")
        outcome = (await load(loader, pools.unit("a", keys(3), range(3))))["a"]
        assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
        assert loader.statistics().quarantined_bytes
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(loader.drain)
                tasks.start_soon(loader.drain)
                await anyio.wait_all_tasks_blocked()
                hanging.release()
        await settle(loader)


async def test_closing_answers_who_drains(quick_close: None) -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    try:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks, PageLoader(hanging, pools.group, config=config()) as loader:
                await put(loader, pools, keys(3))
                hanging.hold("read")
                await load(loader, pools.unit("a", keys(3), range(3), deadline=0.1))
                tasks.start_soon(loader.drain)
                await anyio.wait_all_tasks_blocked()
    finally:
        hanging.release()


@pytest.mark.parametrize("point", ["put_start", "put_write"])
async def test_a_save_of_several_units_is_answered_before_close_returns(point: str, quick_close: None) -> None:
    """Also where closing has to wait, because something else is quarantined."""
    pools = make_pools()
    hanging = HangingStore(store())
    reports: list[SaveReport] = []

    async def save(loader: PageLoader) -> None:
        units = [pools.unit("a", keys(2, "a"), range(2)), pools.unit("b", keys(2, "b"), range(2, 4))]
        reports.append(await loader.save(units))

    try:
        async with anyio.create_task_group() as tasks:
            async with PageLoader(hanging, pools.group, config=config(save_deadline=20.0)) as loader:
                await put(loader, pools, keys(2))
                hanging.hold("read")
                await load(loader, pools.unit("quarantined", keys(2), range(4, 6), deadline=0.1))
                hanging.hold(point)
                tasks.start_soon(save, loader)
                await arrived(hanging, point)
            await eventually(lambda: bool(reports), 1.0)
            assert hanging.held(point) == 1, "the second unit's save is not begun"
            statuses = {page.status for outcome in reports[0].outcomes.values() for page in outcome.pages}
            assert SaveStatus.SAVED not in statuses
    finally:
        hanging.release()
