"""Reads become native calls: batched by endpoint, in turn, and taken back where nobody wants them by their turn."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from softload.config import LoaderConfig
from softload.fetches import Part, PartState, ReadCall, Turn, leaves
from softload.landing import LandingMemory, SegmentState
from softload.native_calls import CallGroup, NativeCall, RefusedError
from softload.outcomes import PageStatus
from softload.planning import read_batches
from softload.ranged_reads import RangedReads
from softload.read_execution import execute_read
from softload.read_health import ReadHealth
from softload.second_reads import SecondReads
from softload.store_calls import StoreCalls

__all__ = ["ReadQueue"]

_TOGETHER_BYTES = 4 << 20
"""Units whose turn it is are read from together up to so much: a call of their own takes longer than so few bytes."""

_LANES_IN_ORDER = 2
"""With as many for an endpoint, or fewer, its ranged reads go one at a time, each while the last one is checked, and so
do large reads of a unit where it is slow; but for those of small items."""

_SMALL = 40 << 10
"""Bytes of a range, or an object, that its owner takes as long for as for the item itself: reads of smaller ones wait
for processors more than for a link, and two at a time are a third faster."""

_SLOW = 3e9
"""Bytes per second below which large reads of one unit go one at a time: the link, or the owner's processors, are the
bound, so that a second one beside the first makes earlier layers late, and all of them no earlier. Above it, two at a
time hide what goes on between calls.
"""

_LARGE = 1 << 20
"""Bytes: less is soon over, and what goes on between calls weighs more."""


class Reads(Protocol):
    """What becomes of the calls; see the reader."""

    def returned(self, call: ReadCall) -> None:
        """A call is back."""

    def fail(self, parts: Sequence[Part], status: PageStatus) -> None:
        """Objects that cannot be had."""


class ReadQueue:
    """The read calls of one loader, until each is back.

    Args:
        reads: told what comes of them.
        calls: the guarded store.
        landing: may refuse an endpoint.
        ranged: sessions that ran down meanwhile are renewed by it.
        seconds: told which calls start.
        health: says how long they should take.
        config: sizes of calls, and how many are out at a time.
        spawn: starts a task of the loader's.
    """

    def __init__(
        self,
        reads: Reads,
        calls: StoreCalls,
        landing: LandingMemory,
        ranged: RangedReads,
        seconds: SecondReads,
        health: ReadHealth,
        config: LoaderConfig,
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
    ) -> None:
        self._reads = reads
        self._calls = calls
        self._landing = landing
        self._ranged = ranged
        self._seconds = seconds
        self._health = health
        self._config = config
        self._spawn = spawn
        self._turn = 0.0
        self._queued: dict[tuple[str, float, bool], ReadCall] = {}
        """Calls that no thread has yet, by endpoint, turn, and whether they are the first: the last of each."""
        self._together = (min(config.read_batch_bytes, _TOGETHER_BYTES), config.read_batch_objects)
        lanes, stuck = config.read_lanes, config.stuck_threads
        self.group = CallGroup("read", width=lanes, max_stuck=stuck, at_a_time=config.endpoint_lanes)

    def close(self) -> None:
        """Take no more, and drop those that no thread has yet."""
        self.group.close()
        self._queued.clear()

    def submit(self, parts: Sequence[Part], turn: Turn, *, ranged: bool) -> None:
        """Submit calls for parts, in the order in which they are wanted."""
        batches = read_batches(
            ((part.fetch.endpoint, part.nbytes, part) for part in parts),
            max_bytes=self._config.read_batch_bytes,
            max_objects=self._config.read_batch_objects,
            count=lambda part: part.fetch.count,
        )
        first = {endpoint for endpoint, _ in batches} if turn.is_first else set()
        # Ranges come over a connection also from this process, and two such reads make the earlier layers later.
        in_order = self._config.endpoint_lanes <= _LANES_IN_ORDER
        turn.is_first = turn.is_first and not batches
        for endpoint, items in batches:
            turn.tag = max(turn.tag, self._turn) + 1.0
            for part in items:
                part.suspects = turn.suspects
            place = (endpoint, turn.tag, endpoint in first)
            first.discard(endpoint)
            call, queued = ReadCall(endpoint, items, ranged=ranged, is_first=place[2]), self._queued.get(place)
            if queued is not None and not self.group.saturated and queued.take_in(call, *self._together):
                continue
            one_by_one = in_order and call.nbytes >= _SMALL * call.items
            native = NativeCall(
                lambda call=call: execute_read(self._calls, call, self._config.integrity),  # type: ignore[misc]
                lambda _, call=call: self._reads.returned(call),  # type: ignore[misc]
                prepare=lambda call=call: self._prepare(call),  # type: ignore[misc]
                priority=turn.tag,
                kind=endpoint,
                alone=call.is_first or (one_by_one and ranged),
                series=turn if one_by_one and self._is_slow(call) else None,
            )
            native.label = call.label
            call.native = native
            self._queued[place] = call
            try:
                self.group.submit(native)
            except RefusedError:
                del self._queued[place]
                self._reads.fail(items, PageStatus.SHED)

    def _is_slow(self, call: ReadCall) -> bool:
        """Whether it is a large read that takes long, as its endpoint has shown."""
        count, nbytes = call.items, call.nbytes
        known = self._health.costs.known(call.endpoint, ranged=call.ranged) if nbytes >= _LARGE else None
        return known is not None and known.seconds(count, nbytes) * _SLOW > nbytes

    def _prepare(self, call: ReadCall) -> bool:
        """On the loop, right before a thread gets the call: what nobody wants any more is not read."""
        assert (native := call.native) is not None
        self._turn = max(self._turn, native.priority)
        place = (call.endpoint, native.priority, call.is_first)
        if self._queued.get(place) is call:
            del self._queued[place]
        live = [part for part in leaves(call.parts) if part.state is PartState.QUEUED and part.fetch.listeners]
        if live and self._landing.refuses(call.endpoint):
            self._reads.fail(live, PageStatus.SHED)
            return False
        if self._ranged.put_off(live):  # its lease ran down while the call was queued
            self._spawn(lambda: self._ranged.go_on(live, Turn(live[0].suspects)))
            return False
        for part in live:
            part.state = PartState.IN_FLIGHT
            part.call = call
            part.fetch.segment.state = SegmentState.IN_FLIGHT
        if live:
            call.live, call.relied_on = live, set(live)
            call.session_starts = self._ranged.session_starts
            self._health.expect(call, running=self.group.running + 1)
            self._seconds.watch(call)
        return bool(live)
