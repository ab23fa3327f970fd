"""Log lines about single requests, at a bounded rate: a store that is away must not fill the disk with news of it."""

from __future__ import annotations

import time
from collections import Counter

from structlog.typing import FilteringBoundLogger

from softload.protocols import Clock

__all__ = ["RequestLog"]

_LINES_A_SECOND = 50


class RequestLog:
    """Passes on so many lines of each event in a second, and counts the others.

    `dropped` is how many were not written so far.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._second = -1
        self._written: Counter[str] = Counter()
        self.dropped = 0

    def info(self, log: FilteringBoundLogger, event: str, **values: object) -> None:
        """Write a line to `log`, unless there were enough of its event in this second."""
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._written.clear()
        self._written[event] += 1
        if self._written[event] > _LINES_A_SECOND:
            self.dropped += 1
        else:
            log.info(event, **values)
