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
    lending_store,
    load,
    make_pools,
    opened,
    put,
    settle,
    store,
)
from .test_direct_reads import Gate, bytes_of, put_object, small_runs  # noqa: F401

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


@pytest.mark.parametrize("again", [False, True], ids=["gone", "stored again elsewhere"])
@pytest.mark.parametrize("part", ["g0", "g1-3"])
async def test_an_object_of_several_groups_that_is_replaced_where_the_store_lends_it(part: str, again: bool) -> None:
    """It is copied for each group of its layers, and all of them are proven, and brought anew, for themselves."""
    pools = make_pools(pages=3 * PAGES, width=WIDTH)
    recording = RecordingStore(memory := lending_store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(PAGES))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            name = "kv." + part
            key, other = (next(k for k in memory._objects if is_of(page)(k) and name in k) for page in ("k2", "k0"))
            (before,) = memory.descriptors([key])
            data, foreign = bytes_of(memory, key).copy(), bytes_of(memory, other).copy()
            assert memory.remove([key], force=True) == [0]
            put_object(memory, "another", foreign)
            assert memory.descriptors(["another"]) == [before]
            if again:
                put_object(memory, key, data)
            gate.opens.set()
            outcome = (await handle.report()).outcomes["a"]
        restored = PAGES if again else 2
        assert_outcome(outcome, restored, None if again else PageStatus.NOT_FOUND)
        pools.assert_restored(keys(restored), range(restored))
        pools.assert_rows_kept(range(PAGES))
        assert set(recording.keys_of("read")) == {key}
        await settle(loader)


async def test_an_object_of_several_groups_is_read_past_the_lease_of_what_is_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = make_pools(pages=3 * PAGES, width=WIDTH)
    recording = RecordingStore(lending_store(lease=5.0))
    async with opened(recording, pools) as loader:
        assert loader._context is not None
        now = 1000.0
        monkeypatch.setattr(loader._context.lender, "clock", lambda: now)
        await put(loader, pools, keys(PAGES))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            now += 5.0
            gate.opens.set()
            assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        assert len(recording.keys_of("read")) == 2 * PAGES
        assert loader.statistics().bytes_direct == 0
        await settle(loader)


async def test_an_object_of_several_groups_that_is_lent_counts_once() -> None:
    pools = make_pools(pages=3 * PAGES, width=WIDTH)
    recording = RecordingStore(memory := lending_store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(PAGES))
        stored = sum(found.size for found in memory._objects.values())
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES))]) as handle:
            report = await handle.report()
        assert_outcome(report.outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        assert recording.count("read") == 0
        assert report.bytes_loaded == loader.statistics().bytes_direct == stored
        await settle(loader)
