"""Books of a replay: what each job was promised, got and lost, and what an ideal store would have given."""

from __future__ import annotations

from collections.abc import Callable

from softload.outcomes import Lookup, PageStatus, SaveReport
from softload.replay.engine_memory import Verification
from softload.replay.jobs import Job
from softload.replay.lru_bound import LruBound
from softload.replay.metrics import Metrics
from softload.replay.shapes import DraftKind

__all__ = ["Ledger"]

_EVICTED = (PageStatus.NOT_FOUND, PageStatus.NO_MEMORY_REPLICA)


class Ledger:
    """Turns what happens to jobs into `Metrics`, and feeds the LRU bound the same events in the same order.

    Args:
        metrics: the counters.
        bound: the ideal store.
        draft: how drafts are stored.
        touched: whether a fault was injected into this page of this job; ``None`` for a run without faults.
        evictions: whether the store may evict: then an untouched page that is gone was evicted, and broke no promise.
    """

    def __init__(
        self,
        metrics: Metrics,
        bound: LruBound,
        draft: DraftKind,
        touched: Callable[[Job], bool] | None = None,
        evictions: Callable[[], bool] = lambda: True,
    ) -> None:
        self.metrics = metrics
        self.bound = bound
        self._draft = draft
        self._touched = touched
        self._evictions = evictions

    def looked_up(self, job: Job, found: Lookup) -> None:
        """The store's promise."""
        self.metrics.request_pages += len(job.keys)
        self.metrics.lookup_pages += found.pages
        if found.status is not None:
            self.metrics.lookups_refused[found.status] += 1
        self.bound.lookup(job.keys)

    def settled(self, job: Job, checked: Verification) -> None:
        """What of the promise was kept, and whether the restored bytes are right."""
        metrics = self.metrics
        metrics.restored_pages += job.restored
        metrics.computed_pages += len(job.keys) - job.restored
        metrics.byte_mismatches += checked.wrong_bytes
        metrics.accepted_bad_pages += checked.wrong_pages
        if self._draft is not DraftKind.NONE:
            metrics.draft_pages += job.draft_restored
            metrics.draft_dropped += job.restored - job.draft_restored
        if job.outcome is None:
            return
        if job.outcome.late_failure is not None:
            metrics.late_failures += 1
        if job.restored < job.promised:
            statuses = job.missed_statuses()
            metrics.missed_pages.update(statuses)
            metrics.missed_requests += 1
            self._judge(job, statuses)

    def saving(self, job: Job) -> None:
        """Computed pages are offered to the store."""
        self.bound.save(job.computed_keys)

    def saved(self, report: SaveReport) -> None:
        """What became of them."""
        for outcome in report.outcomes.values():
            self.metrics.saves.update(str(page.status) for page in outcome.pages)

    def retired(self, settled: Verification, checked: Verification) -> None:
        """Pages are given up: what is wrong now and was right before was overwritten while the engine owned it."""
        self.metrics.finished += 1
        self.metrics.byte_mismatches += max(0, checked.wrong_bytes - settled.wrong_bytes)
        self.metrics.overwritten_pages += max(0, checked.wrong_pages - settled.wrong_pages)

    def _judge(self, job: Job, statuses: list[PageStatus]) -> None:
        """Count a promise that was broken to a request that no fault touched and no eviction robbed."""
        if self._touched is None or self._touched(job):
            return
        if statuses[0] in _EVICTED and self._evictions():
            return
        self.metrics.promised_unrestored += 1
        self.metrics.promised_unrestored_pages.update(statuses)
