"""Where a draft model's pages go: packed behind the target's, or in pools of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import structlog

from softload import events
from softload.geometry.device_pool import Components, ComponentSource, DevicePool, read_components
from softload.transfer import PoolName

__all__ = ["DraftBuffers", "DraftMismatchError", "DraftMode", "attach_draft", "plan_draft", "without_unfit_draft"]

T = TypeVar("T")
D = TypeVar("D")

_log = structlog.get_logger(__name__)

_SIDECAR_NAMES: Mapping[PoolName, PoolName] = {
    PoolName.KV: PoolName.DRAFT,
    PoolName.INDEXER: PoolName.DRAFT_INDEXER,
    PoolName.SWA: PoolName.DRAFT_SWA,
}


class DraftMode(StrEnum):
    """How a draft is stored."""

    PACKED = "packed"
    """Behind the target, in its pools: depth `d` rides on transfer layer `d`."""

    SIDECAR = "sidecar"
    """In pools of its own, with its own number of layers."""

    NONE = "none"


class DraftMismatchError(ValueError):
    """A draft cannot be stored as asked. The target can: the caller may go on with what `fits`.

    Args:
        message: pool, expected and got.
        fits: the modes that this draft and target allow, best first; `DraftMode.NONE` is always among them.
    """

    def __init__(self, message: str, fits: tuple[DraftMode, ...]) -> None:
        super().__init__(f"{message}; what fits: {', '.join(fits)}")
        self.fits = fits


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DraftBuffers:
    """A draft model's tensors.

    Args:
        pools: the draft's components, by the target pool that they are the counterpart of (KV, INDEXER, SWA); within
            each component one tensor per draft layer, in depth order.
        page_size: tokens per page of the draft's pools.
        mode: how to store them; ``None`` packs what can be packed.
        depths: the depth of each layer in the order given, where the engine tells it; must then be 0, 1, 2, ...
    """

    pools: Mapping[PoolName, ComponentSource]
    page_size: int
    mode: DraftMode | None = None
    depths: tuple[int, ...] | None = None


def plan_draft(targets: Sequence[DevicePool], draft: DraftBuffers | None, *, unified_kv: bool = False) -> DraftMode:
    """How the draft will be stored. Refuses what would be misplaced, or silently left out, later.

    Args:
        targets: the target's pools, without a draft.
        draft: the draft's tensors, or ``None``.
        unified_kv: whether the target keeps all its kinds of KV in one pool, which has no place for a draft.

    Raises:
        DraftMismatchError: the draft cannot be stored as asked; its `fits` says what can be done instead.
    """
    if draft is None or draft.mode is DraftMode.NONE:
        return DraftMode.NONE
    if reason := _unfit(targets, draft, unified_kv):
        raise DraftMismatchError(reason, (DraftMode.NONE,))
    unpackable = _unpackable(targets, draft)
    if draft.mode is DraftMode.PACKED and unpackable:
        raise DraftMismatchError(unpackable, (DraftMode.SIDECAR, DraftMode.NONE))
    return draft.mode or (DraftMode.SIDECAR if unpackable else DraftMode.PACKED)


def attach_draft(
    targets: Sequence[DevicePool], draft: DraftBuffers | None, *, unified_kv: bool = False
) -> tuple[DevicePool, ...]:
    """The target's pools and the draft's, as `plan_draft` answers.

    Raises:
        DraftMismatchError: see `plan_draft`.
    """
    mode = plan_draft(targets, draft, unified_kv=unified_kv)
    if draft is None or mode is DraftMode.NONE:
        return tuple(targets)
    if mode is DraftMode.PACKED:
        return tuple(_packed(pool, draft.pools[pool.name]) if pool.name in draft.pools else pool for pool in targets)
    return (*targets, *(_sidecar(pool, draft.pools[pool.name]) for pool in targets if pool.name in draft.pools))


def without_unfit_draft(build: Callable[[D | None], T], draft: D | None) -> T:
    """Build with the draft, or, where it does not fit, without it and with one warning: the target works all the same.

    Args:
        build: what makes the pools, `lambda drafts: build_pool_group(kvcache, page_size, draft_pools=drafts or ())` for
            example.
        draft: what `build` makes them with, `DraftBuffers` or an engine's own pools; it gets ``None`` for no draft.

    Raises:
        ValueError: the target itself does not fit.
    """
    try:
        return build(draft)
    except DraftMismatchError as error:
        _log.warning(events.DRAFT_DISABLED, reason=str(error), fits=[str(mode) for mode in error.fits])
        return build(None)


def _unfit(targets: Sequence[DevicePool], draft: DraftBuffers, unified_kv: bool) -> str | None:
    """Why the draft cannot be stored in any way."""
    if unified_kv:
        return "draft: expected a target with pools of its own for KV and SWA, got one unified KV pool"
    if not draft.pools:
        return "draft: expected buffers for at least one pool, got none"
    by_name = {pool.name: pool for pool in targets}
    layers: dict[PoolName, int] = {}
    for name, source in draft.pools.items():
        if name not in _SIDECAR_NAMES or name not in by_name:
            known = ", ".join(pool for pool in by_name if pool in _SIDECAR_NAMES)
            return f"draft: expected counterparts of the target's pools ({known or 'none'}), got one of {name}"
        target, components = by_name[name], read_components(source)
        if draft.page_size != target.page_size:
            return f"draft of pool {name}: expected page size {target.page_size}, got {draft.page_size}"
        counts = sorted({len(component) for component in components})
        if len(counts) != 1 or counts[0] == 0:
            return f"draft of pool {name}: expected equally many layers, at least 1, in every component, got {counts}"
        layers[name] = counts[0]
        try:
            alone = _sidecar(target, source)
        except ValueError as error:
            return str(error)
        if alone.device != target.device:
            return f"draft of pool {name}: expected the target's device {target.device}, got {alone.device}"
        if alone.num_pages < target.num_pages:
            return f"draft of pool {name}: expected the target's {target.num_pages} pages, got {alone.num_pages}"
    if len(set(layers.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in layers.items())
        return f"draft: expected the same number of layers in every pool, got {listed}"
    count = next(iter(layers.values()))
    if draft.depths is not None and draft.depths != tuple(range(count)):
        return f"draft: expected its layers in the order of their depths {list(range(count))}, got {list(draft.depths)}"
    return None


def _unpackable(targets: Sequence[DevicePool], draft: DraftBuffers) -> str | None:
    """Why a draft that fits otherwise cannot be packed."""
    for target in targets:
        if target.name not in draft.pools:
            continue
        components = read_components(draft.pools[target.name])
        if len(components) != len(target.components):
            return (
                f"packed draft of pool {target.name}: expected {len(target.components)} components as the target has, "
                f"got {len(components)}"
            )
        depths, mapped = len(components[0]), len(target.layer_mapping)
        if depths > mapped:
            return (
                f"packed draft of pool {target.name}: expected at most as many layers as the target has ({mapped}), "
                f"got {depths}"
            )
        absent = [depth for depth in range(depths) if depth not in target.layer_mapping]
        if absent:
            return (
                f"packed draft of pool {target.name}: expected target buffers on transfer layers 0 to {depths - 1} "
                f"for the draft to ride on, got none on {absent}"
            )
    return None


def _packed(target: DevicePool, source: ComponentSource) -> DevicePool:
    def both() -> Components:
        pairs = zip(read_components(target.component_source), read_components(source), strict=True)
        return [[*buffers, *behind] for buffers, behind in pairs]

    depths, count = len(read_components(source)[0]), len(target.components[0])
    mapping: dict[int, tuple[int, ...]] = dict(target.layer_mapping)
    for depth in range(depths):
        mapping[depth] = (*mapping[depth], count + depth)
    return DevicePool(
        target.name,
        target.index_source,
        both,
        mapping,
        target.page_size,
        target.rows_are_pages,
        target.packed,
        target.index_mapper,
        num_draft_layers=depths,
    )


def _sidecar(target: DevicePool, source: ComponentSource) -> DevicePool:
    return DevicePool(
        _SIDECAR_NAMES[target.name],
        target.index_source,
        source,
        {depth: depth for depth in range(len(read_components(source)[0]))},
        target.page_size,
        target.rows_are_pages,
        target.packed,
        target.index_mapper,
    )
