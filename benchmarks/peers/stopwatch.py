"""One load's times, spans of work, and what is told about many."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Sample", "Spans", "summary"]


@dataclass(slots=True)
class Sample:
    """Seconds since the load was asked for.

    Args:
        layers: when each layer could be computed.
        report: when the load had ended.
        admission: when it was known what would come; not everybody tells.
        stall: what the forward waited in all.
        outside: share of the load during which nothing was read and nothing copied; not everybody tells.
        pages: that were restored.
    """

    layers: list[float] = field(default_factory=list)
    report: float = 0.0
    admission: float | None = None
    stall: float = 0.0
    outside: float | None = None
    pages: int = 0


class Spans:
    """Intervals in which something ran, on any thread."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """One interval."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(started, time.perf_counter())

    def add(self, started: float, ended: float) -> None:
        """One interval that is over; cheap, for what is as short as the copy of some pages."""
        self._spans.append((started, ended))  # atomic

    def clear(self) -> None:
        """Forget them."""
        self._spans.clear()

    @property
    def total(self) -> float:
        """Their lengths, added up."""
        return sum(end - start for start, end in self._spans)

    def covered(self, start: float, end: float, *others: Spans) -> float:
        """How much of an interval lies in at least one span of these and `others`."""
        covered, reached = 0.0, start
        every: Iterable[tuple[float, float]] = (span for spans in (self, *others) for span in spans._spans)
        for first, last in sorted(every):
            first, last = max(first, reached), min(last, end)
            if last > first:
                covered += last - first
                reached = last
        return covered


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
