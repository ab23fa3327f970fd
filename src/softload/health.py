"""What is known to be broken: breakers by endpoint and master, refuted keys, failed requests.

Misses never count. A breaker opens when 3 of the last 5 outcomes were outages, or at one call that was waited for in
vain while nothing else came from there either; stays open for a cool-down that doubles from 1 to 30 s with jitter, and
then lets one probe through.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from softload import events
from softload.callbacks import callback_context
from softload.native_calls import NativeCall
from softload.outcomes import PageStatus
from softload.protocols import Clock
from softload.request_log import tell

__all__ = ["MAX_ENDPOINTS", "Breaker", "Health", "HealthStatistics", "NegativeCache", "Permit"]

_log = structlog.get_logger(__name__)

MASTER = "master"
"""The name of the master's breaker in statistics and log events."""

MAX_ENDPOINTS = 4096
"""Endpoints that are remembered: an owner that starts again is a new one, for as long as the loader lives."""

_WINDOW = 5
_FAILURES = 3
_COOL_DOWN = (1.0, 30.0)
_MASTER_SECONDS = 0.05
"""More than any question to the master should take."""

_SILENT_SECONDS = 0.5
"""What does not answer for so long is down, and not just slow: no second call is lost to it."""

_DOUBT_SECONDS = 600.0
"""After something was found to exist that nobody can read from memory, or that is not what it must be."""

_NEGATIVE_SECONDS = {PageStatus.NO_MEMORY_REPLICA: 2.0, PageStatus.CORRUPT: 60.0}
_NEGATIVE_DEFAULT = 10.0


class Breaker:
    """Stops calls to what does not answer, and finds out when it does again.

    | state | `allows` | left by |
    | --- | --- | --- |
    | closed | always | 3 of the last 5 outcomes are outages, or it is silent: open |
    | open | never | the cool-down, or the silence, is over: half open |
    | half open | one probe at a time | success: closed; failure: open, twice as long |

    The next probe starts when the permit of the last one is back, whatever other calls find out meanwhile.
    """

    def __init__(self, name: str, clock: Clock, jitter: Callable[[], float]) -> None:
        self.name = name
        self._clock = clock
        self._jitter = jitter
        self._outcomes: deque[bool] = deque(maxlen=_WINDOW)
        self._open_until: float | None = None
        self._opened_at = -math.inf
        self._cool_down = _COOL_DOWN[0]
        self._probe: Permit | None = None
        self._heard_at = -math.inf
        self.answers = 0
        """Good outcomes so far, late ones too."""
        self.answered_start = -math.inf
        """When the last of the calls that had good outcomes started, `time.monotonic`."""

    def __repr__(self) -> str:
        return f"<Breaker {self.name}: {'open' if self.is_open else 'closed'}>"

    @property
    def is_open(self) -> bool:
        """Whether calls are refused or only probed."""
        return self._open_until is not None

    @property
    def refuses(self) -> bool:
        """Whether a call would be refused now; takes no permit."""
        return self._open_until is not None and (self._probe is not None or self._clock() < self._open_until)

    @property
    def seconds_open(self) -> float:
        """Since it has opened last, by a probe that failed too; 0 where it is closed."""
        return 0.0 if self._open_until is None else self._clock() - self._opened_at

    @property
    def seconds_left(self) -> float:
        """For how long it refuses all calls yet."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    def silence(self, seconds: float) -> float:
        """For how long nothing has come from there, as far as a call shows that has been out for `seconds`."""
        return min(seconds, self._clock() - self._heard_at)

    def allows(self) -> Permit | None:
        """Ask before a call: leave to make it, to be given back when it is over, or ``None``."""
        if self._open_until is None:
            return Permit(self, is_probe=False)
        if self.refuses:
            return None
        self._probe = Permit(self, is_probe=True)
        return self._probe

    def give_back(self, permit: Permit) -> None:
        """The permit's call is over, with or without an outcome: if it was the probe, the next caller may probe."""
        if permit is self._probe:
            self._probe = None

    def record(self, good: bool, permit: Permit | None = None, *, started_at: float | None = None) -> None:
        """An outcome of a call; with its `permit`, the end of it; with its start, where that is known."""
        if permit is not None:
            self.give_back(permit)
        if good:
            self._hear()
            self.answered_start = max(self.answered_start, started_at or -math.inf)
            self._outcomes.append(True)
            if self._open_until is not None:
                self._open_until = None
                self._probe = None
                self._cool_down = _COOL_DOWN[0]
                self._outcomes.clear()
                tell(_log.info, events.BREAKER_CLOSED, breaker=self.name)
            return
        self._outcomes.append(False)
        if self._open_until is not None:
            if self._clock() < self._open_until or (started_at is not None and started_at < self._opened_at):
                return  # a call from before it opened: says nothing new
            self._cool_down = min(self._cool_down * 2, _COOL_DOWN[1])
        elif list(self._outcomes).count(False) < _FAILURES:
            return
        self._open()

    def trip(self) -> None:
        """It is silent: that needs no further outcomes."""
        if self._open_until is None:
            self._open()

    def came_late(self, seconds: float) -> None:
        """A call that nobody waited for any more is back, with what it was to bring, after so many seconds.

        The silence is over: whether for good is for a probe to find out, now. Where that has failed before, it may just
        be slow, and is probed less and less often, unless the silence was as long as the cool-down.
        """
        self._hear()
        if self._open_until is not None and (self._cool_down == _COOL_DOWN[0] or seconds >= self._cool_down):
            self._open_until = min(self._open_until, self._clock())

    def _hear(self) -> None:
        self._heard_at = self._clock()
        self.answers += 1

    def _open(self) -> None:
        self._opened_at = self._clock()
        self._open_until = self._opened_at + self._cool_down * (0.75 + 0.5 * self._jitter())
        seconds = round(self._open_until - self._clock(), 3)
        tell(_log.warning, events.BREAKER_OPENED, breaker=self.name, seconds=seconds)


