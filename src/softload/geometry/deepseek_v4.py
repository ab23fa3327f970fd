"""DeepSeek V4: a sliding window in every layer, compressed KV in most, and rings of compression state.

Every pool has a page in a row. C4, its indexer and C128 go by KV slots; SWA and the states go by SWA slots, and only
the trailing window of them is needed. State of C128 is not stored: nothing of it is pending at the end of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from softload.geometry.device_pool import ComponentSource, DevicePool, read_components
from softload.geometry.drafts import DraftBuffers, DraftMismatchError, DraftMode, attach_draft
from softload.geometry.group import DevicePoolGroup
from softload.transfer import PoolName

__all__ = ["DeepSeekV4KVPool", "assemble_deepseek_v4", "deepseek_v4_parts", "deepseek_v4_pool_group", "ring_view"]

_INDEX_SOURCES: Mapping[PoolName, PoolName] = {
    PoolName.SWA: PoolName.SWA,
    PoolName.C4: PoolName.KV,
    PoolName.C4_INDEXER: PoolName.KV,
    PoolName.C128: PoolName.KV,
    PoolName.C4_STATE: PoolName.SWA,
    PoolName.C4_INDEXER_STATE: PoolName.SWA,
}
"""In the order in which the group has them."""


class DeepSeekV4KVPool(Protocol):
    """What is needed of an engine's DeepSeek V4 pool; SGLang's `DeepSeekV4TokenToKVPool` is one.

    `layer_mapping` and the state pools are lists over the model's layers, of which this pipeline stage has those from
    `start_layer` up to, and without, `end_layer`.
    """

    page_size: int
    swa_page_size: int
    start_layer: int
    end_layer: int
    layer_mapping: Sequence[Any]
    swa_kv_pool: Any
    unified_kv_pool: Any
    c4_kv_pool: Any
    c4_indexer_kv_pool: Any
    c128_kv_pool: Any
    compress_state_pools: Sequence[Any]
    indexer_compress_state_pools: Sequence[Any]


@dataclass(frozen=True, slots=True)
class _Layers:
    """Transfer layer -> index of its buffer, by the kind of compression."""

    swa: dict[int, int]
    c4: dict[int, int]
    c128: dict[int, int]

    @property
    def state(self) -> dict[int, int]:
        return {layer: index for index, layer in enumerate(self.c4)}

    def of(self, name: PoolName) -> dict[int, int]:
        if name is PoolName.SWA:
            return self.swa
        if name is PoolName.C128:
            return self.c128
        return self.c4 if name in (PoolName.C4, PoolName.C4_INDEXER) else self.state


def deepseek_v4_pool_group(
    compress_ratios: Sequence[int],
    page_size: int,
    buffers: Mapping[PoolName, Sequence[torch.Tensor]],
    *,
    draft: DraftBuffers | None = None,
    rank_replicated: bool = True,
) -> DevicePoolGroup:
    """A group of up to six pools, and the draft's, from plain tensors.

    Args:
        compress_ratios: 0, 4 or 128 for each layer of this pipeline stage.
        page_size: tokens per page.
        buffers: tensors `[pages, ...]` by pool: SWA for every layer; C4, C4_INDEXER, C4_STATE and C4_INDEXER_STATE for
            every layer of ratio 4; C128 for every layer of ratio 128. See `ring_view` for states.
        draft: the draft's tensors, of SWA.
        rank_replicated: whether every tensor-parallel rank holds the same bytes.

    Raises:
        ValueError: tensors that do not form the pools; a `DraftMismatchError` where only the draft is at fault.
    """
    unknown = [str(name) for name in buffers if name not in _INDEX_SOURCES]
    if unknown:
        raise ValueError(f"expected buffers of {', '.join(_INDEX_SOURCES)}, got {', '.join(unknown)}")
    ratios = [(ratio, None) for ratio in compress_ratios]

    def source(name: PoolName) -> ComponentSource:
        return lambda: (buffers.get(name, ()),)

    sources = {name: source(name) for name in _INDEX_SOURCES}
    return _group(_layers(ratios, 0), sources, page_size, draft, rank_replicated)


def ring_view(state: torch.Tensor, ring_size: int, name: PoolName = PoolName.C4_STATE) -> torch.Tensor:
    """A state pool's rows as whole rings of bytes, uint8 `[rings, bytes]`: a ring belongs to one SWA page.

    Rows behind the last whole ring are left out.

    Args:
        state: `[rows, ...]`.
        ring_size: rows in a ring.
        name: the pool, for messages.

    Raises:
        ValueError: a state that is not contiguous, does not start at a ring, or is smaller than one.
    """
    if ring_size < 1:
        raise ValueError(f"pool {name}: expected rings of at least 1 row, got {ring_size}")
    if state.dim() < 1 or state.shape[0] < ring_size or not state.numel():
        raise ValueError(f"pool {name}: expected at least one ring of {ring_size} rows, got shape {tuple(state.shape)}")
    if not state.is_contiguous():
        raise ValueError(
            f"pool {name}: expected a contiguous state, got shape {tuple(state.shape)} with strides {state.stride()}"
        )
    ring_elements = ring_size * (state.numel() // state.shape[0])
    if state.storage_offset() % ring_elements:
        raise ValueError(
            f"pool {name}: expected a state that starts at a multiple of {ring_elements} elements (a ring), "
            f"got offset {state.storage_offset()}"
        )
    rings = state.shape[0] // ring_size
    return state.detach().reshape(-1)[: rings * ring_elements].view(rings, ring_elements).view(torch.uint8)


def deepseek_v4_parts(kvcache: DeepSeekV4KVPool) -> Mapping[PoolName, ComponentSource]:
    """What such a pool is to a target when it is a draft's: its sliding window, and that must be all.

    Raises:
        DraftMismatchError: a draft that has more, or whose window does not go by the target's SWA slots.
    """
    if kvcache.unified_kv_pool is not None:
        raise _no_draft("a draft with a paged SWA pool", "one with a unified KV pool")
    if kvcache.swa_kv_pool is None:
        raise _no_draft("a draft with a paged SWA pool", "one without")
    if getattr(kvcache, "swa_req_ring_size", None) is not None:  # later builds than the first have it
        raise _no_draft("a draft whose SWA pool is paged", f"a ring of {kvcache.swa_req_ring_size} tokens per request")  # type: ignore[attr-defined]
    compressed = {pool.layer_num for pool in (kvcache.c4_kv_pool, kvcache.c128_kv_pool) if pool is not None} - {0}
    if compressed:
        raise _no_draft("a draft of SWA layers alone", f"{sum(compressed)} compressed layers, which would be left out")
    if kvcache.swa_kv_pool.page_size != kvcache.swa_page_size:
        raise _no_draft(f"SWA pages of {kvcache.swa_page_size} tokens in a row", f"{kvcache.swa_kv_pool.page_size}")
    return {PoolName.SWA: lambda: (kvcache.swa_kv_pool.kv_buffer,)}


def assemble_deepseek_v4(kvcache: DeepSeekV4KVPool, page_size: int, draft: DraftBuffers | None) -> DevicePoolGroup:
    """A group from an engine's pool."""
    _check_layout(kvcache, page_size)
    stage = list(kvcache.layer_mapping[kvcache.start_layer : kvcache.end_layer])
    layers = _layers([(item.compress_ratio, item.compress_layer_id) for item in stage], kvcache.start_layer)
    _check_compressed(kvcache, page_size, layers)
    global_layers = [kvcache.start_layer + layer for layer in layers.c4]
    sources: dict[PoolName, ComponentSource] = {PoolName.SWA: lambda: (kvcache.swa_kv_pool.kv_buffer,)}
    if layers.c4:
        sources[PoolName.C4] = lambda: (kvcache.c4_kv_pool.kv_buffer,)
        sources[PoolName.C4_INDEXER] = lambda: (kvcache.c4_indexer_kv_pool.index_k_with_scale_buffer,)
        sources[PoolName.C4_STATE] = _states(lambda: kvcache.compress_state_pools, global_layers, PoolName.C4_STATE)
        sources[PoolName.C4_INDEXER_STATE] = _states(
            lambda: kvcache.indexer_compress_state_pools, global_layers, PoolName.C4_INDEXER_STATE
        )
    if layers.c128:
        sources[PoolName.C128] = lambda: (kvcache.c128_kv_pool.kv_buffer,)
    return _group(layers, sources, page_size, draft, rank_replicated=True)


