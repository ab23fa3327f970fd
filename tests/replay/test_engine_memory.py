"""Shapes, pools, the allocator, and what verification tells apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softload.replay.contents import POISON
from softload.replay.engine_memory import EngineMemory, PageAllocator, Verification
from softload.replay.shapes import SHAPES, DraftKind, build_pools, find_shape
from softload.transfer import PoolName

KEYS = tuple(f"{number:016x}" for number in range(6))
MINI = SHAPES["mini"]


@pytest.mark.parametrize("name", [*SHAPES, "mini/4", "glm-5.2/16", "dsv4-flash/64"])
@pytest.mark.parametrize("draft", DraftKind)
def test_pools_have_the_shape(name: str, draft: DraftKind) -> None:
    shape = find_shape(name)
    pools = build_pools(shape, 2, draft)
    target = [
        pool.page_bytes(i)
        for pool in pools.target_pools
        for i in range(len(pool.buffers))
        if not pool.is_draft_buffer(i)
    ]
    assert sum(target) == shape.page_bytes
    assert pools.num_layers == shape.num_layers
    assert pools.page_size == shape.page_size
    assert shape.pages_per_block * shape.page_size == 512
    assert pools.has_draft is (draft is not DraftKind.NONE)
    assert len(shape.page_keys(7)) == len(set(shape.page_keys(7))) == shape.pages_per_block


def test_sizes_are_those_of_the_models() -> None:
    """`shapes.md`: 998,208 bytes a page of DeepSeek V4 besides its window and states."""
    flash = build_pools(SHAPES["dsv4-flash"], 1)
    kv = [pool for pool in flash.pools if pool.index_source is PoolName.KV]
    assert sum(pool.page_bytes(i) for pool in kv for i in range(len(pool.buffers))) == 998_208
    assert [len(pool.buffers) for pool in kv] == [21, 21, 20]
    assert flash.pool(PoolName.SWA).page_bytes(0) == 149_760
    glm = build_pools(SHAPES["glm-5.2"], 1)
    assert [len(pool.buffers) for pool in glm.pools] == [78, 21]
    assert list(glm.pool(PoolName.INDEXER).layer_mapping)[:5] == [0, 1, 2, 6, 10]
    assert SHAPES["deepseek-v3.2"].page_bytes == 61 * (41_984 + 8_448)


def test_mini_is_32_kib_a_page() -> None:
    assert (MINI.num_layers, MINI.page_size, MINI.page_bytes) == (4, 512, 32 << 10)


def test_shapes_that_cannot_be_used_are_named() -> None:
    with pytest.raises(ValueError, match="shape: expected one of mini, llama-3.1-8b, .*, got 'gpt'"):
        find_shape("gpt")
    with pytest.raises(ValueError, match="num_pages: expected at least 1, got 0"):
        build_pools(MINI, 0)


@given(st.lists(st.integers(0, 12), max_size=30))
def test_allocator_never_gives_a_page_twice(counts: list[int]) -> None:
    allocator = PageAllocator(20)
    held: list[np.ndarray] = []
    for count in counts:
        pages = allocator.allocate(count)
        if pages is None:
            assert count > allocator.free
            if held:
                allocator.release(held.pop(0))
        else:
            held.append(pages)
        out = np.concatenate(held) if held else np.empty(0, dtype=np.int64)
        assert len(set(out.tolist())) == len(out) == allocator.allocated
    for pages in held:
        allocator.release(pages)
    assert allocator.allocated == 0
    everything = allocator.allocate(20)
    assert everything is not None and sorted(everything.tolist()) == list(range(20))


def test_allocator_refuses_more_than_is_out() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    assert pages is not None
    with pytest.raises(ValueError, match="expected at most 2 pages to come back, got 4"):
        allocator.release(np.arange(4))


@pytest.mark.parametrize("draft", DraftKind)
def test_computed_pages_verify(draft: DraftKind) -> None:
    memory = EngineMemory(build_pools(MINI, 16, draft), draft)
    pages = memory.allocator.allocate(len(KEYS))
    assert pages is not None
    everything = memory.verify(pages, KEYS, len(KEYS), 0)
    assert everything.wrong_pages == len(KEYS)  # poisoned
    memory.compute(pages, KEYS)
    assert memory.verify(pages, KEYS, len(KEYS), 0) == Verification()
    memory.poison(pages[:1])
    assert memory.verify(pages, KEYS, len(KEYS), 0).wrong_pages == 1


@pytest.mark.parametrize("draft", [DraftKind.PACKED, DraftKind.SIDECAR])
def test_draft_slots_hold_their_bytes_then_zeros(draft: DraftKind) -> None:
    memory = EngineMemory(build_pools(MINI, 16, draft), draft)
    pages = memory.allocator.allocate(len(KEYS))
    assert pages is not None
    memory.compute(pages, KEYS)
    views, rows = draft_rows(memory, pages)
    for view in views:
        view[rows[2:4]] = 0
    assert memory.verify(pages, KEYS, 2, 4) == Verification()
    assert memory.verify(pages, KEYS, 3, 4).wrong_pages == 1  # zeros where the draft should be
    assert memory.verify(pages, KEYS, 1, 4).wrong_pages == 1  # the draft where zeros should be
    views[0][rows[3], 17] = 1
    assert memory.verify(pages, KEYS, 2, 4) == Verification(1, 1)


def draft_rows(memory: EngineMemory, pages: np.ndarray) -> tuple[list[torch.Tensor], np.ndarray]:
    unit = memory.unit("r", KEYS, pages)
    if unit.draft is None:
        pool = memory.pools.pool(PoolName.KV)
        rows = pages
    else:
        pool = memory.pools.pool(PoolName.DRAFT)
        assert unit.draft[0].slots is not None
        rows = unit.draft[0].slots[:: memory.pools.page_size].numpy() // memory.pools.page_size
        assert rows.tolist() != pages.tolist()
    return [view for index, view in enumerate(pool.page_views) if pool.is_draft_buffer(index)], rows


@pytest.mark.parametrize("draft", DraftKind)
def test_units_resolve_to_their_pages(draft: DraftKind) -> None:
    memory = EngineMemory(build_pools(MINI, 16, draft), draft)
    pages = memory.allocator.allocate(len(KEYS))
    assert pages is not None
    unit = memory.unit("r", KEYS, pages)
    (resolved,) = memory.pools.resolve(unit.target)
    assert resolved.rows is not None and resolved.rows.tolist() == pages.tolist()
    assert memory.pools.resolve(memory.unit("r", KEYS).target)[0].rows is None
    assert (unit.draft is not None) is (draft is DraftKind.SIDECAR)


@pytest.mark.parametrize("draft", DraftKind)
def test_windows_hold_what_a_prefix_needs_and_nothing_else(draft: DraftKind) -> None:
    memory = EngineMemory(build_pools(find_shape("dsv4-flash/256"), 16, draft), draft)
    pages = memory.allocator.allocate(len(KEYS))
    assert pages is not None
    memory.compute(pages, KEYS)
    swa = memory.pools.pool(PoolName.SWA)
    by_source = {
        each.pool.index_source: each.rows
        for each in memory.pools.resolve(memory.unit("r", KEYS, pages).target)
        if each.rows is not None
    }
    assert by_source[PoolName.KV].tolist() == pages.tolist()
    rows = by_source[PoolName.SWA]
    assert rows.tolist() != pages.tolist()
    # Four pages were restored: the window is the fourth, and the three before it are as they were.
    assert memory.verify(pages, KEYS, 0 if draft is DraftKind.NONE else 4, 4).wrong_pages == 3
    for pool in memory.pools.pools:
        if pool.index_source is PoolName.SWA:
            each = rows
            if pool.name.is_draft:
                (resolved,) = memory.pools.resolve_draft(memory.unit("r", KEYS, pages).draft or ())
                assert resolved.rows is not None
                each = resolved.rows
            for view in pool.page_views:
                view[each[:3]] = POISON
    assert memory.verify(pages, KEYS, 0 if draft is DraftKind.NONE else 4, 4) == Verification()
    swa.page_views[0][rows[1], 5] = 1
    assert memory.verify(pages, KEYS, 0 if draft is DraftKind.NONE else 4, 4) == Verification(1, 1)


def test_windows_are_stored_where_prefixes_end() -> None:
    memory = EngineMemory(build_pools(find_shape("dsv4-flash/256"), 16), DraftKind.NONE)
    pages = memory.allocator.allocate(5)
    assert pages is not None
    resolved = memory.pools.resolve(memory.unit("r", KEYS[:5], pages, saved_from=3).target)
    kept = {each.pool.index_source: (each.rows >= 0).tolist() for each in resolved if each.rows is not None}
    # Pages 3 to 7 of a prompt: every second one ends a window that is kept, and the last one does.
    assert kept == {PoolName.KV: [True] * 5, PoolName.SWA: [True, False, True, False, True]}
