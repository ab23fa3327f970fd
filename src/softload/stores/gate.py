"""Which native calls are out, and whether new ones may start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CallGate"]


class CallGate:
    """Lets native calls through between `admit` and `shut`, and knows how many are out.

    Before set-up and after closing, most of Mooncake's calls crash the process, and so does closing under a call.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._admitting = False
        self._out = 0

    @property
    def calls_out(self) -> int:
        """Calls that have not returned."""
        return self._out

    @property
    def admitting(self) -> bool:
        """Whether calls may start."""
        return self._admitting

    def admit(self) -> None:
        """From now on calls may start."""
        with self._changed:
            self._admitting = True

    def shut(self) -> None:
        """From now on none may start; those that are out go on."""
        with self._changed:
            self._admitting = False

    @contextmanager
    def call(self) -> Iterator[bool]:
        """Around one native call: whether it may be made."""
        with self._changed:
            allowed = self._admitting
            self._out += allowed
        try:
            yield allowed
        finally:
            if allowed:
                with self._changed:
                    self._out -= 1
                    if not self._out:
                        self._changed.notify_all()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no call is out; whether that came true within `timeout` seconds (None: no limit)."""
        with self._changed:
            return self._changed.wait_for(lambda: self._out == 0, timeout)
