"""One piece of planning per turn of the event loop.

Planning a unit of some hundred pages takes a millisecond or more of Python. When many requests arrive at once, their
plans would run one after another within a single turn of the loop, and everything else, the engine's own scheduler
included, would wait for all of them. `Pacer.turn` lets one of them run per turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque

import anyio

__all__ = ["Pacer"]


class Pacer:
    """Hands out turns in the order in which they are asked for, one per turn of the event loop."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[anyio.Event] = deque()

    async def turn(self) -> None:
        """Return at once where nobody had this turn, else when it is the caller's. Nothing has to be given back."""
        if self._taken:
            mine = anyio.Event()
            self._waiting.append(mine)
            await mine.wait()
            return
        self._taken = True
        asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        if not self._waiting:
            self._taken = False
            return
        self._waiting.popleft().set()
        asyncio.get_running_loop().call_soon(self._advance)
