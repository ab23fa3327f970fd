"""A start without the lines that Mooncake's native library always writes, for programs whose output people read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from softload.stores.wrapper import LendingWrapperStore

__all__ = ["QuietStart"]

_NOISE: Final = (b"Logging before InitGoogleLogging() is written to STDERR", b"Local segment descriptor not found")
_STDERR: Final = 2


class QuietStart(LendingWrapperStore):
    """A store that opens without noise: standard error is held back meanwhile, and all but known noise written after.

    For a program of one's own: it redirects the file descriptor, which is the whole process's.
    """

    def open(self) -> None:
        """Open the inner store."""
        with _noise_held_back():
            super().open()


@contextmanager
def _noise_held_back() -> Iterator[None]:
    with ExitStack() as undo:
        try:
            held = undo.enter_context(tempfile.TemporaryFile())
            terminal = os.dup(_STDERR)
        except OSError:  # no place for it, or standard error is closed: then there is noise, or nobody who listens
            yield
            return
        undo.callback(os.close, terminal)
        os.dup2(held.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(terminal, _STDERR)
            held.seek(0)
            with suppress(OSError):  # nobody listens any more: that is no reason not to be open
                for line in held:
                    if not any(noise in line for noise in _NOISE):
                        os.write(_STDERR, line)
