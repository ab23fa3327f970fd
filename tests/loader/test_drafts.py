"""Drafts: packed and sidecar, what a lost page costs by policy, and what their slots hold."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from softload import PageLoader, PageStatus, PoolName, SaveStatus
from softload.geometry import DraftBuffers, DraftMismatchError, DraftMode, mla_pool_group
from softload.testing import HangingStore, RecordingStore

from .doubles import Held, LyingStore
from .harness import (
    LAYERS,
    MODES,
    PAGE_SIZE,
    Pools,
    arrived,
    assert_outcome,
    config,
    content,
    end_time_of,
    eventually,
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

pytestmark = pytest.mark.asyncio

drafts = pytest.mark.parametrize("draft", [DraftMode.PACKED, DraftMode.SIDECAR])
STORED_APART = [
    pytest.param(DraftMode.SIDECAR, MODES[0], id="sidecar-grouped"),
    pytest.param(DraftMode.SIDECAR, MODES[1], id="sidecar-page"),
    pytest.param(DraftMode.SIDECAR, MODES[2], id="sidecar-ranges"),
    pytest.param(DraftMode.PACKED, MODES[0], id="packed-grouped"),
]
"""Where a draft page can be lost alone."""


def is_draft_of(draft: DraftMode, mode: dict[str, str], page: str) -> Callable[[str], bool]:
    """Whether an object key is of the page's draft."""
    mark = (".d" if mode["layout"] == "grouped" else "_d") if draft is DraftMode.PACKED else "draft"
    return lambda key: is_of(page)(key) and mark in key.rsplit("/", 1)[-1].removeprefix(page)


def assert_draft(pools: Pools, page_keys: tuple[str, ...], rows: range, good: int, zeros: int) -> None:
    """The draft's slots hold its own bytes up to `good`, zeros from there on to `zeros`."""
    pools.assert_restored(page_keys[:good], rows[:good], draft=True)
    assert all(pools.is_zero(row) for row in rows[good:zeros]), "draft slots without their bytes are not zero"


@modes
@drafts
@pytest.mark.parametrize("family", ["mla", "mha"])
async def test_whole_draft(mode: dict[str, str], draft: DraftMode, family: str) -> None:
    pools = make_pools(draft=draft, family=family)
    async with opened(store(), pools, **mode) as loader:
        await put(loader, pools, keys(6))
        found = await loader.lookup(pools.unit("a", keys(8)))
        assert (found.pages, found.status) == (6, None)
        if draft is DraftMode.SIDECAR or mode["layout"] == "grouped":
            assert found.draft_pages == 6
        async with loader.load([pools.unit("a", keys(6), range(6))]) as handle:
            assert await handle.draft() == {"a": 6}
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 6)
        assert outcome.draft_pages == 6
        pools.assert_restored(keys(6), range(6))
        pools.assert_rows_kept(range(6))
        await settle(loader)


@pytest.mark.parametrize(("draft", "mode"), STORED_APART)
@pytest.mark.parametrize(
    ("policy", "truncate", "target_pages"),
    [("drop", 8, 10), ("truncate", 8, 4), ("truncate", 6, 4), ("truncate", 5, 10), ("require", 0, 4)],
)
async def test_lost_at_admission(
    draft: DraftMode, mode: dict[str, str], policy: str, truncate: int, target_pages: int
) -> None:
    """The draft's page 4 of 10 is not there, the target is whole."""
    pools = make_pools(draft=draft)
    lying = LyingStore(store())
    async with opened(lying, pools, **mode, draft_policy=policy, truncate_pages=truncate) as loader:
        await put(loader, pools, keys(10))
        lying.lie("descriptors", is_draft_of(draft, mode, "k4"), PageStatus.NOT_FOUND)
        async with loader.load([pools.unit("a", keys(10), range(10))]) as handle:
            assert (await handle.admitted())["a"] == target_pages
            assert await handle.draft() == {"a": 4}
            outcome = (await handle.report()).outcomes["a"]
        assert outcome.restored_pages == target_pages
        assert outcome.draft_pages == 4
        assert outcome.late_failure is None
        if target_pages < 10:
            assert outcome.pages[4].component == (PoolName.DRAFT if draft is DraftMode.SIDECAR else PoolName.KV)
        pools.assert_restored(keys(target_pages), range(target_pages), draft=False)
        assert_draft(pools, keys(10), range(10), 4, target_pages)
        pools.assert_rows_kept(range(10))
        assert loader.statistics().draft_dropped == (target_pages == 10)
        await settle(loader)


