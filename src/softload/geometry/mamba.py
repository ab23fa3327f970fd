"""Hybrids: full attention in some layers, a sliding window or a recurrent (Mamba) state in others.

A Mamba state is one row of a pool of states; a page has one if it was kept when the page was full. So it is a component
of one page's trailing window, whose slots are `[pages]` state slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from softload.geometry.device_pool import ComponentSource, DevicePool, read_components
from softload.geometry.drafts import DraftBuffers, DraftMismatchError, DraftMode, attach_draft
from softload.geometry.families import SINGLE_FAMILIES, PoolFamily, family_of
from softload.geometry.group import DevicePoolGroup
from softload.transfer import PoolName

__all__ = ["HYBRID_FAMILIES", "HybridLayers", "MambaStates", "hybrid_pool_group", "mamba_layers"]

_ATTENTION_CLASSES = ("MHATokenToKVPool", "MLATokenToKVPool")
"""What the attention layers of a hybrid may be kept in."""


class MambaStates(Protocol):
    """What is needed of an engine's pool of recurrent states; SGLang's `HybridReqToTokenPool` is one."""

    mamba_pool: Any
    mamba_map: Mapping[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class HybridLayers:
    """One kind of layer of a hybrid.

    Args:
        components: tensors `[rows, ...]` by component, one in each for every such layer.
        layer_mapping: transfer layer -> index of its buffer within each component.
        rows_are_pages: whether a row holds a page, or, for Mamba, a state.
    """

    components: ComponentSource
    layer_mapping: Mapping[int, int]
    rows_are_pages: bool = False


def hybrid_pool_group(
    full: HybridLayers,
    page_size: int,
    *,
    swa: HybridLayers | None = None,
    mamba: HybridLayers | None = None,
    draft: DraftBuffers | None = None,
    rank_replicated: bool = False,
) -> DevicePoolGroup:
    """A group of a KV pool, and of an SWA and a MAMBA pool where the model has such layers, and the draft's.

    Args:
        full: the layers of full attention.
        page_size: tokens per page.
        swa: the layers with a sliding window; they go by SWA slots.
        mamba: the recurrent layers; they go by state slots, one a page.
        draft: the draft's tensors, of KV and SWA.
        rank_replicated: whether every tensor-parallel rank holds the same bytes.

    Raises:
        ValueError: tensors that do not form the pools, or a layer that is in none of them or in two; a
            `DraftMismatchError` where only the draft is at fault.
    """
    kinds = [(PoolName.KV, full), (PoolName.SWA, swa), (PoolName.MAMBA, mamba)]
    given = [(name, layers) for name, layers in kinds if layers is not None and layers.layer_mapping]
    owner: dict[int, PoolName] = {}
    for name, layers in given:
        for layer in layers.layer_mapping:
            if layer in owner:
                raise ValueError(
                    f"pool {name}: expected layers of its own, got layer {layer}, which {owner[layer]} has"
                )
            owner[layer] = name
    num_layers = max(owner, default=-1) + 1
    absent = [layer for layer in range(num_layers) if layer not in owner]
    if absent:
        names = ", ".join(name for name, _ in given)
        raise ValueError(f"expected each of {num_layers} layers in one of the pools {names}, got none for {absent}")
    targets = [
        DevicePool(name, name, layers.components, layers.layer_mapping, page_size, layers.rows_are_pages)
        for name, layers in given
    ]
    return DevicePoolGroup(attach_draft(targets, draft), num_layers, page_size, rank_replicated)


def mamba_layers(states: MambaStates, start_layer: int) -> HybridLayers:
    """The recurrent layers of an engine's pool of states: the temporal state and each convolution state.

    Raises:
        ValueError: states that are kept in other places as well, and would be left out.
    """
    for name in ("mamba_ckpt_pool", "short_conv_pool", "ngram_pool"):
        pool = getattr(states, name, None)  # builds differ in which of them they have
        if pool is not None and getattr(pool, "enabled", True):
            raise ValueError(f"pool {PoolName.MAMBA}: expected all state in mamba_pool, got more in {name}")
    lineage = [each.__name__ for each in type(states.mamba_pool).__mro__]
    if "MambaPool" in lineage[1:]:
        raise ValueError(f"pool {PoolName.MAMBA}: expected states of a MambaPool, got {lineage[0]}, derived from it")

    def components() -> list[list[torch.Tensor]]:
        cache = states.mamba_pool.mamba_cache
        kinds: Sequence[torch.Tensor] = (cache.temporal, *cache.conv)
        # A model without recurrence but with convolutions has an empty temporal state.
        return [[_dense_rows(state[i]) for i in range(state.shape[0])] for state in kinds if state.numel()]

    mapping = {layer - start_layer: index for layer, index in states.mamba_map.items()}
    return HybridLayers(components, mapping, rows_are_pages=True)


def _dense_rows(state: torch.Tensor) -> torch.Tensor:
    """Dimensions within a row in the order in which they lie in memory: some builds permute them for their kernels."""
    inner = sorted(range(1, state.dim()), key=lambda dim: (-state.stride()[dim], dim))
    return state.permute(0, *inner)


def assemble_mamba(
    kvcache: Any, page_size: int, draft: DraftBuffers | None, states: MambaStates | None
) -> DevicePoolGroup:
    """A group from an engine's pool of full attention (SGLang's `HybridLinearKVPool`) and its pool of states."""
    if states is None:
        raise ValueError(f"pool {PoolName.MAMBA}: expected the engine's pool of states (req_to_token_pool), got none")
    mapping = {layer - kvcache.start_layer: i for layer, i in kvcache.full_attention_layer_id_mapping.items()}
    full = _attention_layers(PoolName.KV, kvcache.full_kv_pool, mapping, page_size)
    return hybrid_pool_group(full, page_size, mamba=mamba_layers(states, kvcache.start_layer), draft=draft)


def assemble_swa(
    kvcache: Any, page_size: int, draft: DraftBuffers | None, states: MambaStates | None
) -> DevicePoolGroup:
    """A group from an engine's pools of full and windowed attention (SGLang's `SWAKVPool`), and of states if any."""
    by_kind: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for layer, (index, is_swa) in kvcache.layers_mapping.items():
        by_kind[is_swa][layer - kvcache.start_layer] = index
    return hybrid_pool_group(
        _attention_layers(PoolName.KV, kvcache.full_kv_pool, by_kind[False], page_size),
        page_size,
        swa=_attention_layers(PoolName.SWA, kvcache.swa_kv_pool, by_kind[True], page_size),
        mamba=None if states is None else mamba_layers(states, kvcache.start_layer),
        draft=draft,
    )


def mamba_parts(kvcache: Any) -> Mapping[PoolName, ComponentSource]:
    """A draft with recurrent layers has no counterpart of its states.

    Raises:
        DraftMismatchError: always.
    """
    raise DraftMismatchError(
        f"draft: expected one without recurrent layers, got {type(kvcache).__name__}, whose states would be left out",
        (DraftMode.NONE,),
    )


def swa_parts(kvcache: Any) -> Mapping[PoolName, ComponentSource]:
    """A draft's layers of full and of windowed attention, as far as it has some.

    Raises:
        DraftMismatchError: windowed layers that do not go by the target's SWA slots, or that are kept otherwise.
    """
    if getattr(kvcache, "swa_uses_full_indices", False):  # later builds than the first have it
        raise DraftMismatchError(
            f"draft of pool {PoolName.SWA}: expected one that goes by SWA slots, got one that goes by KV slots",
            (DraftMode.NONE,),
        )
    try:
        parts = {
            name: _attention_part(name, pool)
            for name, pool in ((PoolName.KV, kvcache.full_kv_pool), (PoolName.SWA, kvcache.swa_kv_pool))
            if pool.layer_num
        }
    except ValueError as error:
        raise DraftMismatchError(f"draft of {error}", (DraftMode.NONE,)) from error
    return parts


HYBRID_FAMILIES: tuple[PoolFamily, ...] = (
    PoolFamily(
        "Mamba hybrid",
        "HybridLinearKVPool",
        frozenset({"full_kv_pool"}),
        mamba_parts,
        assemble_mamba,
        takes_states=True,
    ),
    PoolFamily(
        "SWA hybrid",
        "SWAKVPool",
        frozenset({"full_kv_pool", "swa_kv_pool"}),
        swa_parts,
        assemble_swa,
        takes_states=True,
    ),
)
"""Families of pools that are made of others."""


def _attention_layers(name: PoolName, pool: Any, mapping: Mapping[int, int], page_size: int) -> HybridLayers:
    source = _attention_part(name, pool)
    if pool.page_size != page_size:
        raise ValueError(f"pool {name}: expected page size {page_size}, got {pool.page_size}")
    buffers = read_components(source)
    if not all(len(component) == pool.layer_num for component in buffers):
        counts = [len(component) for component in buffers]
        raise ValueError(f"pool {name}: expected {pool.layer_num} buffers, one a layer, got {counts}")
    paged = any(buffer.dim() > 3 for component in buffers for buffer in component)
    return HybridLayers(source, mapping, rows_are_pages=paged)


def _attention_part(name: PoolName, pool: Any) -> ComponentSource:
    """The buffers of one of the pools that a hybrid is made of."""
    families = [family for family in SINGLE_FAMILIES if family.engine_class in _ATTENTION_CLASSES]
    try:
        return family_of(pool, families).parts(pool)[PoolName.KV]
    except ValueError as error:
        raise ValueError(f"pool {name}: {error}") from None
