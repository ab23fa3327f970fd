"""A store hangs at one named point and its caller is cancelled, runs out of time, or the loader closes."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest

from softload import LoaderClosedError, PageLoader, PageStatus, SaveStatus, StoreSetupError, UnitOutcome, unit_copies
from softload.stores import WrapperStore
from softload.testing import HangingStore, RecordingStore, ScriptedStore

from .doubles import Held
from .harness import (
    LAYERS,
    MODES,
    any_of,
    arrived,
    assert_outcome,
    config,
    end_time_of,
    eventually,
    hold_copies,
    keys,
    load,
    make_pools,
    modes,
    opened,
    put,
    settle,
    store,
)

pytestmark = pytest.mark.asyncio

POINTS = [
    pytest.param("descriptors", MODES[0], id="descriptors"),
    pytest.param("read", MODES[0], id="read-grouped"),
    pytest.param("read", MODES[1], id="read-page"),
    pytest.param("session_start", MODES[2], id="session_start"),
    pytest.param("read_ranges", MODES[2], id="read_ranges"),
    pytest.param("session_end", MODES[2], id="session_end"),
]
SAVE_POINTS = ("put_start", "put_write", "put_end")


async def assert_well(loader: PageLoader, hanging: HangingStore) -> None:
    """Once the held calls have returned nothing is held and no thread is stuck."""
    hanging.release()
    await settle(loader)
    await eventually(lambda: not loader.statistics().stuck_threads)


@pytest.mark.parametrize(("point", "mode"), POINTS)
@pytest.mark.parametrize("how", ["leave", "cancel", "deadline"])
async def test_load_ends_while_the_store_hangs(point: str, mode: dict[str, str], how: str) -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    # One lane: three calls that time out would open the breaker.
    async with opened(hanging, pools, **mode, read_lanes=1) as loader:
        await put(loader, pools, keys(6))
        hanging.hold(point)
        unit = pools.unit("a", keys(6), range(6))
        with anyio.fail_after(15), anyio.CancelScope() as scope:
            async with loader.load([unit]) as handle:
                await arrived(hanging, point)
                if how == "cancel":
                    scope.cancel()
                elif how == "deadline" and point != "session_end":  # with that nobody waits any more
                    end_time_of(loader, "a")
                if how != "leave":
                    outcome = (await handle.report()).outcomes["a"]
                    # A session that cannot be ended holds nobody up: its bytes have landed.
                    assert_outcome(outcome, *((6, None) if point == "session_end" else (0, PageStatus.TIMED_OUT)))
            if point == "session_end":  # which holds nothing up: the load may have ended before it was cancelled
                await anyio.lowlevel.checkpoint()
        assert (how == "cancel") is scope.cancelled_caught
        now = loader.statistics()
        assert (now.held_slots, now.active_units) == (0, 0)
        if point in ("read", "read_ranges"):
            assert now.quarantined_bytes > 0
            assert now.stuck_threads >= 1
        # The slots are the engine's again: nothing of ours writes them any more, also not when the call returns.
        pools.scramble(seed=77)
        await assert_well(loader, hanging)
        pools.assert_rows_kept()
        loader.computed(pools.unit("a", keys(6), range(6)), 0)
        assert_outcome((await load(loader, pools.unit("b", keys(6), range(6))))["b"], 6)
        pools.assert_restored(keys(6), range(6))
        await settle(loader)


@pytest.mark.parametrize(("point", "mode"), POINTS)
async def test_close_while_the_store_hangs(point: str, mode: dict[str, str], quick_close: None) -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    others = set(threading.enumerate())  # of other tests' stores
    outcomes: list[UnitOutcome] = []
    woken: list[str] = []
    try:
        async with anyio.create_task_group() as tasks:
            async with PageLoader(hanging, pools.group, config=config(**mode)) as loader:
                await put(loader, pools, keys(6))
                hanging.hold(point)

                async def wait(loader: PageLoader = loader) -> None:
                    async with loader.load([pools.unit("a", keys(6), range(6))]) as handle:
                        async with anyio.create_task_group() as waiters:

                            async def layer(number: int) -> None:
                                await handle.layer(number)
                                woken.append(f"layer {number}")

                            waiters.start_soon(layer, 0)
                            waiters.start_soon(layer, LAYERS - 1)
                            outcomes.append((await handle.report()).outcomes["a"])

                tasks.start_soon(wait)
                await arrived(hanging, point)
            await eventually(lambda: bool(outcomes))
        assert sorted(woken) == ["layer 0", f"layer {LAYERS - 1}"]
        if point != "session_end":
            assert_outcome(outcomes[0], 0, PageStatus.CANCELLED)
            pools.assert_rows_kept()
        with pytest.raises(LoaderClosedError):
            loader.load([])
        pools.scramble(seed=78)
    finally:
        hanging.release()
    await eventually(
        lambda: not any(thread.name.startswith("softload-") for thread in set(threading.enumerate()) - others)
    )  # threads end, and what they hold with them
    pools.assert_rows_kept()


@modes
async def test_prefetch_left_or_cancelled_while_the_store_hangs(mode: dict[str, str]) -> None:
    point = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, **mode) as loader:
        await put(loader, pools, keys(6))
        hanging.hold(point)
        with anyio.fail_after(15):
            async with loader.prefetch([pools.unit("a", keys(6))]):
                await arrived(hanging, point)
            with anyio.move_on_after(0.05):
                async with loader.prefetch([pools.unit("b", keys(6))]) as handle:
                    await handle.landed()
        await assert_well(loader, hanging)
        assert_outcome((await load(loader, pools.unit("c", keys(6), range(6))))["c"], 6)
        pools.assert_restored(keys(6), range(6))


@modes
@pytest.mark.parametrize("kind", ["load", "prefetch"])
async def test_cancelled_before_it_started(mode: dict[str, str], kind: str) -> None:
    pools = make_pools()
    recording = RecordingStore(store())
    async with opened(recording, pools, **mode) as loader:
        await put(loader, pools, keys(6))
        recording.clear()
        if kind == "load":
            async with loader.load([pools.unit("a", keys(6), range(6))]):
                assert loader.statistics().held_slots == 6
        else:
            async with loader.prefetch([pools.unit("a", keys(6))]):
                pass
        await settle(loader)
        assert recording.calls == ()
        pools.assert_rows_kept()


@modes
async def test_left_after_the_report_changes_nothing(mode: dict[str, str]) -> None:
    pools = make_pools()
    async with opened(store(), pools, **mode) as loader:
        await put(loader, pools, keys(6))
        async with loader.load([pools.unit("a", keys(6), range(6))]) as handle:
            first = await handle.report()
            assert await handle.report() is first
        await handle.__aexit__(None, None, None)  # left twice
        assert (await handle.report()) is first
        assert loader.statistics().restored_pages == 6
        await settle(loader)


@modes
async def test_exception_in_the_body_cancels_the_load(mode: dict[str, str]) -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, **mode) as loader:
        await put(loader, pools, keys(6))
        hanging.hold("descriptors")
        with anyio.fail_after(15), pytest.raises(ZeroDivisionError):
            async with loader.load([pools.unit("a", keys(6), range(6))]):
                await arrived(hanging, "descriptors")
                raise ZeroDivisionError
        await assert_well(loader, hanging)


async def test_exception_in_the_loaders_body_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with opened(store(), make_pools()):
            raise ZeroDivisionError


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
async def test_lookup_ends_while_the_store_hangs(how: str, quick_close: None) -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    statuses: list[PageStatus | None] = []
    try:
        async with anyio.create_task_group() as tasks:
            options = {"lookup_deadline": 0.1} if how == "deadline" else {}
            async with PageLoader(hanging, pools.group, config=config(**options)) as loader:
                await put(loader, pools, keys(6))
                hanging.hold("exists")

                async def look(loader: PageLoader = loader) -> None:
                    found = await loader.lookup(pools.unit("a", keys(6)))
                    assert found.pages == 0
                    statuses.append(found.status)

                with anyio.fail_after(15):
                    if how == "deadline":
                        await look()
                        assert statuses == [PageStatus.TIMED_OUT]
                    elif how == "cancel":
                        async with anyio.create_task_group() as scope:
                            scope.start_soon(look)
                            await arrived(hanging, "exists")
                            scope.cancel_scope.cancel()
                    else:
                        tasks.start_soon(look)
                        await arrived(hanging, "exists")
                if how != "close":
                    await assert_well(loader, hanging)
                    assert (await loader.lookup(pools.unit("b", keys(6)))).pages == 6
            await eventually(lambda: how != "close" or bool(statuses))
    finally:
        hanging.release()


@pytest.mark.parametrize("point", SAVE_POINTS)
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_save_ends_while_the_store_hangs(point: str, how: str) -> None:
    """Its slots are the engine's again at once: what the late call writes is what they held when they were offered."""
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        pools.fill(keys(6), range(6))
        hanging.hold(point)
        unit = pools.unit("a", keys(6), range(6), deadline=1.0 if how == "deadline" else None)
        with anyio.fail_after(15), anyio.CancelScope() as scope:
            if how == "deadline":
                report = await loader.save([unit])
                assert {page.status for page in report.outcomes["a"].pages} == {SaveStatus.TIMED_OUT}
            else:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(loader.save, [unit])
                    await arrived(hanging, point)
                    scope.cancel()
        assert loader.statistics().quarantined_bytes > 0
        pools.scramble(seed=5)
        await assert_well(loader, hanging)
        pools.assert_rows_kept()
        # Whatever the late call stored, it is right, and what it did not can be stored now.
        pools.fill(keys(6), range(6))
        report = await loader.save([pools.unit("a", keys(6), range(6))])
        assert {page.status for page in report.outcomes["a"].pages} <= {SaveStatus.SAVED, SaveStatus.PRESENT}
        pools.scramble(seed=6)
        assert_outcome((await load(loader, pools.unit("b", keys(6), range(6))))["b"], 6)
        pools.assert_restored(keys(6), range(6))
        await settle(loader)