@pytest.mark.parametrize(("draft", "mode"), STORED_APART)
@pytest.mark.parametrize("policy", ["drop", "truncate", "require"])
@pytest.mark.parametrize("lost", [0, 5, 9])
async def test_lost_after_admission_is_a_drop(draft: DraftMode, mode: dict[str, str], policy: str, lost: int) -> None:
    pools = make_pools(draft=draft)
    lying = LyingStore(store())
    method = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    async with opened(lying, pools, **mode, draft_policy=policy) as loader:
        await put(loader, pools, keys(10))
        lying.lie(method, is_draft_of(draft, mode, f"k{lost}"), PageStatus.TRANSFER_FAILED)
        async with loader.load([pools.unit("a", keys(10), range(10))]) as handle:
            assert (await handle.admitted())["a"] == 10
            assert await handle.draft() == {"a": lost}
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 10)
        assert (outcome.draft_pages, outcome.late_failure) == (lost, None)
        pools.assert_restored(keys(10), range(10), draft=False)
        assert_draft(pools, keys(10), range(10), lost, 10)
        await settle(loader)


@modes
@pytest.mark.parametrize("policy", ["drop", "require"])
async def test_packed_draft_that_was_never_stored(mode: dict[str, str], policy: str) -> None:
    """Pages of a server without the draft serve one that has it: the target, and zeros for the draft."""
    plain = make_pools()
    with_draft = make_pools(draft=DraftMode.PACKED)
    shared = store()
    async with PageLoader(Held(shared), plain.group, config=config(**mode)) as loader:
        await put(loader, plain, keys(6))
    async with opened(shared, with_draft, **mode, draft_policy=policy) as loader:
        outcome = (await load(loader, with_draft.unit("a", keys(6), range(6))))["a"]
        assert outcome.draft_pages == 0
        assert outcome.restored_pages == (6 if policy == "drop" else 0)
        restored = outcome.restored_pages
        assert all(
            torch.equal(view[row], torch.from_numpy(content(keys(6)[row], PoolName.KV, index, view.shape[1])))
            for index, view in enumerate(with_draft.group.pools[0].page_views[:LAYERS])
            for row in range(restored)
        )
        assert all(with_draft.is_zero(row) for row in range(restored))
        with_draft.assert_rows_kept(range(restored))
        await settle(loader)


@drafts
async def test_slots_of_missed_pages_are_left_as_they_are(draft: DraftMode) -> None:
    """The engine computes them, draft and all."""
    pools = make_pools(draft=draft)
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(3))
        outcome = (await load(loader, pools.unit("a", keys(6), range(6))))["a"]
        assert (outcome.restored_pages, outcome.draft_pages) == (3, 3)
        pools.assert_rows_kept(range(3))
        outcome = (await load(loader, pools.unit("b", keys(4, "other"), range(8, 12))))["b"]
        assert (outcome.restored_pages, outcome.draft_pages) == (0, 0)
        pools.assert_rows_kept(range(3))
        await settle(loader)


