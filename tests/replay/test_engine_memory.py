"""Shapes, pools, the allocator, and what verification tells apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softload.replay.engine_memory import EngineMemory, PageAllocator, Verification
from softload.replay.shapes import SHAPES, DraftKind, build_pools, find_shape
from softload.transfer import PoolName

KEYS = tuple(f"{number:016x}" for number in range(6))
MINI = SHAPES["mini"]


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.supported])
@pytest.mark.parametrize("draft", DraftKind)
def test_pools_have_the_shape(name: str, draft: DraftKind) -> None:
    shape = SHAPES[name]
    pools = build_pools(shape, 2, draft)
    kv = pools.pool(PoolName.KV)
    target = [kv.page_bytes(i) for i in range(len(kv.buffers)) if not kv.is_draft_buffer(i)]
    assert sum(target) == shape.page_bytes
    assert pools.num_layers == shape.num_layers
    assert pools.page_size == shape.page_size
    assert shape.pages_per_block * shape.page_size == 512
    assert pools.has_draft is (draft is not DraftKind.NONE)
    assert len(shape.page_keys(7)) == len(set(shape.page_keys(7))) == shape.pages_per_block


def test_mini_is_32_kib_a_page() -> None:
    assert (MINI.num_layers, MINI.page_size, MINI.page_bytes) == (4, 512, 32 << 10)


def test_shapes_that_cannot_be_used_are_named() -> None:
    with pytest.raises(ValueError, match="shape: expected one of mini, llama-3.1-8b, .*, got 'gpt'"):
        find_shape("gpt")
    for name in ("deepseek-v3.2", "glm-5.2", "dsv4-flash"):
        with pytest.raises(ValueError, match=f"'{name}' needs pool families of a later release"):
            find_shape(name)
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
    assert pages is not None and memory.draft is not None
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
