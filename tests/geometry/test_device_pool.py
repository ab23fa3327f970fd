"""Device pools: pages of bytes, rows of slots, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softload.geometry import DevicePool
from softload.transfer import PoolName

KV = PoolName.KV


def token_slots(*pages: int, page_size: int = 4) -> torch.Tensor:
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def test_page_views_address_the_pages_bytes(make_pool: Any) -> None:
    pool = make_pool(widths=(3, 5), num_components=2)
    assert [view.shape for view in pool.page_views] == [(8, 24), (8, 40), (8, 24), (8, 40)]
    for index, (buffer, view) in enumerate(zip(pool.buffers, pool.page_views, strict=True)):
        assert view.data_ptr() == buffer.data_ptr()
        view[6] = torch.arange(pool.page_bytes(index), dtype=torch.uint8)
        expected = torch.arange(pool.page_bytes(index), dtype=torch.uint8).view(torch.float16)
        assert torch.equal(buffer[24:28].reshape(-1).view(torch.int16), expected.view(torch.int16))
        assert not buffer[:24].any() and not buffer[28:].any()


@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn, torch.bool]),
    rows_are_pages=st.booleans(),
    page_size=st.integers(1, 5),
    pages=st.integers(1, 6),
    tail=st.lists(st.integers(1, 4), max_size=3),
    spare_rows=st.integers(0, 3),
)
def test_page_views_are_the_rows_of_each_page(
    dtype: torch.dtype, rows_are_pages: bool, page_size: int, pages: int, tail: list[int], spare_rows: int
) -> None:
    per_page = 1 if rows_are_pages else page_size
    rows = pages * per_page + (spare_rows % per_page)
    buffer = torch.zeros(rows, *tail, dtype=dtype)
    raw = buffer.view(torch.uint8) if tail else buffer.reshape(rows, 1).view(torch.uint8)
    raw.reshape(-1).copy_(torch.arange(buffer.nbytes) % 251)
    pool = DevicePool(KV, KV, [[buffer]], {0: 0}, page_size, rows_are_pages)
    assert pool.num_pages == pages
    expected = raw.reshape(rows, -1)[: pages * per_page].reshape(pages, -1)
    assert torch.equal(pool.page_views[0], expected)
    assert pool.buffer_meta[0][0] == (buffer.data_ptr(), expected.shape[1] // per_page, pool.page_bytes(0))


def test_rows_of_pages_may_have_gaps() -> None:
    """A layout that interleaves K and V, `[pages, 2, ...]`, is two pools' components over one tensor."""
    both = torch.arange(6 * 2 * 4, dtype=torch.int32).reshape(6, 2, 4)
    pool = DevicePool(KV, KV, [[both[:, 0]], [both[:, 1]]], {0: 0}, 4, True)
    assert pool.buffer_meta[1][0] == (both.data_ptr() + 16, 32, 16)
    assert torch.equal(pool.page_views[1][5].view(torch.int32), both[5, 1])


def test_num_pages_is_the_shortest_buffers() -> None:
    pool = DevicePool(KV, KV, [[torch.zeros(16, 2), torch.zeros(11, 2)]], {0: 0, 1: 1}, 4, False)
    assert pool.num_pages == 2
    assert all(view.shape[0] == 2 for view in pool.page_views)


@pytest.mark.parametrize(
    ("rows_are_pages", "slots", "pages", "expected"),
    [
        (False, token_slots(3, 0, 3), 3, [3, 0, 3]),
        (True, token_slots(3, 0), 2, [3, 0]),  # an indexer, addressed by KV's token slots
        (True, torch.tensor([7, 2]), 2, [7, 2]),  # state of one row a page
        (False, torch.tensor([], dtype=torch.int64), 0, []),
        (True, token_slots(1).to(torch.int32), 1, [1]),
    ],
)
def test_rows(make_pool: Any, rows_are_pages: bool, slots: torch.Tensor, pages: int, expected: list[int]) -> None:
    rows = make_pool(rows_are_pages=rows_are_pages).rows(slots, pages)
    assert rows.dtype == np.int64
    assert rows.tolist() == expected


def test_rows_do_not_change_with_the_engines_slots(make_pool: Any) -> None:
    slots = torch.tensor([7, 2])
    rows = make_pool(rows_are_pages=True).rows(slots, 2)
    slots.zero_()
    assert rows.tolist() == [7, 2]


