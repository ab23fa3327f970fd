"""Statistics for vLLM's log line and for `/metrics`: counts, summed over workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from softload.adapters._bridge import LoaderBridge
from softload.errors import LoaderClosedError
from softload.telemetry import Statistics

__all__ = ["METRICS", "SoftloadPromMetrics", "SoftloadStats", "StatsDelta"]

METRICS: Mapping[str, str] = {
    "restored_tokens": "Tokens whose KV came from the store instead of being computed.",
    "failed_loads": "Requests of which a block that was promised did not come.",
    "unanswered_lookups": "Requests that were computed because no answer came by the deadline.",
    "restored_pages": "Blocks restored, summed over workers.",
    "missed_pages": "Blocks asked for and not restored, summed over workers.",
    "saved_pages": "Blocks saved, summed over workers.",
    "skipped_saves": "Blocks offered for saving that are not in the store by that, summed over workers.",
    "draft_dropped": "Loads that lost their draft and kept their target.",
    "second_reads": "Objects read again because the read that somebody had joined was late.",
    "timed_out_calls": "Calls to the store that nobody waits for any more.",
    "loaded_bytes": "Bytes read from the store.",
    "saved_bytes": "Bytes written to the store.",
}
"""Counters, exported as ``vllm:softload_<name>_total``."""

_INTERVAL_SECONDS = 1.0


class SoftloadStats(KVConnectorStats):  # type: ignore[misc]
    """Counts by name, as in `METRICS`."""

    def reset(self) -> None:
        """Forget the counts."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """The sums of both."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts of the interval."""
        return {name: count for name, count in self.data.items() if count}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


class StatsDelta:
    """Turns totals into counts since the last time."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._next = 0.0
        self._totals: dict[str, int] = {}

    def of(self, totals: Mapping[str, int]) -> SoftloadStats | None:
        """What was added; ``None`` for nothing. Totals that went down are those of a new loader."""
        added = {
            name: count - before if count >= (before := self._told.get(name, 0)) else count
            for name, count in totals.items()
        }
        self._told = dict(totals)
        added = {name: count for name, count in added.items() if count}
        return SoftloadStats(data=added) if added else None

    def of_loader(self, bridge: LoaderBridge, now: float) -> SoftloadStats | None:
        """The same of a loader's totals, which are fetched in the background once a second: this never waits."""
        if now >= self._next:
            self._next = now + _INTERVAL_SECONDS

            async def read() -> None:
                if bridge.loader is not None:
                    self._totals = _totals(bridge.loader.statistics())

            try:
                bridge.spawn(read)
            except LoaderClosedError:
                pass
        return self.of(self._totals)


class SoftloadPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus counters."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, documentation in METRICS.items():
            counter = self._counter_cls(
                name=f"vllm:softload_{name}", documentation=documentation, labelnames=self._labelnames
            )
            self._counters[name] = {
                index: counter.labels(*values) for index, values in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)


def _totals(statistics: Statistics) -> dict[str, int]:
    saved = sum(count for status, count in statistics.saved_pages.items() if status == "saved")
    return {
        "restored_pages": statistics.restored_pages,
        "missed_pages": sum(statistics.missed_pages.values()),
        "saved_pages": saved,
        "skipped_saves": sum(
            count for status, count in statistics.saved_pages.items() if status not in ("saved", "present")
        ),
        "draft_dropped": statistics.draft_dropped,
        "second_reads": statistics.second_reads,
        "timed_out_calls": statistics.timed_out_calls,
        "loaded_bytes": statistics.bytes_loaded,
        "saved_bytes": statistics.bytes_saved,
    }
