"""Lines of the log: at a bounded rate, one line each whatever names are in them, and never a failure of their own.

A store that is away must not fill the disk with news of it; a request's name must not forge lines or move a terminal's
cursor; and a log that cannot be written costs the line.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from softload.protocols import Clock

__all__ = ["RequestLog", "printable", "tell"]

_LINES_A_SECOND = 50

_MOST_CHARACTERS = 200


class RequestLog:
    """Passes on so many lines about single requests or objects in a second, of each event, and counts the others.

    `dropped` is how many were not written so far.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._second = -1
        self._written: Counter[str] = Counter()
        self.dropped = 0

    def tell(self, method: Callable[..., object], event: str, /, **values: object) -> None:
        """`tell`, unless there were enough lines of this event in this second."""
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._written.clear()
        self._written[event] += 1
        if self._written[event] > _LINES_A_SECOND or not tell(method, event, **values):
            self.dropped += 1


def tell(method: Callable[..., object], event: str, /, **values: object) -> bool:
    """Write a line by a logger's `method`: False where that raised."""
    try:
        method(event, **{name: printable(value) for name, value in values.items()})
    except Exception:  # a full disk, a closed terminal: there is nobody to tell
        return False
    return True


def printable(value: object) -> object:
    """A value as it may stand in a line: of a text what can be printed, and not too much of it."""
    if not isinstance(value, str):
        return value
    if value.isprintable() and len(value) <= _MOST_CHARACTERS:
        return value
    text = value[:_MOST_CHARACTERS] if value.isprintable() else repr(value[:_MOST_CHARACTERS])[1:-1]
    return text if len(value) <= _MOST_CHARACTERS else f"{text}..."
