"""Layers of some kilobytes: several groups of them are one object, and each comes when all of that is here."""

from __future__ import annotations

import pytest

from softload import PageStatus
from softload.geometry import DraftMode
from softload.testing import HangingStore, RecordingStore

from .doubles import LyingStore
from .harness import (
    LAYERS,
    arrived,
    assert_outcome,
    is_of,
    keys,
    load,
    make_pools,
    opened,
    put,
    settle,
    store,
)

pytestmark = pytest.mark.asyncio

PAGES = 4

WIDTH = 4 << 10
"""16 KiB a page and layer: an object for the first layer, and one for all others."""


@pytest.fixture(autouse=True)
def single_groups() -> None:
    """Here groups of layers are joined as they are for engines."""


async def test_the_first_layer_is_there_before_the_object_of_the_others() -> None:
    pages = 64  # so many that what they have of the first layer is a read of its own
    pools = make_pools(pages=2 * pages, width=WIDTH)
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    async with opened(hanging, pools, landing_bytes=16 << 20) as loader:
        await put(loader, pools, keys(pages))
        recording.clear()
        hanging.hold("read", lambda names: any(name.endswith("g1-3") for name in names))
        async with loader.load([pools.unit("a", keys(pages), range(pages))]) as handle:
            assert (await handle.layer(0)).live == {"a"}
            await arrived(hanging, "read")
            assert not any(pools.holds(key, row) for row, key in enumerate(keys(pages)))
            hanging.release()
            for layer in range(1, LAYERS):
                assert (await handle.layer(layer)).live == {"a"}
            assert_outcome((await handle.report()).outcomes["a"], pages)
        assert len(recording.keys_of("read")) == 2 * pages
        pools.assert_restored(keys(pages), range(pages))
        pools.assert_rows_kept(range(pages))
        await settle(loader)


@pytest.mark.parametrize("part", ["g0", "g1-3"])
async def test_an_object_of_several_groups_that_is_gone_costs_its_page(part: str) -> None:
    pools = make_pools(pages=3 * PAGES, width=WIDTH)
    lying = LyingStore(store())
    async with opened(lying, pools) as loader:
        await put(loader, pools, keys(PAGES))
        lying.lie("read", lambda key: is_of("k2")(key) and key.endswith(part), PageStatus.NOT_FOUND)
        outcome = (await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"]
        assert_outcome(outcome, 2, PageStatus.NOT_FOUND)
        pools.assert_restored(keys(2), range(2))
        await settle(loader)


@pytest.mark.parametrize("draft", [DraftMode.PACKED, DraftMode.SIDECAR])
async def test_a_draft_of_small_layers_is_one_object_and_its_loss_costs_the_draft_alone(draft: DraftMode) -> None:
    pools = make_pools(pages=3 * PAGES, width=WIDTH // 4, draft=draft, draft_layers=3)
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(PAGES))
        recording.clear()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES))]) as handle:
            assert await handle.draft() == {"a": PAGES}
            assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        read = recording.keys_of("read")
        drafts = [key for key in read if "draft" in key or ".d0-" in key]
        assert (len(read), len(drafts)) == (2 * PAGES, PAGES)
        pools.scramble()
        lying.lie("read", lambda key: is_of("k2")(key) and key in drafts, PageStatus.NOT_FOUND)
        async with loader.load([pools.unit("b", keys(PAGES), range(PAGES))]) as handle:
            assert await handle.draft() == {"b": 2}
            assert_outcome((await handle.report()).outcomes["b"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES), draft=False)
        pools.assert_restored(keys(2), range(2), draft=True)
        assert pools.is_zero(2) and pools.is_zero(3)
        await settle(loader)
