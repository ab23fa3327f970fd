"""Second reads: a read that does not come back takes nobody along who only joined it.

A load that joined a read in its first moments knows nothing of it: it would hang, and time out, with the load that
started it. So when a call becomes overdue, every object of it that was joined is read once more, into memory of its
own, while the first read goes on. Whichever lands first serves those who joined; the first read's own load stays with
it, unless that fails. What was replaced goes to quarantine when nobody wants it any more, as every other read does.

There is one second read per first read, and none where it could do harm: without landing memory for it, or where the
endpoint is suspect, or has as much in quarantine as it may. Then all wait for the first, as they would without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from softload.callbacks import callback_context
from softload.fetches import Fetch, FetchListener, Part, PartState, ReadCall, Turn, by_unit, leaves
from softload.health import Health
from softload.landing import LandingMemory, Segment
from softload.outcomes import PageStatus
from softload.protocols import Descriptor
from softload.telemetry import Counters

__all__ = ["SecondReads"]


class Reads(Protocol):
    """What second reads ask of the reader; see there."""

    def find(self, key: str) -> Fetch | None:
        """A fetch that may be joined."""

    def piece(self, fetch: Fetch, first: int, end: int) -> Fetch:
        """A fetch of some of the objects of a fetch."""

    def split(self, fetch: Fetch) -> list[Fetch]:
        """A fetch for each object in the stead of one."""

    def join(self, fetch: Fetch, listener: FetchListener) -> None:
        """Want a fetch."""

    def add(
        self,
        keys: Sequence[str],
        segment: Segment,
        descriptors: Sequence[Descriptor | None],
        listener: FetchListener,
        *,
        size: int,
        tailed: bool,
        ranges: Sequence[tuple[range, Sequence[tuple[int, int]]]] = (),
    ) -> Fetch:
        """A fetch for objects that are not here."""

    def read(self, parts: Sequence[Part], turn: Turn) -> None:
        """Queue reads."""

    def leave(self, fetch: Fetch, listener: FetchListener, *, timed_out: bool = False, keep: bool = False) -> None:
        """Stop wanting a fetch."""

    def fail(self, parts: Sequence[Part], status: PageStatus) -> None:
        """Objects that cannot be had."""


class SecondReads:
    """The second reads of one loader.

    Args:
        reads: where they are read, and joined.
        landing: where they land.
        health: told by it which endpoints are suspect.
        counters: told how many there were.
    """

    def __init__(self, reads: Reads, landing: LandingMemory, health: Health, counters: Counters) -> None:
        self._reads = reads
        self._landing = landing
        self._health = health
        self._counters = counters
        self._out: dict[Fetch, _Relay] = {}

    def __repr__(self) -> str:
        return f"<SecondReads {len(self._out)} out>"

    def __contains__(self, first: Fetch) -> bool:
        """Whether a second read of this one is out."""
        return first in self._out

    def __bool__(self) -> bool:
        """Whether any is out."""
        return bool(self._out)

    def watch(self, call: ReadCall) -> None:
        """A call starts: be woken when it is overdue."""
        loop = asyncio.get_running_loop()
        call.alarm = loop.call_later(call.due_seconds, self._overdue, call, context=callback_context())
        for part in call.live if self._out else ():
            relay = part.fetch.issuer
            if isinstance(relay, _Relay) and not relay.is_reading:  # not when it was queued: it may have been refused
                relay.is_reading = True
                self._counters.second_reads += 1

    @staticmethod
    def returned(call: ReadCall) -> None:
        """It is back: nobody needs to be woken."""
        if call.alarm is not None:
            call.alarm.cancel()
            call.alarm = None

    def landed(self, first: Fetch) -> None:
        """The first read came first after all: it serves those too who have joined the second, which goes on."""
        relay = self._out.pop(first, None)
        if relay is not None:
            for listener in relay.second.joiners:
                if listener is not relay:  # it may have joined that, too
                    listener.fetch_replaced(relay.second, first)
                    listener.wake()
            self._reads.leave(relay.second, relay)

    def stands_in(self, first: Fetch, status: PageStatus) -> bool:
        """Whether a second read is out that makes up for a first one that failed: nobody is told before that fails too.

        Then whoever waits for the first one is served by the second, its own load included.
        """
        relay = self._out.get(first)
        if relay is None:
            return False
        relay.first_failure = relay.first_failure or status
        return True

    def left(self, first: Fetch, *, timed_out: bool) -> None:
        """Somebody does not want the first read any more: without anybody whom the second would serve, that ends."""
        relay = self._out.get(first)
        if relay is not None and not relay.served():
            del self._out[first]
            self._reads.leave(relay.second, relay, timed_out=timed_out)

    def _overdue(self, call: ReadCall) -> None:
        """The alarm. It is not asked again whether the time is over: timers and clocks round differently."""
        call.alarm, call.overdue = None, True
        if call.native is not None:
            call.native.lend_lane()  # before its load's deadline: reads of other endpoints do not wait that long
        firsts = dict.fromkeys(
            part.fetch
            for part in leaves(call.live)
            if part.call is call and part.state is PartState.IN_FLIGHT and not part.fetch.has_second
        )
        joined = [first for first in firsts if first.joiners]
        # Each of its objects may come, or fail, at another time than the others.
        singly = (self._reads.split(first) if first.count > 1 else (first,) for first in joined)
        self._read_again([first for pieces in singly for first in pieces], call)

    def _read_again(self, firsts: list[Fetch], call: ReadCall) -> None:
        landing, health = self._landing, self._health
        if not firsts or landing.sheds or landing.refuses(call.endpoint) or health.endpoint(call.endpoint).is_open:
            return
        unread: list[Fetch] = []
        for first in firsts:
            other = self._reads.find(first.key)  # somebody who came too late to join may have started one just now
            if other is None:
                unread.append(first)
            elif other.size == first.size:
                place = other.keys.index(first.key)
                other = self._reads.piece(other, place, place + 1)
                relay = _Relay(self, first, other)
                self._reads.join(other, relay)
                self._begin(relay)
                relay.wake()  # it may be here already
        # Now or never: who holds memory never waits for more.
        segments = landing.try_grant([(first.size, 1) for first in unread], unread[0].segment.share) if unread else []
        parts: list[Part] = []
        for first, segment in zip(unread, segments or (), strict=False):
            relay = _Relay(self, first, first)
            relay.second = self._reads.add(
                first.keys,
                segment,
                first.descriptors,
                relay,
                size=first.size,
                tailed=first.tailed,
                ranges=[(part.layers, part.ranges) for part in first.parts if part.layers is not None],
            )
            relay.second.has_second = True
            self._begin(relay)
            for part in relay.second.parts:
                part.suspects = first.parts[0].suspects
            parts += relay.second.parts
        for suspects, of_one in by_unit(parts):
            self._reads.read(of_one, Turn(suspects))

    def _begin(self, relay: _Relay) -> None:
        relay.first.has_second = True
        self._out[relay.first] = relay
        if relay.first.issuer is None:
            relay.first.give_up_calls()

    def _second_failed(self, relay: _Relay) -> None:
        if self._out.get(relay.first) is relay:
            del self._out[relay.first]
            self._reads.leave(relay.second, relay)
            if relay.first_failure is not None:
                self._reads.fail(relay.first.parts, relay.first_failure)

    def _second_woken(self, relay: _Relay) -> None:
        if not relay.second.landed or self._out.get(relay.first) is not relay:
            return
        del self._out[relay.first]
        for listener in relay.served():
            listener.fetch_replaced(relay.first, relay.second)
            listener.wake()
        self._reads.leave(relay.second, relay)


@dataclass(slots=True, eq=False)
class _Relay:
    """Wants a second read on behalf of those who joined the first."""

    owner: SecondReads
    first: Fetch
    second: Fetch
    first_failure: PageStatus | None = None
    is_reading: bool = False
    """Whether a call for the second read, which this one had read, has started."""

    def served(self) -> list[FetchListener]:
        """Who gets the second read's bytes: all who still wait once the first has failed."""
        return self.first.joiners if self.first_failure is None else list(dict.fromkeys(self.first.listeners))

    def fetch_failed(self, _: Fetch) -> None:
        """The second read failed too, or was refused."""
        self.owner._second_failed(self)

    def fetch_split(self, old: Fetch, new: Sequence[Fetch]) -> None:
        """Never: what it wants is one object."""

    def fetch_replaced(self, old: Fetch, new: Fetch) -> None:
        """Another load's read stood in for the second one, hung as well, and was replaced."""
        self.owner._reads.join(new, self)
        self.second = new
        self.owner._reads.leave(old, self)

    def wake(self) -> None:
        """Some of it is here."""
        self.owner._second_woken(self)
