"""Calls that wait for a lane, by kind: the lowest priority value first, and no more of a kind at a time than is good.

A kind is what calls share besides lanes: an endpoint. Calls to one endpoint share its link and its processors: more
at a time are not faster together, and each takes longer, the first one too. So what runs of a kind at a time is bounded
for itself, what is urgent runs alone, and what belongs to one series runs one at a time, in order. What is late does
not count: it may never come back, and others still might.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

__all__ = ["CallQueue"]


class Waiting(Protocol):
    """A call, as far as its turn depends on it."""

    priority: float
    kind: str
    alone: bool
    series: object | None


C = TypeVar("C", bound=Waiting)


class _Kind(Generic[C]):
    """One kind's calls: those that wait, and what runs."""

    __slots__ = ("alone", "aside", "heap", "running", "series")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, C]] = []
        self.running = 0
        self.aside: set[C] = set()
        self.alone: C | None = None
        self.series: dict[C, object] = {}
        """Of what runs, and did not step aside."""

    def holds_up_no_more(self, call: C) -> None:
        """Others need not wait for it, for whatever reason they did."""
        self.series.pop(call, None)
        if self.alone is call:
            self.alone = None


class CallQueue(Generic[C]):
    """Calls that wait, and how much of each kind runs.

    Args:
        width: calls of one kind that run at a time.
        at_a_time: calls of one kind that run at a time, those that stepped aside not counted.
    """

    def __init__(self, *, width: int, at_a_time: int) -> None:
        self._width = width
        self._at_a_time = at_a_time
        self._kinds: dict[str, _Kind[C]] = {}
        self._order = itertools.count()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def push(self, call: C) -> None:
        """Let a call wait for its turn."""
        kind = self._kinds.get(call.kind)
        if kind is None:
            kind = self._kinds[call.kind] = _Kind()
        heapq.heappush(kind.heap, (call.priority, next(self._order), call))
        self._waiting += 1

    def pop(self) -> C | None:
        """The next call that may run; ``None`` where there is none. `started` follows, if it does."""
        best: _Kind[C] | None = None
        for kind in self._kinds.values():
            if kind.heap and self._has_room(kind) and (best is None or kind.heap[0] < best.heap[0]):
                best = kind
        if best is None:
            return None
        self._waiting -= 1
        call = heapq.heappop(best.heap)[2]
        self._forget(call.kind)
        return call

    def started(self, call: C) -> None:
        """A call runs."""
        kind = self._kinds.setdefault(call.kind, _Kind())
        kind.running += 1
        if call.alone:
            kind.alone = call
        if call.series is not None:
            kind.series[call] = call.series

    def step_aside(self, call: C) -> None:
        """A running call takes long, or does nothing any more that its kind shares: it keeps no other waiting."""
        kind = self._kinds[call.kind]
        kind.aside.add(call)
        kind.holds_up_no_more(call)

    def left(self, call: C) -> None:
        """A running call is back, or nobody waits for it any more."""
        kind = self._kinds[call.kind]
        kind.running -= 1
        kind.aside.discard(call)
        kind.holds_up_no_more(call)
        self._forget(call.kind)

    def drain(self) -> Iterator[C]:
        """Every call that waits; none does afterwards."""
        entries = sorted(entry for kind in self._kinds.values() for entry in kind.heap)
        for kind in self._kinds.values():
            kind.heap = []
        self._waiting = 0
        for name in list(self._kinds):
            self._forget(name)
        for _, _, call in entries:
            yield call

    def _has_room(self, kind: _Kind[C]) -> bool:
        running = kind.running - len(kind.aside)
        if kind.running >= self._width or kind.alone is not None:
            return False
        first = kind.heap[0][2]
        if first.series is not None and first.series in kind.series.values():
            return False
        return running == 0 if first.alone else running < self._at_a_time

    def _forget(self, name: str) -> None:
        """Endpoints come and go for as long as the loader lives."""
        kind = self._kinds[name]
        if not kind.heap and not kind.running:
            del self._kinds[name]