async def test_zeroing_waits_for_the_engines_fence() -> None:
    pools = make_pools(draft=DraftMode.SIDECAR)
    lying = LyingStore(store())
    opens, asked = threading.Event(), threading.Event()

    def fence() -> None:
        asked.set()
        opens.wait(10)

    async with opened(lying, pools) as loader:
        await put(loader, pools, keys(4))
        lying.lie("descriptors", is_draft_of(DraftMode.SIDECAR, MODES[0], "k0"), PageStatus.NOT_FOUND)
        async with loader.load([pools.unit("a", keys(4), range(4), ready=fence)]) as handle:
            await eventually(asked.is_set)
            pools.assert_rows_kept()
            opens.set()
            await handle.report()
        assert_draft(pools, keys(4), range(4), 0, 4)
        opens.clear()
        unit = pools.unit("b", keys(4), range(8, 12), ready=lambda: opens.wait(10), deadline=0.1)
        await load(loader, unit)
        pools.assert_rows_kept(range(4))
        opens.set()


ROW_BYTES = PAGE_SIZE * 24
"""Of one page in one buffer."""


def zeroed(pools: Pools, rows: range) -> int:
    """How many of the sidecar draft's pages in these rows hold zeros, counted in every buffer."""
    views = [view for pool in pools.group.pools if pool.name is PoolName.DRAFT for view in pool.page_views]
    return sum(not view[row].any() for view in views for row in rows)


async def test_after_the_deadline_one_chunk_of_zeros_is_written_and_no_more() -> None:
    pools = make_pools(draft=DraftMode.SIDECAR)
    hanging = HangingStore(store())
    async with opened(hanging, pools, copy_chunk_bytes=3 * ROW_BYTES) as loader:
        await put(loader, pools, keys(20))
        hanging.hold("read", lambda object_keys: any("draft" in key for key in object_keys))
        async with loader.load([pools.unit("a", keys(20), range(20))]) as handle:
            await arrived(hanging, "read")
            assert (await handle.layer(LAYERS - 1)).live == {"a"}
            end_time_of(loader, "a")
            assert await handle.draft() == {"a": 0}
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 20)
        assert outcome.draft_pages == 0
        pools.assert_restored(keys(20), range(20), draft=False)
        assert zeroed(pools, range(20)) == 3
        # What is there is nobody's draft: it is not stored as one.
        report = await loader.save([pools.unit("a", keys(20), range(20))])
        draft_pages = [page for page in report.outcomes["a"].pages if page.component is PoolName.DRAFT]
        assert {page.status for page in draft_pages} == {SaveStatus.REFUSED}
        hanging.release()
        await settle(loader)


async def test_leaving_a_load_does_not_wait_for_the_zeros_of_a_long_draft() -> None:
    pools = make_pools(draft=DraftMode.SIDECAR)
    lying = LyingStore(store())
    async with opened(lying, pools, copy_chunk_bytes=ROW_BYTES) as loader:
        await put(loader, pools, keys(40))
        lying.lie("descriptors", is_draft_of(DraftMode.SIDECAR, MODES[0], "k0"), PageStatus.NOT_FOUND)
        async with loader.load([pools.unit("a", keys(40), range(40))]) as handle:
            await handle.layer(LAYERS - 1)
        assert_outcome((await handle.report()).outcomes["a"], 40)
        assert zeroed(pools, range(40)) < 80
        await settle(loader)


async def test_a_load_that_was_never_admitted_writes_no_zeros() -> None:
    pools = make_pools(draft=DraftMode.SIDECAR)
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(4))
        hanging.hold("descriptors")
        async with loader.load([pools.unit("a", keys(4), range(4), deadline=0.1)]) as handle:
            assert (await handle.admitted())["a"] == 0
            await handle.layer(LAYERS - 1)
            assert await handle.draft() == {"a": 0}
            assert_outcome((await handle.report()).outcomes["a"], 0, PageStatus.TIMED_OUT)
        pools.assert_rows_kept()
        hanging.release()
        await settle(loader)


@modes
async def test_sidecar_with_more_layers_than_the_target(mode: dict[str, str]) -> None:
    pools = make_pools(layers=2, draft=DraftMode.SIDECAR, draft_layers=7)
    async with opened(store(), pools, **mode) as loader:
        await put(loader, pools, keys(5))
        async with loader.load([pools.unit("a", keys(5), range(5))]) as handle:
            assert (await handle.layer(1)).live == {"a"}
            assert await handle.draft() == {"a": 5}
            assert_outcome((await handle.report()).outcomes["a"], 5)
        pools.assert_restored(keys(5), range(5))


