"""Layout `page`, read mode `auto`: whole objects, or first layers first where the forward then waits less."""

from __future__ import annotations

import pytest
import torch

from softload import DevicePool, DevicePoolGroup, PageLoader, PoolName
from softload.geometry import DraftMode
from softload.testing import RecordingStore

from .harness import LAYERS, PAGE_SIZE, Pools, assert_outcome, keys, make_pools, opened, put, settle, store

pytestmark = pytest.mark.asyncio

PAGES = 8
LARGE = {"layout": "page", "read_mode": "auto", "landing_bytes": 32 << 20}


def large_pools(draft: DraftMode | None = None) -> Pools:
    """128 KiB a page and layer: 5 MiB in all, for which a choice is worth while."""
    return make_pools(pages=3 * PAGES, width=32 << 10, draft=draft, draft_layers=2)


async def loaded(loader: PageLoader, pools: Pools, layer_seconds: float) -> None:
    """Load all pages, layer by layer; every layer must be there when it is said to be."""
    async with loader.load([pools.unit("a", keys(PAGES), range(PAGES))], layer_seconds=layer_seconds) as handle:
        for layer in range(LAYERS):
            assert (await handle.layer(layer)).live == {"a"}
        assert_outcome((await handle.report()).outcomes["a"], PAGES)
    pools.assert_restored(keys(PAGES), range(PAGES))
    await settle(loader)


@pytest.mark.parametrize("draft", [None, DraftMode.PACKED], ids=["plain", "packed-draft"])
@pytest.mark.parametrize(("layer_seconds", "method"), [(0.0, "read"), (1.0, "read_ranges")])
async def test_a_slow_forward_gets_its_first_layers_first(
    layer_seconds: float, method: str, draft: DraftMode | None
) -> None:
    pools = large_pools(draft)
    recording = RecordingStore(store(capacity=32 << 20))
    async with opened(recording, pools, **LARGE) as loader:
        await put(loader, pools, keys(PAGES))
        recording.clear()
        await loaded(loader, pools, layer_seconds)
    used = {call for call in ("read", "read_ranges") if recording.keys_of(call)}
    assert used == {method}


async def test_what_is_here_in_no_time_and_what_nobody_computes_with_yet_is_read_whole() -> None:
    pools, small = large_pools(), make_pools()
    for group, landing in ((pools, 64 << 20), (small, 4 << 20)):
        recording = RecordingStore(store(capacity=32 << 20))
        async with opened(recording, group, **{**LARGE, "landing_bytes": landing}) as loader:
            await put(loader, group, keys(PAGES))
            unit = group.unit("a", keys(PAGES), range(PAGES))
            if group is small:
                async with loader.load([unit], layer_seconds=1.0) as handle:
                    assert_outcome((await handle.report()).outcomes["a"], PAGES)
            else:
                async with loader.prefetch([group.unit("a", keys(PAGES))]) as prefetch:
                    assert (await prefetch.landed()).pages == {"a": PAGES}
            assert not recording.keys_of("read_ranges")


@pytest.mark.parametrize(("first", "method"), [(0, "read_ranges"), (3, "read")])
async def test_layers_without_bytes_are_waited_for_by_nobody(first: int, method: str) -> None:
    """As in DeepSeek V4, whose first layers have a sliding window alone: by layer 3 all of it is here."""
    buffers = [torch.zeros(3 * PAGES * PAGE_SIZE, 32 << 10, dtype=torch.uint8) for _ in range(LAYERS)]
    mapping = {first + layer: layer for layer in range(LAYERS)}
    pool = DevicePool(PoolName.KV, PoolName.KV, [buffers], mapping, PAGE_SIZE, rows_are_pages=False)
    pools = Pools(DevicePoolGroup([pool], first + LAYERS, PAGE_SIZE))
    pools.scramble()
    recording = RecordingStore(store(capacity=32 << 20))
    async with opened(recording, pools, **LARGE) as loader:
        await put(loader, pools, keys(PAGES))
        recording.clear()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES))], layer_seconds=1.0) as handle:
            assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        await settle(loader)
    assert {call for call in ("read", "read_ranges") if recording.keys_of(call)} == {method}


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
async def test_a_layer_time_that_is_none_is_refused(wrong: float) -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        with pytest.raises(ValueError, match=r"layer_seconds: expected 0 or more, got"):
            loader.load([pools.unit("a", keys(1), [0])], layer_seconds=wrong)