@pytest.mark.parametrize(
    ("rows_are_pages", "slots", "pages", "message"),
    [
        (False, torch.arange(6), 2, "pool kv: expected 8 token slots for 2 pages of 4 tokens, got 6 slots"),
        (False, torch.tensor([0, 4]), 2, "pool kv: expected 8 token slots for 2 pages of 4 tokens, got 2 slots"),
        (True, torch.arange(6), 2, "pool kv: expected 8 token slots or 2 rows for 2 pages of 4 tokens, got 6"),
        (False, torch.arange(4), 0, "expected 0 token slots for 0 pages"),
        (False, torch.arange(2, 6), 1, "pool kv: expected page 0 to start at a multiple of 4, got slot 2"),
        (
            False,
            torch.tensor([0, 1, 2, 3, 8, 9, 11, 10]),
            2,
            "pool kv: expected contiguous slots within page 1, got 11 at token 2 of the page that starts at 8",
        ),
        (False, torch.arange(32, 36), 1, "pool kv: expected page rows in [0, 8), got 8 for page 0"),
        (False, torch.arange(-4, 0), 1, "pool kv: expected page rows in [0, 8), got -1 for page 0"),
        (True, torch.tensor([3, -1]), 2, "pool kv: expected page rows in [0, 8), got -1 for page 1"),
        (False, torch.zeros(4), 1, "pool kv: expected one-dimensional integer slots, got torch.float32 of (4,)"),
        (False, torch.zeros(1, 4, dtype=torch.int64), 1, "got torch.int64 of (1, 4)"),
    ],
)
def test_rows_refuses(make_pool: Any, rows_are_pages: bool, slots: torch.Tensor, pages: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_pool(rows_are_pages=rows_are_pages).rows(slots, pages)


@given(pages=st.lists(st.integers(0, 7), max_size=12), page_size=st.integers(1, 6))
def test_rows_inverts_token_slots(pages: list[int], page_size: int) -> None:
    pool = DevicePool(KV, KV, [[torch.zeros(8 * page_size, 2)]], {0: 0}, page_size, False)
    slots = token_slots(*pages, page_size=page_size) if pages else torch.empty(0, dtype=torch.int64)
    assert pool.rows(slots, len(pages)).tolist() == pages


def buffers(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in shapes]


def strided(rows: int, width: int, stride: int) -> torch.Tensor:
    return torch.zeros(rows * max(stride, width)).as_strided((rows, width), (stride, 1))


@pytest.mark.parametrize(
    ("components", "rows_are_pages", "message"),
    [
        ([], False, "pool kv: expected at least one component, got none"),
        ([[], []], False, "pool kv: expected buffers in every component, got none in 0"),
        ([buffers((8, 2)), buffers((8, 2), (8, 2))], False, "equally many buffers in every component, got [1, 2]"),
        ([[torch.zeros(())]], False, "pool kv: buffer 0: expected rows with bytes, got shape ()"),
        ([[torch.zeros(8, 0)]], False, "pool kv: buffer 0: expected rows with bytes, got shape (8, 0)"),
        ([[torch.zeros(3, 2)]], False, "expected rows for at least one page of 4 tokens, got 3 rows"),
        ([[torch.zeros(8, 2), torch.zeros(8, 2, device="meta")]], False, "expected all buffers on cpu, got meta"),
        # State views over a buffer whose rows, or whose pages, are not contiguous bytes.
        (
            [[torch.zeros(8, 4)[:, ::2]]],
            True,
            "expected every row to be contiguous, got shape (8, 2) with strides (4, 2)",
        ),
        ([[torch.zeros(2, 8).T]], False, "expected every row to be contiguous, got shape (8, 2)"),
        ([[torch.zeros(8, 4)[:, :2]]], False, "the 4 rows of a page to be contiguous, got rows of 2 elements every 4"),
        ([[torch.zeros(1, 2).expand(8, 2)]], True, "expected rows that do not overlap, got 2 elements every 0"),
        ([[strided(8, 4, 2)]], True, "expected rows that do not overlap, got 4 elements every 2"),
    ],
)
def test_refuses_buffers(components: list[list[torch.Tensor]], rows_are_pages: bool, message: str) -> None:
    mapping = {layer: layer for layer in range(max((len(c) for c in components), default=0))}
    with pytest.raises(ValueError, match=re.escape(message)):
        DevicePool(KV, KV, components, mapping, 4, rows_are_pages)


def test_refuses_what_is_no_tensor() -> None:
    wrong: Any = [[np.zeros((8, 2))]]
    with pytest.raises(TypeError, match=r"pool kv: buffer 0: expected a torch.Tensor, got ndarray"):
        DevicePool(KV, KV, wrong, {0: 0}, 4, False)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({0: 0, 1: 2}, "pool kv: layer 1: expected buffer indices in [0, 2), got 2"),
        ({0: 0, 1: -1}, "pool kv: layer 1: expected buffer indices in [0, 2), got -1"),
        ({-1: 0, 1: 1}, "pool kv: expected transfer layers from 0, got -1"),
        ({0: (0, 1), 1: 1}, "expected every buffer in one transfer layer, got buffer 1 in layers 0 and 1"),
        ({0: 0}, "pool kv: expected a transfer layer for every buffer, got none for [1]"),
        ({}, "got none for [0, 1]"),
        ({0: (), 1: (0, 1)}, "pool kv: expected buffers for transfer layer 0, got none"),
    ],
)
def test_refuses_layer_mappings(make_pool: Any, mapping: dict[int, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_pool(layer_mapping=mapping)


def test_refuses_a_page_of_no_tokens(make_pool: Any) -> None:
    with pytest.raises(ValueError, match="pool kv: expected a page size of at least 1 token, got 0"):
        make_pool(page_size=0)


def test_packed_draft_buffers(make_pool: Any) -> None:
    pool = make_pool(widths=(4, 4, 6, 6), num_components=2, layer_mapping={0: (0, 2), 1: (1, 3)}, num_draft_layers=2)
    assert pool.layer_buffers(0) == (0, 4)
    assert pool.draft_buffers(1) == (3, 7)
    assert [pool.is_draft_buffer(index) for index in range(8)] == [False, False, True, True] * 2
    assert [pool.layer_of(index) for index in range(8)] == [0, 1, 0, 1] * 2
    assert pool.num_layers == 2


def test_layers_without_buffers(make_pool: Any) -> None:
    pool = make_pool(PoolName.INDEXER, layer_mapping={2: 0, 5: 1})
    assert pool.layer_buffers(2) == (0,)
    assert pool.layer_buffers(3) == ()
    assert pool.num_layers == 6


@pytest.mark.parametrize(
    ("name", "widths", "mapping", "num_draft_layers", "message"),
    [
        # More draft layers than target layers.
        (KV, 5, {0: (0, 2), 1: (1, 3), 2: 4}, 3, "at most as many packed draft layers as target layers (2), got 3"),
        (KV, 2, {0: 0, 1: 1}, 2, "expected 0 to 1 packed draft layers among 2 buffers, got 2"),
        (KV, 2, {0: 0, 1: 1}, -1, "expected 0 to 1 packed draft layers among 2 buffers, got -1"),
        # Another order than the depths'.
        (KV, 4, {0: (0, 3), 1: (1, 2)}, 2, "expected draft depth 0 (buffer 2) on transfer layer 0, got it on layer 1"),
        # A sparse mapping without the depth's layer.
        (KV, 3, {1: (0, 2), 3: 1}, 1, "expected draft depth 0 (buffer 2) on transfer layer 0, got it on layer 1"),
        (PoolName.DRAFT, 2, {0: (0, 1)}, 1, "pool draft: expected no packed draft in a draft pool, got 1 layers"),
    ],
)
def test_refuses_packed_drafts(
    make_pool: Any, name: PoolName, widths: int, mapping: dict[int, Any], num_draft_layers: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_pool(name, widths=(4,) * widths, layer_mapping=mapping, num_draft_layers=num_draft_layers)


def test_the_pool_keeps_its_tensors_alive() -> None:
    listed = [torch.full((8, 2), 7.0)]
    pool = DevicePool(KV, KV, [list(listed)], {0: 0}, 4, False)
    listed.clear()
    pool.check_alive()
    assert torch.equal(pool.page_views[0][1].view(torch.float32), torch.full((8,), 7.0))


def test_notices_a_tensor_that_moved() -> None:
    buffer = torch.zeros(8, 2)
    pool = DevicePool(KV, KV, [[buffer]], {0: 0}, 4, False)
    pool.check_alive()
    buffer.set_(torch.zeros(8, 2))  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match=r"pool kv: buffer 0 has moved: expected address 0x\w+, got 0x\w+"):
        pool.check_alive()


def test_notices_a_pool_that_was_rebuilt() -> None:
    engine = {"k": [torch.zeros(8, 2)], "v": [torch.zeros(8, 2)]}
    pool = DevicePool(KV, KV, lambda: (engine["k"], engine["v"]), {0: 0}, 4, False)
    pool.check_alive()
    engine["v"] = [torch.zeros(8, 2)]
    with pytest.raises(RuntimeError, match=r"pool kv: the engine's pool was rebuilt: expected buffer 1 at 0x\w+"):
        pool.check_alive()
    engine["v"] = []
    with pytest.raises(RuntimeError, match="expected 2 buffers, got 1"):
        pool.check_alive()


def test_geometry_depends_on_meaning_not_on_size(make_pool: Any) -> None:
    text = make_pool().geometry(draft=False)
    assert make_pool(pages=20).geometry(draft=False) == text
    for other in (
        make_pool(widths=(4, 6)),
        make_pool(layer_mapping={0: 0, 2: 1}),
        make_pool(layer_mapping={0: 1, 1: 0}),
        make_pool(page_size=2),
        make_pool(packed=False),
        make_pool(rows_are_pages=True),
        make_pool(num_components=2),
        make_pool(PoolName.SWA),
    ):
        assert other.geometry(draft=False) != text


def test_repr(make_pool: Any) -> None:
    assert repr(make_pool(num_components=2)) == "<DevicePool kv from kv: 2x2 buffers of 8 pages, page 4>"
