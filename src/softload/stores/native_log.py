"""The log level of Mooncake's native library."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

__all__ = ["native_library", "restore_log_level"]

_GLOG_LEVEL: Final = "_ZN3fLI17FLAGS_minloglevelE"


def native_library() -> str | None:
    """The path of Mooncake's native module, once it is imported."""
    module = sys.modules.get("mooncake.store")
    return None if module is None else module.__file__


def restore_log_level(library: str | None) -> None:
    """Give glog the level that its own variable `GLOG_minloglevel` names.

    Mooncake's set-up puts one of its own in its place, and that one writes a line for every missing key.

    Args:
        library: path of the loaded native module.
    """
    level = os.environ.get("GLOG_minloglevel", "")
    if library is None or not level.isdigit():
        return
    try:
        ctypes.c_int.in_dll(ctypes.CDLL(library), _GLOG_LEVEL).value = int(level)
    except (OSError, ValueError):
        return  # a build that hides the symbol: it stays talkative
