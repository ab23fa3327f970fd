"""From an engine's pool object to a `DevicePoolGroup`: one line per family of pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from softload.geometry.device_pool import Components, ComponentSource, read_components
from softload.geometry.drafts import DraftBuffers, DraftMismatchError, DraftMode
from softload.geometry.group import DevicePoolGroup
from softload.geometry.mha import assemble_mha, mha_components
from softload.geometry.mla import assemble_mla, mla_components
from softload.transfer import PoolName

__all__ = ["FAMILIES", "PoolFamily", "build_pool_group"]


@dataclass(frozen=True, slots=True)
class PoolFamily:
    """A kind of engine pool.

    Args:
        name: what people call it.
        engine_class: the engine's class; one that derives from it has changed something, and is not of this family.
        buffers: the attributes that hold its bytes, all of them: names that end in `_buffer`.
        components: the buffers of such a pool.
        assemble: makes the group from pool, page size and draft.
    """

    name: str
    engine_class: str
    buffers: frozenset[str]
    components: Callable[[Any], ComponentSource]
    assemble: Callable[[Any, int, DraftBuffers | None], DevicePoolGroup]


FAMILIES: tuple[PoolFamily, ...] = (
    PoolFamily("MHA/GQA", "MHATokenToKVPool", frozenset({"k_buffer", "v_buffer"}), mha_components, assemble_mha),
    PoolFamily("MLA", "MLATokenToKVPool", frozenset({"kv_buffer"}), mla_components, assemble_mla),
)


def build_pool_group(
    kvcache: Any,
    page_size: int,
    *,
    draft_pools: Sequence[Any] = (),
    draft_mode: DraftMode | None = None,
    draft_depths: Sequence[int] | None = None,
) -> DevicePoolGroup:
    """The device pools of an engine, from its own pool objects; no engine needs to be installed.

    Args:
        kvcache: the target's pool.
        page_size: tokens per page in the engine's prefix tree.
        draft_pools: the draft's pools, in depth order, each with one or more layers.
        draft_mode: how to store the draft; ``None`` packs it where that is possible.
        draft_depths: the depth of each draft layer in the order given, where the engine tells it.

    Raises:
        ValueError: a pool of no known family (the message lists those that are), or of another page size; a
            `DraftMismatchError` where only the draft is at fault.
    """
    family = _family(kvcache)
    if kvcache.page_size != page_size:
        raise ValueError(f"pool {PoolName.KV}: expected page size {page_size}, got {kvcache.page_size}")
    if not draft_pools:
        return family.assemble(kvcache, page_size, None)
    try:
        families = [_family(pool) for pool in draft_pools]
    except ValueError as error:
        raise DraftMismatchError(f"draft: {error}", (DraftMode.NONE,)) from error
    if len(set(families)) > 1:
        names = ", ".join(each.name for each in families)
        raise DraftMismatchError(f"draft: expected pools of one family, got {names}", (DraftMode.NONE,))
    sources = [each.components(pool) for each, pool in zip(families, draft_pools, strict=True)]
    paged = _has_paged_rows(family.components(kvcache))
    if any(_has_paged_rows(source) is not paged for source in sources):
        expected, got = ("a page", "a token") if paged else ("a token", "a page")
        raise DraftMismatchError(f"draft: expected {expected} in a row as the target has, got {got}", (DraftMode.NONE,))
    draft = DraftBuffers(
        pools={PoolName.KV: lambda: _joined(sources)},
        page_size=next((pool.page_size for pool in draft_pools if pool.page_size != page_size), page_size),
        mode=draft_mode,
        depths=None if draft_depths is None else tuple(draft_depths),
    )
    return family.assemble(kvcache, page_size, draft)


def _family(kvcache: Any) -> PoolFamily:
    """By the buffers that the pool has: one more than the family's would be left out of the store without a word."""
    held = _held_buffers(kvcache)
    lineage = [each.__name__ for each in type(kvcache).__mro__]
    classes = {family.engine_class for family in FAMILIES}
    derived = lineage[0] not in classes and any(name in classes for name in lineage)
    for family in FAMILIES:
        if family.buffers == held and not derived:
            return family
    known = "; ".join(f"{family.name} ({', '.join(sorted(family.buffers))})" for family in FAMILIES)
    what = f"{lineage[0]} with {', '.join(sorted(held)) or 'no buffers'}"
    if derived:
        what += f", derived from {next(name for name in lineage if name in classes)}"
    raise ValueError(f"expected a pool of a known family, {known}; got {what}")


def _held_buffers(kvcache: Any) -> frozenset[str]:
    names = (name for name in dir(kvcache) if name.endswith("_buffer") and not name.startswith("_"))
    values = {name: getattr(kvcache, name) for name in names}
    return frozenset(name for name, value in values.items() if value is not None and not callable(value))


def _has_paged_rows(source: ComponentSource) -> bool:
    return any(buffer.dim() > 3 for component in read_components(source) for buffer in component)


def _joined(sources: Sequence[ComponentSource]) -> Components:
    """The components of several pools as those of one, layer behind layer."""
    by_pool = [read_components(source) for source in sources]
    return [[buffer for component in parts for buffer in component] for parts in zip(*by_pool, strict=True)]
