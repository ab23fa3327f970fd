"""What reads cost, as the reads themselves tell, and which way of reading makes a forward wait least. No I/O.

A read takes so many seconds an item (an object, or a range of one) and so many a byte. Both are fitted, per endpoint
and kind of read, to what calls took; samples lose weight with every later one and with time, so that a kind of read
that is not chosen any more is tried again some day. Where there are none yet, the answer is what such a read should
cost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from softload.protocols import Clock

__all__ = ["CostModel", "Costs", "SharedTime", "Way", "best_way", "stall"]

_FORGET = 0.85
"""Weight that a sample keeps when the next one comes."""

_HALF_LIFE = 30.0
"""Seconds in which a sample loses half of its weight."""

_PRIOR = 0.2
"""Weight of what is expected before the first sample, in samples."""

_LEAST_WEIGHT = 1e-3
"""Of all samples of a kind: with less, they are forgotten."""

_EXPECTED_ITEM = {False: 5e-6, True: 30e-6}
"""Seconds for an object of a whole read, and for a range."""

_EXPECTED_BYTE = 1 / 2e9

_HOPE = 1.5
"""A kind of read without samples should have this many times the rate that the endpoint has shown: else the first kind
that was chosen would be the only one ever tried."""

_MARGIN = 0.9
"""Ranges must promise less than this share of the wait: whole reads need no session, and take their own leases."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of an item and of a byte, on a machine whose lanes are all at work."""

    item: float
    byte: float

    def seconds(self, items: int, nbytes: int) -> float:
        """What so many should take."""
        return items * self.item + nbytes * self.byte


_EXPECTED_START = Costs(30e-6, 1e-3)
"""Of sessions: seconds for each, and for the question."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """Least squares of errors over seconds with two unknowns, held to what is expected by a small weight.

    Args:
        at: when the last sample came.
        weight: of all samples.
        moments: sums over them: of items and of bytes, squared, and of their product, all three a second; and of both.
    """

    at: float = 0.0
    weight: float = 0.0
    moments: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def faded(self, now: float, share: float = 1.0) -> _Fit:
        share *= math.exp2(-max(0.0, now - self.at) / _HALF_LIFE)
        aa, bb, ab, a, b = self.moments
        return _Fit(now, self.weight * share, (aa * share, bb * share, ab * share, a * share, b * share))

    def with_sample(self, items: int, nbytes: int, seconds: float) -> _Fit:
        # Squares of errors over seconds: what a call that took much longer than such calls do adds is little. First
        # reads touch memory that was never touched, and any may be held up by others. Were it squares of relative
        # errors, the fastest calls alone would count, and sums of calls would come out too short.
        x, y = items / seconds, nbytes / seconds
        aa, bb, ab, a, b = self.moments
        return _Fit(
            self.at, self.weight + 1.0, (aa + items * x, bb + nbytes * y, ab + items * y, a + items, b + nbytes)
        )

    def solve(self, expected: Costs) -> Costs:
        aa, bb, ab, a, b = self.moments
        if self.weight < _LEAST_WEIGHT:
            return expected
        # Calls that all have as many bytes an item do not tell the two apart: then an item costs what it should, and
        # what that does not explain are the bytes.
        expected = Costs(expected.item, max(0.0, (b - ab * expected.item) / bb))
        # In the samples' own scale, so that an expectation that is off by orders of magnitude weighs no more.
        hold_a, hold_b = _PRIOR * aa / self.weight, _PRIOR * bb / self.weight
        aa, bb, a, b = aa + hold_a, bb + hold_b, a + hold_a * expected.item, b + hold_b * expected.byte
        determinant = aa * bb - ab * ab  # positive: what holds it is
        item = (a * bb - b * ab) / determinant
        byte = (b * aa - a * ab) / determinant
        if item < 0:
            return Costs(0.0, b / bb)
        if byte < 0:
            return Costs(a / aa, 0.0)
        return Costs(item, byte)


@dataclass(slots=True)
class _Endpoint:
    fits: dict[bool, _Fit] = field(default_factory=lambda: {False: _Fit(), True: _Fit()})
    rate: float = 0.0
    """Bytes a second over all its reads, decaying; 0 before the first: what is expected of a kind not tried yet."""


class CostModel:
    """What reads cost, by endpoint, and sessions. Bounded: the endpoint that was read from longest ago is forgotten.

    Args:
        capacity: endpoints at most.
        clock: seconds, monotonic.
    """

    def __init__(self, capacity: int = 4096, *, clock: Clock = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._endpoints: dict[str, _Endpoint] = {}
        self._starts = _Fit()

    def record(self, endpoint: str, *, ranged: bool, items: int, nbytes: int, seconds: float) -> None:
        """A read is back, good and in time.

        Args:
            endpoint: who holds what was read.
            ranged: whether ranges were read.
            items: objects, or ranges.
            nbytes: bytes in all.
            seconds: its part of the time, as `SharedTime` has it.
        """
        seconds = max(seconds, 1e-7)
        known = self._endpoints.pop(endpoint, None) or _Endpoint()
        self._endpoints[endpoint] = known
        if len(self._endpoints) > self._capacity:
            del self._endpoints[next(iter(self._endpoints))]
        known.fits[ranged] = known.fits[ranged].faded(self._clock(), _FORGET).with_sample(items, nbytes, seconds)
        known.rate = known.rate + 0.2 * (nbytes / seconds - known.rate) if known.rate else nbytes / seconds

    def costs(self, endpoint: str, *, ranged: bool) -> Costs:
        """What a read should cost now."""
        known = self._endpoints.get(endpoint)
        if known is None:
            return Costs(_EXPECTED_ITEM[ranged], _EXPECTED_BYTE)
        expected = Costs(_EXPECTED_ITEM[ranged], 1 / (_HOPE * known.rate) if known.rate else _EXPECTED_BYTE)
        return known.fits[ranged].faded(self._clock()).solve(expected)

    def known(self, endpoint: str, *, ranged: bool) -> Costs | None:
        """What such a read should cost now, as such reads of this endpoint have shown; ``None`` where none was seen."""
        known = self._endpoints.get(endpoint)
        return self.costs(endpoint, ranged=ranged) if known is not None and known.fits[ranged].weight else None

    def record_start(self, sessions: int, seconds: float) -> None:
        """Ranges of so many objects are about to be read: what it took until each had its session."""
        self._starts = self._starts.faded(self._clock(), _FORGET).with_sample(sessions, 1, max(seconds, 1e-7))

    def start_seconds(self, sessions: int) -> float:
        """What it should take now until so many objects have sessions, before the first range of one is read."""
        return self._starts.faded(self._clock()).solve(_EXPECTED_START).seconds(sessions, 1)


def stall(steps: Sequence[tuple[int, float, float]], layer_seconds: float) -> float:
    """How long a forward waits in all for layers that are read and copied one step after another.

    Args:
        steps: `(first layer, seconds to read, seconds to copy)`; a step is copied while the next one is read.
        layer_seconds: what the forward takes for a layer.
    """
    read = copied = waited = 0.0
    for first, reading, copying in steps:
        read += reading
        copied = max(copied, read) + copying
        waited = max(waited, copied - first * layer_seconds)
    return waited


class SharedTime:
    """A clock for what several do at a time: while `n` are at work, it goes an `n`-th as fast as the others.

    What passed on it from the start to the end of a call is the call's part of the time; the parts of all calls add up
    to the time in which there was any.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._now = 0.0
        self._running = 1

    def now(self, running: int) -> float:
        """The time, seconds; from now on so many are at work."""
        at = self._clock()
        self._now += (at - self._at) / self._running
        self._at, self._running = at, max(1, running)
        return self._now


