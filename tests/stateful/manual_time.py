"""Time that stands still until a test moves it, for an event loop and for everything else that looks at a clock."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

_SETTLE_SECONDS = 30.0
"""Of real time: more than any machine needs for what is under way."""


class ManualClock:
    """Seconds on a clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Ticks:
    """A clock of the event loop's own work, which goes on by as much at every look: turns end at the same places."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._looks = 0

    def __call__(self) -> float:
        self._looks += 1
        return self._looks * self._seconds


class ManualLoop(asyncio.SelectorEventLoop):
    """An event loop on a manual clock: timers fire when the test says so, threads report as they always do."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.errors: list[str] = []
        super().__init__()
        self.set_exception_handler(
            lambda _, context: self.errors.append(str(context.get("exception") or context["message"]))
        )

    def time(self) -> float:
        """The manual clock's seconds."""
        return self.clock.now

    def settle(self, busy: Callable[[], bool]) -> None:
        """Run until nothing is left to run: no callback, and no thread that is not held on purpose."""
        self.run_until_complete(self._settle(busy))

    def advance(self, seconds: float, busy: Callable[[], bool]) -> None:
        """Move the clock from timer to timer, and settle after each."""
        end = self.clock.now + seconds
        self.settle(busy)
        until = time.monotonic() + 2 * _SETTLE_SECONDS
        while due := [
            timer.when()
            for timer in self._scheduled  # type: ignore[attr-defined]
            # The loop runs what is due within its clock's resolution; the timer may find that too early, over and over.
            if not timer.cancelled() and timer.when() <= end + 2 * self._clock_resolution  # type: ignore[attr-defined]
        ]:
            assert time.monotonic() < until, f"timers without end, the first of them {self._scheduled[0]}"  # type: ignore[attr-defined]
            self.clock.now = max(self.clock.now, min(due))
            self.settle(busy)
        self.clock.now = max(self.clock.now, end)
        self.settle(busy)

    async def _settle(self, busy: Callable[[], bool]) -> None:
        quiet = 0
        until = time.monotonic() + _SETTLE_SECONDS
        while quiet < 2:
            await asyncio.sleep(0)
            assert time.monotonic() < until, f"it does not come to rest: {len(self._ready)} callbacks, busy: {busy()}"  # type: ignore[attr-defined]
            if self._ready or busy():  # type: ignore[attr-defined]
                quiet = 0
                os.sched_yield()
            else:
                quiet += 1
