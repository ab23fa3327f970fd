"""Units with a sliding-window pool: boundaries, cuts by others, late failures, and slots that were never written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from softload import (
    ComponentTransfer,
    DevicePool,
    DevicePoolGroup,
    HitPolicy,
    LoaderConfig,
    PageLoader,
    PageStatus,
    PoolName,
    RankConsensus,
    SaveStatus,
    TransferUnit,
)
from softload.stores import MemoryStore
from softload.testing import ScriptedStore

pytestmark = pytest.mark.asyncio

PAGE_SIZE, LAYERS, ROWS, PAGES, WINDOW = 2, 2, 32, 10, 2
KEYS = tuple(f"page{page}" for page in range(PAGES))


class AtMost:
    """A second rank that has no more than `pages` pages."""

    def __init__(self, pages: int) -> None:
        self.pages = pages

    async def minimum(self, values: Sequence[int]) -> Sequence[int]:
        return [min(value, self.pages) for value in values]


def make_pools() -> DevicePoolGroup:
    def pool(name: PoolName) -> DevicePool:
        buffers = [
            torch.from_numpy(np.random.default_rng(layer).integers(1, 255, (ROWS * PAGE_SIZE, 1, 48), dtype=np.uint8))
            for layer in range(LAYERS)
        ]
        return DevicePool(name, name, [buffers], {layer: layer for layer in range(LAYERS)}, PAGE_SIZE, False)

    return DevicePoolGroup([pool(PoolName.KV), pool(PoolName.SWA)], LAYERS, PAGE_SIZE)


def unit(name: str, first_row: int | None = None, pages: int = PAGES) -> TransferUnit:
    slots = None if first_row is None else torch.arange(first_row * PAGE_SIZE, (first_row + pages) * PAGE_SIZE)
    keys = KEYS[:pages]
    return TransferUnit(
        name,
        (
            ComponentTransfer(PoolName.KV, keys, slots),
            ComponentTransfer(PoolName.SWA, keys, slots, HitPolicy.TRAILING_PAGES, WINDOW),
        ),
    )


def swa_keys(store: MemoryStore, page: int) -> list[str]:
    return [key for key in store._objects if f"/{KEYS[page]}/" in key and "/swa." in key]


async def stored(loader: PageLoader, store: MemoryStore, *, swa: Sequence[int]) -> None:
    """All of KV, and the sliding-window pages `swa`."""
    report = await loader.save([unit("saved", 0)])
    assert report.outcomes["saved"].saved_pages == PAGES
    for page in set(range(PAGES)) - set(swa):
        store.remove(swa_keys(store, page), force=True)


def opened(
    store: ScriptedStore, *, pools: DevicePoolGroup | None = None, ranks: RankConsensus | None = None
) -> PageLoader:
    config = LoaderConfig(landing_bytes=1 << 20, deadline=20.0)
    return PageLoader(store, pools or make_pools(), config=config, consensus=ranks)


@pytest.mark.parametrize(("agreed", "expected"), [(PAGES, 8), (8, 8), (7, 4), (4, 4), (3, 0), (0, 0)])
async def test_ranks_agree_on_a_boundary_that_has_its_window(agreed: int, expected: int) -> None:
    memory = MemoryStore(capacity=1 << 20)
    async with opened(ScriptedStore(memory), ranks=AtMost(agreed)) as loader:
        await stored(loader, memory, swa=(2, 3, 6, 7))
        assert (await loader.lookup(unit("asked"))).boundaries == (4, 8)
        async with loader.load([unit("loaded", PAGES)]) as load:
            admission = await load.admitted()
            report = await load.report()
    assert admission["loaded"] == report.outcomes["loaded"].restored_pages == expected


async def test_a_window_that_fails_late_costs_the_unit_with_the_status_of_the_failure() -> None:
    memory = MemoryStore(capacity=1 << 20)
    store = ScriptedStore(memory)
    async with opened(store) as loader:
        await stored(loader, memory, swa=range(PAGES))
        lost = set(swa_keys(memory, 9))

        def lose(keys: Sequence[str], answers: Sequence[object]) -> list[object]:
            return [
                PageStatus.TRANSFER_FAILED if key in lost else answer for key, answer in zip(keys, answers, strict=True)
            ]

        original = memory.read
        memory.read = lambda keys, pointers, sizes: lose(keys, original(keys, pointers, sizes))  # type: ignore[method-assign, assignment, return-value]
        async with loader.load([unit("loaded", PAGES)]) as load:
            outcome = (await load.report()).outcomes["loaded"]
    assert outcome.restored_pages == 0
    assert [page.status for page in outcome.pages] == [
        PageStatus.TRANSFER_FAILED,
        *[PageStatus.AFTER_MISS] * (PAGES - 2),
        PageStatus.TRANSFER_FAILED,
    ]


async def test_slots_outside_the_window_were_not_written_and_are_not_stored() -> None:
    memory = MemoryStore(capacity=1 << 20)
    pools = make_pools()
    before = pools.pool(PoolName.SWA).page_views[0].clone()
    async with opened(ScriptedStore(memory), pools=pools) as loader:
        await stored(loader, memory, swa=(6, 7))
        async with loader.load([unit("loaded", PAGES)]) as load:
            outcome = (await load.report()).outcomes["loaded"]
        assert outcome.restored_pages == 8
        after = pools.pool(PoolName.SWA).page_views[0]
        assert torch.equal(after[PAGES : PAGES + 6], before[PAGES : PAGES + 6])
        assert torch.equal(after[PAGES + 6 : PAGES + 8], before[6:8])
        saved = (await loader.save([unit("loaded", PAGES, pages=8)])).outcomes["loaded"]
        of_swa = [page.status for page in saved.pages if page.component is PoolName.SWA]
        assert of_swa == [SaveStatus.REFUSED] * 6 + [SaveStatus.PRESENT] * 2
        assert [page.status for page in saved.pages if page.component is PoolName.KV] == [SaveStatus.PRESENT] * 8
