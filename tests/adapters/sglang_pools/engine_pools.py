"""SGLang's own pools, small, on a CPU, and what its own assembler makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_context

PAGE_SIZE, PAGES = 64, 9
"""Of all but DeepSeek V4; one page more is there for padding."""

V4_PAGE_SIZE, V4_PAGES, V4_SWA_PAGES = 256, 7, 5
COMMON = {"device": "cpu", "enable_memory_saver": False}

get_context().override_server_args().install()


def mha(layers: int, pages: int = PAGES) -> Any:
    return MHATokenToKVPool(
        size=PAGE_SIZE * pages,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        layer_num=layers,
        **COMMON,
    )


def mla(layers: int) -> Any:
    return MLATokenToKVPool(
        size=PAGE_SIZE * PAGES,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        layer_num=layers,
        **COMMON,
    )


def dsa(layers: int, *, without_indexer: Sequence[int] = ()) -> Any:
    return DSATokenToKVPool(
        size=PAGE_SIZE * PAGES,
        page_size=PAGE_SIZE,
        kv_lora_rank=16,
        dtype=torch.bfloat16,
        qk_rope_head_dim=8,
        layer_num=layers,
        index_head_dim=128,
        kv_cache_dim=24,
        skip_topk_layers=[layer in without_indexer for layer in range(layers)],
        **COMMON,
    )


def deepseek_v4(ratios: Sequence[int], *, start: int = 0, end: int | None = None, draft: bool = False) -> Any:
    end = len(ratios) if end is None else end
    return DeepSeekV4TokenToKVPool(
        max_num_reqs=2,
        swa_size=V4_PAGE_SIZE * V4_SWA_PAGES,
        c4_size=V4_PAGE_SIZE // 4 * V4_PAGES,
        c128_size=V4_PAGE_SIZE // 128 * V4_PAGES,
        c4_state_pool_size=8 * V4_SWA_PAGES,
        c128_state_pool_size=8,
        page_size=V4_PAGE_SIZE,
        swa_page_size=V4_PAGE_SIZE,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=end - start,
        compression_ratios=list(ratios),
        start_layer=start,
        end_layer=end,
        is_draft_worker=draft,
        **COMMON,
    )


def states(layers: Sequence[int], start: int = 0) -> Any:
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=4, head_dim=8, state_size=4, conv_kernel=4
    )
    return HybridReqToTokenPool(
        size=3,
        mamba_size=PAGES,
        mamba_spec_state_size=2,
        max_context_len=64,
        cache_params=Mamba2CacheParams(shape=shape, layers=list(layers)),
        mamba_layer_ids=list(layers),
        enable_mamba_extra_buffer=False,
        start_layer=start,
        **COMMON,
    )


def mamba_mla(full: Sequence[int], pool_of_states: Any, start: int = 0) -> Any:
    return HybridLinearKVPool(
        size=PAGE_SIZE * PAGES,
        dtype=torch.bfloat16,
        page_size=PAGE_SIZE,
        head_num=1,
        head_dim=8,
        full_attention_layer_ids=list(full),
        mamba_pool=pool_of_states.mamba_pool,
        use_mla=True,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        start_layer=start,
        **COMMON,
    )


def swa(full: Sequence[int], windowed: Sequence[int]) -> Any:
    return SWAKVPool(
        size=PAGE_SIZE * PAGES,
        size_swa=PAGE_SIZE * (PAGES - 2),
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        swa_attention_layer_ids=list(windowed),
        full_attention_layer_ids=list(full),
        **COMMON,
    )


def assembled_by_sglang(
    kvcache: Any,
    page_size: int,
    components: Sequence[str],
    *,
    pool_of_states: Any = None,
    packed: Sequence[Any] = (),
    sidecar: Sequence[Any] = (),
) -> Any:
    """What SGLang's own linker would go by."""
    params = SimpleNamespace(
        req_to_token_pool=pool_of_states,
        mtp_draft_device_pools=tuple(packed),
        sidecar_draft_device_pools=tuple(sidecar),
    )
    kinds = {ComponentType[name] for name in components}
    return resolve_hybrid_device_pool_group(kvcache=kvcache, page_size=page_size, params=params, components=kinds)
