"""The shapes that are measured, and their pools, bytes and page keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from softload import ComponentTransfer, DevicePool, DevicePoolGroup, PoolName, TransferUnit
from softload.replay.shapes import SHAPES, PoolFamily, Shape, build_pools

__all__ = ["CASES", "Case", "Workload"]


@dataclass(frozen=True, slots=True)
class Case:
    """One shape at one length.

    Args:
        name: what the command line and the tables call it.
        kind: which of the goals apply: `mla`, `dsa`, `mha` or `fragments`.
        shape: the model's geometry; pools that go by KV's slots are measured, windows are left out.
        pages: of the load.
    """

    name: str
    kind: str
    shape: Shape
    pages: int


def _mla(name: str, layers: int, nbytes: int) -> Shape:
    return Shape(name, PoolFamily.MLA, layers, 64, nbytes, 0, 0, "")


def _dsa(name: str, layers: int, nbytes: int) -> Shape:
    return Shape(name, PoolFamily.DSA, layers, 64, nbytes, 0, 0, "", tuple(range(layers)))


_MHA = Shape("mha", PoolFamily.MHA, 36, 64, 262_144, 0, 0, "")
_V4 = SHAPES["dsv4-flash"]

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("mla 32x64x73728", "mla", _mla("mla", 32, 73_728), 64),
        Case("dsa 61x128x41984", "dsa", _dsa("dsa", 61, 41_984), 128),
        Case("mha 36x32x262144", "mha", _MHA, 32),
        Case("dsv4-flash 8K", "fragments", _V4, 32),
        Case("dsv4-flash 32K", "fragments", _V4, 128),
        Case("dsv4-flash 128K", "fragments", _V4, 512),
        Case("small 43x512x4096", "fragments", _mla("small", 43, 4_096), 512),
        Case("small 43x1024x4096", "fragments", _mla("small", 43, 4_096), 1024),
    )
}


class Workload:
    """The pools of a shape with random bytes in them, and the units that save and load those.

    Args:
        shape: the geometry.
        pages: pages that are stored, under keys of their own.
        seed: of the bytes and of the order of the slots.
    """

    def __init__(self, shape: Shape, pages: int, seed: int = 0) -> None:
        self.pages = pages
        self.pools: DevicePoolGroup = build_pools(shape, 2 * pages)
        random = np.random.default_rng(seed)
        order = random.permutation(2 * pages)
        self._sources, self._targets = order[:pages], order[pages:]
        for pool in self.kv_pools:
            for view in pool.page_views:
                rows = random.integers(0, 256, (pages, view.shape[1]), np.uint8)
                view.numpy()[self._sources] = rows
        self.keys = tuple(random.bytes(32).hex() for _ in range(pages))

    @cached_property
    def kv_pools(self) -> tuple[DevicePool, ...]:
        """Pools that go by KV's slots."""
        return tuple(pool for pool in self.pools.pools if pool.index_source is PoolName.KV)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all measured pools and layers."""
        return sum(pool.page_bytes(index) for pool in self.kv_pools for index in range(len(pool.buffers)))

    def slots(self, first: int = 0, count: int | None = None, *, source: bool = False) -> torch.Tensor:
        """Token slots of `count` pages, scattered; where they are read from, or brought to."""
        rows = (self._sources if source else self._targets)[first:][:count]
        size = self.pools.page_size
        return torch.from_numpy((rows[:, None] * size + np.arange(size)).reshape(-1))

    def rows(self) -> np.ndarray:
        """Rows of `page_views` that all pages are brought to."""
        return self._targets

    def unit(self, name: str, first: int = 0, count: int | None = None, *, source: bool = False) -> TransferUnit:
        """A unit of `count` pages from `first`."""
        slots = self.slots(first, count, source=source)
        keys = self.keys[first:][:count]
        return TransferUnit(name, (ComponentTransfer(PoolName.KV, keys, slots),), deadline=60.0, partial=True)

    def poison(self) -> None:
        """Overwrite the slots that are brought to."""
        for pool in self.kv_pools:
            for view in pool.page_views:
                view.numpy()[self._targets] = 0xA5

    def wrong_pages(self, pages: int | None = None) -> int:
        """Pages, of the first `pages`, that do not hold what they must."""
        wrong = np.zeros(self.pages, bool)
        for pool in self.kv_pools:
            for view in pool.page_views:
                rows = view.numpy()
                wrong |= (rows[self._targets] != rows[self._sources]).any(axis=1)
        return int(wrong[:pages].sum())
