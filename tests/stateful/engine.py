"""A small engine: pools, the bytes that pages must hold, and which rows are whose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from softload import ComponentTransfer, DevicePoolGroup, PoolName, TransferUnit
from softload.geometry import DraftBuffers, DraftMode, mla_pool_group
from softload.geometry.device_pool import DevicePool
from softload.transfer import Fence

PAGE_SIZE = 2
LAYERS = 4
DRAFT_LAYERS = 2
ROWS = 44
GUARDS = (0, ROWS - 1)
ROW_BYTES = 1056
"""Bytes of a token in one layer: objects are longer than a block of the sample digest, and end in a part of one."""

POISON = 0xDB
Bytes = npt.NDArray[np.uint8]


@lru_cache(maxsize=4096)
def content(key: str, pool: str, buffer: int) -> Bytes:
    """What the page `key` holds in one buffer of a pool."""
    seed = xxhash.xxh3_64_intdigest(f"{key}|{pool}|{buffer}".encode())
    return np.random.default_rng(seed).integers(1, 256, PAGE_SIZE * ROW_BYTES, dtype=np.uint8)


class Engine:
    """Device pools, and an allocator of page rows; a sidecar draft's rows are its target's."""

    def __init__(self, draft: DraftMode) -> None:
        def buffers(count: int) -> list[torch.Tensor]:
            shape = (ROWS * PAGE_SIZE, 1, ROW_BYTES)
            return [torch.from_numpy(np.full(shape, POISON, np.uint8)) for _ in range(count)]

        self.draft = draft
        beside = None
        if draft is not DraftMode.NONE:
            source = (buffers(DRAFT_LAYERS),)
            beside = DraftBuffers(pools={PoolName.KV: source}, page_size=PAGE_SIZE, mode=draft)
        self.pools: DevicePoolGroup = mla_pool_group(buffers(LAYERS), PAGE_SIZE, draft=beside)
        self.free = [row for row in range(ROWS) if row not in GUARDS]
        self.written: set[int] = set()
        """Rows that the engine itself has written since the last look."""
        self._before = self._copy()

    def take(self, count: int) -> list[int] | None:
        """Rows for `count` pages, poisoned: what is left in them is nobody's."""
        if count > len(self.free):
            return None
        rows, self.free = self.free[:count], self.free[count:]
        return rows

    def give(self, rows: Iterable[int]) -> None:
        """Rows come back and are overwritten at once, so that a late write is seen."""
        rows = list(rows)
        self.free += rows
        for pool in self.pools.pools:
            for view in pool.page_views:
                view.numpy()[rows] = POISON
        self.written.update(rows)

    def compute(self, rows: Sequence[int], keys: Sequence[str]) -> None:
        """A forward pass over these pages, the draft's too."""
        for pool, buffer, view in self._views():
            for row, key in zip(rows, keys, strict=True):
                view[row] = content(key, pool.name, buffer)
        self.written.update(rows)

    def unit(
        self,
        request_id: str,
        keys: Sequence[str],
        rows: Sequence[int] | None = None,
        deadline: float | None = None,
        ready: Fence | None = None,
    ) -> TransferUnit:
        """A transfer unit, with slots where rows are given."""
        slots = None
        if rows is not None:
            slots = torch.tensor([row * PAGE_SIZE + token for row in rows for token in range(PAGE_SIZE)])
            slots = slots.to(torch.int64)
        names = tuple(keys)
        draft = None
        if self.draft is DraftMode.SIDECAR:
            draft = (ComponentTransfer(PoolName.DRAFT, names, slots),)
        return TransferUnit(request_id, (ComponentTransfer(PoolName.KV, names, slots),), draft, deadline, ready)

    def check_page(self, row: int, key: str, draft: str) -> None:
        """A page's rows hold its own bytes; those of the draft are `good`, `zero` or anything (`any`)."""
        for pool, buffer, view in self._views():
            if not pool.is_draft_buffer(buffer):
                assert np.array_equal(view[row], content(key, pool.name, buffer)), (
                    f"wrong bytes: {key}, buffer {buffer}"
                )
            elif draft == "good":
                assert np.array_equal(view[row], content(key, pool.name, buffer)), (
                    f"wrong draft: {key}, buffer {buffer}"
                )
            elif draft == "zero":
                assert not view[row].any(), f"stale draft: {key}, buffer {buffer}"

    def changed_rows(self) -> dict[PoolName, set[int]]:
        """Rows that changed since the last look and that the engine did not write."""
        now = self._copy()
        changed: dict[PoolName, set[int]] = {}
        for pool in self.pools.pools:
            rows: set[int] = set()
            for was, view in zip(self._before[pool.name], now[pool.name], strict=True):
                rows |= {int(row) for row in np.flatnonzero((was != view).any(axis=1))}
            changed[pool.name] = rows - self.written
        self._before = now
        self.written = set()
        return changed

    def _views(self) -> Iterable[tuple[DevicePool, int, Bytes]]:
        for pool in self.pools.pools:
            for buffer, view in enumerate(pool.page_views):
                yield pool, buffer, view.numpy()

    def _copy(self) -> dict[PoolName, list[Bytes]]:
        return {pool.name: [view.numpy().copy() for view in pool.page_views] for pool in self.pools.pools}
