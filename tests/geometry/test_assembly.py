"""Groups from an engine's pool objects, and from plain tensors."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from softload.config import Layout
from softload.geometry import (
    DraftBuffers,
    DraftMismatchError,
    DraftMode,
    build_pool_group,
    mha_pool_group,
    mla_pool_group,
)
from softload.transfer import PoolName

KV = PoolName.KV
PAGE, PAGES = 4, 6


class MHATokenToKVPool:
    """The attributes that SGLang's pool of this name has, as far as they matter."""

    def __init__(self, layers: int = 3, *, page_size: int = PAGE, heads: int = 2, head_major: bool = False) -> None:
        rows = (PAGES, heads, page_size, 8) if head_major else (PAGES * page_size, heads, 8)
        self.page_size = page_size
        self.layer_num = layers
        self.k_buffer = [torch.zeros(rows, dtype=torch.bfloat16) for _ in range(layers)]
        self.v_buffer = [torch.zeros(rows, dtype=torch.bfloat16) for _ in range(layers)]
        self.k_scale_buffer = None
        self.k_data_ptrs = torch.tensor([buffer.data_ptr() for buffer in self.k_buffer])

    def get_kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_buffer[layer], self.v_buffer[layer]


class MLATokenToKVPool:
    def __init__(self, layers: int = 3, *, page_size: int = PAGE) -> None:
        self.page_size = page_size
        self.layer_num = layers
        self.kv_buffer = [torch.zeros(PAGES * page_size, 1, 12, dtype=torch.bfloat16) for _ in range(layers)]


class IndexedPool(MLATokenToKVPool):
    """Keeps an indexer as well, behind a property, as sparse-attention pools do."""

    @property
    def index_k_with_scale_buffer(self) -> list[torch.Tensor]:
        return [torch.zeros(PAGES, 8)]


def test_mha() -> None:
    kvcache = MHATokenToKVPool()
    group = build_pool_group(kvcache, PAGE)
    pool = group.pool(KV)
    assert (group.num_layers, group.page_size, group.rank_replicated) == (3, PAGE, False)
    assert [id(buffer) for buffer in pool.buffers] == [id(given) for given in kvcache.k_buffer + kvcache.v_buffer]
    assert (pool.num_pages, pool.page_bytes(0)) == (PAGES, PAGE * 2 * 8 * 2)
    (spec,) = group.specs(Layout.PAGE)[KV]
    assert [fragment.buffer for fragment in spec.fragments] == [0, 1, 2, 3, 4, 5]


def test_mha_with_a_page_in_a_row() -> None:
    pool = build_pool_group(MHATokenToKVPool(head_major=True), PAGE).pool(KV)
    assert (pool.rows_are_pages, pool.num_pages, pool.page_bytes(0)) == (True, PAGES, PAGE * 2 * 8 * 2)


def test_mla() -> None:
    group = build_pool_group(MLATokenToKVPool(), PAGE)
    assert (group.num_layers, group.rank_replicated) == (3, True)
    assert group.pool(KV).page_bytes(0) == PAGE * 12 * 2


def test_any_object_with_the_right_buffers_will_do() -> None:
    buffers = [torch.zeros(8, 1, 4)]
    assert build_pool_group(SimpleNamespace(page_size=4, layer_num=1, kv_buffer=buffers), 4).num_layers == 1


@pytest.mark.parametrize(
    ("kvcache", "got"),
    [
        (SimpleNamespace(page_size=4), "got SimpleNamespace with no buffers"),
        (5, "got int with no buffers"),
        (IndexedPool(), "got IndexedPool with index_k_with_scale_buffer, kv_buffer, derived from MLATokenToKVPool"),
        (type("PagedOtherwise", (MHATokenToKVPool,), {})(), "derived from MHATokenToKVPool"),
        (
            SimpleNamespace(page_size=4, k_buffer=[], v_buffer=[], k_scale_buffer=[]),
            "got SimpleNamespace with k_buffer, k_scale_buffer, v_buffer",
        ),
    ],
)
def test_unknown_pools_are_refused(kvcache: Any, got: str) -> None:
    known = "expected a pool of a known family, MHA/GQA (k_buffer, v_buffer); MLA (kv_buffer); "
    with pytest.raises(ValueError, match=re.escape(known)) as refused:
        build_pool_group(kvcache, PAGE)
    assert got in str(refused.value)


def test_page_size_of_the_engine_is_checked() -> None:
    with pytest.raises(ValueError, match="pool kv: expected page size 8, got 4"):
        build_pool_group(MHATokenToKVPool(), 8)


def test_missing_layers_are_refused() -> None:
    mha, mla = MHATokenToKVPool(), MLATokenToKVPool()
    mha.v_buffer.pop()
    mla.kv_buffer.pop()
    with pytest.raises(ValueError, match="expected 3 K and V buffers, one of each a layer, got 3 and 2"):
        build_pool_group(mha, PAGE)
    with pytest.raises(ValueError, match="expected 3 buffers, one a layer, got 2"):
        build_pool_group(mla, PAGE)
    with pytest.raises(ValueError, match="pool kv: expected buffers in every component, got none in 0"):
        build_pool_group(MHATokenToKVPool(0), PAGE)


