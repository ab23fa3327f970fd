"""One allocation of landing memory and the free ranges in it."""

from __future__ import annotations

import ctypes
from bisect import bisect_left

import numpy as np
import numpy.typing as npt
import torch

from softload.errors import LandingMemoryError

__all__ = ["ALIGNMENT", "PAGE", "Arena", "aligned"]

ALIGNMENT = 64
PAGE = 4096


class Arena:
    """One registered allocation and the free ranges in it.

    Raises:
        LandingMemoryError: the machine does not have that much.
    """

    __slots__ = ("_lengths", "_offsets", "free_bytes", "memory", "nbytes", "pointer")

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        try:
            block = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=pinned)
        except Exception as error:  # torch has no class of its own for it, and several for sizes that it cannot count
            kind = "page-locked landing memory" if pinned else "landing memory"
            raise LandingMemoryError(
                f"expected room for {nbytes} bytes ({nbytes / 2**30:.3g} GiB) of {kind} on this machine, got none; "
                f"set a smaller `landing_bytes`"
            ) from error
        skip = -block.data_ptr() % PAGE
        self.memory: npt.NDArray[np.uint8] = block.numpy()[skip : skip + nbytes]
        if not pinned:  # page by page, now: else the first reads into it would pay for that
            self.memory[::PAGE] = 0
        self.pointer = block.data_ptr() + skip
        self.nbytes = nbytes
        self.free_bytes = nbytes
        self._offsets = [0]
        self._lengths = [nbytes]

    @classmethod
    def of_others(cls, addresses: range) -> Arena:
        """Memory of this process that is somebody else's: nothing of it is ever free. To be read while it lasts."""
        arena = cls.__new__(cls)
        arena.pointer, arena.nbytes, arena.free_bytes = addresses.start, len(addresses), 0
        arena.memory = np.ctypeslib.as_array((ctypes.c_uint8 * len(addresses)).from_address(addresses.start))
        arena._offsets, arena._lengths = [], []
        return arena

    @property
    def is_unused(self) -> bool:
        """Whether nothing is taken."""
        return self.free_bytes == self.nbytes

    def take(self, nbytes: int) -> int | None:
        """The offset of a range of `nbytes`, first fit; ``None`` where no gap is long enough."""
        for index, length in enumerate(self._lengths):
            if length >= nbytes:
                offset = self._offsets[index]
                if length == nbytes:
                    del self._offsets[index], self._lengths[index]
                else:
                    self._offsets[index] += nbytes
                    self._lengths[index] -= nbytes
                self.free_bytes -= nbytes
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Give a range back and join it with its neighbours."""
        index = bisect_left(self._offsets, offset)
        self.free_bytes += nbytes
        joins_next = index < len(self._offsets) and offset + nbytes == self._offsets[index]
        joins_last = index > 0 and self._offsets[index - 1] + self._lengths[index - 1] == offset
        if joins_last and joins_next:
            self._lengths[index - 1] += nbytes + self._lengths[index]
            del self._offsets[index], self._lengths[index]
        elif joins_last:
            self._lengths[index - 1] += nbytes
        elif joins_next:
            self._offsets[index] = offset
            self._lengths[index] += nbytes
        else:
            self._offsets.insert(index, offset)
            self._lengths.insert(index, nbytes)


def aligned(nbytes: int) -> int:
    """Bytes that an allocation of `nbytes` takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
