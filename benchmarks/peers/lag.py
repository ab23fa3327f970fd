"""How late an event loop is: in this process, and in one of its own that has nothing else to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator

__all__ = ["LagMeter", "idle_control", "percentiles"]

_TICK = 0.001
_MOST_BYTES = 1 << 26
"""Of a control's answer."""


class LagMeter:
    """Sleeps for a millisecond at a time, and notes how much longer it took."""

    def __init__(self) -> None:
        self.lags: list[float] = []

    async def __aenter__(self) -> LagMeter:
        self._task = asyncio.create_task(self._measure())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _measure(self) -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(_TICK)
            self.lags.append(time.perf_counter() - asked - _TICK)


@contextlib.asynccontextmanager
async def idle_control() -> AsyncIterator[list[float]]:
    """A loop in a process of its own, meanwhile: what the machine, rather than this process, holds up.

    Yields:
        its lags, filled in at the end.
    """
    lags: list[float] = []
    pipe = asyncio.subprocess.PIPE
    control = await asyncio.create_subprocess_exec(sys.executable, __file__, stdin=pipe, stdout=pipe, limit=_MOST_BYTES)
    assert control.stdin is not None and control.stdout is not None
    try:
        await control.stdout.readline()  # it is up
        control.stdin.write(b"begin\n")
        yield lags
        control.stdin.write(b"end\n")
        lags += json.loads(await asyncio.wait_for(control.stdout.readline(), 30))
    finally:
        with contextlib.suppress(ProcessLookupError):
            control.kill()
        await control.wait()


def percentiles(values: list[float]) -> dict[str, float]:
    """In the values' own unit."""
    ordered = sorted(values)
    at = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999, "max": 1.0}
    found = {name: ordered[min(len(ordered) - 1, int(len(ordered) * share))] for name, share in at.items()}
    return {**found, "samples": len(ordered)}


async def _control() -> None:
    """Measure between the first line and the second."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    print("up", flush=True)
    sys.stdin.readline()

    def wait() -> None:
        sys.stdin.readline()
        loop.call_soon_threadsafe(stopped.set)

    threading.Thread(target=wait, daemon=True).start()
    async with LagMeter() as meter:
        await stopped.wait()
    print(json.dumps(meter.lags))


if __name__ == "__main__":
    asyncio.run(_control())
