"""Time that stands still until a test moves it, for an event loop and for everything else that looks at a clock."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class ManualClock:
    """Seconds on a clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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
        while due := [
            timer.when()
            for timer in self._scheduled  # type: ignore[attr-defined]
            if not timer.cancelled() and timer.when() <= end
        ]:
            self.clock.now = max(self.clock.now, min(due))
            self.settle(busy)
        self.clock.now = end
        self.settle(busy)

    async def _settle(self, busy: Callable[[], bool]) -> None:
        quiet = 0
        while quiet < 2:
            await asyncio.sleep(0)
            if self._ready or busy():  # type: ignore[attr-defined]
                quiet = 0
                os.sched_yield()
            else:
                quiet += 1