@pytest.mark.parametrize("point", SAVE_POINTS)
async def test_close_while_a_save_hangs(point: str, quick_close: None) -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    done: list[set[SaveStatus]] = []
    try:
        async with anyio.create_task_group() as tasks:
            async with PageLoader(hanging, pools.group, config=config(write_lanes=1)) as loader:
                hanging.hold(point)

                async def save(prefix: str, loader: PageLoader = loader) -> None:
                    report = await loader.save([pools.unit(prefix, keys(6, prefix), range(6))])
                    done.append({page.status for page in report.outcomes[prefix].pages})

                tasks.start_soon(save, "a")
                await arrived(hanging, point)
                tasks.start_soon(save, "b")  # queued behind it
                await anyio.wait_all_tasks_blocked()
            await eventually(lambda: len(done) == 2)
        assert not any(SaveStatus.SAVED in statuses for statuses in done)
    finally:
        hanging.release()


@pytest.mark.parametrize("how", ["cancel", "exception", "refused"])
async def test_registering_memory_hangs_or_fails(how: str, quick_close: None) -> None:
    pools = make_pools()
    inner = store()
    hanging = HangingStore(inner)
    scripted = ScriptedStore(hanging)
    try:
        if how == "cancel":
            hanging.hold("register")
            with anyio.fail_after(15), anyio.move_on_after(0.1) as scope:
                async with PageLoader(scripted, pools.group, config=config()):
                    raise AssertionError("it must not open")
            assert scope.cancelled_caught
        else:
            scripted.script("register", RuntimeError("no") if how == "exception" else False)
            with pytest.raises(StoreSetupError, match="landing memory"):
                async with PageLoader(scripted, pools.group, config=config()):
                    raise AssertionError("it must not open")
    finally:
        hanging.release()
    with pytest.raises(LoaderClosedError):  # the store was closed again
        inner.open()


