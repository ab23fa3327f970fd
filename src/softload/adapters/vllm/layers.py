"""Which of the engine's layers is what: target or draft, full attention or sliding window."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from softload.adapters.vllm.units import BlockTable
from softload.geometry.group import DevicePoolGroup
from softload.geometry.vllm_blocks import BlockGroup, block_pool_group
from softload.transfer import PoolName

__all__ = [
    "block_size_of",
    "block_tables",
    "draft_layers",
    "landing_pages",
    "pool_group",
    "ranks_are_alike",
    "transfer_layers",
]

_TAIL_BYTES = 1024
"""More than the tails and the alignment of one page's objects."""

_DRAFT_POOLS = {PoolName.KV: PoolName.DRAFT, PoolName.SWA: PoolName.DRAFT_SWA}


def block_tables(kv_cache_config: KVCacheConfig, drafts: frozenset[str] = frozenset()) -> list[BlockTable]:
    """One per KV cache group.

    Raises:
        ValueError: a kind of cache, or a combination of groups, that the connector does not support.
    """
    tables = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = _uniform(group.kv_cache_spec)
        draft = not drafts.isdisjoint(group.layer_names)
        if isinstance(spec, SlidingWindowSpec):
            # What the first token after the boundary still sees, which is not itself.
            tokens = spec.sliding_window - 1 + spec.extra_retained_tokens
            window = -(-tokens // spec.block_size)
            tables.append(BlockTable(PoolName.SWA, PoolName.DRAFT_SWA if draft else None, max(1, window)))
        elif isinstance(spec, FullAttentionSpec):
            tables.append(BlockTable(PoolName.KV, PoolName.DRAFT if draft else None))
        else:
            raise ValueError(
                f"KV cache group {index}: expected full attention, MLA or a sliding window, got {type(spec).__name__}"
            )
    pools = [table.pool for table in tables]
    if len(set(pools)) != len(pools) or PoolName.KV not in pools:
        raise ValueError(
            "expected one KV cache group of full attention and at most one of a sliding window, got "
            f"{', '.join(pools)}; start with --disable-hybrid-kv-cache-manager, which makes them one group"
        )
    return tables


def block_size_of(kv_cache_config: KVCacheConfig) -> int:
    """Tokens per block, and per block hash.

    Raises:
        ValueError: groups of different block sizes.
    """
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if kv_cache_config.hash_block_size is not None:
        sizes.add(kv_cache_config.hash_block_size)
    if len(sizes) != 1:
        raise ValueError(f"expected one block size in all KV cache groups and block hashes, got {sorted(sizes)}")
    return int(sizes.pop())


def draft_layers(vllm_config: Any, layer_names: Iterable[str]) -> frozenset[str]:
    """The layers of a draft model: what the engine has marked, and what lies beyond the target's last layer."""
    if vllm_config.speculative_config is None:
        return frozenset()
    count = vllm_config.model_config.hf_text_config.num_hidden_layers
    modules = vllm_config.compilation_config.static_forward_context
    return frozenset(
        name
        for name in layer_names
        if modules[name].is_draft_layer or name.startswith("draft_model.") or extract_layer_index(name) >= count
    )


def pool_group(
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    drafts: frozenset[str],
    *,
    rank_replicated: bool,
) -> DevicePoolGroup:
    """The worker's pools.

    Raises:
        ValueError: tensors that cannot be addressed block by block.
    """
    groups = []
    for table, group in zip(block_tables(kv_cache_config, drafts), kv_cache_config.kv_cache_groups, strict=True):
        names = [name for name in _in_layer_order(group.layer_names) if name in kv_caches]
        groups.append(
            BlockGroup(
                table.pool,
                [kv_caches[name] for name in names if name not in drafts],
                [kv_caches[name] for name in names if name in drafts],
            )
        )
    return block_pool_group(
        groups, kv_cache_config.num_blocks, block_size_of(kv_cache_config), rank_replicated=rank_replicated
    )


def ranks_are_alike(kv_cache_config: KVCacheConfig, tensor_parallel_size: int) -> bool:
    """Whether all tensor-parallel ranks hold the same bytes, as with MLA; not where a draft's heads are divided."""
    return tensor_parallel_size > 1 and kv_cache_config.kv_tp_replicas == tensor_parallel_size


def transfer_layers(kv_cache_config: KVCacheConfig, drafts: frozenset[str]) -> dict[str, int]:
    """The transfer layer of each of the target's layers, by the engine's name."""
    return {
        name: layer
        for group in kv_cache_config.kv_cache_groups
        for layer, name in enumerate(name for name in _in_layer_order(group.layer_names) if name not in drafts)
    }


def landing_pages(kv_cache_config: KVCacheConfig, landing_bytes: int) -> int:
    """Pages of one request that a worker can let land before it has blocks, without waiting for much else to go."""
    room = landing_bytes // 2
    page_bytes = 0
    for table, group in zip(block_tables(kv_cache_config), kv_cache_config.kv_cache_groups, strict=True):
        spec = group.kv_cache_spec
        layers = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
        nbytes = spec.page_size_bytes * layers + _TAIL_BYTES
        if table.window is None:
            page_bytes += nbytes
        else:
            room -= nbytes * table.window
    return max(0, int(room // page_bytes))


def _in_layer_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (extract_layer_index(name), name))


def _uniform(spec: KVCacheSpec) -> KVCacheSpec:
    """Layers of one type but different sizes come as one spec of many."""
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
