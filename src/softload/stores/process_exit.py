"""The end of a process with native calls still out.

A call on a frozen peer holds its thread for minutes. The thread is a daemon, so Python does not wait for it. Two things
then turn the end of the process into a crash that hides its exit status, and both are seen to here:

* libc's `exit` runs the native library's static destructors under the running call: a segmentation fault.
* The call returns while the interpreter is ending: up to Python 3.13 its thread is unwound when it asks for the GIL,
  which C++ frames do not allow: `std::terminate`, hence an abort.
"""

from __future__ import annotations

import ctypes
import gc

__all__ = ["survive_calls_at_exit"]


def survive_calls_at_exit() -> None:
    """Let this process end with its own exit status although native calls are out.

    For use at interpreter exit, and only where a native client is left behind. Exit functions and the flushing of
    streams are not affected: what is left out is the collection of cycles (most of a second where torch is loaded) and
    the static destruction after it, and a thread that comes back too late is parked. A system without glibc or
    libstdc++ is left as it is.
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
