"""Failures after admission: while bytes come, and after layers were given out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import numpy as np
import pytest

from softload import LateFailure, PageStatus, SaveStatus
from softload.protocols import Descriptor
from softload.testing import HangingStore, RecordingStore, ScriptedStore

from .doubles import ForgingStore, LyingStore
from .harness import (
    LAYERS,
    MODE_IDS,
    MODES,
    any_of,
    arrived,
    assert_outcome,
    end_time_of,
    eventually,
    from_call,
    is_of,
    keys,
    load,
    make_pools,
    modes,
    opened,
    put,
    settle,
    store,
)
from .test_direct_reads import object_keys

pytestmark = pytest.mark.asyncio

GROUPS = ((0, 1), (1, 2), (2, 4), (4, 5))
"""Layers of `make_pools` in groups: the first one and the one behind the last."""
BY_LAYERS = [pytest.param(MODES[0], id="grouped"), pytest.param(MODES[2], id="page-ranges")]


def read_method(mode: dict[str, str]) -> str:
    return "read_ranges" if mode.get("read_mode") == "ranges" else "read"


@modes
@pytest.mark.parametrize(
    "status",
    [
        PageStatus.NOT_FOUND,
        PageStatus.NO_MEMORY_REPLICA,
        PageStatus.NOT_READY,
        PageStatus.LEASE_EXPIRED,
        PageStatus.TRANSFER_FAILED,
        PageStatus.STORE_UNREACHABLE,
        PageStatus.MALFORMED,
    ],
)
@pytest.mark.parametrize("bad", [0, 3, 7])
async def test_failed_read_cuts_the_unit(mode: dict[str, str], status: PageStatus, bad: int) -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools, **mode) as loader:
        await put(loader, pools, keys(8))
        lying.lie(read_method(mode), is_of(f"k{bad}"), status)
        outcomes = await load(loader, pools.unit("a", keys(8), range(8)))
        assert_outcome(outcomes["a"], bad, status)
        pools.assert_restored(keys(bad), range(bad))
        pools.assert_rows_kept(range(8))
        await settle(loader)


@pytest.mark.parametrize("mode", BY_LAYERS)
@pytest.mark.parametrize("group", range(len(GROUPS)))
@pytest.mark.parametrize("bad", [0, 2, 3])
async def test_failure_at_each_layer(mode: dict[str, str], group: int, bad: int) -> None:
    """Layers before the failing group were given out: a late failure. None were: none."""
    pools = make_pools()
    lying = LyingStore(store())
    hanging = HangingStore(lying)
    method = read_method(mode)
    async with opened(hanging, pools, **mode, read_lanes=1, read_batch_objects=4) as loader:
        await put(loader, pools, keys(4))
        hanging.hold(method, from_call(group))
        first, _ = GROUPS[group]
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            assert (await handle.admitted())["a"] == 4
            for layer in range(first):
                assert (await handle.layer(layer)).live == {"a"}
            await arrived(hanging, method)
            lying.lie(method, is_of(f"k{bad}"), PageStatus.TRANSFER_FAILED)
            hanging.release()
            with anyio.fail_after(15):
                for layer in range(first, LAYERS):
                    ready = await handle.layer(layer)
                    assert (ready.live, ready.failed) == (frozenset(), {"a": PageStatus.TRANSFER_FAILED})
                outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, bad, PageStatus.TRANSFER_FAILED)
        assert outcome.late_failure == (LateFailure(bad, first, PageStatus.TRANSFER_FAILED) if first else None)
        assert loader.statistics().late_failures == (1 if first else 0)
        pools.assert_restored(keys(bad), range(bad))
        pools.assert_rows_kept(range(4))
        refused = await loader.save([pools.unit("a", keys(4), range(4))])
        statuses = [page.status for page in refused.outcomes["a"].pages]
        assert all(status is SaveStatus.REFUSED for status in statuses[bad:])
        assert SaveStatus.REFUSED not in statuses[:bad]
        await settle(loader)


async def test_late_failure_of_one_leaves_the_other_live() -> None:
    pools = make_pools()
    lying = LyingStore(store())
    hanging = HangingStore(lying)
    async with opened(hanging, pools, read_batch_objects=4) as loader:
        await put(loader, pools, [*keys(4, "a"), *keys(4, "b")])
        hanging.hold("read", lambda object_keys: any(is_of("a1")(key) and key.endswith(".g2") for key in object_keys))
        units = [pools.unit("A", keys(4, "a"), range(4)), pools.unit("B", keys(4, "b"), range(4, 8))]
        async with loader.load(units) as handle:
            assert (await handle.layer(1)).live == {"A", "B"}
            await arrived(hanging, "read")
            lying.lie("read", is_of("a1"), PageStatus.NOT_FOUND)
            hanging.release()
            last = await handle.layer(LAYERS - 1)
            assert last.live == {"B"}
            assert last.failed == {"A": PageStatus.NOT_FOUND}
            outcomes = (await handle.report()).outcomes
        assert outcomes["A"].late_failure == LateFailure(1, 2, PageStatus.NOT_FOUND)
        assert outcomes["B"].late_failure is None
        assert_outcome(outcomes["B"], 4)
        pools.assert_restored(["a0", *keys(4, "b")], [0, 4, 5, 6, 7])
        pools.assert_rows_kept(range(8))
        await settle(loader)


async def test_a_late_failure_tells_of_the_first_page_that_is_missed_in_the_end() -> None:
    pools = make_pools()
    lying = LyingStore(store())
    hanging = HangingStore(lying)

    def of_group(group: int) -> Callable[[Sequence[str]], bool]:
        return lambda object_keys: object_keys[0].endswith(f".g{group}")

    async with opened(hanging, pools, read_lanes=1, read_batch_objects=4) as loader:
        await put(loader, pools, keys(4))
        hanging.hold("read", of_group(1))
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            assert (await handle.layer(0)).live == {"a"}
            await arrived(hanging, "read")
            lying.lie("read", is_of("k3"), PageStatus.TRANSFER_FAILED)
            hanging.hold("read", of_group(2))
            assert (await handle.layer(1)).failed == {"a": PageStatus.TRANSFER_FAILED}
            await arrived(hanging, "read")
            lying.lie("read", is_of("k1"), PageStatus.NOT_FOUND)
            hanging.release()
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 1, PageStatus.NOT_FOUND)
        assert outcome.late_failure == LateFailure(1, 1, PageStatus.NOT_FOUND)
        assert loader.statistics().late_failures == 1
        pools.assert_restored(keys(1), range(1))
        await settle(loader)


async def test_a_late_failure_tells_of_the_page_that_did_not_come_in_time() -> None:
    pools = make_pools()
    lying = LyingStore(store())
    later = HangingStore(lying)
    sooner = HangingStore(later)

    def of_object(page: str, group: int) -> Callable[[Sequence[str]], bool]:
        return lambda object_keys: is_of(page)(object_keys[0]) and object_keys[0].endswith(f".g{group}")

    async with opened(sooner, pools, read_lanes=4, endpoint_lanes=4, read_batch_objects=1) as loader:
        try:
            await put(loader, pools, keys(4))
            sooner.hold("read", of_object("k2", 1))
            later.hold("read", of_object("k1", 2))
            async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
                assert (await handle.layer(0)).live == {"a"}
                await arrived(sooner, "read")
                lying.lie("read", is_of("k2"), PageStatus.TRANSFER_FAILED)
                sooner.release()
                assert (await handle.layer(1)).failed == {"a": PageStatus.TRANSFER_FAILED}
                await arrived(later, "read")
                assert loader._context is not None
                reader = loader._context.reader
                first = object_keys(loader, pools, "k0")[2:]
                await eventually(lambda: all(fetch and fetch.landed for fetch in map(reader.find, first)))
                end_time_of(loader, "a")
                outcome = (await handle.report()).outcomes["a"]
            assert_outcome(outcome, 1, PageStatus.TIMED_OUT)
            assert outcome.late_failure == LateFailure(1, 1, PageStatus.TIMED_OUT)
            pools.assert_restored(keys(1), range(1))
        finally:
            later.release()
        await settle(loader)


@modes
async def test_failed_waits_return_at_once(mode: dict[str, str]) -> None:
    pools = make_pools(layers=12)
    lying = LyingStore(store())
    async with opened(lying, pools, **mode) as loader:
        await put(loader, pools, keys(2))
        lying.lie(read_method(mode), is_of(*keys(2)), PageStatus.TRANSFER_FAILED)
        async with loader.load([pools.unit("a", keys(2), range(2))]) as handle:
            # What fails before the admission is out makes that 0 pages, and nothing fails then.
            admitted = (await handle.admitted())["a"]
            with anyio.fail_after(15):  # the deadline is 20 s
                for layer in range(12):
                    failed = (await handle.layer(layer)).failed
                    assert failed == ({"a": PageStatus.TRANSFER_FAILED} if admitted else {})
            assert_outcome((await handle.report()).outcomes["a"], 0, PageStatus.TRANSFER_FAILED)


@modes
@pytest.mark.parametrize("status", [PageStatus.LEASE_EXPIRED, PageStatus.NO_MEMORY_REPLICA])
@pytest.mark.parametrize("page", [0, 3])
async def test_what_may_be_read_again_is_read_again_once(mode: dict[str, str], status: PageStatus, page: int) -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools, **mode) as loader:
        await put(loader, pools, keys(4))
        lying.lie(read_method(mode), is_of(f"k{page}"), status, times=1)
        outcomes = await load(loader, pools.unit("a", keys(4), range(4)))
        assert_outcome(outcomes["a"], 4)
        pools.assert_restored(keys(4), range(4))
        assert loader.statistics().retries == 1
        await settle(loader)


async def test_replica_that_moved_is_read_again() -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools, layout="page") as loader:
        await put(loader, pools, keys(4))

        def moved(_: str, truth: Descriptor) -> Descriptor:
            return Descriptor(truth.size, truth.endpoint, truth.address + 4096)

        lying.lie("descriptors", is_of("k2"), moved, skip=1)
        assert_outcome((await load(loader, pools.unit("a", keys(4), range(4))))["a"], 4)
        assert loader.statistics().retries == 1


@pytest.mark.parametrize("mode", MODES[1:], ids=MODE_IDS[1:])
async def test_replica_that_keeps_moving_is_a_miss(mode: dict[str, str]) -> None:
    pools = make_pools()
    lying = LyingStore(store())
    addresses = iter(range(1 << 20))

    def moving(_: str, truth: Descriptor) -> Descriptor:
        return Descriptor(truth.size, truth.endpoint, next(addresses))

    async with opened(lying, pools, **mode) as loader:
        await put(loader, pools, keys(4))
        lying.lie("descriptors", is_of("k2"), moving)
        assert_outcome((await load(loader, pools.unit("a", keys(4), range(4))))["a"], 2, PageStatus.REPLICA_CHANGED)
        await settle(loader)


@pytest.mark.parametrize("mode", MODES[1:], ids=MODE_IDS[1:])
@pytest.mark.parametrize("page", [0, 2, 3])
async def test_replica_that_vanished_during_the_read_is_a_miss(mode: dict[str, str], page: int) -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools, **mode) as loader:
        await put(loader, pools, keys(4))
        lying.lie("descriptors", is_of(f"k{page}"), PageStatus.NOT_FOUND, skip=1)
        outcome = (await load(loader, pools.unit("a", keys(4), range(4))))["a"]
        assert_outcome(outcome, page, PageStatus.REPLICA_CHANGED)
        await settle(loader)


@pytest.mark.parametrize("mode", MODES[1:], ids=MODE_IDS[1:])
async def test_removed_and_replaced_behind_the_admission(mode: dict[str, str]) -> None:
    """The real thing: other objects take the place of an admitted one before its bytes are read."""
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, **mode) as loader:
        await put(loader, pools, keys(4))
        first = "session_start" if mode["read_mode"] == "ranges" else "read"
        hanging.hold(read_method(mode))
        hanging.hold(first)
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            assert (await handle.admitted())["a"] == 4
            if first == "session_start":
                await arrived(hanging, first)
                hanging.release(first)
            await arrived(hanging, read_method(mode))
            victim = next(key for key in ("k1_tp0_cp0_pp0_k", "k1_cp0_pp0_k") if hanging.exists([key]) == [True])
            assert hanging.remove([victim], force=True) == [0]
            await put(loader, pools, ["foreign"])
            hanging.release()
            outcome = (await handle.report()).outcomes["a"]
        assert outcome.restored_pages == 1
        assert_outcome(outcome, 1, PageStatus.NOT_FOUND if mode["read_mode"] == "whole" else PageStatus.REPLICA_CHANGED)
        pools.assert_restored(["k0"], [0])
        await settle(loader)


def flip(memory: np.ndarray) -> None:
    memory[memory.size // 2] ^= 0xFF


def flip_sampled(memory: np.ndarray) -> None:
    memory[7] ^= 0x01


def tear(memory: np.ndarray) -> None:
    memory[memory.size // 2 : -32] = 0x5A


def cut_tail(memory: np.ndarray) -> None:
    memory[-32:] = 0


@pytest.mark.parametrize(
    ("integrity", "damage"),
    [("full", flip), ("full", tear), ("full", cut_tail), ("sample", flip_sampled), ("sample", tear), ("off", cut_tail)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.parametrize("page", [0, 2])
async def test_corrupt_object_is_a_miss_and_makes_room(integrity: str, damage: object, page: int) -> None:
    pools = make_pools(width=3000)
    forging = ForgingStore(store())
    recording = RecordingStore(forging)
    async with opened(recording, pools, integrity=integrity) as loader:
        await put(loader, pools, keys(4))
        forging.forge(lambda key: is_of(f"k{page}")(key) and key.endswith(".g2"), damage)  # type: ignore[arg-type]
        outcome = (await load(loader, pools.unit("a", keys(4), range(4))))["a"]
        assert_outcome(outcome, page, PageStatus.CORRUPT)
        pools.assert_restored(keys(page), range(page))
        await settle(loader)
        await eventually(lambda: recording.count("remove") > 0)
        removed = recording.keys_of("remove")
        assert len(removed) == loader.statistics().removed_corrupt == 1
        assert is_of(f"k{page}")(removed[0])
        # Read twice, from the store, before it is believed.
        assert recording.keys_of("read").count(removed[0]) == 2
        forging.forged.clear()
        pools.fill(keys(4), range(4))
        loader.computed(pools.unit("a", keys(4), range(4)))
        saved = await loader.save([pools.unit("a", keys(4), range(4))])
        statuses = [each.status for each in saved.outcomes["a"].pages]
        assert statuses[page] in (SaveStatus.SAVED, SaveStatus.PRESENT)
        pools.scramble(seed=9)
        assert_outcome((await load(loader, pools.unit("b", keys(4), range(4))))["b"], 4)
        pools.assert_restored(keys(4), range(4))


async def test_corrupt_once_is_read_again_and_kept() -> None:
    pools = make_pools()
    forging = ForgingStore(store())
    recording = RecordingStore(forging)
    async with opened(recording, pools, integrity="full") as loader:
        await put(loader, pools, keys(4))
        once = iter([True])
        forging.forge(lambda key: is_of("k1")(key) and next(once, False), flip)
        assert_outcome((await load(loader, pools.unit("a", keys(4), range(4))))["a"], 4)
        pools.assert_restored(keys(4), range(4))
        assert recording.count("remove") == 0


@pytest.mark.parametrize("first", [PageStatus.TRANSFER_FAILED, PageStatus.LEASE_EXPIRED], ids=str)
async def test_corrupt_once_after_another_failure_is_not_believed(first: PageStatus) -> None:
    pools = make_pools()
    forging = ForgingStore(store())
    lying = LyingStore(forging)
    recording = RecordingStore(lying)
    async with opened(recording, pools, integrity="full") as loader:
        await put(loader, pools, keys(4))
        chosen = is_of("k1")
        lying.lie("read", chosen, first, times=4)  # the object of each group of layers, once
        forging.forge(chosen, flip)
        assert_outcome((await load(loader, pools.unit("a", keys(4), range(4))))["a"], 1)
        await settle(loader)
        assert loader.statistics().removed_corrupt == recording.count("remove") == 0


async def test_foreign_object_is_found_by_sample() -> None:
    """Memory that another whole object took over has a valid tail, but not this key's."""
    pools = make_pools(width=3000)
    forging = ForgingStore(store())
    async with opened(forging, pools) as loader:
        await put(loader, pools, keys(4))
        seen: dict[str, np.ndarray] = {}

        def swap(memory: np.ndarray) -> None:
            memory[:] = seen["k0"]

        def keep(memory: np.ndarray) -> None:
            seen["k0"] = memory.copy()

        forging.forge(lambda key: is_of("k0")(key) and key.endswith(".g1"), keep)
        forging.forge(lambda key: is_of("k2")(key) and key.endswith(".g1"), swap)
        assert_outcome((await load(loader, pools.unit("a", keys(4), range(4))))["a"], 2, PageStatus.CORRUPT)


