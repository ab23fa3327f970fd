"""Every family in every layout with every kind of draft: saved, loaded into other slots, and nothing else touched."""

from __future__ import annotations

import itertools

import pytest
import xxhash

from softload import Layout, LoaderConfig, PageLoader, PageStatus, PoolName, ReadMode, SaveStatus
from softload.geometry import DraftMode

from .conftest import KeptOpen
from .families import DRAFTS, FAMILIES, KV, MAMBA, SWA, Engine, build, shuffled, windows_of

pytestmark = [pytest.mark.asyncio, pytest.mark.mooncake]

PAGES = 10
LAYOUTS = ("grouped", "page-whole", "page-ranges")
CASES = [
    pytest.param(family, mode, min(layers, most), layout, id=f"{family}-{name}-{layout}")
    for (family, name), layout in itertools.product(itertools.product(FAMILIES, DRAFTS), LAYOUTS)
    for mode, layers in [DRAFTS[name]]
    for most in [FAMILIES[family].most_packed if mode is DraftMode.PACKED else layers]
    if most or mode is DraftMode.NONE
]


def config(layout: str, namespace: str) -> LoaderConfig:
    name, _, mode = layout.partition("-")
    return LoaderConfig(
        layout=Layout(name),
        read_mode=ReadMode(mode or "auto"),
        namespace=namespace,
        landing_bytes=4 << 20,
        deadline=20.0,
        lookup_deadline=20.0,
    )


def rows_of(engine: Engine, seed: int, boundaries: set[int] | None = None) -> dict[PoolName, list[int]]:
    """Rows by index source: other ones in each; recurrent states only where a prefix ends."""
    rows = {source: shuffled(seed + at, PAGES) for at, source in enumerate(engine.sources)}
    if MAMBA in rows and boundaries is not None:
        rows[MAMBA] = [row if page + 1 in boundaries else -1 for page, row in enumerate(rows[MAMBA])]
    if SWA in rows and boundaries is not None:
        kept = {page for boundary in boundaries for page in windows_of(boundary)[SWA]}
        rows[SWA] = [row if page in kept else -1 for page, row in enumerate(rows[SWA])]
    return rows


@pytest.mark.parametrize(("family", "mode", "layers", "layout"), CASES)
async def test_round_trip(
    store: KeptOpen, request: pytest.FixtureRequest, family: str, mode: DraftMode, layers: int, layout: str
) -> None:
    engine = build(family, mode, layers)
    unique = xxhash.xxh3_64_hexdigest(request.node.name.encode())
    keys = [f"{unique}{page}" for page in range(PAGES)]
    trailing = any(source is not KV for source in engine.sources)
    boundary = 8 if trailing else PAGES
    async with PageLoader(store, engine.group, config=config(layout, unique)) as loader:
        saved_at = rows_of(engine, 1, {4, 8})
        engine.compute(keys, saved_at)
        report = (await loader.save([engine.unit("saved", keys, saved_at)])).outcomes["saved"]
        assert {page.status for page in report.pages} == {SaveStatus.SAVED}
    engine.scramble(2)
    # Another loader: its landing memory has seen none of these bytes.
    async with PageLoader(store, engine.group, config=config(layout, unique)) as loader:
        found = await loader.lookup(engine.unit("asked", keys))
        assert found.boundaries == ((4, 8) if trailing else tuple(range(1, PAGES + 1)))
        loaded_at = rows_of(engine, 3)
        async with loader.load([engine.unit("loaded", keys, loaded_at)]) as load:
            outcome = (await load.report()).outcomes["loaded"]
    assert outcome.restored_pages == boundary
    assert outcome.draft_pages == (boundary if mode is not DraftMode.NONE else 0)
    assert {page.status for page in outcome.pages[:boundary]} == {PageStatus.LOADED}
    needed = windows_of(boundary)
    for pool in engine.group.pools:
        rows = loaded_at[pool.index_source]
        pages = needed[pool.index_source]
        for index in range(len(pool.buffers)):
            wrong = [page for page in pages if not engine.holds(pool, index, keys[page], rows[page])]
            assert not wrong, f"{pool.name}, buffer {index}: wrong bytes on pages {wrong}"
            assert engine.changed_rows(pool, index) == {rows[page] for page in pages}
