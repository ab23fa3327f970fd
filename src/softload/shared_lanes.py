"""Lanes that the groups of calls of one event loop share.

Copies are bound by processors and memory. More of them at a time than there are processors are not faster together:
they only take turns, and one that waits for its turn may hold the interpreter meanwhile. Then the event loop waits too.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import suppress
from typing import Protocol
from weakref import WeakKeyDictionary

__all__ = ["SharedLanes"]


class Sharer(Protocol):
    """A group of calls, as far as it shares lanes with others."""

    def dispatch(self) -> None:
        """There may be room: start what waits."""


class SharedLanes:
    """How many calls of several groups run at a time. Groups that find no room take turns.

    Args:
        width: calls that run at a time, those not counted that were given up.
    """

    _of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, SharedLanes] = WeakKeyDictionary()

    def __init__(self, width: int) -> None:
        self.width = width
        self.running = 0
        self._waiting: deque[Sharer] = deque()

    def __repr__(self) -> str:
        return f"<SharedLanes: {self.running} of {self.width} in use, {len(self._waiting)} groups wait>"

    @classmethod
    def of_loop(cls) -> SharedLanes:
        """As many as there are processors for this process, at least two, for all groups of the running event loop."""
        loop = asyncio.get_running_loop()
        found = None
        with suppress(TypeError):  # a loop that cannot be referred to weakly has lanes for each group
            found = cls._of_loops.get(loop)
        if found is None:
            found = cls(max(2, _processors()))
            with suppress(TypeError):
                cls._of_loops[loop] = found
        return found

    def has_room(self, sharer: Sharer) -> bool:
        """Whether one more call may run; where not, the group is told when there may be room."""
        if self.running < self.width:
            return True
        if sharer not in self._waiting:
            self._waiting.append(sharer)
        return False

    def entered(self) -> None:
        """One more call runs."""
        self.running += 1

    def left(self) -> None:
        """One call less runs."""
        self.running -= 1
        while self._waiting and self.running < self.width:
            self._waiting.popleft().dispatch()


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