@dataclass(frozen=True, slots=True, eq=False)
class Permit:
    """A breaker's leave to make a call, from the breaker that gave it. A probe's has to be given back."""

    breaker: Breaker
    is_probe: bool

    def give_back(self) -> None:
        """See `Breaker.give_back`; more than once does no harm."""
        self.breaker.give_back(self)


class NegativeCache:
    """Keys that the store said to have and could not give: bounded, and each for a short time."""

    def __init__(self, capacity: int, clock: Clock) -> None:
        self.capacity = capacity
        self._clock = clock
        self._until: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: str, status: PageStatus, *, at_most: float = math.inf) -> None:
        """Remember a refuted hit, for at most so many seconds."""
        self._until[key] = self._clock() + min(at_most, _NEGATIVE_SECONDS.get(status, _NEGATIVE_DEFAULT))
        self._until.move_to_end(key)
        while len(self._until) > self.capacity:
            self._until.popitem(last=False)

    def discard(self, keys: Iterable[str]) -> None:
        """Good reads, or saves of our own: forget them."""
        for key in keys if self._until else ():
            self._until.pop(key, None)

    def knows_any(self, keys: Collection[str]) -> bool:
        """Whether any of these may be in it, expired ones included."""
        return bool(self._until) and not self._until.keys().isdisjoint(keys)

    def __contains__(self, key: str) -> bool:
        until = self._until.get(key)
        if until is None:
            return False
        if self._clock() < until:
            return True
        del self._until[key]
        return False


@dataclass(frozen=True, slots=True)
class HealthStatistics:
    """Breakers that are open, endpoints with one, keys in the negative cache, requests whose lookups are answered 0."""

    open_breakers: tuple[str, ...]
    known_endpoints: int
    negative_keys: int
    suppressed_requests: int


