"""What a replay remembers of single loads, calls and waits, for its timeline and its report page. Bounded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from softload.native_calls import CallSpan

__all__ = ["LoadRecord", "Recorder", "StallRecord"]

_MOST_LOADS = 20_000
_MOST_CALLS = 200_000


@dataclass(slots=True, eq=False)
class LoadRecord:
    """One load of one or more requests. Times are `time.monotonic`; 0 for what has not happened.

    Args:
        requests: their names.
        started: when it was asked for.
        admitted: when it was known what would come; for a prefetch when it had landed.
        waits: `(from, to)` of the forward, per layer; a prefetch has none.
        ended: when its outcome was known.
        promised: pages that the lookup had found.
        restored: pages that are in their slots.
        missed: the others, by status.
    """

    requests: tuple[str, ...]
    started: float
    admitted: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)
    ended: float = 0.0
    promised: int = 0
    restored: int = 0
    missed: Counter[str] = field(default_factory=Counter)

    def settled(self, promised: int, restored: int, missed: Iterable[str]) -> None:
        """The outcome of one of its requests is known."""
        self.ended = time.monotonic()
        self.promised += promised
        self.restored += restored
        self.missed.update(str(status) for status in missed)


@dataclass(frozen=True, slots=True)
class StallRecord:
    """Running decodes waited for loads, from `ended - seconds` to `ended`."""

    ended: float
    seconds: float


class Recorder:
    """Remembers, up to a bound; `left_out` counts what was beyond it."""

    def __init__(self, most_loads: int = _MOST_LOADS, most_calls: int = _MOST_CALLS) -> None:
        self.began = time.monotonic()
        self.loads: list[LoadRecord] = []
        self.calls: list[CallSpan] = []
        self.stalls: list[StallRecord] = []
        self.left_out = 0
        self._most_loads = most_loads
        self._most_calls = most_calls

    def load(self, *requests: str) -> LoadRecord:
        """A load that starts now."""
        record = LoadRecord(requests, time.monotonic())
        if len(self.loads) < self._most_loads:
            self.loads.append(record)
        else:
            self.left_out += 1
        return record

    def call(self, span: CallSpan) -> None:
        """A blocking call of the loader's has returned."""
        if len(self.calls) < self._most_calls:
            self.calls.append(span)
        else:
            self.left_out += 1

    def stalled(self, seconds: float) -> None:
        """Running decodes have waited until now."""
        if len(self.stalls) < self._most_calls:
            self.stalls.append(StallRecord(time.monotonic(), seconds))
        else:
            self.left_out += 1