def _check_layout(kvcache: DeepSeekV4KVPool, page_size: int) -> None:
    if kvcache.unified_kv_pool is not None:
        raise ValueError(f"pool {PoolName.SWA}: expected pools of its own for each kind of KV, got one unified KV pool")
    if kvcache.swa_kv_pool is None:
        raise ValueError(f"pool {PoolName.SWA}: expected a paged pool, got none: the window is kept per request")
    if getattr(kvcache, "swa_req_ring_size", None) is not None:
        raise ValueError(f"pool {PoolName.SWA}: expected a paged pool, got a ring per request")
    if kvcache.swa_page_size != page_size:
        raise ValueError(f"pool {PoolName.SWA}: expected page size {page_size}, got {kvcache.swa_page_size}")
    if kvcache.swa_kv_pool.page_size != page_size:
        raise ValueError(
            f"pool {PoolName.SWA}: expected rows of {page_size} tokens, got rows of {kvcache.swa_kv_pool.page_size}"
        )


def _check_compressed(kvcache: DeepSeekV4KVPool, page_size: int, layers: _Layers) -> None:
    wanted = [(PoolName.C4, kvcache.c4_kv_pool, 4, layers.c4), (PoolName.C128, kvcache.c128_kv_pool, 128, layers.c128)]
    wanted.insert(1, (PoolName.C4_INDEXER, kvcache.c4_indexer_kv_pool, 4, layers.c4))
    for name, pool, ratio, mapping in wanted:
        if not mapping:
            continue
        if pool is None:
            raise ValueError(f"pool {name}: expected buffers of {len(mapping)} layers, got no pool")
        if "HiSparse" in type(pool).__name__:
            raise ValueError(f"pool {name}: expected pages that go by KV slots, got {type(pool).__name__}")
        if pool.page_size * ratio != page_size:
            raise ValueError(
                f"pool {name}: expected rows of {page_size} tokens ({page_size // ratio} of ratio {ratio}), "
                f"got {pool.page_size} of ratio {ratio}"
            )
    if layers.c4 and kvcache.c4_indexer_kv_pool.index_k_with_scale_buffer is None:
        raise ValueError(f"pool {PoolName.C4_INDEXER}: expected keys with their scales in one buffer, got them apart")