async def test_what_hangs_for_one_holds_no_other_up() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, read_batch_objects=1, endpoint_lanes=4) as loader:
        await put(loader, pools, [*keys(4, "a"), *keys(4, "b")])
        hanging.hold("read", any_of("a2"))
        units = [pools.unit("A", keys(4, "a"), range(4), deadline=1.0), pools.unit("B", keys(4, "b"), range(4, 8))]
        with anyio.fail_after(15):
            outcomes = await load(loader, *units)
        assert_outcome(outcomes["A"], 2, PageStatus.TIMED_OUT)
        assert_outcome(outcomes["B"], 4)
        pools.assert_restored([*keys(2, "a"), *keys(4, "b")], [0, 1, 4, 5, 6, 7])
        pools.assert_rows_kept(range(8))
        await assert_well(loader, hanging)


@modes
async def test_cancelling_one_waiter_leaves_the_load_alone(mode: dict[str, str]) -> None:
    point = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, **mode) as loader:
        await put(loader, pools, keys(4))
        hanging.hold(point)
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            await arrived(hanging, point)
            for wait in (handle.report, handle.draft, lambda: handle.layer(0)):
                with suppress(TimeoutError), anyio.fail_after(0.01):
                    await wait()
            hanging.release()
            assert_outcome((await handle.report()).outcomes["a"], 4)


