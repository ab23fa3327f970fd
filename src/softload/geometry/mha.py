"""MHA and GQA: keys and values apart, one buffer each per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from softload.geometry.device_pool import ComponentSource, DevicePool, read_components
from softload.geometry.drafts import DraftBuffers, attach_draft
from softload.geometry.group import DevicePoolGroup
from softload.transfer import PoolName

__all__ = ["MHAKVPool", "assemble_mha", "mha_components", "mha_pool_group"]


class MHAKVPool(Protocol):
    """What is needed of an engine's MHA pool; SGLang's `MHATokenToKVPool` is one."""

    page_size: int
    layer_num: int
    k_buffer: Sequence[torch.Tensor]
    v_buffer: Sequence[torch.Tensor]


def mha_pool_group(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    page_size: int,
    *,
    draft: DraftBuffers | None = None,
    packed: bool = True,
    rows_are_pages: bool = False,
    rank_replicated: bool = False,
) -> DevicePoolGroup:
    """A group of one KV pool, and the draft's, from plain tensors.

    Args:
        k_buffers: keys, one tensor `[rows, ...]` per layer; a row is one token (`[slots, heads, dim]`).
        v_buffers: values, likewise.
        page_size: tokens per page.
        draft: the draft's tensors.
        packed: whether K and V share one object in `Layout.PAGE`.
        rows_are_pages: whether a row holds a page instead (`[pages, ...]`).
        rank_replicated: whether every tensor-parallel rank holds the same bytes.

    Raises:
        ValueError: tensors that do not form a pool; a `DraftMismatchError` where only the draft is at fault.
    """
    return _group(
        lambda: (k_buffers, v_buffers),
        page_size,
        draft,
        packed=packed,
        rows_are_pages=rows_are_pages,
        rank_replicated=rank_replicated,
    )


def mha_components(kvcache: MHAKVPool) -> ComponentSource:
    """The buffers that the engine's pool has whenever it is asked."""
    return lambda: (kvcache.k_buffer, kvcache.v_buffer)


def assemble_mha(kvcache: MHAKVPool, page_size: int, draft: DraftBuffers | None) -> DevicePoolGroup:
    """A group from an engine's pool; one of four or more dimensions (head-major pages) has a page in a row."""
    if not len(kvcache.k_buffer) == len(kvcache.v_buffer) == kvcache.layer_num:
        raise ValueError(
            f"pool {PoolName.KV}: expected {kvcache.layer_num} K and V buffers, one of each a layer, "
            f"got {len(kvcache.k_buffer)} and {len(kvcache.v_buffer)}"
        )
    paged = any(buffer.dim() > 3 for buffer in kvcache.k_buffer)
    return _group(mha_components(kvcache), page_size, draft, packed=True, rows_are_pages=paged, rank_replicated=False)


def _group(
    source: ComponentSource,
    page_size: int,
    draft: DraftBuffers | None,
    *,
    packed: bool,
    rows_are_pages: bool,
    rank_replicated: bool,
) -> DevicePoolGroup:
    num_layers = len(read_components(source)[0])
    mapping = {layer: layer for layer in range(num_layers)}
    pool = DevicePool(PoolName.KV, PoolName.KV, source, mapping, page_size, rows_are_pages, packed)
    return DevicePoolGroup(attach_draft([pool], draft), num_layers, page_size, rank_replicated)
