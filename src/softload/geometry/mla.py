"""MLA: one latent buffer per layer, the same on every tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from softload.geometry.device_pool import ComponentSource, DevicePool, read_components
from softload.geometry.drafts import DraftBuffers, attach_draft
from softload.geometry.group import DevicePoolGroup
from softload.transfer import PoolName

__all__ = ["MLAKVPool", "assemble_mla", "mla_components", "mla_pool_group"]


class MLAKVPool(Protocol):
    """What is needed of an engine's MLA pool; SGLang's `MLATokenToKVPool` is one."""

    page_size: int
    layer_num: int
    kv_buffer: Sequence[torch.Tensor]


def mla_pool_group(
    kv_buffers: Sequence[torch.Tensor],
    page_size: int,
    *,
    draft: DraftBuffers | None = None,
    rows_are_pages: bool = False,
    rank_replicated: bool | None = None,
) -> DevicePoolGroup:
    """A group of one KV pool, and the draft's, from plain tensors.

    Args:
        kv_buffers: one tensor `[rows, ...]` per layer; a row is one token (`[slots, 1, dim]`).
        page_size: tokens per page.
        draft: the draft's tensors.
        rows_are_pages: whether a row holds a page instead (`[pages, ...]`).
        rank_replicated: whether every tensor-parallel rank holds the same bytes; ``None`` for yes, unless a draft with
            keys and values apart stands beside, which is split by heads.

    Raises:
        ValueError: tensors that do not form a pool; a `DraftMismatchError` where only the draft is at fault.
    """
    return _group(lambda: (kv_buffers,), page_size, draft, rows_are_pages, rank_replicated)


def mla_components(kvcache: MLAKVPool) -> ComponentSource:
    """The buffers that the engine's pool has whenever it is asked."""
    return lambda: (kvcache.kv_buffer,)


def assemble_mla(kvcache: MLAKVPool, page_size: int, draft: DraftBuffers | None) -> DevicePoolGroup:
    """A group from an engine's pool; one of four or more dimensions (head-major pages) has a page in a row."""
    if len(kvcache.kv_buffer) != kvcache.layer_num:
        raise ValueError(
            f"pool {PoolName.KV}: expected {kvcache.layer_num} buffers, one a layer, got {len(kvcache.kv_buffer)}"
        )
    paged = any(buffer.dim() > 3 for buffer in kvcache.kv_buffer)
    return _group(mla_components(kvcache), page_size, draft, paged, None)


def _group(
    source: ComponentSource,
    page_size: int,
    draft: DraftBuffers | None,
    rows_are_pages: bool,
    rank_replicated: bool | None,
) -> DevicePoolGroup:
    num_layers = len(read_components(source)[0])
    mapping = {layer: layer for layer in range(num_layers)}
    pool = DevicePool(PoolName.KV, PoolName.KV, source, mapping, page_size, rows_are_pages)
    pools = attach_draft([pool], draft)
    if rank_replicated is None:
        rank_replicated = all(len(each.components) == 1 for each in pools)
    return DevicePoolGroup(pools, num_layers, page_size, rank_replicated)
