"""What a replay counts and measures."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import psutil  # type: ignore[import-untyped]
from anyio.from_thread import start_blocking_portal

__all__ = ["ActiveTime", "LagProbe", "Metrics", "Samples", "idle_loop_lag", "resident_bytes"]

LAG_PERIOD = 0.002


class Samples:
    """Durations: kept whole up to `most`, then every second of them, every fourth, and so on; the largest always.

    So a run of any length takes at most 8 bytes for each of `most`.
    """

    def __init__(self, most: int = 1 << 18) -> None:
        self._most = most
        self._seconds = array("d")
        self._every = 1
        self._added = 0
        self._largest = 0.0

    def __len__(self) -> int:
        return self._added

    def add(self, seconds: float) -> None:
        """Add one duration."""
        if self._added % self._every == 0:
            if len(self._seconds) == self._most:
                self._seconds = self._seconds[::2]
                self._every *= 2
            self._seconds.append(seconds)
        self._added += 1
        self._largest = max(self._largest, seconds)

    def milliseconds(self, *quantiles: float) -> dict[str, float]:
        """Percentiles such as 50, 99 and 99.9, and the largest, in milliseconds; zeros where there are none."""
        names = [f"p{quantile:g}".replace(".", "_") for quantile in quantiles]
        if not self._seconds:
            return {**dict.fromkeys(names, 0.0), "max": 0.0}
        values = np.percentile(np.frombuffer(self._seconds), quantiles)
        return {
            name: round(float(value) * 1e3, 3)
            for name, value in zip([*names, "max"], [*values, self._largest], strict=True)
        }


class ActiveTime:
    """Seconds during which at least one of several overlapping things went on."""

    def __init__(self) -> None:
        self._depth = 0
        self._since = 0.0
        self.seconds = 0.0

    def __enter__(self) -> ActiveTime:
        if not self._depth:
            self._since = time.perf_counter()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._since


class LagProbe:
    """Measures how late the event loop runs a callback that is due every 2 ms."""

    def __init__(self) -> None:
        self.lag = Samples()
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> LagProbe:
        self._loop = asyncio.get_running_loop()
        self._schedule()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _schedule(self) -> None:
        self._due = self._loop.time() + LAG_PERIOD
        self._handle = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        self.lag.add(max(0.0, self._loop.time() - self._due))
        self._schedule()


@contextmanager
def idle_loop_lag() -> Iterator[Samples]:
    """The lag of an event loop that has nothing to do, in a thread of its own while the block runs.

    It has the same processor, interpreter and moment as what runs beside it: what another loop lags more is its own.
    """
    probe = LagProbe()
    with start_blocking_portal(name="replay-idle-loop") as portal:
        portal.call(probe.__enter__)
        try:
            yield probe.lag
        finally:
            portal.call(probe.__exit__)


@dataclass(slots=True)
class Metrics:
    """Counters of one replay. Pages are pages of the shape, not blocks of the trace."""

    requests: int = 0
    finished: int = 0
    lost_requests: int = 0
    request_pages: int = 0
    cut_pages: int = 0
    lookup_pages: int = 0
    lookups_refused: Counter[str] = field(default_factory=Counter)
    restored_pages: int = 0
    computed_pages: int = 0
    missed_requests: int = 0
    missed_pages: Counter[str] = field(default_factory=Counter)
    draft_pages: int = 0
    draft_dropped: int = 0
    late_failures: int = 0
    byte_mismatches: int = 0
    accepted_bad_pages: int = 0
    overwritten_pages: int = 0
    promised_unrestored: int = 0
    promised_unrestored_pages: Counter[str] = field(default_factory=Counter)
    exceptions: Counter[str] = field(default_factory=Counter)
    saves: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    rss_mid: int = 0
    first_layer: Samples = field(default_factory=Samples)
    load: Samples = field(default_factory=Samples)
    stall: Samples = field(default_factory=Samples)
    loading: ActiveTime = field(default_factory=ActiveTime)

    @property
    def done(self) -> int:
        """Requests that ended, well or not."""
        return self.finished + self.lost_requests


def resident_bytes() -> int:
    """This process's resident memory in bytes."""
    return int(psutil.Process().memory_info().rss)
