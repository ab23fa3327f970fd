"""Memory of this process: taken, and copied between addresses."""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np

from softload.errors import StoreSetupError

__all__ = ["copy_bytes", "take_bytes"]

# Giving the GIL up costs a waiting thread's switch interval to get it back, so short copies keep it.
_KEEP_GIL_BELOW: Final = 64 << 10

_memmove_holding_gil = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def copy_bytes(destination: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` between two addresses; other threads run meanwhile where it takes long enough to matter."""
    if nbytes < _KEEP_GIL_BELOW:
        _memmove_holding_gil(destination, source, nbytes)
    else:
        ctypes.memmove(destination, source, nbytes)


def take_bytes(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Memory for a store of `nbytes`, taken from the system as it is first written.

    Raises:
        StoreSetupError: the system refuses.
    """
    try:
        return np.empty(nbytes, dtype=np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more than numpy can address
        raise StoreSetupError(
            f"capacity: expected no more memory than the system gives, got {nbytes} bytes, which it refused"
        ) from error
