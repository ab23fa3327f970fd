"""What reads say about the health of endpoints and of the master, and how long the next one should take."""

from __future__ import annotations

from collections.abc import Sequence

from softload.cost_model import CostModel, SharedTime
from softload.fetches import Fetch, PartState, ReadCall
from softload.health import MAX_ENDPOINTS, Health
from softload.outcomes import PageStatus
from softload.telemetry import Counters

__all__ = ["ReadHealth"]

_FIRST_RATE = 500e6
"""Bytes per second that are expected of an endpoint before the first sample."""

_CALL_SECONDS = 0.002

_NOT_REFUTED = (PageStatus.SHED, PageStatus.CANCELLED, PageStatus.STORE_UNREACHABLE, PageStatus.MALFORMED)
"""Failures that say nothing about the key."""

_BROUGHT = {PageStatus.LOADED, PageStatus.CORRUPT}
"""Bytes came from the endpoint, whatever they are worth: it answers."""


class ReadHealth:
    """Judges the reads of one loader.

    Args:
        health: told what endpoints and keys turn out to be.
        counters: told of time-outs.
    """

    def __init__(self, health: Health, counters: Counters) -> None:
        self._health = health
        self._counters = counters
        self._rates: dict[str, float] = {}
        self.costs = CostModel(MAX_ENDPOINTS)
        self._work = SharedTime()

    def expect(self, call: ReadCall, *, running: int) -> None:
        """Say how long a call that starts now should take.

        Args:
            call: it.
            running: reads under way from now on, this one among them.
        """
        call.work_at = self._work.now(running)
        nbytes = sum(part.nbytes for part in call.live)
        call.expected = _CALL_SECONDS + nbytes / self._rates.get(call.endpoint, _FIRST_RATE)

    def record(self, call: ReadCall, statuses: Sequence[PageStatus], *, running: int) -> None:
        """A call is back.

        Args:
            call: it.
            statuses: of its parts.
            running: reads that are still under way.
        """
        seconds = self._work.now(running) - call.work_at
        assert call.native is not None
        if PageStatus.STORE_UNREACHABLE in statuses or call.master_answered is False:
            self._health.record_master([PageStatus.STORE_UNREACHABLE])
        elif call.master_answered:
            self._health.record_master([])
        breaker = self._health.endpoint(call.endpoint)
        if call.timed_out:  # counted when its waiters gave up
            if not _BROUGHT.isdisjoint(statuses):
                breaker.came_late(call.native.elapsed())
            return
        if PageStatus.TRANSFER_FAILED in statuses or PageStatus.MALFORMED in statuses:
            breaker.record(False, started_at=call.native.started_at)
        elif not _BROUGHT.isdisjoint(statuses):
            breaker.record(True, started_at=call.native.started_at)
            nbytes = sum(part.nbytes for part in call.live)
            rate = nbytes / max(call.native.elapsed(), 1e-6)
            known = self._rates.pop(call.endpoint, rate)
            self._rates[call.endpoint] = known + 0.2 * (rate - known)
            if not call.overdue and statuses.count(PageStatus.LOADED) == len(statuses):
                self.costs.record(
                    call.endpoint,
                    ranged=call.ranged,
                    items=sum(len(part.ranges) or part.fetch.count for part in call.live),
                    nbytes=nbytes,
                    seconds=seconds,
                )
            if len(self._rates) > MAX_ENDPOINTS:  # the one that was read from longest ago
                del self._rates[next(iter(self._rates))]

    def time_out(self, fetch: Fetch) -> None:
        """Somebody gave a fetch up because its bytes did not come in time.

        Counts once per call and once per load, at once, and only for a call that really takes too long: our own queue
        counts for nothing.
        """
        for part in fetch.parts:
            call = part.call
            if part.state is PartState.IN_FLIGHT and call is not None and call.overdue:
                breaker = self._health.endpoint(call.endpoint)
                is_first = not call.timed_out
                if is_first:
                    call.timed_out = True
                    self._counters.timed_out_calls += 1
                # A call of several loads counts for the first of them that has not counted one yet, and for no other.
                if not call.counted and call.endpoint not in part.suspects and call.native is not None:
                    call.counted = True
                    part.suspects.add(call.endpoint)
                    breaker.record(False, started_at=call.native.started_at)
                if breaker.is_open:
                    self._health.refuse(fetch.keys, call.endpoint, PageStatus.TIMED_OUT)
                elif is_first and call.native is not None:
                    self._health.endpoint_timed_out(call.endpoint, call.native, due=call.due_seconds)

    def refute(self, fetch: Fetch) -> None:
        """A fetch failed."""
        if fetch.status not in _NOT_REFUTED:
            for key in fetch.keys:
                self._health.negative.add(key, fetch.status)

    def confirm(self, fetch: Fetch) -> None:
        """A fetch has landed."""
        self._health.negative.discard(fetch.keys)