async def test_packed_with_more_layers_than_the_target_is_refused_when_built() -> None:
    with pytest.raises(ValueError, match="expected at most as many layers as the target has"):
        make_pools(layers=2, draft=DraftMode.PACKED, draft_layers=3)


async def test_draft_that_does_not_fit_leaves_the_target() -> None:
    """The engine goes on without it: the error says what fits."""
    target = [torch.zeros(8 * PAGE_SIZE, 1, 16, dtype=torch.uint8) for _ in range(2)]
    draft = DraftBuffers(pools={PoolName.KV: (target[:1],)}, page_size=2 * PAGE_SIZE)
    with pytest.raises(DraftMismatchError, match="page size") as refused:
        mla_pool_group(target, PAGE_SIZE, draft=draft)
    assert refused.value.fits == (DraftMode.NONE,)
    assert mla_pool_group(target, PAGE_SIZE).num_draft_layers == 0


async def test_target_layers_do_not_wait_for_the_draft() -> None:
    pools = make_pools(draft=DraftMode.SIDECAR)
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(4))
        hanging.hold("read", lambda object_keys: any("draft" in key for key in object_keys))
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            await arrived(hanging, "read")
            for layer in range(LAYERS):
                assert (await handle.layer(layer)).live == {"a"}
            end_time_of(loader, "a")
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 4)
        assert outcome.draft_pages == 0
        assert_draft(pools, keys(4), range(4), 0, 4)
        hanging.release()
        await settle(loader)


@pytest.mark.parametrize("draft_pages", [0, 3])
async def test_fewer_draft_pages_than_target_pages(draft_pages: int) -> None:
    pools = make_pools(draft=DraftMode.SIDECAR)
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(6))
        unit = pools.unit("a", keys(6), range(6), draft_keys=keys(draft_pages))
        outcome = (await load(loader, unit))["a"]
        assert_outcome(outcome, 6)
        assert outcome.draft_pages == draft_pages
        pools.assert_restored(keys(draft_pages), range(draft_pages))


@pytest.mark.parametrize("policy", ["drop", "truncate", "require"])
async def test_unit_without_a_draft_in_a_group_that_has_one(policy: str) -> None:
    pools = make_pools(draft=DraftMode.SIDECAR)
    recording = RecordingStore(store())
    async with opened(recording, pools, draft_policy=policy) as loader:
        await put(loader, pools, keys(6))
        recording.clear()
        pools.has_sidecar = False
        outcome = (await load(loader, pools.unit("a", keys(6), range(6))))["a"]
        assert_outcome(outcome, 6)
        assert outcome.draft_pages == 0
        pools.assert_rows_kept(draft=True)
        assert not any("draft" in key for key in recording.keys_of("read"))


@pytest.mark.parametrize("draft", [DraftMode.PACKED, DraftMode.SIDECAR])
async def test_prefetched_draft(draft: DraftMode) -> None:
    pools = make_pools(draft=draft)
    lying = LyingStore(store())
    async with opened(lying, pools) as loader:
        await put(loader, pools, keys(6))
        lying.lie("read", is_draft_of(draft, MODES[0], "k3"), PageStatus.NOT_FOUND)
        async with loader.prefetch([pools.unit("a", keys(6))]) as handle:
            landed = await handle.landed()
            assert (landed["a"], landed.draft_pages["a"]) == (6, 3)
            outcome = (await handle.place([pools.unit("a", keys(6), range(6))])).outcomes["a"]
        assert_outcome(outcome, 6)
        assert outcome.draft_pages == 3
        pools.assert_restored(keys(6), range(6), draft=False)
        assert_draft(pools, keys(6), range(6), 3, 6)
        await settle(loader)
