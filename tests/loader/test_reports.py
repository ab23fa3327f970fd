"""Reports: every page exactly once, counters that agree with them, log events that say why."""

from __future__ import annotations

import random
from collections import Counter

import anyio
import pytest
import torch
from structlog.testing import capture_logs

from softload import (
    ComponentTransfer,
    DevicePool,
    DevicePoolGroup,
    HitPolicy,
    PageStatus,
    PoolName,
    TransferUnit,
    UnitOutcome,
    events,
)
from softload.testing import Fault, FaultKind, FaultyStore

from .doubles import LyingStore
from .harness import (
    Pools,
    assert_outcome,
    content,
    is_of,
    keys,
    load,
    make_pools,
    modes,
    opened,
    put,
    settle,
    slots,
    store,
)

pytestmark = pytest.mark.asyncio


@modes
@pytest.mark.parametrize("seed", range(3))
async def test_every_page_is_accounted_for_under_faults(mode: dict[str, str], seed: int) -> None:
    """Overlapping loads of shared prefixes over a store that loses, replaces and delays objects."""
    pools = make_pools(pages=200)
    faults = [
        Fault(FaultKind.EVICT, probability=0.02),
        Fault(FaultKind.REMOVE, probability=0.01),
        Fault(FaultKind.LATE, probability=0.05),
    ]
    outcomes: list[UnitOutcome] = []
    dice = random.Random(seed)
    async with opened(FaultyStore(store(), faults, seed=seed), pools, **mode) as loader:
        await put(loader, pools, keys(30))

        async def one(request: int, length: int, rows: range) -> None:
            page_keys = keys(30)[:length]
            outcome = (await load(loader, pools.unit(f"r{request}", page_keys, rows)))[f"r{request}"]
            outcomes.append(outcome)
            pools.assert_restored(page_keys[: outcome.restored_pages], rows[: outcome.restored_pages])

        for wave in range(5):
            async with anyio.create_task_group() as tasks:
                for request in range(6):
                    length = dice.randint(1, 30)
                    rows = range(request * 30, request * 30 + length)
                    tasks.start_soon(one, wave * 6 + request, length, rows)
        await settle(loader)
        now = loader.statistics()
    for outcome in outcomes:
        assert [page.page for page in outcome.pages] == list(range(outcome.requested_pages))
        loaded = [page.page for page in outcome.pages if page.status is PageStatus.LOADED]
        assert loaded == list(range(outcome.restored_pages))
        assert outcome.prefill_from_page == outcome.restored_pages
    assert now.requested_pages == sum(outcome.requested_pages for outcome in outcomes)
    assert now.restored_pages == sum(outcome.restored_pages for outcome in outcomes)
    statuses = Counter(page.status for outcome in outcomes for page in outcome.pages)
    del statuses[PageStatus.LOADED]
    assert now.missed_pages == statuses
    assert now.requested_pages == now.restored_pages + sum(now.missed_pages.values())


async def test_events_say_what_was_missed_and_why() -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools) as loader:
        await put(loader, pools, keys(4))
        lying.lie("descriptors", is_of("k2"), PageStatus.NO_MEMORY_REPLICA)
        with capture_logs() as logs:
            await load(loader, pools.unit("a", keys(4), range(4)))
        (event,) = [each for each in logs if each["event"] == events.PAGE_MISSED]
        assert event["request_id"] == "a"
        assert (event["page"], event["status"], event["component"]) == (2, "no_memory_replica", "kv")
        with capture_logs() as logs:
            await load(loader, pools.unit("b", keys(2), range(2)))
        assert [each for each in logs if each["event"] == events.PAGE_MISSED] == []


async def test_times_of_a_report() -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(4))
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            await handle.layer(0)
            report = await handle.report()
        assert 0 <= report.admission_s <= report.first_layer_s <= report.load_s < 5
        assert report.bytes_loaded == loader.statistics().bytes_loaded


