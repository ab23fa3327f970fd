"""The first layers' objects are read while the master is still asked for the others; slots wait for all of it.

So it is where a unit is not admitted before all is known of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import torch

from softload import (
    ComponentTransfer,
    DevicePool,
    DevicePoolGroup,
    HitPolicy,
    PageLoader,
    PageStatus,
    PageStore,
    PoolName,
    SaveStatus,
    TransferUnit,
    admission,
    unit_copies,
    unit_layers,
)
from softload.testing import HangingStore, RecordingStore

from . import harness
from .doubles import LyingStore
from .harness import (
    PAGE_SIZE,
    Pools,
    arrived,
    assert_idle,
    assert_outcome,
    config,
    end_time_of,
    eventually,
    hold_copies,
    is_of,
    keys,
    load,
    make_pools,
    missed,
    put,
    settle,
    slots,
    store,
)

pytestmark = pytest.mark.asyncio

PAGES = 40
"""In four groups of layers: enough objects to ask for the first layers' apart."""

ROWS = range(PAGES)


@asynccontextmanager
async def opened(page_store: PageStore, pools: Pools, **options: Any) -> AsyncIterator[PageLoader]:
    """A loader to which it is not enough that objects exist."""
    async with harness.opened(page_store, pools, **options) as loader:
        assert loader._context is not None
        loader._context.health.doubt_existence()
        yield loader


def for_the_rest(object_keys: Sequence[str]) -> bool:
    """For `HangingStore.hold`: the question for all objects but those of the first layers."""
    return len(object_keys) == 3 * PAGES


async def test_first_layers_are_read_before_the_rest_is_known_and_copied_after() -> None:
    pools = make_pools(pages=2 * PAGES)
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(PAGES))
        recording.clear()
        hanging.hold("descriptors", for_the_rest)
        async with loader.load([pools.unit("a", keys(PAGES), ROWS)]) as handle:
            await arrived(hanging, "descriptors")
            await eventually(lambda: loader.statistics().bytes_loaded > 0)
            first = recording.keys_of("read")
            assert len(first) == PAGES and all(map(is_of(*keys(PAGES)), first))
            with anyio.move_on_after(0.05) as waited:
                await handle.admitted()
            assert waited.cancelled_caught, "admitted while most objects are not known to be there"
            pools.assert_rows_kept()
            hanging.release()
            assert (await handle.admitted())["a"] == PAGES
            assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), ROWS)
        assert sorted(recording.keys_of("read")) == sorted(set(recording.keys_of("read"))), "read twice"
        await settle(loader)


async def test_nothing_else_is_read_until_the_first_layers_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_layers, "_HEAD_START", 20.0)  # they land before it is over, on a busy machine as well
    pools = make_pools(pages=2 * PAGES)
    recording = RecordingStore(store())

    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(PAGES))
        recording.clear()
        _, may_copy = hold_copies(monkeypatch, unit_copies)
        async with loader.load([pools.unit("a", keys(PAGES), ROWS)]) as handle:
            await handle.admitted()
            await eventually(lambda: loader.statistics().bytes_loaded > 0)
            await anyio.wait_all_tasks_blocked()
            assert len(recording.keys_of("read")) == PAGES
            may_copy.set()
            assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), ROWS)
        await settle(loader)


async def test_first_layers_that_do_not_come_keep_the_others_from_nothing() -> None:
    pools = make_pools(pages=2 * PAGES)
    hanging = HangingStore(store())
    async with opened(hanging, pools, stuck_threads=4) as loader:
        await put(loader, pools, keys(PAGES))
        hanging.hold("read", lambda object_keys: object_keys[0].endswith(".g0"))
        async with loader.load([pools.unit("a", keys(PAGES), ROWS)]) as handle:
            await arrived(hanging, "read")
            await eventually(lambda: loader.statistics().bytes_loaded > 0)
            hanging.release()
            assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), ROWS)
        await settle(loader)


@pytest.mark.parametrize("good", [0, 7])
async def test_what_is_read_ahead_of_a_cut_is_let_go(good: int) -> None:
    pools = make_pools(pages=2 * PAGES)
    lying = LyingStore(store())
    async with opened(lying, pools) as loader:
        await put(loader, pools, keys(PAGES))
        page = is_of(f"k{good}")
        lying.lie("descriptors", page, PageStatus.NOT_FOUND, skip=1)  # its first layer is there, the others are not
        async with loader.load([pools.unit("a", keys(PAGES), ROWS)]) as handle:
            assert (await handle.admitted())["a"] == good
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, good, PageStatus.NOT_FOUND)
        assert set(missed(outcome)[1:]) == {PageStatus.AFTER_MISS} and outcome.late_failure is None
        pools.assert_restored(keys(good), ROWS[:good])
        pools.assert_rows_kept(ROWS[:good])
        await settle(loader)


async def test_a_page_that_fails_to_be_read_ahead_cuts_the_unit_before_it_is_admitted() -> None:
    pools = make_pools(pages=2 * PAGES)
    lying = LyingStore(store())
    hanging = HangingStore(lying)
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(PAGES))
        lying.lie("read", is_of("k5"), PageStatus.NOT_FOUND)
        hanging.hold("descriptors", for_the_rest)
        async with loader.load([pools.unit("a", keys(PAGES), ROWS)]) as handle:
            await arrived(hanging, "descriptors")
            await eventually(lambda: loader.statistics().bytes_loaded > 0)
            hanging.release()
            assert (await handle.admitted())["a"] == 5
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 5, PageStatus.NOT_FOUND)
        assert outcome.late_failure is None
        pools.assert_restored(keys(5), ROWS[:5])
        pools.assert_rows_kept(ROWS[:5])
        await settle(loader)


