"""The end of a process with native calls still out.

A call on a frozen peer holds its thread for minutes. The thread is a daemon, so Python does not wait for it. Two things
then turn the end of the process into a crash that hides its exit status, and both are seen to here:

* libc's `exit` runs the native library's static destructors under the running call: a segmentation fault.
* The call returns while the interpreter is ending: up to Python 3.13 its thread is unwound when it asks for the GIL,
  which C++ frames do not allow: `std::terminate`, hence an abort.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import time
from typing import Final, Protocol

__all__ = ["Leaving", "has_left", "leave_at_exit"]

_DEADLINE: Final = 0.3


class Leaving(Protocol):
    """Something with native calls."""

    def leave(self, timeout: float) -> bool:
        """At interpreter exit: start no more calls, wait at most about `timeout` seconds for those that are out.

        False where the native part is left behind.
        """


_leaving: set[Leaving] = set()


def leave_at_exit(client: Leaving) -> None:
    """From now on the end of the process takes leave of `client`."""
    _leaving.add(client)


def has_left(client: Leaving) -> None:
    """The native part of `client` is gone."""
    _leaving.discard(client)


def _at_exit() -> None:
    deadline = time.monotonic() + _DEADLINE
    if not all([client.leave(max(0.0, deadline - time.monotonic())) for client in list(_leaving)]):
        _survive_calls()


atexit.register(_at_exit)


def _survive_calls() -> None:
    """Let this process end with its own exit status although native calls are out.

    Only where a native client is left behind. Exit functions that come later and the flushing of streams are not
    affected: what is left out is the collection of cycles (most of a second where torch is loaded) and the static
    destruction after it, and a thread that comes back too late is parked. A system without glibc or libstdc++ is left
    as it is.
    """
    gc.freeze()
    libc = ctypes.CDLL(None)
    try:
        on_exit, leave, park = libc.on_exit, libc._exit, libc.pause
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (AttributeError, OSError):
        return
    # glibc runs exit handlers last come first and hands them the status: this one precedes all that were there before.
    on_exit(ctypes.cast(leave, ctypes.c_void_p), None)
    set_terminate(ctypes.cast(park, ctypes.c_void_p))
