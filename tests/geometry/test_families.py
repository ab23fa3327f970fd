"""Families of several pools, from what an engine has: what belongs where, and what is refused at start."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from softload.config import Layout
from softload.geometry import (
    DevicePoolGroup,
    DraftBuffers,
    DraftMismatchError,
    DraftMode,
    HybridLayers,
    build_pool_group,
    deepseek_v4_pool_group,
    dsa_pool_group,
    hybrid_pool_group,
    ring_view,
)
from softload.transfer import ComponentTransfer, HitPolicy, PoolName

from .engine_pools import (
    PAGE,
    PAGES,
    DeepSeekV4TokenToKVPool,
    DSATokenToKVPool,
    HiSparseC4DevicePool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SinglePool,
    SWAKVPool,
    state_pool,
)

KV, INDEXER, SWA, MAMBA = PoolName.KV, PoolName.INDEXER, PoolName.SWA, PoolName.MAMBA
C4, C4_INDEXER, C128 = PoolName.C4, PoolName.C4_INDEXER, PoolName.C128
C4_STATE, C4_INDEXER_STATE = PoolName.C4_STATE, PoolName.C4_INDEXER_STATE


def same(tensors: Any, others: Any) -> bool:
    return [each.data_ptr() for each in tensors] == [each.data_ptr() for each in others]


# -- DSA


def test_dsa() -> None:
    kvcache = DSATokenToKVPool()
    group = build_pool_group(kvcache, PAGE)
    assert [pool.name for pool in group.pools] == [KV, INDEXER]
    assert (group.num_layers, group.rank_replicated) == (4, True)
    kv, indexer = group.pools
    assert (kv.rows_are_pages, indexer.rows_are_pages, indexer.index_source) == (False, True, KV)
    assert same(kv.buffers, kvcache.kv_buffer) and same(indexer.buffers, kvcache.index_k_with_scale_buffer)
    slots = torch.arange(2 * PAGE, 4 * PAGE)
    assert [each.rows.tolist() for each in group.resolve([ComponentTransfer(KV, ("a", "b"), slots)])] == [[2, 3]] * 2  # type: ignore[union-attr]


def test_dsa_with_an_indexer_in_some_layers() -> None:
    kvcache = DSATokenToKVPool(6, without=(1, 3, 4))
    group = build_pool_group(kvcache, PAGE)
    indexer = group.pool(INDEXER)
    assert dict(indexer.layer_mapping) == {0: (0,), 2: (1,), 5: (2,)}
    assert [spec.layers for spec in group.specs(Layout.GROUPED)[INDEXER]] == [(0, 2, 5)]  # so few bytes are one object
    plain = dsa_pool_group(kvcache.kv_buffer, indexer.buffers, PAGE, indexer_layers=(0, 2, 5), rank_replicated=False)
    assert plain.pool(INDEXER).buffer_meta == indexer.buffer_meta
    assert not plain.rank_replicated


def test_dsa_drafts() -> None:
    draft = DSATokenToKVPool(2)
    packed = build_pool_group(DSATokenToKVPool(), PAGE, draft_pools=[draft], draft_mode=DraftMode.PACKED)
    assert [dict(pool.layer_mapping) for pool in packed.pools] == [{0: (0, 4), 1: (1, 5), 2: (2,), 3: (3,)}] * 2
    assert same(packed.pool(INDEXER).buffers[4:], draft.index_k_with_scale_buffer)
    beside = build_pool_group(DSATokenToKVPool(), PAGE, draft_pools=[DSATokenToKVPool(9)])
    assert [pool.name for pool in beside.draft_pools] == [PoolName.DRAFT, PoolName.DRAFT_INDEXER]
    assert (beside.num_layers, beside.num_draft_layers, beside.rank_replicated) == (4, 9, True)
    other = build_pool_group(DSATokenToKVPool(), PAGE, draft_pools=[MHATokenToKVPool()])
    assert [pool.name for pool in other.draft_pools] == [PoolName.DRAFT]
    assert not other.rank_replicated
    # Depths ride on layers that have an indexer; the third of this target has none.
    sparse = DSATokenToKVPool(4, without=(2,))
    assert build_pool_group(sparse, PAGE, draft_pools=[DSATokenToKVPool(2)]).num_draft_layers == 2
    assert build_pool_group(sparse, PAGE, draft_pools=[DSATokenToKVPool(3)]).draft_pools
    with pytest.raises(DraftMismatchError, match=re.escape("draft to ride on, got none on [2]")):
        build_pool_group(sparse, PAGE, draft_pools=[DSATokenToKVPool(3)], draft_mode=DraftMode.PACKED)


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ([DSATokenToKVPool(2, without=(1,))], "same number of layers in every pool, got indexer: 1, kv: 2"),
        ([DSATokenToKVPool(1, without=(0,))], "draft of pool indexer: expected equally many layers, at least 1"),
        ([DSATokenToKVPool(1, page_size=8)], "expected page size 4, got 8"),
        ([DSATokenToKVPool(1), DSATokenToKVPool(1, page_size=8)], "expected page size 4, got 8"),
        ([DSATokenToKVPool(1), MLATokenToKVPool(1)], "expected pools of one family, got DSA, MLA"),
        ([HybridLinearKVPool()], "expected one without recurrent layers, got HybridLinearKVPool"),
        ([DeepSeekV4TokenToKVPool((0,))], "counterparts of the target's pools (kv, indexer), got one of swa"),
        ([SWAKVPool()], "counterparts of the target's pools (kv, indexer), got one of swa"),
    ],
)
def test_dsa_drafts_that_do_not_fit(drafts: list[Any], message: str) -> None:
    with pytest.raises(DraftMismatchError, match=re.escape(message)) as refused:
        build_pool_group(DSATokenToKVPool(), PAGE, draft_pools=drafts)
    assert refused.value.fits == (DraftMode.NONE,)


def test_dsa_that_does_not_fit() -> None:
    kvcache = DSATokenToKVPool()
    kvcache.index_key_cache.buffer.pop()
    with pytest.raises(ValueError, match="pools kv and indexer: expected 4 buffers each, one a layer, got 4 and 3"):
        build_pool_group(kvcache, PAGE)
    with pytest.raises(ValueError, match="pool kv: expected page size 8, got 4"):
        build_pool_group(DSATokenToKVPool(), 8)
    with pytest.raises(ValueError, match="pool indexer: expected buffers in every component, got none in 0"):
        build_pool_group(DSATokenToKVPool(2, without=(0, 1)), PAGE)
    with pytest.raises(ValueError, match="pool mamba: expected no pool of states beside one of DSA, got HybridReq"):
        build_pool_group(DSATokenToKVPool(), PAGE, req_to_token_pool=HybridReqToTokenPool())
    buffers = DSATokenToKVPool().index_k_with_scale_buffer
    with pytest.raises(ValueError, match="a buffer for each of the 2 layers that have an indexer, got 4"):
        dsa_pool_group(kvcache.kv_buffer, buffers, PAGE, indexer_layers=(0, 1))
    with pytest.raises(ValueError, match=re.escape("pool indexer: expected every layer once, got [0, 1, 1, 2]")):
        dsa_pool_group(kvcache.kv_buffer, buffers, PAGE, indexer_layers=(0, 1, 1, 2))
    derived = type("HiSparseDSATokenToKVPool", (DSATokenToKVPool,), {})()
    with pytest.raises(ValueError, match="got HiSparseDSATokenToKVPool with .*, derived from DSATokenToKVPool"):
        build_pool_group(derived, PAGE)


# -- DeepSeek V4


def test_deepseek_v4() -> None:
    kvcache = DeepSeekV4TokenToKVPool((0, 0, 4, 128, 4))
    group = build_pool_group(kvcache, 256)
    assert [(pool.name, pool.index_source) for pool in group.pools] == [
        (SWA, SWA),
        (C4, KV),
        (C4_INDEXER, KV),
        (C128, KV),
        (C4_STATE, SWA),
        (C4_INDEXER_STATE, SWA),
    ]
    assert (group.num_layers, group.rank_replicated) == (5, True)
    assert [dict(pool.layer_mapping) for pool in group.pools[1:]] == [
        {2: (0,), 4: (1,)},
        {2: (0,), 4: (1,)},
        {3: (0,)},
        {2: (0,), 4: (1,)},
        {2: (0,), 4: (1,)},
    ]
    state = group.pool(C4_STATE)
    assert (state.num_pages, state.page_bytes(0)) == (PAGES, 8 * 3 * 4)
    assert same(state.buffers, [kvcache.compress_state_pools[layer].kv_score_buffer.kv_score for layer in (2, 4)])
    slots, swa = torch.arange(2 * 256, 3 * 256), torch.arange(256)
    resolved = group.resolve(
        [ComponentTransfer(KV, ("a",), slots), ComponentTransfer(SWA, ("a",), swa, HitPolicy.TRAILING_PAGES, 2)]
    )
    assert [(each.rows.tolist(), each.hit_policy, each.window) for each in resolved] == [  # type: ignore[union-attr]
        ([0], HitPolicy.TRAILING_PAGES, 2),
        ([2], HitPolicy.ALL_PAGES, 1),
        ([2], HitPolicy.ALL_PAGES, 1),
        ([2], HitPolicy.ALL_PAGES, 1),
        ([0], HitPolicy.TRAILING_PAGES, 2),
        ([0], HitPolicy.TRAILING_PAGES, 2),
    ]


def test_a_pipeline_stage_of_deepseek_v4() -> None:
    group = build_pool_group(DeepSeekV4TokenToKVPool((4, 0, 128, 4, 4, 0), start=2, end=5), 256)
    assert [dict(pool.layer_mapping) for pool in group.pools] == [
        {0: (0,), 1: (1,), 2: (2,)},
        {1: (0,), 2: (1,)},
        {1: (0,), 2: (1,)},
        {0: (0,)},
        {1: (0,), 2: (1,)},
        {1: (0,), 2: (1,)},
    ]
    only_swa = build_pool_group(DeepSeekV4TokenToKVPool((4, 0, 0), start=1), 256)
    assert [pool.name for pool in only_swa.pools] == [SWA]


def test_deepseek_v4_drafts() -> None:
    drafts = [DeepSeekV4TokenToKVPool((0,)), DeepSeekV4TokenToKVPool((0,))]
    packed = build_pool_group(DeepSeekV4TokenToKVPool(), 256, draft_pools=drafts)
    swa = packed.pool(SWA)
    assert dict(swa.layer_mapping) == {0: (0, 4), 1: (1, 5), 2: (2,), 3: (3,)}
    assert same(swa.buffers[4:], [draft.swa_kv_pool.kv_buffer[0] for draft in drafts])
    assert packed.num_draft_layers == 2
    beside = build_pool_group(DeepSeekV4TokenToKVPool(), 256, draft_pools=[DeepSeekV4TokenToKVPool((0,) * 7)])
    assert [(pool.name, pool.index_source, pool.num_layers) for pool in beside.draft_pools] == [
        (PoolName.DRAFT_SWA, SWA, 7)
    ]


def changed(**attributes: Any) -> DeepSeekV4TokenToKVPool:
    pool = DeepSeekV4TokenToKVPool()
    for name, value in attributes.items():
        setattr(pool, name, value)
    return pool


def with_ratio(ratio: int) -> DeepSeekV4TokenToKVPool:
    pool = DeepSeekV4TokenToKVPool()
    pool.layer_mapping[2] = SimpleNamespace(compress_ratio=ratio, compress_layer_id=0)
    return pool


def with_state(state: torch.Tensor, ring_size: int = 8) -> DeepSeekV4TokenToKVPool:
    pool = DeepSeekV4TokenToKVPool()
    pool.compress_state_pools[1] = SimpleNamespace(ring_size=ring_size, kv_score_buffer=SimpleNamespace(kv_score=state))
    return pool


def without_scales() -> DeepSeekV4TokenToKVPool:
    pool = DeepSeekV4TokenToKVPool()
    pool.c4_indexer_kv_pool.index_k_with_scale_buffer = None
    return pool


@pytest.mark.parametrize(
    ("kvcache", "message"),
    [
        (changed(unified_kv_pool=object()), "pool swa: expected pools of its own for each kind of KV, got one unified"),
        (changed(swa_kv_pool=None), "pool swa: expected a paged pool, got none"),
        (changed(swa_req_ring_size=128), "pool swa: expected a paged pool, got a ring per request"),
        (changed(swa_page_size=64), "pool swa: expected page size 256, got 64"),
        (changed(page_size=64), "pool kv: expected page size 256, got 64"),
        (changed(swa_kv_pool=SinglePool(4, 24, 64)), "pool swa: expected rows of 256 tokens, got rows of 64"),
        (
            changed(swa_kv_pool=SinglePool(3, 24, 256)),
            "pool swa: expected 4 buffers, one for each of its layers, got 3",
        ),
        (changed(c4_kv_pool=None), "pool deepseek_v4_c4: expected buffers of 2 layers, got no pool"),
        (
            changed(c4_kv_pool=HiSparseC4DevicePool(2, 12, 64)),
            "pool deepseek_v4_c4: expected pages that go by KV slots, got HiSparseC4DevicePool",
        ),
        (
            changed(c4_kv_pool=SinglePool(2, 12, 32)),
            "pool deepseek_v4_c4: expected rows of 256 tokens (64 of ratio 4), got 32 of ratio 4",
        ),
        (
            changed(c128_kv_pool=SinglePool(2, 12, 2)),
            "pool deepseek_v4_c128: expected 1 buffers, one for each of its layers, got 2",
        ),
        (
            without_scales(),
            "pool deepseek_v4_c4_indexer: expected keys with their scales in one buffer, got them apart",
        ),
        (with_ratio(2), "expected compression ratios 0, 4 and 128, got 2 at layer 2"),
        (changed(start_layer=4), "expected at least 1 layer in this pipeline stage, got none"),
        (changed(compress_state_pools=[None] * 4), "pool deepseek_v4_c4_state: expected a state pool for layer 1, got"),
        (
            with_state(torch.zeros(3, 48).t()),
            "pool deepseek_v4_c4_state: expected a contiguous state, got shape (48, 3)",
        ),
        (with_state(torch.zeros(52, 3)[3:]), "expected a state that starts at a multiple of 24 elements (a ring), got"),
        (with_state(torch.zeros(7, 3)), "expected at least one ring of 8 rows, got shape (7, 3)"),
        (with_state(torch.zeros(48, 3), 0), "pool deepseek_v4_c4_state: expected rings of at least 1 row, got 0"),
    ],
)
def test_deepseek_v4_that_does_not_fit(kvcache: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build_pool_group(kvcache, 256)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (changed(unified_kv_pool=object()), "expected a draft with a paged SWA pool, got one with a unified KV pool"),
        (changed(swa_kv_pool=None), "expected a draft with a paged SWA pool, got one without"),
        (changed(swa_req_ring_size=128), "draft whose SWA pool is paged, got a ring of 128 tokens per request"),
        (DeepSeekV4TokenToKVPool(), "a draft of SWA layers alone, got 3 compressed layers, which would be left out"),
        (DeepSeekV4TokenToKVPool((0,), page_size=128), "draft of pool swa: expected page size 256, got 128"),
        (MHATokenToKVPool(1, page_size=256), "counterparts of the target's pools (swa), got one of kv"),
    ],
)
def test_deepseek_v4_drafts_that_do_not_fit(draft: Any, message: str) -> None:
    with pytest.raises(DraftMismatchError, match=re.escape(message)) as refused:
        build_pool_group(DeepSeekV4TokenToKVPool(), 256, draft_pools=[draft])
    assert refused.value.fits == (DraftMode.NONE,)
    physical = DeepSeekV4TokenToKVPool((0,))
    physical.swa_kv_pool = SinglePool(1, 24, 64)
    with pytest.raises(DraftMismatchError, match="expected SWA pages of 256 tokens in a row, got 64"):
        build_pool_group(DeepSeekV4TokenToKVPool(), 256, draft_pools=[physical])
    with pytest.raises(DraftMismatchError, match=re.escape("at most as many layers as the target has (4), got 5")):
        build_pool_group(
            DeepSeekV4TokenToKVPool(),
            256,
            draft_pools=[DeepSeekV4TokenToKVPool((0,) * 5)],
            draft_mode=DraftMode.PACKED,
        )


def test_plain_tensors_of_deepseek_v4() -> None:
    buffers = {SWA: [torch.zeros(PAGES, 4) for _ in range(2)], C128: [torch.zeros(PAGES, 4)]}
    group = deepseek_v4_pool_group((0, 128), 256, buffers)
    assert [pool.name for pool in group.pools] == [SWA, C128]
    with pytest.raises(ValueError, match="expected buffers of swa, .*, got kv"):
        deepseek_v4_pool_group((0, 128), 256, buffers | {KV: buffers[C128]})
    with pytest.raises(ValueError, match="pool deepseek_v4_c4: expected 1 buffers, one for each of its layers, got 0"):
        deepseek_v4_pool_group((4,), 256, {SWA: buffers[SWA][:1]})


def test_rings_are_views() -> None:
    state = state_pool().kv_score_buffer.kv_score
    view = ring_view(state, 8)
    assert (view.data_ptr(), view.dtype, tuple(view.shape)) == (state.data_ptr(), torch.uint8, (PAGES, 96))
    view[2] = 1
    assert [bool(row.any()) for row in state.view(torch.uint8)] == [16 <= row < 24 for row in range(len(state))]


def test_a_rebuilt_part_of_an_engine_pool_is_noticed() -> None:
    kvcache = DeepSeekV4TokenToKVPool()
    group = build_pool_group(kvcache, 256, draft_pools=[draft := DeepSeekV4TokenToKVPool((0,))])
    group.check_alive()
    kvcache.indexer_compress_state_pools[3] = state_pool(width=2)
    with pytest.raises(RuntimeError, match="pool deepseek_v4_c4_indexer_state: the engine's pool was rebuilt"):
        group.check_alive()
    kvcache = DeepSeekV4TokenToKVPool()
    group = build_pool_group(kvcache, 256, draft_pools=[draft])
    draft.swa_kv_pool = SinglePool(1, 24, 256)
    with pytest.raises(RuntimeError, match="pool swa: the engine's pool was rebuilt: expected buffer 4"):
        group.check_alive()


# -- hybrids


def test_mamba_and_mla() -> None:
    kvcache, states = HybridLinearKVPool((2, 5), start=2), HybridReqToTokenPool((3, 4))
    group = build_pool_group(kvcache, PAGE, req_to_token_pool=states)
    kv, mamba = group.pools
    assert (group.num_layers, group.rank_replicated) == (4, False)
    assert dict(kv.layer_mapping) == {0: (0,), 3: (1,)}
    assert dict(mamba.layer_mapping) == {1: (0,), 2: (1,)}
    assert [len(component) for component in mamba.components] == [2, 2]
    assert [mamba.page_bytes(index) for index in range(4)] == [24, 24, 48, 48]
    assert same(mamba.buffers[2:], states.mamba_pool.mamba_cache.conv[0].unbind(0))
    last = ComponentTransfer(MAMBA, ("a", "b"), torch.tensor([-1, 4]), HitPolicy.TRAILING_PAGES)
    resolved = group.resolve([ComponentTransfer(KV, ("a", "b"), torch.arange(2 * PAGE)), last])
    assert resolved[1].rows.tolist() == [-1, 4]  # type: ignore[union-attr]
    without = HybridReqToTokenPool((3, 4), temporal=False)
    assert len(build_pool_group(kvcache, PAGE, req_to_token_pool=without).pool(MAMBA).components) == 1


def test_mamba_and_swa() -> None:
    kvcache, states = SWAKVPool(), HybridReqToTokenPool((2, 5))
    group = build_pool_group(kvcache, PAGE, req_to_token_pool=states)
    assert [(pool.name, dict(pool.layer_mapping)) for pool in group.pools] == [
        (KV, {0: (0,), 3: (1,)}),
        (SWA, {1: (0,), 4: (1,)}),
        (MAMBA, {2: (0,), 5: (1,)}),
    ]
    assert same(group.pool(SWA).buffers, kvcache.swa_kv_pool.k_buffer + kvcache.swa_kv_pool.v_buffer)
    alone = build_pool_group(SWAKVPool((0, 2), (1, 3)), PAGE)
    assert [pool.name for pool in alone.pools] == [KV, SWA]


def test_hybrid_drafts() -> None:
    states = HybridReqToTokenPool((1, 2))

    def group(*drafts: Any, mode: DraftMode | None = None) -> DevicePoolGroup:
        return build_pool_group(
            HybridLinearKVPool(), PAGE, req_to_token_pool=states, draft_pools=drafts, draft_mode=mode
        )

    assert group(MLATokenToKVPool(1)).pool(KV).num_draft_layers == 1
    with pytest.raises(DraftMismatchError, match=re.escape("draft to ride on, got none on [1]")):
        group(MLATokenToKVPool(2), mode=DraftMode.PACKED)
    assert [pool.name for pool in group(MHATokenToKVPool(5)).draft_pools] == [PoolName.DRAFT]
    swa = build_pool_group(
        SWAKVPool(), PAGE, req_to_token_pool=HybridReqToTokenPool((2, 5)), draft_pools=[SWAKVPool((0,), (1,))]
    )
    assert [pool.name for pool in swa.draft_pools] == [PoolName.DRAFT, PoolName.DRAFT_SWA]
    only = build_pool_group(SWAKVPool((0, 2), (1, 3)), PAGE, draft_pools=[SWAKVPool((), (0, 1, 2))])
    assert [(pool.name, pool.num_layers) for pool in only.draft_pools] == [(PoolName.DRAFT_SWA, 3)]
    with pytest.raises(DraftMismatchError, match="expected one that goes by SWA slots, got one that goes by KV slots"):
        build_pool_group(SWAKVPool((0, 2), (1, 3)), PAGE, draft_pools=[SWAKVPool((0,), (1,), full_indices=True)])


def more_state(**attributes: Any) -> HybridReqToTokenPool:
    states = HybridReqToTokenPool()
    for name, value in attributes.items():
        setattr(states, name, value)
    return states


def scaled() -> MHATokenToKVPool:
    pool = MHATokenToKVPool()
    pool.k_scale_buffer = [torch.zeros(1)]
    return pool


@pytest.mark.parametrize(
    ("kvcache", "states", "message"),
    [
        (HybridLinearKVPool(), None, "pool mamba: expected the engine's pool of states (req_to_token_pool), got none"),
        (HybridLinearKVPool(inner=DSATokenToKVPool(2)), HybridReqToTokenPool(), "pool kv: expected a pool of a known"),
        (HybridLinearKVPool(inner=scaled()), HybridReqToTokenPool(), "with k_buffer, k_scale_buffer, v_buffer"),
        (
            HybridLinearKVPool(inner=MLATokenToKVPool(page_size=8)),
            HybridReqToTokenPool(),
            "pool kv: expected page size 4, got 8",
        ),
        (HybridLinearKVPool(inner=MLATokenToKVPool(3)), HybridReqToTokenPool(), "expected a transfer layer for every"),
        (
            HybridLinearKVPool(),
            more_state(mamba_ckpt_pool=object()),
            "pool mamba: expected all state in mamba_pool, got more in mamba_ckpt_pool",
        ),
        (
            HybridLinearKVPool(),
            more_state(short_conv_pool=SimpleNamespace(enabled=True)),
            "pool mamba: expected all state in mamba_pool, got more in short_conv_pool",
        ),
        (
            HybridLinearKVPool(),
            more_state(mamba_pool=type("UnifiedMambaPool", (MambaPool,), {})(2)),
            "pool mamba: expected states of a MambaPool, got UnifiedMambaPool, derived from it",
        ),
        (HybridLinearKVPool((0, 1)), HybridReqToTokenPool(), "pool mamba: expected layers of its own, got layer 1"),
        (
            HybridLinearKVPool((0, 4)),
            HybridReqToTokenPool(),
            "each of 5 layers in one of the pools kv, mamba, got none",
        ),
        (SWAKVPool(), None, "each of 5 layers in one of the pools kv, swa, got none for [2]"),
    ],
)
def test_hybrids_that_do_not_fit(kvcache: Any, states: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build_pool_group(kvcache, PAGE, req_to_token_pool=states)


def test_plain_tensors_of_a_hybrid() -> None:
    layers = HybridLayers([[torch.zeros(PAGES * PAGE, 2)]], {0: 0})
    assert hybrid_pool_group(layers, PAGE).num_layers == 1
    with pytest.raises(ValueError, match="pool mamba: expected layers of its own, got layer 0, which kv has"):
        hybrid_pool_group(layers, PAGE, mamba=layers)


# -- all of them


@pytest.mark.parametrize(
    "build",
    [
        lambda shared: build_pool_group(twice(MLATokenToKVPool(2), "kv_buffer"), PAGE),
        lambda shared: build_pool_group(twice(DSATokenToKVPool(2), "kv_buffer"), PAGE),
        lambda shared: build_pool_group(shared, PAGE, draft_pools=[shared]),
        lambda shared: build_pool_group(shared, PAGE, draft_pools=[shared], draft_mode=DraftMode.SIDECAR),
        lambda shared: dsa_pool_group([shared.kv_buffer[0]], [shared.kv_buffer[0].view(PAGES, -1)], PAGE),
    ],
)
def test_bytes_that_two_buffers_share_are_refused(build: Callable[[MLATokenToKVPool], DevicePoolGroup]) -> None:
    with pytest.raises(ValueError, match=r"pool \w+, buffer \d: expected bytes of its own, got some that pool kv, "):
        build(MLATokenToKVPool(2))


def twice(pool: Any, name: str) -> Any:
    buffers = getattr(pool, name)
    buffers[1] = buffers[0]
    return pool


def test_buffers_may_be_interleaved() -> None:
    page_major = torch.zeros(PAGES, 3, 8)
    draft = DraftBuffers(pools={SWA: [[page_major[:, 2]]]}, page_size=256)
    group = deepseek_v4_pool_group((0, 0), 256, {SWA: [page_major[:, 0], page_major[:, 1]]}, draft=draft)
    assert group.num_draft_layers == 1
    overlapping = torch.zeros(PAGES * 24)
    shifted = [overlapping.as_strided((PAGES, 12), (24, 1), offset) for offset in (0, 11)]
    with pytest.raises(ValueError, match="pool swa, buffer 1: expected bytes of its own, got some that pool swa, buff"):
        deepseek_v4_pool_group((0, 0), 256, {SWA: shifted})
