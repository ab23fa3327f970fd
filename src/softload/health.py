"""What is known to be broken: breakers by endpoint and master, refuted keys, failed requests.

Misses never count. A breaker opens when 3 of the last 5 outcomes were outages, stays open for a cool-down that doubles
from 1 to 30 s with jitter, and then lets one probe through.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from softload import events
from softload.outcomes import PageStatus
from softload.protocols import Clock

__all__ = ["Breaker", "Health", "HealthStatistics", "NegativeCache"]

_log = structlog.get_logger(__name__)

MASTER = "master"
"""The name of the master's breaker; endpoints have their own."""

_WINDOW = 5
_FAILURES = 3
_COOL_DOWN = (1.0, 30.0)
_NEGATIVE_SECONDS = {PageStatus.NO_MEMORY_REPLICA: 2.0, PageStatus.CORRUPT: 60.0}
_NEGATIVE_DEFAULT = 10.0


class Breaker:
    """Stops calls to what does not answer, and finds out when it does again.

    | state | `allows` | left by |
    | --- | --- | --- |
    | closed | always | 3 of the last 5 outcomes are outages: open |
    | open | never | the cool-down has passed: half open |
    | half open | one probe at a time | success: closed; failure: open, twice as long; neither: the permit is back |
    """

    def __init__(self, name: str, clock: Clock, jitter: Callable[[], float]) -> None:
        self.name = name
        self._clock = clock
        self._jitter = jitter
        self._outcomes: deque[bool] = deque(maxlen=_WINDOW)
        self._open_until: float | None = None
        self._cool_down = _COOL_DOWN[0]
        self._probing = False

    def __repr__(self) -> str:
        return f"<Breaker {self.name}: {'open' if self.is_open else 'closed'}>"

    @property
    def is_open(self) -> bool:
        """Whether calls are refused or only probed."""
        return self._open_until is not None

    @property
    def refuses(self) -> bool:
        """Whether a call would be refused now; takes no permit."""
        return self._open_until is not None and (self._probing or self._clock() < self._open_until)

    def allows(self) -> bool:
        """Ask before a call. True while open takes the probe's permit: `record` or `give_back` must follow."""
        if self._open_until is None:
            return True
        if self.refuses:
            return False
        self._probing = True
        return True

    def give_back(self) -> None:
        """The probe ended without an outcome (cancelled, withdrawn): the next caller may probe."""
        self._probing = False

    def record(self, good: bool) -> None:
        """An outcome of a call."""
        self._probing = False
        if good:
            self._outcomes.append(True)
            if self._open_until is not None:
                self._open_until = None
                self._cool_down = _COOL_DOWN[0]
                self._outcomes.clear()
                _log.info(events.BREAKER_CLOSED, breaker=self.name)
            return
        self._outcomes.append(False)
        if self._open_until is not None:
            if self._clock() < self._open_until:
                return  # a call from before it opened: says nothing new
            self._cool_down = min(self._cool_down * 2, _COOL_DOWN[1])
        elif list(self._outcomes).count(False) < _FAILURES:
            return
        self._open_until = self._clock() + self._cool_down * (0.75 + 0.5 * self._jitter())
        _log.warning(events.BREAKER_OPENED, breaker=self.name, seconds=round(self._open_until - self._clock(), 3))


class NegativeCache:
    """Keys that the store said to have and could not give: bounded, and each for a short time."""

    def __init__(self, capacity: int, clock: Clock) -> None:
        self.capacity = capacity
        self._clock = clock
        self._until: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: str, status: PageStatus) -> None:
        """Remember a refuted hit."""
        self._until[key] = self._clock() + _NEGATIVE_SECONDS.get(status, _NEGATIVE_DEFAULT)
        self._until.move_to_end(key)
        while len(self._until) > self.capacity:
            self._until.popitem(last=False)

    def discard(self, key: str) -> None:
        """A good read, or a save of our own: forget it."""
        self._until.pop(key, None)

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
    """Breakers that are open, keys in the negative cache, requests whose lookups are answered 0."""

    open_breakers: tuple[str, ...]
    negative_keys: int
    suppressed_requests: int


class Health:
    """All that is known to be broken, for one loader."""

    def __init__(self, *, negative_entries: int = 65_536, seed: int = 0, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._jitter = random.Random(seed).random
        self._breakers: dict[str, Breaker] = {}
        self.negative = NegativeCache(negative_entries, clock)
        self._suppressed: OrderedDict[str, None] = OrderedDict()
        self._master_lost = False
        self.on_master_back: Callable[[], None] = lambda: None

    @property
    def master(self) -> Breaker:
        """The master's breaker."""
        return self.endpoint(MASTER)

    def endpoint(self, name: str) -> Breaker:
        """The breaker of one endpoint."""
        breaker = self._breakers.get(name)
        if breaker is None:
            breaker = self._breakers[name] = Breaker(name, self._clock, self._jitter)
        return breaker

    def record_master(self, statuses: list[PageStatus]) -> None:
        """One outcome per call that asked the master: unreachable, or not."""
        reached = PageStatus.STORE_UNREACHABLE not in statuses
        self.master.record(reached)
        if reached and self._master_lost:
            self.on_master_back()
        self._master_lost = not reached

    @property
    def master_lost(self) -> bool:
        """Whether the last call that asked the master did not reach it."""
        return self._master_lost

    def master_timed_out(self) -> None:
        """A call to the master took too long; it counts at once, not when it returns."""
        self.record_master([PageStatus.STORE_UNREACHABLE])

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
            tuple(sorted(name for name, breaker in self._breakers.items() if breaker.is_open)),
            len(self.negative),
            len(self._suppressed),
        )
