"""Copies between addresses of this process."""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["copy_bytes"]

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
