"""Engines keep no slots for pages that a sliding window has passed: nothing is written for them, and nothing breaks."""

from __future__ import annotations

import pytest
import torch

from softload import ComponentTransfer, DevicePool, DevicePoolGroup, HitPolicy, PoolName, TransferUnit

from .harness import Pools, content, keys, opened, settle, slots, store

pytestmark = pytest.mark.asyncio


def windowed() -> Pools:
    mapping = {layer: layer for layer in range(3)}

    def buffers() -> list[torch.Tensor]:
        return [torch.zeros(48 * 4, 16, dtype=torch.uint8) for _ in mapping]

    kv = DevicePool(PoolName.KV, PoolName.KV, [buffers()], mapping, 4, False)
    swa = DevicePool(PoolName.SWA, PoolName.SWA, [buffers()], mapping, 4, False)
    return Pools(DevicePoolGroup([kv, swa], 3, 4))


def unit(name: str, rows: range | None, *, with_slots: int = 0) -> TransferUnit:
    """Ten pages; of the window's component only the last `with_slots` have slots."""
    kv = None if rows is None else slots(rows)
    swa = None if kv is None else kv.clone()
    if swa is not None:
        swa[: swa.numel() - with_slots * 4] = -1
    return TransferUnit(
        name,
        (
            ComponentTransfer(PoolName.KV, keys(10), kv),
            ComponentTransfer(PoolName.SWA, keys(10), swa, HitPolicy.TRAILING_PAGES, window=2),
        ),
    )


@pytest.mark.parametrize("with_slots", [2, 3])
@pytest.mark.parametrize("placed", [False, True], ids=["load", "place"])
async def test_only_the_window_has_slots(placed: bool, with_slots: int) -> None:
    pools = windowed()
    async with opened(store(), pools) as loader:
        pools.fill(keys(10), range(10))
        await loader.save([unit("put", range(10), with_slots=10)])
        pools.scramble(seed=2)
        before = [view.clone() for view in pools.group.pool(PoolName.SWA).page_views]
        wanted = unit("a", range(20, 30), with_slots=with_slots)
        if placed:
            async with loader.prefetch([unit("a", None)]) as prefetch:
                report = await prefetch.place([wanted])
        else:
            async with loader.load([wanted]) as streaming:
                report = await streaming.report()
        assert report.outcomes["a"].restored_pages == 10
        for index, view in enumerate(pools.group.pool(PoolName.SWA).page_views):
            for page in (8, 9):
                expected = torch.from_numpy(content(f"k{page}", PoolName.SWA, index, view.shape[1]))
                assert torch.equal(view[20 + page], expected)
            untouched = [row for row in range(48) if row not in (28, 29)]
            assert torch.equal(view[untouched], before[index][untouched])
        await settle(loader)


async def test_a_window_without_slots_cannot_be_restored() -> None:
    pools = windowed()
    async with opened(store(), pools) as loader:
        pools.fill(keys(10), range(10))
        await loader.save([unit("put", range(10), with_slots=10)])
        async with loader.load([unit("a", range(20, 30), with_slots=1)]) as streaming:
            report = await streaming.report()
        assert report.outcomes["a"].restored_pages == 0
        await settle(loader)


async def test_components_that_need_every_page_need_every_slot() -> None:
    pools = windowed()
    async with opened(store(), pools) as loader:
        mine = slots(range(10))
        mine[:4] = -1
        bad = TransferUnit("a", (ComponentTransfer(PoolName.KV, keys(10), mine), unit("a", range(10)).target[1]))
        with pytest.raises(ValueError, match="pool kv: expected slots from 0, got -1"):
            loader.load([bad])
