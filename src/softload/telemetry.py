"""Counters of one loader, and the frozen snapshot that everybody reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from softload.outcomes import PageStatus, SaveStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Counters", "Statistics"]


@dataclass(slots=True)
class Counters:
    """What happened so far; written on the event loop only."""

    loads: int = 0
    lookups: int = 0
    lookups_unanswered: int = 0
    requested_pages: int = 0
    restored_pages: int = 0
    late_failures: int = 0
    draft_dropped: int = 0
    bytes_loaded: int = 0
    bytes_direct: int = 0
    bytes_saved: int = 0
    retries: int = 0
    second_reads: int = 0
    removed_corrupt: int = 0
    timed_out_calls: int = 0
    shared_objects: int = 0
    missed: Counter[PageStatus] = field(default_factory=Counter)
    saves: Counter[SaveStatus] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Statistics:
    """A loader's state now and its totals so far. Sizes in bytes; everything that has a bound is here.

    Args:
        active_units: units whose outcome is not known yet.
        missed_pages: pages that were asked for and not restored, by status.
        saved_pages: pages that were offered for saving, by what became of them.
        bytes_direct: of `bytes_loaded`, what was copied from where it lay in this process's own segment.
        landing_bytes: landing memory in all; `landing_bytes_in_use` of it are granted (kept bytes included).
        kept_bytes: landed by prefetches that have ended, until somebody wants them or the room.
        quarantined_bytes: memory that native calls may still write although nobody waits for them.
        replaced_bytes: fresh memory that stands in for quarantined memory.
        waiting_grants: units and saves that wait for landing memory.
        held_slots: page rows that are reserved or being filled.
        open_sessions: sessions for ranged reads.
        stuck_threads: threads in native calls that nobody waits for.
        queued_calls: calls that wait for a lane.
        second_reads: objects that were read again because the read that somebody had joined was late.
        shared_objects: objects that were wanted again while they were here or on their way, and not read again.
        open_breakers: endpoints, and the master, to which nothing is sent.
        known_endpoints: endpoints whose outcomes are remembered, 4,096 at most.
        negative_keys: keys in the negative cache.
        promised_keys: keys that lookups found, 65,536 at most: one that is gone at admission is a refuted hit.
        suppressed_requests: requests whose lookups are answered 0 until they are computed.
        dropped_log_lines: lines about single requests that were not written: 50 a second of each event are.
    """

    loads: int
    lookups: int
    lookups_unanswered: int
    active_units: int
    requested_pages: int
    restored_pages: int
    late_failures: int
    draft_dropped: int
    missed_pages: Mapping[PageStatus, int]
    saved_pages: Mapping[SaveStatus, int]
    bytes_loaded: int
    bytes_direct: int
    bytes_saved: int
    retries: int
    second_reads: int
    removed_corrupt: int
    timed_out_calls: int
    shared_objects: int
    landing_bytes: int
    landing_bytes_in_use: int
    kept_bytes: int
    quarantined_bytes: int
    quarantined_bytes_peak: int
    replaced_bytes: int
    waiting_grants: int
    held_slots: int
    open_sessions: int
    sessions_opened: int
    sessions_restarted: int
    sessions_ended: int
    threads: int
    stuck_threads: int
    queued_calls: int
    refused_calls: int
    open_breakers: tuple[str, ...]
    known_endpoints: int
    negative_keys: int
    promised_keys: int
    suppressed_requests: int
    dropped_log_lines: int
