"""Who waits for what is in flight is answered: several at a time, and when the loader closes."""

from __future__ import annotations

import anyio
import pytest

from softload import PageLoader, PageStatus, SaveReport, SaveStatus
from softload import loader as loader_module
from softload.stores.wrapper import WrapperStore
from softload.testing import HangingStore

from .harness import (
    any_of,
    arrived,
    assert_outcome,
    config,
    eventually,
    keys,
    make_pools,
    opened,
    put,
    settle,
    store,
    timed_out,
)

pytestmark = pytest.mark.asyncio


async def test_two_who_drain_are_both_answered() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(3))
        hanging.hold("read")
        outcome = await timed_out(loader, hanging, "read", pools.unit("a", keys(3), range(3)))
        assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
        assert loader.statistics().quarantined_bytes
        with anyio.fail_after(30):
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
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks, PageLoader(hanging, pools.group, config=config()) as loader:
                await put(loader, pools, keys(3))
                hanging.hold("read")
                await timed_out(loader, hanging, "read", pools.unit("a", keys(3), range(3)))
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
                await timed_out(loader, hanging, "read", pools.unit("quarantined", keys(2), range(4, 6)))
                hanging.hold(point)
                tasks.start_soon(save, loader)
                await arrived(hanging, point)
            await eventually(lambda: bool(reports), 1.0)
            assert hanging.held(point) == 1, "the second unit's save is not begun"
            statuses = {page.status for outcome in reports[0].outcomes.values() for page in outcome.pages}
            assert SaveStatus.SAVED not in statuses
    finally:
        hanging.release()


async def test_memory_that_hangs_in_registration_holds_nothing_else_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept bytes expire, and the store is closed, while fresh memory in place of quarantined memory is registered."""

    class Door(WrapperStore):
        closed = 0

        def close(self) -> None:
            self.closed += 1
            super().close()

    monkeypatch.setattr(loader_module, "_HOUSEKEEPING_SECONDS", 0.01)
    monkeypatch.setattr(loader_module, "_CLOSE_SECONDS", 1.0)
    pools = make_pools()
    door = Door(store())
    hanging = HangingStore(door)
    try:
        async with PageLoader(hanging, pools.group, config=config(prefetch_ttl=0.2)) as loader:
            await put(loader, pools, keys(3))
            await put(loader, pools, keys(3, "kept"))
            hanging.hold("register")
            hanging.hold("read", any_of(*keys(3)))
            await timed_out(loader, hanging, "read", pools.unit("a", keys(3), range(3)))
            await arrived(hanging, "register")
            async with loader.prefetch([pools.unit("kept", keys(3, "kept"))]) as prefetch:
                assert (await prefetch.landed())["kept"] == 3
            assert loader.statistics().kept_bytes
            await eventually(lambda: not loader.statistics().kept_bytes)
            assert hanging.held("register") == 1
        assert door.closed == 1
        assert hanging.held("register") == 1, "it was closed while the call was out"
    finally:
        hanging.release()


async def test_memory_that_a_late_call_gives_back_while_the_loader_closes_is_unregistered_once(
    quick_close: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes fresh memory surplus, which is being unregistered just then."""

    class Registry(WrapperStore):
        def __init__(self, inner: HangingStore) -> None:
            super().__init__(inner)
            self.registered: list[int] = []
            self.unregistered: list[int] = []

        def register(self, pointer: int, nbytes: int) -> bool:
            self.registered.append(pointer)
            return super().register(pointer, nbytes)

        def unregister(self, pointer: int) -> None:
            self.unregistered.append(pointer)
            super().unregister(pointer)

    monkeypatch.setattr(loader_module, "_HOUSEKEEPING_SECONDS", 0.01)
    pools = make_pools()
    hanging = HangingStore(store())
    registry = Registry(hanging)
    try:
        async with anyio.create_task_group() as tasks:
            async with PageLoader(registry, pools.group, config=config()) as loader:
                await put(loader, pools, keys(3))
                hanging.hold("read")
                await timed_out(loader, hanging, "read", pools.unit("a", keys(3), range(3)))
                await eventually(lambda: loader.statistics().replaced_bytes > 0)
                landing = loader._context.landing
                hanging.hold("unregister")
                monkeypatch.setattr(loader_module, "_CLOSE_SECONDS", 1.0)

                async def late_call_returns() -> None:
                    await arrived(hanging, "unregister")
                    hanging.release("read")
                    await eventually(lambda: not landing.quarantined())
                    hanging.release("unregister")

                tasks.start_soon(late_call_returns)
    finally:
        hanging.release()
    assert len(registry.registered) == 2
    assert len(registry.unregistered) == len(set(registry.unregistered))
    assert set(registry.unregistered) <= set(registry.registered)