@dataclass(frozen=True, slots=True)
class Way:
    """A way to read: the layers of each part, none for whole objects; and how long a forward should wait with it."""

    parts: tuple[range, ...]
    stall: float


def best_way(
    groups: Sequence[range],
    *,
    whole_seconds: float,
    part_seconds: Callable[[range], float],
    copy_seconds: Callable[[range], float],
    layer_seconds: float,
    start_seconds: float = 0.0,
) -> Way:
    """The way to read that makes a forward wait least: whole, or in two parts or more of neighbouring groups of layers.

    Args:
        groups: the groups of layers that are copied one after another, in order; those of which nothing is read are
            left out, since nobody waits for them.
        whole_seconds: what whole objects take to read.
        part_seconds: what the ranges of some layers take: together no more than apart.
        copy_seconds: what the copy of some layers into their slots takes.
        layer_seconds: what the forward takes for a layer; 0 where all of it is wanted as soon as possible.
        start_seconds: what goes before the first range is read.
    """
    copies = [copy_seconds(group) for group in groups]
    starts = [group.start * layer_seconds for group in groups]
    whole = stall(
        [(group.start, 0.0 if index else whole_seconds, copies[index]) for index, group in enumerate(groups)],
        layer_seconds,
    )
    best = Way((), whole)
    bound = _MARGIN * whole
    reads: dict[tuple[int, int], float] = {}
    seen: list[list[tuple[float, float, float]]] = [[] for _ in groups]

    def part(first: int, stop: int) -> float:
        if (first, stop) not in reads:
            reads[first, stop] = part_seconds(range(groups[first].start, groups[stop - 1].stop))
        return reads[first, stop]

    def search(first: int, read: float, copied: float, waited: float, parts: tuple[range, ...]) -> None:
        """All ways to read what is left from group `first` on, that could still be the best."""
        nonlocal best, bound
        if first == len(groups):
            best, bound = Way(parts, waited), waited
            return
        if any(a <= read and b <= copied and c <= waited for a, b, c in seen[first]):
            return  # there is a way to get as far that is no worse in anything
        seen[first].append((read, copied, waited))
        if read + part(first, len(groups)) + copies[-1] - starts[-1] >= bound:
            return  # even the last layers would come too late
        for stop in range(first + 1, len(groups) + (first > 0)):  # all in one part is no choice
            there = read + part(first, stop)
            now, wait = copied, waited
            for index in range(first, stop):
                now = max(now, there) + copies[index]
                wait = max(wait, now - starts[index])
            if wait < bound:
                search(stop, there, now, wait, (*parts, range(groups[first].start, groups[stop - 1].stop)))

    search(0, start_seconds, 0.0, 0.0, ())
    return best