@modes
@pytest.mark.parametrize("sparse", [(0, 3), (4,), (1, 2)])
async def test_component_without_a_buffer_at_some_layers(mode: dict[str, str], sparse: tuple[int, ...]) -> None:
    """An indexer on few of the layers: no read for the others, which are ready when KV is."""

    def buffers(count: int, width: int) -> list[torch.Tensor]:
        return [torch.zeros(48 * 4, width, dtype=torch.uint8) for _ in range(count)]

    kv = DevicePool(PoolName.KV, PoolName.KV, [buffers(5, 24)], {layer: layer for layer in range(5)}, 4, False)
    mapping = {layer: index for index, layer in enumerate(sparse)}
    indexer = DevicePool(PoolName.INDEXER, PoolName.KV, [buffers(len(sparse), 8)], mapping, 4, False)
    pools = Pools(DevicePoolGroup([kv, indexer], 5, 4))
    lying = LyingStore(store())
    method = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    async with opened(lying, pools, **mode) as loader:
        await put(loader, pools, keys(4))
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            for layer in range(5):
                assert (await handle.layer(layer)).live == {"a"}
            assert_outcome((await handle.report()).outcomes["a"], 4)
        pools.assert_restored(keys(4), range(4))
        pools.assert_rows_kept(range(4))
        lying.lie(method, lambda key: is_of("k2")(key) and "indexer" in key, PageStatus.NOT_FOUND)
        outcome = (await load(loader, pools.unit("b", keys(4), range(8, 12))))["b"]
        assert_outcome(outcome, 2, PageStatus.NOT_FOUND)
        assert outcome.pages[2].component is PoolName.INDEXER
        await settle(loader)


async def test_trailing_windows_cut_down_to_a_boundary() -> None:
    """KV pages 0..9 are there, SWA only around boundaries 4 and 8: 8 pages."""

    def buffers(count: int) -> list[torch.Tensor]:
        return [torch.zeros(48 * 4, 16, dtype=torch.uint8) for _ in range(count)]

    mapping = {layer: layer for layer in range(3)}
    kv = DevicePool(PoolName.KV, PoolName.KV, [buffers(3)], mapping, 4, False)
    swa = DevicePool(PoolName.SWA, PoolName.SWA, [buffers(3)], mapping, 4, False)
    pools = Pools(DevicePoolGroup([kv, swa], 3, 4))

    def unit(name: str, rows: range | None) -> TransferUnit:
        mine = None if rows is None else slots(rows)
        return TransferUnit(
            name,
            (
                ComponentTransfer(PoolName.KV, keys(10), mine),
                ComponentTransfer(PoolName.SWA, keys(10), mine, HitPolicy.TRAILING_PAGES, window=2),
            ),
        )

    lying = LyingStore(store())
    async with opened(lying, pools) as loader:
        pools.fill(keys(10), range(10))
        await loader.save([unit("put", range(10))])
        pools.scramble(seed=2)

        def absent(key: str) -> bool:
            return "swa" in key and not is_of("k2", "k3", "k6", "k7")(key)

        lying.lie("descriptors", absent, PageStatus.NOT_FOUND)
        lying.lie("exists", absent, False)
        found = await loader.lookup(unit("a", None))
        assert found.boundaries == (4, 8)
        outcome = (await load(loader, unit("a", range(20, 30))))["a"]
        assert outcome.restored_pages == 8
        for index, view in enumerate(kv.page_views):
            for page in range(8):
                expected = torch.from_numpy(content(f"k{page}", PoolName.KV, index, view.shape[1]))
                assert torch.equal(view[20 + page], expected)
        for index, view in enumerate(swa.page_views):
            for page in (6, 7):
                expected = torch.from_numpy(content(f"k{page}", PoolName.SWA, index, view.shape[1]))
                assert torch.equal(view[20 + page], expected)
        assert pools.is_kept(29)
        # The window of boundary 8 is lost on the way: down to 4 is not possible, its window was not read.
        lying.lie("read", lambda key: "swa" in key and is_of("k7")(key), PageStatus.NOT_FOUND)
        outcome = (await load(loader, unit("b", range(30, 40))))["b"]
        assert outcome.restored_pages in (0, 4)
        await settle(loader)
