"""Every family of pools, small, from plain tensors, with each kind of draft; and units over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from softload import ComponentTransfer, DevicePool, DevicePoolGroup, HitPolicy, PoolName, TransferUnit
from softload.geometry import (
    DraftBuffers,
    DraftMode,
    HybridLayers,
    deepseek_v4_pool_group,
    dsa_pool_group,
    hybrid_pool_group,
    mha_pool_group,
    mla_pool_group,
    ring_view,
)

KV, INDEXER, SWA, MAMBA = PoolName.KV, PoolName.INDEXER, PoolName.SWA, PoolName.MAMBA
PAGE_SIZE, ROWS = 4, 40
WINDOWS: Mapping[PoolName, int] = {SWA: 2, PoolName.DRAFT_SWA: 2, MAMBA: 1}
"""Trailing windows in pages, by logical component."""


def tokens(layers: int, width: int = 24) -> list[torch.Tensor]:
    """A row is a token. One row too many, as engines have for padding."""
    return [torch.zeros(ROWS * PAGE_SIZE + 1, 1, width, dtype=torch.uint8) for _ in range(layers)]


def pages(layers: int, *shape: int, dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
    """A row is a page."""
    return [torch.zeros(ROWS, *(shape or (40,)), dtype=dtype) for _ in range(layers)]


def mha(draft: DraftBuffers | None) -> DevicePoolGroup:
    return mha_pool_group(tokens(4), tokens(4, 16), PAGE_SIZE, draft=draft)


def mla(draft: DraftBuffers | None) -> DevicePoolGroup:
    return mla_pool_group(tokens(5), PAGE_SIZE, draft=draft)


def dsa(draft: DraftBuffers | None) -> DevicePoolGroup:
    return dsa_pool_group(tokens(4), pages(4), PAGE_SIZE, draft=draft)


def dsa_in_some_layers(draft: DraftBuffers | None) -> DevicePoolGroup:
    return dsa_pool_group(tokens(7), pages(4), PAGE_SIZE, indexer_layers=(0, 1, 2, 6), draft=draft)


def deepseek_v4(draft: DraftBuffers | None) -> DevicePoolGroup:
    ratios = (0, 0, 4, 128, 4, 128)

    def states(width: int) -> list[torch.Tensor]:
        return [ring_view(torch.zeros(ROWS * 8 + 9, width, dtype=torch.float32), 8) for _ in range(2)]

    buffers = {
        SWA: pages(6, 96),
        PoolName.C4: pages(2, 48),
        PoolName.C4_INDEXER: pages(2, 16),
        PoolName.C128: pages(2, 8),
        PoolName.C4_STATE: states(6),
        PoolName.C4_INDEXER_STATE: states(2),
    }
    return deepseek_v4_pool_group(ratios, PAGE_SIZE, buffers, draft=draft)


def states(layers: int) -> HybridLayers:
    """As an engine has them: `[layers, states, ...]`, temporal ones and those of the convolution."""
    temporal = torch.zeros(layers, ROWS, 2, 3, 4)
    convolution = torch.zeros(layers, ROWS, 3, 8, dtype=torch.bfloat16)
    by_layer = [list(temporal.unbind(0)), list(convolution.unbind(0))]
    return HybridLayers(by_layer, {}, rows_are_pages=True)


def mamba_mla(draft: DraftBuffers | None) -> DevicePoolGroup:
    full = HybridLayers([tokens(2)], {0: 0, 4: 1})
    mamba = HybridLayers(states(3).components, {1: 0, 2: 1, 3: 2}, rows_are_pages=True)
    return hybrid_pool_group(full, PAGE_SIZE, mamba=mamba, draft=draft)


def mamba_swa(draft: DraftBuffers | None) -> DevicePoolGroup:
    full = HybridLayers([tokens(2), tokens(2, 16)], {0: 0, 3: 1})
    swa = HybridLayers([tokens(2), tokens(2, 16)], {1: 0, 5: 1})
    mamba = HybridLayers(states(2).components, {2: 0, 4: 1}, rows_are_pages=True)
    return hybrid_pool_group(full, PAGE_SIZE, swa=swa, mamba=mamba, draft=draft)


@dataclass(frozen=True, slots=True)
class Family:
    """How to build one, and its draft of `layers` layers."""

    build: Callable[[DraftBuffers | None], DevicePoolGroup]
    draft: Callable[[int], Mapping[PoolName, Sequence[Sequence[torch.Tensor]]]]
    most_packed: int
    """Draft layers that can be packed."""


FAMILIES: dict[str, Family] = {
    "mha": Family(mha, lambda n: {KV: (tokens(n), tokens(n, 16))}, 4),
    "mla": Family(mla, lambda n: {KV: (tokens(n),)}, 5),
    "dsa": Family(dsa, lambda n: {KV: (tokens(n),), INDEXER: (pages(n),)}, 4),
    "dsa-in-some-layers": Family(dsa_in_some_layers, lambda n: {KV: (tokens(n),), INDEXER: (pages(n),)}, 3),
    "deepseek-v4": Family(deepseek_v4, lambda n: {SWA: (pages(n, 96),)}, 6),
    "mamba-mla": Family(mamba_mla, lambda n: {KV: (tokens(n),)}, 1),
    "mamba-swa": Family(mamba_swa, lambda n: {KV: (tokens(n), tokens(n, 16)), SWA: (tokens(n), tokens(n, 16))}, 0),
}

DRAFTS: Mapping[str, tuple[DraftMode, int]] = {
    "none": (DraftMode.NONE, 0),
    "packed": (DraftMode.PACKED, 1),
    "packed-most": (DraftMode.PACKED, 99),
    "sidecar-fewer": (DraftMode.SIDECAR, 1),
    "sidecar-more": (DraftMode.SIDECAR, 9),
}
"""Mode and layers; 99 for as many as can be packed."""


def build(family: str, mode: DraftMode = DraftMode.NONE, layers: int = 1) -> Engine:
    """An engine's memory with pools of one family."""
    chosen = FAMILIES[family]
    if mode is DraftMode.NONE:
        return Engine(chosen.build(None))
    draft = DraftBuffers(pools=chosen.draft(layers), page_size=PAGE_SIZE, mode=mode)
    return Engine(chosen.build(draft))