@pytest.mark.parametrize("method", ["descriptors", "read", "session_start", "read_ranges", "session_end", "exists"])
@pytest.mark.parametrize(
    "answer",
    [[], [0], None, "00000000", RuntimeError("native"), [True] * 4, [-702] * 4, [1 << 70] * 4, [0.0] * 4, [None] * 4],
    ids=["empty", "short", "none", "text", "raises", "bools", "codes", "huge", "floats", "nones"],
)
async def test_answers_no_store_should_give(method: str, answer: object) -> None:
    pools = make_pools()
    scripted = ScriptedStore(store())
    layout = MODES[2] if method in ("session_start", "session_end", "read_ranges") else MODES[1]
    async with opened(scripted, pools, **layout) as loader:
        await put(loader, pools, keys(4))
        scripted.script(method, *[answer] * 8)
        if method == "exists":
            found = await loader.lookup(pools.unit("a", keys(4)))
            assert (found.pages, found.status) == ((4, None) if answer == [True] * 4 else (0, PageStatus.MALFORMED))
            return
        outcome = (await load(loader, pools.unit("a", keys(4), range(4))))["a"]
        if method == "session_end":
            assert_outcome(outcome, 4)
        else:
            assert_outcome(outcome, 0, PageStatus.MALFORMED)
            pools.assert_rows_kept()
        scripted.script(method, *[])
        await eventually(lambda: not loader.statistics().open_sessions)
        assert loader.statistics().held_slots == 0