async def test_memory_outlives_close_until_the_call_returns(quick_close: None) -> None:
    """The read lands after the loader is gone: in memory that is still there, and in nobody's slots."""
    pools = make_pools()
    inner = Held(store())
    recording = RecordingStore(inner)
    hanging = HangingStore(recording)
    others = set(threading.enumerate())  # of other tests' stores
    try:
        async with PageLoader(hanging, pools.group, config=config()) as loader:
            await put(loader, pools, keys(6))
            hanging.hold("read")
            async with loader.load([pools.unit("a", keys(6), range(6))]):
                await arrived(hanging, "read")
        del loader
        gc.collect()
        assert recording.count("unregister") == 0  # the call may still write it
        pools.remember()
    finally:
        hanging.release()
    await eventually(
        lambda: not any(thread.name.startswith("softload-read") for thread in set(threading.enumerate()) - others)
    )
    assert recording.count("read") > 0
    pools.assert_rows_kept()


async def test_a_load_whose_task_is_cancelled_again_is_left_when_nothing_writes_its_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by `asyncio.timeout` in a task that ends: no scope holds such cancellations off."""
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(2))
        copying, may_end = hold_copies(monkeypatch, unit_copies)
        task = asyncio.create_task(load(loader, pools.unit("a", keys(2), range(2))))
        try:
            await eventually(copying.is_set)
            for _ in range(3):
                task.cancel()
                await anyio.wait_all_tasks_blocked()
            assert not task.done(), "its slots are written yet"
        finally:
            may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle(loader)


class Closed(WrapperStore):
    """Knows whether it was closed."""

    was_closed = False

    def close(self) -> None:
        super().close()
        self.was_closed = True


async def test_a_loader_whose_task_is_cancelled_while_it_closes_closes_its_store() -> None:
    pools = make_pools()
    closed = Closed(store())
    hanging = HangingStore(closed)
    left = asyncio.Event()

    async def use() -> None:
        async with PageLoader(hanging, pools.group, config=config()) as loader:
            await put(loader, pools, keys(2))
            hanging.hold("read")
            async with loader.load([pools.unit("a", keys(2), range(2))]):
                await arrived(hanging, "read")
            left.set()  # closing waits for the call

    task = asyncio.create_task(use())
    try:
        await left.wait()
        for _ in range(2):
            await anyio.wait_all_tasks_blocked()
            task.cancel()
    finally:
        hanging.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.was_closed
