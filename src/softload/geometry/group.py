"""The pools of one engine: what a transfer unit's logical components mean in physical pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from softload.config import Layout
from softload.geometry.device_pool import DevicePool
from softload.geometry.layout import ObjectSpec, object_specs
from softload.geometry.overlaps import first_overlap
from softload.transfer import ComponentTransfer, HitPolicy, PoolName

__all__ = ["DevicePoolGroup", "ResolvedComponent"]

_DRAFT_SOURCES: Mapping[PoolName, frozenset[PoolName]] = {
    PoolName.DRAFT: frozenset({PoolName.KV, PoolName.DRAFT}),
    PoolName.DRAFT_SWA: frozenset({PoolName.SWA, PoolName.DRAFT_SWA}),
}
"""Logical draft components, and the index sources of the draft pools that they stand for."""

_KnownRows: TypeAlias = dict[tuple[int, bool], npt.NDArray[np.int64]]
"""What was worked out while one unit is resolved: the rows of its components, in pools with a row a page or a token."""


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedComponent:
    """One physical pool's part of a transfer.

    Args:
        pool: the pool.
        keys: one page key per page, in prefix order.
        rows: int64 `[pages]`, each page's row in the pool's `page_views`, -1 for a page without slots; ``None`` where
            no slots are taken yet.
        hit_policy: which pages a boundary needs.
        window: pages in a trailing window.
    """

    pool: DevicePool
    keys: tuple[str, ...]
    rows: npt.NDArray[np.int64] | None
    hit_policy: HitPolicy
    window: int


class DevicePoolGroup:
    """All pools that one loader fills, under one range of transfer layers.

    Args:
        pools: target pools and, for a sidecar draft, draft pools; at least one target pool, every name once, all on one
            device and of one page size.
        num_layers: the target's transfer layers; a sidecar draft has its own number.
        page_size: tokens per page.
        rank_replicated: whether every tensor-parallel rank holds the same bytes.
        shared_memory: whether pools of different index sources may lie in the same memory, because the engine gives a
            page of it to one of them at a time. Pools of one index source never may.

    Raises:
        ValueError: pools that do not fit together; the message names pool, expected and got.
    """

    def __init__(
        self,
        pools: Sequence[DevicePool],
        num_layers: int,
        page_size: int,
        rank_replicated: bool = False,
        *,
        shared_memory: bool = False,
    ) -> None:
        self.pools: tuple[DevicePool, ...] = tuple(pools)
        self.target_pools: tuple[DevicePool, ...] = tuple(pool for pool in pools if not pool.name.is_draft)
        self.draft_pools: tuple[DevicePool, ...] = tuple(pool for pool in pools if pool.name.is_draft)
        self.num_layers = num_layers
        self.page_size = page_size
        self.rank_replicated = rank_replicated
        self._by_name = {pool.name: pool for pool in self.pools}
        self._check()
        self._check_apart(shared_memory)
        self._specs: dict[Layout, Mapping[PoolName, tuple[ObjectSpec, ...]]] = {}

    def __repr__(self) -> str:
        names = ", ".join(self._by_name)
        draft = f", {self.num_draft_layers} draft layers" if self.has_draft else ""
        return f"<DevicePoolGroup {names}: {self.num_layers} layers{draft}, page {self.page_size}, {self.device}>"

    @property
    def device(self) -> torch.device:
        """Where the pools are."""
        return self.pools[0].device

    @property
    def has_draft(self) -> bool:
        """Whether a draft is stored, packed or in pools of its own."""
        return self.num_draft_layers > 0

    @property
    def num_draft_layers(self) -> int:
        """Layers of the draft model; 0 without a draft."""
        packed = max(pool.num_draft_layers for pool in self.target_pools)
        return max((pool.num_layers for pool in self.draft_pools), default=packed)

    def pool(self, name: PoolName) -> DevicePool:
        """The pool of this name.

        Raises:
            ValueError: there is none; the message lists those that are there.
        """
        if name not in self._by_name:
            raise ValueError(f"expected one of the pools {', '.join(self._by_name)}, got {name}")
        return self._by_name[name]

    def specs(self, layout: Layout) -> Mapping[PoolName, tuple[ObjectSpec, ...]]:
        """The objects of one page, by pool, draft pools included."""
        if layout not in self._specs:
            specs = {pool.name: object_specs(pool, layout, self.num_layers) for pool in self.target_pools}
            specs |= {pool.name: object_specs(pool, layout, self.num_draft_layers) for pool in self.draft_pools}
            self._specs[layout] = MappingProxyType(specs)
        return self._specs[layout]

    def fingerprint(self, layout: Layout) -> str:
        """Stable text of all of the target's geometry that decides what stored bytes mean.

        A draft is no part of it, so that the target's pages serve with and without one; draft objects of
        `Layout.GROUPED` carry a digest of their own geometry in their part of the key.
        """
        pools = sorted(self.target_pools, key=lambda pool: pool.name)
        head = f"{layout}|layers={self.num_layers}|page={self.page_size}|replicated={int(self.rank_replicated)}"
        return "\n".join([head, *(pool.geometry(draft=False) for pool in pools)])

    def check_alive(self) -> None:
        """Make sure that every pool's addresses are still the engine's buffers.

        Raises:
            RuntimeError: a buffer has moved or was rebuilt; the message names its pool.
        """
        for pool in self.pools:
            pool.check_alive()

    def resolve(
        self,
        components: Sequence[ComponentTransfer],
        allow_partial: bool = False,
        allow_missing_kv: bool = False,
    ) -> tuple[ResolvedComponent, ...]:
        """Expand the target's logical components into every pool that takes its indices from them.

        Pools that take them from KV become ALL_PAGES: without every page of KV no prefix is whole.

        Args:
            components: the target's components. Without pages in any of them nothing is asked for.
            allow_partial: accept that an index source other than KV has no component, or one without pages.
            allow_missing_kv: the same for KV.

        Returns:
            In the group's order of pools; empty for no pages.

        Raises:
            ValueError: an unknown pool, slots that do not fit the keys or the pool, or a partial transfer.
        """
        sources = {pool.index_source for pool in self.target_pools}
        by_source = self._by_pool(components, sorted(sources), "target")
        if not by_source:
            return ()
        missing = sorted(sources - by_source.keys())
        if PoolName.KV in missing and not allow_missing_kv:
            raise ValueError(f"expected a {PoolName.KV} component, got only {', '.join(sorted(by_source))}")
        partial = [source for source in missing if source is not PoolName.KV]
        if partial and not allow_partial:
            left_out = ", ".join(pool.name for pool in self.target_pools if pool.index_source in partial)
            raise ValueError(
                f"expected components for {', '.join(sorted(sources))}, got only {', '.join(sorted(by_source))}: "
                f"{left_out} would be left out"
            )
        known: _KnownRows = {}
        return tuple(
            _resolved(pool, by_source[pool.index_source], known)
            for pool in self.target_pools
            if pool.index_source in by_source
        )

    def resolve_draft(self, components: Sequence[ComponentTransfer]) -> tuple[ResolvedComponent, ...]:
        """Expand the draft's logical components, DRAFT and DRAFT_SWA, into all draft pools.

        Returns:
            In the group's order of pools; empty for no pages.

        Raises:
            ValueError: an unknown pool, slots that do not fit, or a set that leaves a draft pool out: a draft is valid
                only as a whole.
        """
        if components and not self.draft_pools:
            packed = "the draft is packed and comes with the target" if self.has_draft else "there is no draft"
            raise ValueError(f"expected no draft components ({packed}), got {', '.join(c.pool for c in components)}")
        logical = {pool.name: _draft_component(pool) for pool in self.draft_pools}
        by_name = self._by_pool(components, sorted(set(logical.values())), "draft")
        if not by_name:
            return ()
        missing = [pool.name for pool in self.draft_pools if logical[pool.name] not in by_name]
        if missing:
            raise ValueError(
                f"expected draft components for {', '.join(sorted(set(logical.values())))}, "
                f"got only {', '.join(sorted(by_name))}: {', '.join(missing)} would be left out"
            )
        known: _KnownRows = {}
        return tuple(_resolved(pool, by_name[logical[pool.name]], known) for pool in self.draft_pools)

    def _by_pool(
        self, components: Sequence[ComponentTransfer], known: Sequence[PoolName], kind: str
    ) -> dict[PoolName, ComponentTransfer]:
        """The components that have pages, by logical pool."""
        chosen: dict[PoolName, ComponentTransfer] = {}
        for component in components:
            if component.pool not in known:
                raise ValueError(f"expected a {kind} component of {', '.join(known)}, got {component.pool}")
            if component.pool in chosen:
                raise ValueError(f"expected one {kind} component of {component.pool}, got two")
            chosen[component.pool] = component
            self._check_slots(component)
        return {name: component for name, component in chosen.items() if component.keys}

    def _check_slots(self, component: ComponentTransfer) -> None:
        """Before an index mapper sees them: a negative slot would wrap around in its table, unnoticed."""
        if component.slots is None:
            return
        pages, count = len(component.keys), component.slots.numel()
        if count not in (pages, pages * self.page_size):
            raise ValueError(
                f"pool {component.pool}: expected {pages * self.page_size} token slots, or {pages} rows, "
                f"for {pages} keys, got {count} slots"
            )
        # numpy: torch would start its thread pool for so little.
        lowest = int(component.slots.cpu().numpy().min()) if count else 0
        if lowest < (-1 if component.hit_policy is HitPolicy.TRAILING_PAGES else 0):
            raise ValueError(f"pool {component.pool}: expected slots from 0, got {lowest}")

    def _check(self) -> None:
        if not self.target_pools:
            raise ValueError(f"expected at least one target pool, got {[str(name) for name in self._by_name]}")
        if len(self._by_name) != len(self.pools):
            names = [pool.name for pool in self.pools]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"expected every pool once, got {', '.join(twice)} more than once")
        for pool in self.pools:
            self._check_pool(pool)
        packed = {pool.name: pool.num_draft_layers for pool in self.target_pools if pool.num_draft_layers}
        if len(set(packed.values())) > 1:
            counts = ", ".join(f"{name}: {count}" for name, count in packed.items())
            raise ValueError(f"expected equally many packed draft layers in every pool that has some, got {counts}")
        if packed and self.draft_pools:
            raise ValueError(
                f"expected a draft either packed or in pools of its own, got it packed in {', '.join(packed)} "
                f"and the pools {', '.join(pool.name for pool in self.draft_pools)}"
            )

    def _check_apart(self, shared_memory: bool) -> None:
        sources = sorted({pool.index_source for pool in self.pools})
        together = [[pool for pool in self.pools if pool.index_source is source] for source in sources]
        for pools in together if shared_memory else [self.pools]:
            overlap = first_overlap(pools)
            if overlap is not None:
                raise ValueError(f"{overlap[1]}: expected bytes of its own, got some that {overlap[0]}, has")

    def _check_pool(self, pool: DevicePool) -> None:
        if pool.page_size != self.page_size:
            raise ValueError(f"pool {pool.name}: expected page size {self.page_size}, got {pool.page_size}")
        if pool.device != self.device:
            raise ValueError(f"pool {pool.name}: expected device {self.device}, got {pool.device}")
        if pool.name.is_draft:
            _draft_component(pool)
        elif pool.index_source.is_draft:
            raise ValueError(f"pool {pool.name}: expected a target pool as index source, got {pool.index_source}")
        elif pool.num_layers > self.num_layers:
            raise ValueError(
                f"pool {pool.name}: expected transfer layers below {self.num_layers}, "
                f"got a buffer for layer {pool.num_layers - 1}"
            )


def _draft_component(pool: DevicePool) -> PoolName:
    """The logical component that a draft pool belongs to."""
    for logical, sources in _DRAFT_SOURCES.items():
        if pool.index_source in sources:
            return logical
    known = ", ".join(sorted(source for sources in _DRAFT_SOURCES.values() for source in sources))
    raise ValueError(f"pool {pool.name}: expected an index source of {known}, got {pool.index_source}")


def _resolved(pool: DevicePool, component: ComponentTransfer, known: _KnownRows) -> ResolvedComponent:
    all_pages = pool.index_source is PoolName.KV or component.hit_policy is HitPolicy.ALL_PAGES
    return ResolvedComponent(
        pool=pool,
        keys=component.keys,
        rows=None if component.slots is None else _rows(pool, component, component.slots, known),
        hit_policy=HitPolicy.ALL_PAGES if all_pages else component.hit_policy,
        window=1 if all_pages else component.window,
    )


def _rows(
    pool: DevicePool, component: ComponentTransfer, slots: torch.Tensor, known: _KnownRows
) -> npt.NDArray[np.int64]:
    """Each page's row; -1 for a page before a trailing window that has no slots, only -1."""
    pages = len(component.keys)
    if component.hit_policy is HitPolicy.TRAILING_PAGES:  # elsewhere every page has slots: that was checked
        by_page = slots.cpu().numpy().reshape(pages, -1) if pages else np.empty((0, 1), np.int64)
        present = (by_page >= 0).any(axis=1)
        if not present.all():
            rows = np.full(pages, -1, np.int64)
            kept = torch.from_numpy(by_page[present].flatten()).to(slots.device)
            rows[present] = pool.rows(pool.translate(kept), int(present.sum()))
            return rows
    if pool.index_mapper is not None:
        return pool.rows(pool.translate(slots), pages)
    # Pools of one page size that take the same slots as they come have the same rows.
    source = (id(component), pool.rows_are_pages)
    if source in known:
        pool.check_rows(known[source])
    else:
        known[source] = pool.rows(slots, pages)
    return known[source]