@pytest.mark.parametrize("ends_by", ["leaving", "deadline"])
async def test_a_load_that_ends_while_it_reads_ahead_leaves_nothing_behind(ends_by: str) -> None:
    pools = make_pools(pages=2 * PAGES)
    hanging = HangingStore(store())
    async with opened(hanging, pools, stuck_threads=4) as loader:
        await put(loader, pools, keys(PAGES))
        hanging.hold("descriptors", for_the_rest)
        hanging.hold("read")
        async with loader.load([pools.unit("a", keys(PAGES), ROWS)]) as handle:
            await arrived(hanging, "read")
            if ends_by == "deadline":
                end_time_of(loader, "a")
                outcome = (await handle.report()).outcomes["a"]
                assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
        now = loader.statistics()
        assert now.quarantined_bytes > 0 == now.landing_bytes_in_use, "only what the call may still write"
        assert now.held_slots == now.active_units == 0
        hanging.release()
        await settle(loader)
        pools.assert_rows_kept()
        assert_outcome((await load(loader, pools.unit("again", keys(PAGES), ROWS)))["again"], PAGES)
        pools.assert_restored(keys(PAGES), ROWS)


async def test_units_that_share_pages_read_each_object_once() -> None:
    pools = make_pools(pages=4 * PAGES)
    recording = RecordingStore(store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(PAGES))
        recording.clear()
        others = range(PAGES, 2 * PAGES)
        units = [pools.unit("a", keys(PAGES), ROWS), pools.unit("b", keys(PAGES), others)]
        async with loader.load(units) as handle:
            outcomes = (await handle.report()).outcomes
        for name, rows in (("a", ROWS), ("b", others)):
            assert_outcome(outcomes[name], PAGES)
            pools.assert_restored(keys(PAGES), rows)
        read = recording.keys_of("read")
        assert len(read) == len(set(read)) == 4 * PAGES
        await settle(loader)


async def test_without_memory_for_all_of_it_nothing_is_read_ahead() -> None:
    pools = make_pools(pages=2 * PAGES)
    hanging = HangingStore(store())
    pages = 4 * 24  # bytes a page and layer
    async with opened(hanging, pools, landing_bytes=PAGES * pages * 4) as loader:
        await put(loader, pools, keys(PAGES))
        hanging.hold("descriptors", for_the_rest)
        async with loader.load([pools.unit("a", keys(PAGES), ROWS)]) as handle:
            await arrived(hanging, "descriptors")
            await anyio.wait_all_tasks_blocked()
            assert loader.statistics().landing_bytes_in_use == 0
            hanging.release()
            outcome = (await handle.report()).outcomes["a"]
        assert outcome.restored_pages < PAGES
        assert missed(outcome)[0] is PageStatus.SHED
        await settle(loader)
        assert_idle(loader)


async def test_no_question_is_longer_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_OBJECTS", 32)
    pools = make_pools(pages=2 * PAGES)
    recording = RecordingStore(store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(PAGES))
        recording.clear()
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), ROWS)))["a"], PAGES)
        assert [len(call.keys) for call in recording.calls if call.method == "descriptors"] == [32, 8, 32, 32, 32, 24]
        assert len(set(recording.keys_of("descriptors"))) == 4 * PAGES
        await settle(loader)


async def test_a_unit_that_is_not_simple_holds_nothing_ahead_beside_one_that_is() -> None:
    mapping = {layer: layer for layer in range(3)}

    def pool(name: PoolName) -> DevicePool:
        buffers = [torch.zeros(4 * PAGES * PAGE_SIZE, 1, 24, dtype=torch.uint8) for _ in mapping]
        return DevicePool(name, name, [buffers], mapping, PAGE_SIZE, False)

    def of(name: str, rows: Sequence[int], *, windowed: bool) -> TransferUnit:
        target = [ComponentTransfer(PoolName.KV, keys(PAGES, name), slots(rows))]
        if windowed:
            swa = ComponentTransfer(PoolName.SWA, keys(PAGES, name), slots(rows), HitPolicy.TRAILING_PAGES, 2)
            target.append(swa)
        return TransferUnit(name, tuple(target), partial=not windowed)

    pools = Pools(DevicePoolGroup([pool(PoolName.KV), pool(PoolName.SWA)], 3, PAGE_SIZE))
    both = [of("simple", ROWS, windowed=False), of("windowed", range(PAGES, 2 * PAGES), windowed=True)]
    async with PageLoader(store(), pools.group, config=config()) as loader:
        for unit, rows in zip(both, (ROWS, range(PAGES, 2 * PAGES)), strict=True):
            pools.fill(keys(PAGES, unit.request_id), rows)
            saved = await loader.save([unit])
            assert {page.status for page in saved.outcomes[unit.request_id].pages} == {SaveStatus.SAVED}
        pools.scramble()
        outcomes = await load(loader, *both)
        assert_outcome(outcomes["simple"], PAGES)
        assert_outcome(outcomes["windowed"], PAGES)
        await settle(loader)
