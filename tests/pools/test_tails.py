"""Trailing windows and replicated pools, over all families that have them."""

from __future__ import annotations

import pytest
import torch

from softload import DraftPolicy, Layout, LoaderConfig, PageLoader, PageStatus, PoolName, SaveStatus, TransferUnit
from softload.geometry import DraftMode
from softload.stores import MemoryStore
from softload.testing import RecordingStore

from .conftest import KeptOpen
from .families import KV, MAMBA, SWA, Engine, build, windows_of

pytestmark = pytest.mark.asyncio

PAGES = 10
KEYS = tuple(f"page{page}" for page in range(PAGES))


def opened(store: RecordingStore, engine: Engine, **options: object) -> PageLoader:
    config = LoaderConfig(**{"landing_bytes": 4 << 20, "deadline": 20.0, "lookup_deadline": 20.0, **options})  # type: ignore[arg-type]
    return PageLoader(store, engine.group, config=config)


def recording() -> RecordingStore:
    return RecordingStore(MemoryStore(capacity=8 << 20))


def kept(memory: MemoryStore) -> RecordingStore:
    """A store for several loaders."""
    memory.open()
    return RecordingStore(KeptOpen(memory))


def rows(engine: Engine, first: int, **without: set[int]) -> dict[PoolName, list[int]]:
    """Page `p` in row `first + p` of every pool; `-1` for the pages in `without` of a source."""
    return {
        source: [-1 if page in without.get(source.name, ()) else first + page for page in range(PAGES)]
        for source in engine.sources
    }


def only(unit: TransferUnit, *pools: PoolName, partial: bool) -> TransferUnit:
    return TransferUnit(unit.request_id, tuple(c for c in unit.target if c.pool in pools), partial=partial)


@pytest.mark.parametrize(("family", "side"), [("deepseek-v4", SWA), ("mamba-mla", MAMBA), ("mamba-swa", MAMBA)])
async def test_a_tail_may_hold_side_pools_alone(family: str, side: PoolName) -> None:
    engine = build(family)
    async with opened(recording(), engine) as loader:
        engine.compute(KEYS, rows(engine, 0))
        await loader.save([engine.unit("saved", KEYS, rows(engine, 0))])
        engine.scramble(1)
        whole = engine.unit("loaded", KEYS, rows(engine, 20))
        with pytest.raises(ValueError, match="expected a kv component, got only"):
            loader.load([only(whole, side, partial=False)])
        async with loader.load([only(whole, side, partial=True)]) as load:
            for layer in range(engine.group.num_layers):
                assert (await load.layer(layer)).live == {"loaded"}
            outcome = (await load.report()).outcomes["loaded"]
    assert outcome.restored_pages == PAGES
    for pool in engine.group.pools:
        written = {20 + page for page in windows_of(PAGES)[side]} if pool.index_source is side else set()
        assert engine.changed_rows(pool, 0) == written
        assert all(engine.holds(pool, 0, KEYS[row - 20], row) for row in written)


async def test_the_lookup_of_a_part_is_refused() -> None:
    engine = build("deepseek-v4")
    async with opened(recording(), engine) as loader:
        with pytest.raises(ValueError, match="expected a kv component"):
            await loader.lookup(only(engine.unit("asked", KEYS), SWA, partial=True))


async def test_parts_that_are_saved_one_after_another_make_a_boundary() -> None:
    engine = build("mamba-swa")
    async with opened(recording(), engine) as loader:
        engine.compute(KEYS, rows(engine, 0))
        whole = engine.unit("saved", KEYS, rows(engine, 0, MAMBA=set(range(PAGES)) - {4}))
        with pytest.raises(ValueError, match="swa would be left out"):
            await loader.save([only(whole, KV, MAMBA, partial=False)])
        await loader.save([only(whole, KV, MAMBA, partial=True)])
        assert (await loader.lookup(engine.unit("asked", KEYS))).boundaries == ()
        report = await loader.save([only(whole, SWA, partial=True)])
        assert report.outcomes["saved"].saved_pages == PAGES
        assert (await loader.lookup(engine.unit("asked", KEYS))).boundaries == (5,)


async def test_a_page_without_slots_is_not_offered_to_the_store() -> None:
    """Its row would be the last one of the pool, with another page's bytes."""
    engine = build("mamba-mla")
    store = recording()
    async with opened(store, engine) as loader:
        report = await loader.save([engine.unit("saved", KEYS, rows(engine, 0, MAMBA=set(range(9))))])
        pages = report.outcomes["saved"].pages
        assert [page.page for page in pages if page.component is MAMBA] == [9]
        assert [page.page for page in pages if page.component is KV] == list(range(PAGES))
        assert report.outcomes["saved"].saved_pages == PAGES
        assert (await loader.lookup(engine.unit("asked", KEYS))).boundaries == (PAGES,)