class Health:
    """All that is known to be broken, for one loader."""

    def __init__(self, *, negative_entries: int = 65_536, seed: int = 0, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._jitter = random.Random(seed).random
        self.master = Breaker(MASTER, clock, self._jitter)
        self._endpoints: OrderedDict[str, Breaker] = OrderedDict()
        self.negative = NegativeCache(negative_entries, clock)
        self._suppressed: OrderedDict[str, None] = OrderedDict()
        self._master_lost = False
        self._doubts_until = -math.inf
        self.on_master_back: Callable[[], None] = lambda: None

    def endpoint(self, name: str) -> Breaker:
        """The breaker of one endpoint. Closed ones that were not asked for in a long time start anew."""
        breaker = self._endpoints.get(name)
        if breaker is None:
            if len(self._endpoints) >= MAX_ENDPOINTS:
                oldest = next(iter(self._endpoints))
                del self._endpoints[next((n for n, known in self._endpoints.items() if not known.is_open), oldest)]
            breaker = self._endpoints[name] = Breaker(name, self._clock, self._jitter)
        self._endpoints.move_to_end(name)
        return breaker

    def record_master(self, statuses: list[PageStatus], *, started_at: float | None = None) -> None:
        """One outcome per call that asked the master: unreachable, or not."""
        reached = PageStatus.STORE_UNREACHABLE not in statuses
        self.master.record(reached, started_at=started_at)
        if reached and self._master_lost:
            self.on_master_back()
        self._master_lost = not reached

    @property
    def master_lost(self) -> bool:
        """Whether the last call that asked the master did not reach it."""
        return self._master_lost

    def master_timed_out(self, call: NativeCall[Any]) -> None:
        """A call to the master took too long; it counts at once, not when it returns."""
        self.record_master([PageStatus.STORE_UNREACHABLE], started_at=call.started_at)
        self._doubt(self.master, call, _MASTER_SECONDS)

    def master_came_late(self, answers: Sequence[object], seconds: float) -> None:
        """A call to the master that nobody waited for any more is back after so many seconds."""
        if PageStatus.STORE_UNREACHABLE not in answers:
            self.master.came_late(seconds)

    def endpoint_timed_out(self, name: str, call: NativeCall[Any], *, due: float) -> None:
        """A read was waited for in vain, and is still out. This is besides its outcome.

        Args:
            name: of the endpoint.
            call: the read.
            due: seconds that it might take, several times what it should.
        """
        if not self._is_master_down:  # reads ask the master, too: then it may be that
            self._doubt(self.endpoint(name), call, due)

    def refuse(self, keys: Iterable[str], endpoint: str, status: PageStatus) -> None:
        """Remember keys that lie at an endpoint that is down, for as long as it may not be asked."""
        at_most = max(self.endpoint(endpoint).seconds_left, _COOL_DOWN[0])
        for key in keys:
            self.negative.add(key, status, at_most=at_most)

    @property
    def _is_master_down(self) -> bool:
        return self._master_lost or self.master.is_open

    def _doubt(self, breaker: Breaker, call: NativeCall[Any], due: float) -> None:
        """Open the breaker, now or by the time that nothing has come from there for long enough, if nothing does."""
        if call.started_at is None or breaker.answered_start >= call.started_at + due / 2:
            return  # others that set out well after it are back: it is this call, and not all of them
        left = max(due, _SILENT_SECONDS) - breaker.silence(call.elapsed())
        if left <= 0:
            breaker.trip()
            return
        answers = breaker.answers

        def judge() -> None:
            may_be_master = breaker is not self.master and self._is_master_down  # lost since
            if not call.finished and breaker.answers == answers and not may_be_master:
                breaker.trip()

        asyncio.get_running_loop().call_later(left, judge, context=callback_context())

    def doubt_existence(self) -> None:
        """An object exists and cannot be read, or is not what it must be: others may be like that."""
        self._doubts_until = self._clock() + _DOUBT_SECONDS

    @property
    def trusts_existence(self) -> bool:
        """Whether an object that exists can be read, as far as is known."""
        if self._is_master_down or self._clock() < self._doubts_until:
            return False
        # An owner that is gone for good is never probed again: nothing that exists is there any more.
        return not any(each.is_open and each.seconds_open < _DOUBT_SECONDS for each in self._endpoints.values())

    def suppress(self, request_id: str) -> None:
        """A request failed: its lookups are answered 0 until it is computed or ends."""
        self._suppressed[request_id] = None
        while len(self._suppressed) > self.negative.capacity:
            self._suppressed.popitem(last=False)

    def unsuppress(self, request_id: str) -> None:
        """The engine has computed the request, or it has ended."""
        self._suppressed.pop(request_id, None)

    def is_suppressed(self, request_id: str) -> bool:
        """Whether the request failed and has not been computed since."""
        return request_id in self._suppressed

    def statistics(self) -> HealthStatistics:
        """What is broken now."""
        return HealthStatistics(
            tuple(sorted(breaker.name for breaker in (self.master, *self._endpoints.values()) if breaker.is_open)),
            len(self._endpoints),
            len(self.negative),
            len(self._suppressed),
        )
