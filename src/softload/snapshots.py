"""A loader's state and totals, gathered from its parts into one frozen value."""

from __future__ import annotations

from types import MappingProxyType

from softload.context import Context
from softload.slots import SlotState
from softload.telemetry import Statistics

__all__ = ["snapshot"]


def snapshot(context: Context) -> Statistics:
    """What `PageLoader.statistics` answers."""
    landing = context.landing.statistics()
    sessions = context.sessions.statistics()
    health = context.health.statistics()
    groups = [group.statistics() for group in context.groups()]
    counters = context.counters
    return Statistics(
        loads=counters.loads,
        lookups=counters.lookups,
        lookups_unanswered=counters.lookups_unanswered,
        active_units=len(context.active),
        requested_pages=counters.requested_pages,
        restored_pages=counters.restored_pages,
        late_failures=counters.late_failures,
        draft_dropped=counters.draft_dropped,
        missed_pages=MappingProxyType(dict(counters.missed)),
        saved_pages=MappingProxyType(dict(counters.saves)),
        bytes_loaded=counters.bytes_loaded,
        bytes_direct=counters.bytes_direct,
        bytes_saved=counters.bytes_saved,
        retries=counters.retries,
        second_reads=counters.second_reads,
        removed_corrupt=counters.removed_corrupt,
        timed_out_calls=counters.timed_out_calls,
        shared_objects=counters.shared_objects,
        landing_bytes=landing.capacity,
        landing_bytes_in_use=landing.in_use,
        kept_bytes=context.reader.kept_bytes,
        quarantined_bytes=landing.quarantined,
        quarantined_bytes_peak=landing.quarantined_peak,
        replaced_bytes=landing.replaced,
        waiting_grants=landing.waiting,
        held_slots=context.slots.count(SlotState.RESERVED, SlotState.FILLING, SlotState.ZEROING),
        open_sessions=sessions.open,
        sessions_opened=sessions.opened,
        sessions_restarted=sessions.restarted,
        sessions_ended=sessions.ended,
        threads=sum(group.threads for group in groups),
        stuck_threads=sum(group.stuck for group in groups),
        queued_calls=sum(group.queued for group in groups),
        refused_calls=sum(group.refused for group in groups),
        open_breakers=health.open_breakers,
        known_endpoints=health.known_endpoints,
        negative_keys=health.negative_keys,
        promised_keys=len(context.promised),
        suppressed_requests=health.suppressed_requests,
        dropped_log_lines=context.log.dropped,
    )
