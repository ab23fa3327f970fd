"""DSA: a latent per layer as MLA has, and an indexer, one page of it in a row, in all layers or in some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from softload.geometry.device_pool import Components, ComponentSource, DevicePool, read_components
from softload.geometry.drafts import DraftBuffers, attach_draft
from softload.geometry.group import DevicePoolGroup
from softload.transfer import PoolName

__all__ = ["DSAKVPool", "assemble_dsa", "dsa_parts", "dsa_pool_group"]


class DSAKVPool(Protocol):
    """What is needed of an engine's DSA pool; SGLang's `DSATokenToKVPool` is one.

    A layer without an indexer of its own has an indexer buffer without rows.
    """

    page_size: int
    layer_num: int
    kv_buffer: Sequence[torch.Tensor]
    index_k_with_scale_buffer: Sequence[torch.Tensor]


def dsa_pool_group(
    kv_buffers: Sequence[torch.Tensor],
    indexer_buffers: Sequence[torch.Tensor],
    page_size: int,
    *,
    indexer_layers: Sequence[int] | None = None,
    draft: DraftBuffers | None = None,
    rank_replicated: bool | None = None,
) -> DevicePoolGroup:
    """A group of a KV and an INDEXER pool, and the draft's, from plain tensors.

    Args:
        kv_buffers: one tensor `[rows, ...]` per layer; a row is one token.
        indexer_buffers: one tensor `[pages, ...]` per layer that has an indexer; a row is one page.
        page_size: tokens per page.
        indexer_layers: the layers of `indexer_buffers`, ascending; all by default.
        draft: the draft's tensors: of KV and INDEXER, or of KV alone for a draft model without indexers.
        rank_replicated: whether every tensor-parallel rank holds the same bytes; ``None`` for yes, unless a draft with
            keys and values apart stands beside, which is split by heads.

    Raises:
        ValueError: tensors that do not form the pools; a `DraftMismatchError` where only the draft is at fault.
    """
    layers = range(len(kv_buffers)) if indexer_layers is None else indexer_layers
    if len(layers) != len(indexer_buffers):
        raise ValueError(
            f"pool {PoolName.INDEXER}: expected a buffer for each of the {len(layers)} layers that have an indexer, "
            f"got {len(indexer_buffers)}"
        )
    mapping = {layer: index for index, layer in enumerate(layers)}
    if len(mapping) != len(layers):
        raise ValueError(f"pool {PoolName.INDEXER}: expected every layer once, got {list(layers)}")
    return _group(lambda: (kv_buffers,), lambda: (indexer_buffers,), mapping, page_size, draft, rank_replicated)


def dsa_parts(kvcache: DSAKVPool) -> Mapping[PoolName, ComponentSource]:
    """The buffers that the engine's pool has whenever it is asked."""
    return {
        PoolName.KV: lambda: (kvcache.kv_buffer,),
        PoolName.INDEXER: lambda: _with_rows(kvcache.index_k_with_scale_buffer),
    }


def assemble_dsa(kvcache: DSAKVPool, page_size: int, draft: DraftBuffers | None) -> DevicePoolGroup:
    """A group from an engine's pool."""
    kv, indexer = kvcache.kv_buffer, kvcache.index_k_with_scale_buffer
    if not len(kv) == len(indexer) == kvcache.layer_num:
        raise ValueError(
            f"pools {PoolName.KV} and {PoolName.INDEXER}: expected {kvcache.layer_num} buffers each, one a layer, "
            f"got {len(kv)} and {len(indexer)}"
        )
    layers = [layer for layer, buffer in enumerate(indexer) if buffer.shape[0]]
    mapping = {layer: index for index, layer in enumerate(layers)}
    parts = dsa_parts(kvcache)
    return _group(parts[PoolName.KV], parts[PoolName.INDEXER], mapping, page_size, draft, None)


def _with_rows(buffers: Sequence[torch.Tensor]) -> Components:
    return ([buffer for buffer in buffers if buffer.shape[0]],)


def _group(
    kv: ComponentSource,
    indexer: ComponentSource,
    indexer_mapping: Mapping[int, int],
    page_size: int,
    draft: DraftBuffers | None,
    rank_replicated: bool | None,
) -> DevicePoolGroup:
    num_layers = len(read_components(kv)[0])
    identity = {layer: layer for layer in range(num_layers)}
    targets = [
        DevicePool(PoolName.KV, PoolName.KV, kv, identity, page_size, rows_are_pages=False),
        DevicePool(PoolName.INDEXER, PoolName.KV, indexer, indexer_mapping, page_size, rows_are_pages=True),
    ]
    pools = attach_draft(targets, draft)
    if rank_replicated is None:
        rank_replicated = all(len(each.components) == 1 for each in pools)
    return DevicePoolGroup(pools, num_layers, page_size, rank_replicated)
