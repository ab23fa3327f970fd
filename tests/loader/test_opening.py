"""Opening that fails or is cancelled leaves no thread behind and no store open."""

from __future__ import annotations

import gc
import threading

import anyio
import pytest

from softload import LoaderClosedError, PageLoader, StoreSetupError
from softload import loader as loader_module
from softload.landing import Arena
from softload.stores.wrapper import WrapperStore
from softload.testing import HangingStore

from .harness import config, eventually, keys, make_pools, store

pytestmark = pytest.mark.asyncio


class Door(WrapperStore):
    """Counts openings and closings; opening waits for `may_open`, and fails with `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(store())
        self.error = error
        self.entered, self.may_open = threading.Event(), threading.Event()
        self.opened = self.closed = 0

    def open(self) -> None:
        self.entered.set()
        assert self.may_open.wait(10)
        if self.error is not None:
            raise self.error
        super().open()
        self.opened += 1

    def close(self) -> None:
        self.closed += 1
        super().close()


def lifecycle_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "softload-lifecycle"]


async def test_a_store_that_cannot_be_opened_leaves_no_thread() -> None:
    before = set(lifecycle_threads())  # of other tests, whose calls hang
    door = Door(StoreSetupError("no master"))
    door.may_open.set()
    for _ in range(3):
        with pytest.raises(StoreSetupError, match="no master"):
            async with PageLoader(door, make_pools().group, config=config()):
                pytest.fail("it was opened")
    await eventually(lambda: not set(lifecycle_threads()) - before)


async def test_an_opening_that_is_cancelled_closes_the_store_when_it_returns() -> None:
    before = set(lifecycle_threads())
    door = Door()
    try:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_enter, door)
                await eventually(door.entered.is_set)
                scope.cancel()
        assert (door.opened, door.closed) == (0, 0)
    finally:
        door.may_open.set()
    await eventually(lambda: (door.opened, door.closed) == (1, 1))
    await eventually(lambda: not set(lifecycle_threads()) - before)


async def _enter(door: Door) -> None:
    async with PageLoader(door, make_pools().group, config=config()):
        pytest.fail("it was opened")


async def test_memory_lives_as_long_as_the_call_that_registers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "_CLOSE_SECONDS", 0.1)
    pointers: list[int] = []

    class Registering(WrapperStore):
        def register(self, pointer: int, nbytes: int) -> bool:
            pointers.append(pointer)
            return super().register(pointer, nbytes)

    hanging = HangingStore(store())
    hanging.hold("register")
    noting = Registering(hanging)
    loader = PageLoader(noting, make_pools().group, config=config())

    def is_alive() -> bool:
        gc.collect()
        return any(type(each) is Arena and each.pointer == pointers[0] for each in gc.get_objects())

    try:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(loader.__aenter__)
                assert await anyio.to_thread.run_sync(lambda: hanging.wait_held("register"))
                scope.cancel()
        assert is_alive()
    finally:
        hanging.release()
    await eventually(lambda: not is_alive())


async def test_a_handle_outlives_its_loader_by_an_error_of_its_own() -> None:
    pools = make_pools()
    async with PageLoader(store(), pools.group, config=config()) as loader:
        load = loader.load([pools.unit("a", keys(4), range(4))])
        prefetch = loader.prefetch([pools.unit("b", keys(4))])
        await prefetch.__aenter__()
        await prefetch.landed()
    with pytest.raises(LoaderClosedError):
        await load.__aenter__()
    with pytest.raises(LoaderClosedError):
        await prefetch.place([pools.unit("b", keys(4), range(4))])
    await prefetch.__aexit__(None, None, None)


async def test_place_that_waits_while_the_loader_closes_is_told() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    raised = anyio.Event()

    async def place(loader: PageLoader) -> None:
        async with loader.prefetch([pools.unit("a", keys(4))]) as prefetch:
            with pytest.raises(LoaderClosedError):
                await prefetch.place([pools.unit("a", keys(4), range(4))])
            raised.set()

    async with anyio.create_task_group() as tasks:
        async with PageLoader(hanging, pools.group, config=config()) as loader:
            hanging.hold("descriptors")
            tasks.start_soon(place, loader)
            assert await anyio.to_thread.run_sync(lambda: hanging.wait_held("descriptors"))
            tasks.start_soon(release, hanging)
        with anyio.fail_after(5):
            await raised.wait()


async def release(hanging: HangingStore) -> None:
    await anyio.to_thread.run_sync(hanging.release)