def test_drafts_of_several_pools_are_packed_in_their_order() -> None:
    drafts = [MLATokenToKVPool(1), MLATokenToKVPool(1)]
    pool = build_pool_group(MLATokenToKVPool(), PAGE, draft_pools=drafts, draft_depths=[0, 1]).pool(KV)
    assert pool.num_draft_layers == 2
    assert [pool.buffers[3 + depth] is drafts[depth].kv_buffer[0] for depth in range(2)] == [True, True]


def test_sidecar_of_another_family_is_no_longer_the_same_on_every_rank() -> None:
    group = build_pool_group(MLATokenToKVPool(2), PAGE, draft_pools=[MHATokenToKVPool(5)])
    assert [pool.name for pool in group.pools] == [KV, PoolName.DRAFT]
    assert (group.num_layers, group.num_draft_layers, group.rank_replicated) == (2, 5, False)


@pytest.mark.parametrize(
    ("pools", "options", "message", "fits"),
    [
        ([MHATokenToKVPool(1, page_size=8)], {}, "draft of pool kv: expected page size 4, got 8", [DraftMode.NONE]),
        (
            [MHATokenToKVPool(1), MHATokenToKVPool(1, page_size=8)],
            {},
            "expected page size 4, got 8",
            [DraftMode.NONE],
        ),
        (
            [MHATokenToKVPool(1), MHATokenToKVPool(1)],
            {"draft_depths": [1, 0]},
            "in the order of their depths [0, 1], got [1, 0]",
            [DraftMode.NONE],
        ),
        (
            [MHATokenToKVPool(4)],
            {"draft_mode": DraftMode.PACKED},
            "at most as many layers as the target has (3), got 4",
            [DraftMode.SIDECAR, DraftMode.NONE],
        ),
        ([SimpleNamespace(page_size=4)], {}, "draft: expected a pool of a known family", [DraftMode.NONE]),
        (
            [MHATokenToKVPool(1), MLATokenToKVPool(1)],
            {},
            "draft: expected pools of one family, got MHA/GQA, MLA",
            [DraftMode.NONE],
        ),
        (
            [MHATokenToKVPool(1, head_major=True)],
            {},
            "draft: expected a token in a row as the target has, got a page",
            [DraftMode.NONE],
        ),
    ],
)
def test_drafts_that_do_not_fit(pools: list[Any], options: dict[str, Any], message: str, fits: list[DraftMode]) -> None:
    with pytest.raises(DraftMismatchError, match=re.escape(message)) as refused:
        build_pool_group(MHATokenToKVPool(), PAGE, draft_pools=pools, **options)
    assert list(refused.value.fits) == fits
    assert not build_pool_group(MHATokenToKVPool(), PAGE).has_draft  # what the caller does: go on without it


def test_a_rebuilt_engine_pool_is_noticed() -> None:
    kvcache = MLATokenToKVPool()
    group = build_pool_group(kvcache, PAGE)
    group.check_alive()
    kvcache.kv_buffer = [torch.zeros_like(buffer) for buffer in kvcache.kv_buffer]
    with pytest.raises(RuntimeError, match="pool kv: the engine's pool was rebuilt"):
        group.check_alive()


def test_plain_tensors_with_each_kind_of_draft() -> None:
    def layers(count: int) -> list[torch.Tensor]:
        return [torch.zeros(24, 2, 4) for _ in range(count)]

    assert not mha_pool_group(layers(2), layers(2), PAGE).has_draft
    both = DraftBuffers(pools={KV: (layers(1), layers(1))}, page_size=PAGE, mode=DraftMode.PACKED)
    packed = mha_pool_group(layers(2), layers(2), PAGE, draft=both, packed=False)
    assert [spec.part for spec in packed.specs(Layout.PAGE)[KV]] == ["_0", "_1"]
    assert packed.num_draft_layers == 1
    beside = DraftBuffers(pools={KV: (layers(4),)}, page_size=PAGE, mode=DraftMode.SIDECAR)
    sidecar = mla_pool_group(layers(2), PAGE, draft=beside)
    assert (sidecar.num_draft_layers, sidecar.rank_replicated) == (4, True)
    assert not mla_pool_group(layers(2), PAGE, rank_replicated=False).rank_replicated


def test_tensors_that_interleave_keys_and_values() -> None:
    """Block-major layouts come as one row a page: `[blocks, 2, block, heads, dim]`, sliced."""
    blocks = [torch.zeros(PAGES, 2, PAGE, 2, 8) for _ in range(2)]
    group = mha_pool_group([each[:, 0] for each in blocks], [each[:, 1] for each in blocks], PAGE, rows_are_pages=True)
    assert group.pool(KV).buffer_meta[0][0][1:] == (2 * PAGE * 2 * 8 * 4, PAGE * 2 * 8 * 4)
