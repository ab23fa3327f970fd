"""From an engine's pool objects to a `DevicePoolGroup`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from softload.geometry.device_pool import Components, ComponentSource, read_components
from softload.geometry.drafts import DraftBuffers, DraftMismatchError, DraftMode
from softload.geometry.families import SINGLE_FAMILIES, PoolFamily, family_of
from softload.geometry.group import DevicePoolGroup
from softload.geometry.mamba import HYBRID_FAMILIES
from softload.transfer import PoolName

__all__ = ["FAMILIES", "build_pool_group"]

FAMILIES: tuple[PoolFamily, ...] = (*SINGLE_FAMILIES, *HYBRID_FAMILIES)
"""Every family of pools that is known."""


def build_pool_group(
    kvcache: Any,
    page_size: int,
    *,
    req_to_token_pool: Any = None,
    draft_pools: Sequence[Any] = (),
    draft_mode: DraftMode | None = None,
    draft_depths: Sequence[int] | None = None,
) -> DevicePoolGroup:
    """The device pools of an engine, from its own pool objects; no engine needs to be installed.

    Args:
        kvcache: the target's pool.
        page_size: tokens per page in the engine's prefix tree.
        req_to_token_pool: the engine's pool of recurrent states, for models that have such layers.
        draft_pools: the draft's pools, in depth order, each with one or more layers.
        draft_mode: how to store the draft; ``None`` packs it where that is possible.
        draft_depths: the depth of each draft layer in the order given, where the engine tells it.

    Raises:
        ValueError: a pool of no known family (the message lists those that are), or of another page size; a
            `DraftMismatchError` where only the draft is at fault.
    """
    family = family_of(kvcache, FAMILIES)
    if kvcache.page_size != page_size:
        raise ValueError(f"pool {PoolName.KV}: expected page size {page_size}, got {kvcache.page_size}")
    if req_to_token_pool is not None and not family.takes_states:
        what = type(req_to_token_pool).__name__
        raise ValueError(f"pool {PoolName.MAMBA}: expected no pool of states beside one of {family.name}, got {what}")
    draft = _draft_buffers(kvcache, family, page_size, draft_pools, draft_mode, draft_depths) if draft_pools else None
    if family.takes_states:
        return family.assemble(kvcache, page_size, draft, req_to_token_pool)
    return family.assemble(kvcache, page_size, draft)


def _draft_buffers(
    kvcache: Any,
    family: PoolFamily,
    page_size: int,
    pools: Sequence[Any],
    mode: DraftMode | None,
    depths: Sequence[int] | None,
) -> DraftBuffers:
    try:
        families = [family_of(pool, FAMILIES) for pool in pools]
    except ValueError as error:
        raise DraftMismatchError(f"draft: {error}", (DraftMode.NONE,)) from error
    if len(set(families)) > 1:
        names = ", ".join(each.name for each in families)
        raise DraftMismatchError(f"draft: expected pools of one family, got {names}", (DraftMode.NONE,))
    by_pool = [families[0].parts(pool) for pool in pools]
    parts = sorted({name for each in by_pool for name in each})
    partly = [name for name in parts if any(name not in each for each in by_pool)]
    if partly:
        raise DraftMismatchError(
            f"draft: expected layers of {', '.join(parts)} in each of its pools, got some without {', '.join(partly)}",
            (DraftMode.NONE,),
        )
    _check_rows(kvcache, family, by_pool)
    sizes = [families[0].draft_page_size(pool) for pool in pools]
    return DraftBuffers(
        pools={name: _joined([each[name] for each in by_pool]) for name in parts},
        page_size=next((size for size in sizes if size != page_size), page_size),
        mode=mode,
        depths=None if depths is None else tuple(depths),
    )


def _check_rows(kvcache: Any, family: PoolFamily, drafts: Sequence[Mapping[PoolName, ComponentSource]]) -> None:
    """A draft goes by its target's slots: its rows hold as much."""
    if family.takes_states:
        kvcache, family = kvcache.full_kv_pool, family_of(kvcache.full_kv_pool, SINGLE_FAMILIES)
    if family.engine_class == "DeepSeekV4TokenToKVPool":
        return  # without a KV pool of its own there is no counterpart, which is said later
    paged = _has_paged_rows(family.parts(kvcache)[PoolName.KV])
    if any(_has_paged_rows(parts[PoolName.KV]) is not paged for parts in drafts if PoolName.KV in parts):
        expected, got = ("a page", "a token") if paged else ("a token", "a page")
        raise DraftMismatchError(f"draft: expected {expected} in a row as the target has, got {got}", (DraftMode.NONE,))


def _has_paged_rows(source: ComponentSource) -> bool:
    return any(buffer.dim() > 3 for component in read_components(source) for buffer in component)


def _joined(sources: Sequence[ComponentSource]) -> ComponentSource:
    """The components of several pools as those of one, layer behind layer."""

    def components() -> Components:
        by_pool = [read_components(source) for source in sources]
        return [[buffer for component in parts for buffer in component] for parts in zip(*by_pool, strict=True)]

    return components