@pytest.mark.parametrize(
    ("policy", "restored"), [(DraftPolicy.DROP, 10), (DraftPolicy.TRUNCATE, 10), (DraftPolicy.REQUIRE, 4)]
)
async def test_a_draft_of_windows_and_its_target_end_at_one_boundary(policy: DraftPolicy, restored: int) -> None:
    """The target's boundaries are 4, 8 and 10, the draft's window is lost at 8 and 10; 6 pages are too many to cut."""
    engine = build("deepseek-v4", DraftMode.SIDECAR, 2)
    memory = MemoryStore(capacity=8 << 20)
    async with opened(kept(memory), engine, draft_policy=policy, truncate_pages=5) as loader:
        missing = {0, 1, 4, 5}
        engine.compute(KEYS, rows(engine, 0))
        await loader.save([engine.unit("saved", KEYS, rows(engine, 0, SWA=missing))])
        lost = [key for key in memory._objects if "draft_swa" in key and any(f"/{KEYS[p]}/" in key for p in (6, 7, 9))]
        assert lost and not any(memory.remove(lost, force=True))
        assert (await loader.lookup(engine.unit("asked", KEYS))).boundaries == (4, 8, 9, 10)
        async with loader.load([engine.unit("loaded", KEYS, rows(engine, 20))]) as load:
            outcome = (await load.report()).outcomes["loaded"]
    assert (outcome.restored_pages, outcome.draft_pages) == (restored, 4)


async def test_a_window_that_was_stored_without_its_packed_draft_serves_the_target() -> None:
    """In the `page` layout the size tells; the draft's slots of the window are zeroed, others are left alone."""
    memory = MemoryStore(capacity=8 << 20)
    plain, packed = build("deepseek-v4"), build("deepseek-v4", DraftMode.PACKED, 2)
    async with opened(kept(memory), plain, layout=Layout.PAGE) as loader:
        plain.compute(KEYS, rows(plain, 0))
        await loader.save([plain.unit("saved", KEYS, rows(plain, 0))])
    async with opened(kept(memory), packed, layout=Layout.PAGE) as loader:
        async with loader.load([packed.unit("loaded", KEYS, rows(packed, 20))]) as load:
            outcome = (await load.report()).outcomes["loaded"]
        assert (outcome.restored_pages, outcome.draft_pages) == (PAGES, 0)
        swa = packed.group.pool(SWA)
        for index in range(len(swa.buffers)):
            assert packed.changed_rows(swa, index) == {28, 29}
            if swa.is_draft_buffer(index):
                assert not swa.page_views[index][28:30].any()
            else:
                assert all(packed.holds(swa, index, KEYS[page], 20 + page) for page in (8, 9))


async def test_one_rank_saves_what_all_ranks_hold() -> None:
    memory = MemoryStore(capacity=8 << 20)
    engine = build("dsa", DraftMode.PACKED, 2)
    assert engine.group.rank_replicated
    engine.compute(KEYS, rows(engine, 0))
    second = kept(memory)
    async with opened(second, engine, tp_rank=1) as loader:
        report = await loader.save([engine.unit("saved", KEYS, rows(engine, 0))])
        assert {page.status for page in report.outcomes["saved"].pages} == {SaveStatus.SAVED}
        assert report.bytes_saved == 0
        assert (await loader.lookup(engine.unit("asked", KEYS))).pages == 0
        async with opened(kept(memory), engine, tp_rank=0) as first:
            assert (await first.save([engine.unit("saved", KEYS, rows(engine, 0))])).bytes_saved > 0
        engine.scramble(1)
        async with loader.load([engine.unit("loaded", KEYS, rows(engine, 20))]) as load:
            outcome = (await load.report()).outcomes["loaded"]
    assert (outcome.restored_pages, outcome.draft_pages) == (PAGES, PAGES)
    pools = engine.group.pools
    assert all(engine.holds(pool, 0, key, 20 + page) for pool in pools for page, key in enumerate(KEYS))


async def test_ranks_that_hold_parts_save_for_themselves() -> None:
    memory = MemoryStore(capacity=8 << 20)
    engine = build("mamba-mla")
    assert not engine.group.rank_replicated
    engine.compute(KEYS, rows(engine, 0))
    async with opened(kept(memory), engine, tp_rank=1) as loader:
        assert (await loader.save([engine.unit("saved", KEYS, rows(engine, 0))])).bytes_saved > 0
        async with opened(kept(memory), engine, tp_rank=0) as first:
            assert (await first.lookup(engine.unit("asked", KEYS))).pages == 0


async def test_fewer_pages_than_landed_are_placed_down_to_a_boundary_whose_window_landed() -> None:
    engine = build("deepseek-v4")
    async with opened(recording(), engine) as loader:
        engine.compute(KEYS, rows(engine, 0))
        await loader.save([engine.unit("saved", KEYS, rows(engine, 0))])
        async with loader.prefetch([engine.unit("loaded", KEYS)]) as prefetch:
            assert (await prefetch.landed())["loaded"] == PAGES
            fewer = {source: torch.arange(20, 29).tolist() for source in engine.sources}
            report = await prefetch.place([engine.unit("loaded", KEYS[:9], fewer)])
    outcome = report.outcomes["loaded"]
    assert outcome.restored_pages == 0  # the window of nine pages is 7 and 8; 8 and 9 have landed
    assert PageStatus.LOADED not in {page.status for page in outcome.pages}