class Engine:
    """Pools in random bytes, and who may write which page.

    Args:
        group: the pools.
    """

    def __init__(self, group: DevicePoolGroup) -> None:
        self.group = group
        self.sources = sorted({pool.index_source for pool in group.target_pools})
        self._before: dict[tuple[PoolName, int], torch.Tensor] = {}
        self.scramble(0)

    def unit(
        self,
        name: str,
        keys: Sequence[str],
        rows: Mapping[PoolName, Sequence[int]] | None = None,
    ) -> TransferUnit:
        """A unit over all pools; `rows` by index source, -1 for a page without slots."""
        target = tuple(self._component(source, source, keys, rows) for source in self.sources)
        logical = [
            (PoolName.DRAFT if source is KV else PoolName.DRAFT_SWA, source)
            for source in self.sources
            if any(pool.index_source is source for pool in self.group.draft_pools)
        ]
        draft = tuple(self._component(name, source, keys, rows) for name, source in logical)
        return TransferUnit(name, target, draft or None)

    def scramble(self, seed: int) -> None:
        """Other random bytes everywhere, rows beyond the pages too, and remember them."""
        for index, (_, _, tensor) in enumerate(self.tensors()):
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.from_numpy(np.random.default_rng((seed, index)).integers(0, 256, raw.shape, np.uint8)))
        self.remember()

    def remember(self) -> None:
        """Take the picture that `changed_rows` compares with."""
        self._before = {(name, i): tensor.clone() for name, i, tensor in self.tensors()}

    def tensors(self) -> list[tuple[PoolName, int, torch.Tensor]]:
        """All buffers, whole."""
        return [(pool.name, i, buffer) for pool in self.group.pools for i, buffer in enumerate(pool.buffers)]

    def compute(self, keys: Sequence[str], rows: Mapping[PoolName, Sequence[int]]) -> None:
        """Put each page's bytes where its slots are, as a forward pass would."""
        for pool in self.group.pools:
            for index, view in enumerate(pool.page_views):
                for key, row in zip(keys, rows[pool.index_source], strict=True):
                    if row >= 0:
                        view[row] = torch.from_numpy(content(key, pool, index))

    def holds(self, pool: DevicePool, index: int, key: str, row: int) -> bool:
        """Whether a row of a buffer holds the page's bytes."""
        return torch.equal(pool.page_views[index][row], torch.from_numpy(content(key, pool, index)))

    def changed_rows(self, pool: DevicePool, index: int) -> set[int]:
        """Rows of a buffer that are not as remembered; -1 for bytes beyond its pages."""
        before = self._before[pool.name, index].view(torch.uint8).reshape(pool.buffers[index].shape[0], -1)
        now = pool.buffers[index].view(torch.uint8).reshape(before.shape)
        rows = np.flatnonzero((before != now).any(dim=1).numpy())
        per_page = 1 if pool.rows_are_pages else pool.page_size
        return {int(row) // per_page if row < pool.num_pages * per_page else -1 for row in rows}

    def _component(
        self,
        name: PoolName,
        source: PoolName,
        keys: Sequence[str],
        rows: Mapping[PoolName, Sequence[int]] | None,
    ) -> ComponentTransfer:
        policy = HitPolicy.ALL_PAGES if source is KV else HitPolicy.TRAILING_PAGES
        slots = None if rows is None else _slots(source, rows[source])
        return ComponentTransfer(name, tuple(keys), slots, policy, WINDOWS.get(name, 1))


def content(key: str, pool: DevicePool, index: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """What a page must hold in one buffer: not zero anywhere, so that zeroed bytes are not mistaken for it."""
    seed = xxhash.xxh3_64_intdigest(f"{key}\x00{pool.name}\x00{index}".encode())
    return np.random.Generator(np.random.SFC64(seed)).integers(1, 256, pool.page_bytes(index), dtype=np.uint8)


def shuffled(seed: int, count: int) -> list[int]:
    """Distinct page rows in no order, the first and the last among them."""
    inner = np.random.default_rng(seed).permutation(np.arange(1, ROWS - 1))[: count - 2].tolist()
    return [ROWS - 1, *inner, 0]


def windows_of(boundary: int) -> dict[PoolName, range]:
    """The pages that a prefix needs, by index source."""
    return {KV: range(boundary)} | {
        source: range(max(0, boundary - window), boundary) for source, window in WINDOWS.items()
    }


def _slots(source: PoolName, rows: Sequence[int]) -> torch.Tensor:
    starts = torch.tensor(list(rows), dtype=torch.int64)
    if source is MAMBA:
        return starts
    slots = starts[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)
    slots[starts < 0] = -1
    return slots.reshape(-1)