async def test_waiter_wakes_at_once_when_the_failure_is_all_there_is() -> None:
    pools = make_pools()
    hanging = HangingStore(LyingStore(store()))
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(2))
        hanging.hold("read")
        woken: list[str] = []
        async with loader.load([pools.unit("a", keys(2), range(2))]) as handle, anyio.create_task_group() as tasks:

            async def wait(layer: int) -> None:
                await handle.layer(layer)
                woken.append(f"layer {layer}")

            async def report() -> None:
                await handle.report()
                woken.append("report")

            for layer in range(LAYERS):
                tasks.start_soon(wait, layer)
            tasks.start_soon(report)
            await arrived(hanging, "read")
            assert woken == []
            assert isinstance(hanging.inner, LyingStore)
            hanging.inner.lie("read", is_of("k0"), PageStatus.NOT_FOUND)
            hanging.release()
            await eventually(lambda: len(woken) == LAYERS + 1, 2)


@modes
@pytest.mark.parametrize("lanes", [1, 4])
async def test_reads_of_an_owner_that_hangs_hold_up_no_other_owners(mode: dict[str, str], lanes: int) -> None:
    """Long before their load's deadline; and no more of them are started than there are lanes."""
    method = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    hanging = HangingStore(store())
    lying = LyingStore(hanging)
    async with opened(lying, pools, **mode, integrity="off", read_lanes=lanes, read_batch_objects=1) as loader:
        await put(loader, pools, [*keys(6, "bad"), *keys(6, "good")])
        for owner in ("bad", "good"):
            lying.lie(
                "descriptors",
                is_of(*keys(6, owner)),
                lambda _, truth, owner=owner: Descriptor(truth.size, owner, truth.address),
            )
        hanging.hold(method, any_of(*keys(6, "bad")))
        try:
            async with loader.load([pools.unit("bad", keys(6, "bad"), range(6), deadline=20.0)]) as bad:
                await arrived(hanging, method, lanes)
                with anyio.fail_after(15):
                    outcomes = await load(loader, pools.unit("good", keys(6, "good"), range(6, 12)))
                assert_outcome(outcomes["good"], 6)
                pools.assert_restored(keys(6, "good"), range(6, 12))
                now = loader.statistics()
                assert hanging.held(method) == lanes
                assert (now.stuck_threads, now.timed_out_calls) == (0, 0)
                hanging.release()
                assert_outcome((await bad.report()).outcomes["bad"], 6)
        finally:
            hanging.release()
        await settle(loader)
