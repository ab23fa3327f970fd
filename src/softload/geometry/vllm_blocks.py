"""vLLM: one tensor per layer, a block in each row, and one block table per group of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from softload.geometry.device_pool import DevicePool
from softload.geometry.group import DevicePoolGroup
from softload.transfer import PoolName

__all__ = ["BlockGroup", "block_pool_group", "block_rows"]


@dataclass(frozen=True, slots=True, eq=False)
class BlockGroup:
    """The layers that share one block table.

    Args:
        pool: what they become: `PoolName.KV` for full attention, `PoolName.SWA` for a sliding window.
        layers: the target's tensors, in layer order.
        draft: the draft's tensors, in depth order.
    """

    pool: PoolName
    layers: Sequence[torch.Tensor]
    draft: Sequence[torch.Tensor] = ()


_DRAFT_POOLS: Mapping[PoolName, PoolName] = {PoolName.KV: PoolName.DRAFT, PoolName.SWA: PoolName.DRAFT_SWA}


def block_pool_group(
    groups: Sequence[BlockGroup], num_blocks: int, block_size: int, *, rank_replicated: bool = False
) -> DevicePoolGroup:
    """The device pools of a vLLM worker; a slot is a block id, and a page is a block.

    A draft is stored beside the target, in pools of its own: vLLM keeps it under the target's block ids.

    Args:
        groups: by block table; one for `PoolName.KV` at least.
        num_blocks: blocks of the engine.
        block_size: tokens in a block, the same in every group.
        rank_replicated: whether every tensor-parallel rank holds the same bytes.

    Raises:
        ValueError: tensors whose blocks are not contiguous, or that do not fit together.
    """
    pools = []
    for group in groups:
        if group.layers:
            pools.append(_pool(group.pool, group.pool, group.layers, num_blocks, block_size))
        if group.draft:
            pools.append(_pool(_DRAFT_POOLS[group.pool], group.pool, group.draft, num_blocks, block_size))
    num_layers = max((len(group.layers) for group in groups), default=0)
    # Groups of layers share the tensors: a block belongs to one of them at a time.
    return DevicePoolGroup(pools, num_layers, block_size, rank_replicated, shared_memory=True)


def block_rows(tensor: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """A layer's tensor as buffers `[num_blocks, ...]` whose rows are contiguous: one, or K and V apart.

    A view: dimensions within a block come in the order in which they lie in memory, since that is what its bytes mean.
    Blocks that a kernel splits are put together again.

    Raises:
        ValueError: no dimension of blocks, or blocks that are not contiguous.
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    if tensor.dim() >= 2 and shape[0] == 2 and shape[0] != num_blocks and shape[1] % num_blocks == 0:
        return [rows for part in tensor.unbind(0) for rows in block_rows(part, num_blocks)]
    if not tensor.dim() or shape[0] % num_blocks:
        raise ValueError(f"expected a tensor of {num_blocks} blocks, got shape {shape}")
    if shape[0] != num_blocks:
        tensor = tensor.reshape(num_blocks, shape[0] // num_blocks, *shape[1:])
    inner = sorted(range(1, tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim))
    rows = tensor.permute(0, *inner)
    if not rows[0].is_contiguous():
        raise ValueError(f"expected blocks of contiguous bytes, got shape {shape} with strides {strides}")
    return [rows]


def _pool(
    name: PoolName, source: PoolName, layers: Sequence[torch.Tensor], num_blocks: int, block_size: int
) -> DevicePool:
    by_layer = []
    for layer, tensor in enumerate(layers):
        try:
            by_layer.append(block_rows(tensor, num_blocks))
        except ValueError as error:
            raise ValueError(f"pool {name}: layer {layer}: {error}") from None
    counts = {len(buffers) for buffers in by_layer}
    if len(counts) > 1:
        raise ValueError(f"pool {name}: expected K and V together in every layer, or apart in every one, got both")
    components = [list(part) for part in zip(*by_layer, strict=True)]
    return DevicePool(name, source, components, {i: i for i in range(len(layers))}, block_size, rows_are_pages=True)
