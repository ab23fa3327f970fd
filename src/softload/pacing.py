"""About a millisecond of planning per turn of the event loop.

Planning a unit of some hundred pages takes a millisecond or more of Python. When many requests arrive at once, their
plans would run one after another within a single turn of the loop, and everything else, the engine's own scheduler
included, would wait for all of them. `Pacer.turn` lets as much of it run in a turn of the loop as takes a millisecond:
one large piece, or several small ones, for which a turn each would cost as much as they do.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from softload.protocols import Clock

__all__ = ["Pacer"]

_TURN_SECONDS = 0.001


class Pacer:
    """Hands out the time of the event loop's turns, in the order in which it is asked for."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._is_taken = False
        self._started: float | None = None
        """When the first piece of this turn began; ``None`` while it is yet to begin."""
        self._pieces = 0
        self._too_late = 0
        """Who was woken for this turn and found no time left: the first ones of those that wait."""
        self._waiting: deque[asyncio.Event] = deque()

    async def turn(self) -> None:
        """Return at once where this turn has time left, else when there is some. Nothing has to be given back."""
        if not self._is_taken:
            self._begin()
        elif self._is_over():
            # Not behind those that wait, where there is time: who has just had some had better get on with it.
            mine = asyncio.Event()
            self._waiting.append(mine)
            await mine.wait()
            while self._is_over():
                mine = asyncio.Event()
                self._waiting.insert(self._too_late, mine)
                self._too_late += 1
                await mine.wait()
        if self._started is None:
            self._started = self._clock()
        self._pieces += 1

    def _is_over(self) -> bool:
        return self._started is not None and self._clock() - self._started >= _TURN_SECONDS

    def _begin(self) -> None:
        self._is_taken = True
        self._started = None
        self._pieces = self._too_late = 0
        asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """A turn is over: so many may go on in the next one as this one had time for."""
        seconds = 0.0 if self._started is None else self._clock() - self._started
        count = max(1, int(self._pieces * _TURN_SECONDS / seconds) if seconds > 0 else self._pieces)
        if not self._waiting:
            self._is_taken = False
            return
        for _ in range(min(count, len(self._waiting))):
            self._waiting.popleft().set()
        self._begin()
