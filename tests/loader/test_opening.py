"""Opening that fails or is cancelled leaves no thread behind and no store open."""

from __future__ import annotations

import gc
import threading

import anyio
import pytest

from softload import LandingMemoryError, LoaderClosedError, PageLoader, StoreSetupError
from softload import loader as loader_module
from softload.arena import Arena
from softload.stores.wrapper import WrapperStore
from softload.testing import HangingStore

from .doubles import Held
from .harness import assert_outcome, config, eventually, keys, load, make_pools, put, store

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


async def test_memory_is_given_back_at_once_where_opening_fails() -> None:
    """Not when the collector comes by: who tries again would need it twice."""

    class Refusing(WrapperStore):
        def register(self, pointer: int, nbytes: int) -> bool:
            return False

    def arenas() -> int:
        return sum(type(each) is Arena for each in gc.get_objects())

    gc.collect()
    before = arenas()
    gc.disable()
    try:
        with pytest.raises(StoreSetupError, match="refused to register"):
            async with PageLoader(Refusing(store()), make_pools().group, config=config()):
                pytest.fail("it was opened")
        assert arenas() == before
    finally:
        gc.enable()


async def test_two_tasks_that_enter_one_loader() -> None:
    door = Door()
    loader = PageLoader(door, make_pools().group, config=config())
    leave = anyio.Event()

    async def first() -> None:
        async with loader:
            await leave.wait()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            await eventually(door.entered.is_set)
            with pytest.raises(RuntimeError, match="not entered, got one that is being opened already"):
                async with loader:
                    pytest.fail("it was opened twice")
            door.may_open.set()
            await eventually(lambda: "open" in repr(loader) or door.opened == 1)
            leave.set()
    finally:
        door.may_open.set()
    assert (door.opened, door.closed) == (1, 1)


async def test_a_loader_is_used_once() -> None:
    loader = PageLoader(Held(store()), make_pools().group, config=config())
    async with loader:
        pass
    with pytest.raises(LoaderClosedError, match="was closed, and its store with it"):
        async with loader:
            pytest.fail("it was opened again")


async def test_a_loader_may_be_entered_again_where_opening_failed() -> None:
    door = Door(StoreSetupError("no master"))
    door.may_open.set()
    loader = PageLoader(door, make_pools().group, config=config())
    with pytest.raises(StoreSetupError, match="no master"):
        async with loader:
            pytest.fail("it was opened")
    door.error = None
    async with loader:
        pass
    assert (door.opened, door.closed) == (1, 1)


async def test_a_store_has_one_loader() -> None:
    """The first that closes would close the other's store: the second is refused, and the first is unharmed."""
    pools = make_pools()
    shared = Held(store())
    async with PageLoader(shared, pools.group, config=config()) as first:
        await put(first, pools, keys(4))
        with pytest.raises(RuntimeError, match="expected a store that no other PageLoader has open"):
            async with PageLoader(shared, pools.group, config=config()):
                pytest.fail("it was opened")
        assert_outcome((await load(first, pools.unit("a", keys(4), range(4))))["a"], 4)
    async with PageLoader(shared, pools.group, config=config()) as second:  # one after the other
        assert_outcome((await load(second, pools.unit("a", keys(4), range(4))))["a"], 4)


async def test_a_store_that_does_not_open_in_time() -> None:
    before = set(lifecycle_threads())
    door = Door()
    loader = PageLoader(door, make_pools().group, config=config(open_deadline=0.5))
    try:
        with anyio.fail_after(15), pytest.raises(StoreSetupError, match=r"open, with 4194304 bytes .* within 0.5 s"):
            async with loader:
                pytest.fail("it was opened")
        # The call is still out: nobody else may open the store under it.
        with pytest.raises(RuntimeError, match="no other PageLoader has open"):
            async with PageLoader(door, make_pools().group, config=config()):
                pytest.fail("it was opened")
    finally:
        door.may_open.set()
    await eventually(lambda: (door.opened, door.closed) == (1, 1))
    await eventually(lambda: not set(lifecycle_threads()) - before)


async def test_memory_that_is_not_registered_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "_CLOSE_SECONDS", 1.0)
    door = Door()
    door.may_open.set()
    hanging = HangingStore(door)
    hanging.hold("register")
    try:
        with anyio.fail_after(15), pytest.raises(StoreSetupError, match=r"within 0.1 s"):
            async with PageLoader(hanging, make_pools().group, config=config(open_deadline=0.1)):
                pytest.fail("it was opened")
        assert (door.opened, door.closed) == (1, 1)
    finally:
        hanging.release()


@pytest.mark.parametrize("nbytes", [1 << 46, 1 << 70])
async def test_more_landing_memory_than_the_machine_has(nbytes: int) -> None:
    door = Door()
    with pytest.raises(LandingMemoryError, match=rf"expected room for {nbytes} bytes .* `landing_bytes`"):
        async with PageLoader(door, make_pools().group, config=config(landing_bytes=nbytes)):
            pytest.fail("it was opened")
    assert not door.entered.is_set()


async def test_less_landing_memory_than_a_page_needs() -> None:
    door = Door()
    with pytest.raises(ValueError, match=r"landing_bytes: expected at least \d+ for pages of \d+ bytes .* got 512"):
        async with PageLoader(door, make_pools().group, config=config(landing_bytes=512)):
            pytest.fail("it was opened")
    assert not door.entered.is_set()


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), None, "5s"])
async def test_a_store_without_a_usable_lease(ttl: object) -> None:
    class Leaseless(Door):
        @property
        def lease_ttl(self) -> float:
            return ttl  # type: ignore[return-value]

    door = Leaseless()
    door.may_open.set()
    with pytest.raises(StoreSetupError, match="lease of more than 0 seconds, got"):
        async with PageLoader(door, make_pools().group, config=config()):
            pytest.fail("it was opened")
    assert (door.opened, door.closed) == (1, 1)


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
        with anyio.fail_after(15):
            await raised.wait()


async def release(hanging: HangingStore) -> None:
    await anyio.to_thread.run_sync(hanging.release)