def _states(pools: Callable[[], Sequence[Any]], global_layers: Sequence[int], name: PoolName) -> ComponentSource:
    def views() -> tuple[list[torch.Tensor]]:
        found = []
        for layer in global_layers:
            pool = pools()[layer]
            if pool is None:
                raise ValueError(f"pool {name}: expected a state pool for layer {layer}, got none")
            found.append(ring_view(pool.kv_score_buffer.kv_score, int(pool.ring_size), name))
        return (found,)

    return views


def _layers(stage: Sequence[tuple[int, int | None]], first: int) -> _Layers:
    """From `(compression ratio, index of the layer's buffer)` by transfer layer; ``None`` counts them."""
    if not stage:
        raise ValueError("expected at least 1 layer in this pipeline stage, got none")
    found: dict[int, dict[int, int]] = {0: {}, 4: {}, 128: {}}
    for layer, (ratio, index) in enumerate(stage):
        if ratio not in found:
            raise ValueError(f"expected compression ratios 0, 4 and 128, got {ratio} at layer {first + layer}")
        found[ratio][layer] = len(found[ratio]) if index is None else index
    return _Layers({layer: layer for layer in range(len(stage))}, found[4], found[128])


def _group(
    layers: _Layers,
    sources: Mapping[PoolName, ComponentSource],
    page_size: int,
    draft: DraftBuffers | None,
    rank_replicated: bool,
) -> DevicePoolGroup:
    targets = []
    for name, index_source in _INDEX_SOURCES.items():
        mapping = layers.of(name)
        have = len(read_components(sources[name])[0]) if name in sources else 0
        if have != len(mapping):
            raise ValueError(f"pool {name}: expected {len(mapping)} buffers, one for each of its layers, got {have}")
        if mapping:
            targets.append(DevicePool(name, index_source, sources[name], mapping, page_size, rows_are_pages=True))
    return DevicePoolGroup(attach_draft(targets, draft), len(layers.swa), page_size, rank_replicated)


def _no_draft(expected: str, got: str) -> DraftMismatchError:
    return DraftMismatchError(f"draft of pool {PoolName.SWA}: expected {expected}, got {got}", (DraftMode.NONE,))
