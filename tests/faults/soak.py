"""A replay whose cluster and whose calls fail all the time, in random ways: nothing may be lost, nothing may grow.

python -m tests.faults.soak [--seconds 1800] [--seed 0] [--trace FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from softload.config import Integrity
from softload.replay.options import AdmissionMode, ReplayOptions
from softload.replay.runner import ZEROS, replay
from softload.replay.shapes import DraftKind

STORE = "mooncake://embedded?segment=384MiB&owners=3&client_ttl=2s&lease=1s&high_watermark=0.9"
CALLS = (
    "evict=0.002", "remove=0.002", "late=0.02", "slow=0.02:0.1", "corrupt=0.002", "draft-loss=0.005", "malformed=0.01"
)  # fmt: skip
"""Of objects mostly, of which a page has several: rare enough for long prefixes to be restored between them."""

REQUESTS_A_SECOND = 8
KINDS = {"freeze-owner": 4, "kill-owner": 2, "freeze-master": 3, "kill-master": 1, "restart-master": 1}
"""Faults of processes, by how often they come: a new master knows nothing, and what is not stored is not loaded."""

_WRITE_SECONDS = 62.0
"""A write to an owner that is killed comes back after that long; the end of the soak waits for it."""


def random_faults(seconds: float, seed: int) -> Iterator[str]:
    """One fault of a process every few seconds. Owners are killed while there is time for their calls to return."""
    dice = random.Random(seed)
    at = 2.0
    yield f"kill-owner@{at}:1"
    while (at := at + dice.uniform(3.0, 6.0)) < seconds - 6.0:
        (kind,) = dice.choices(list(KINDS), list(KINDS.values()))
        if kind == "kill-owner" and at > max(6.0, seconds - _WRITE_SECONDS):
            kind = "freeze-owner"
        lasts = "" if kind == "restart-master" else f":{dice.uniform(0.2, 2.5):.2f}"
        yield f"{kind}@{at:.2f}{lasts}"


@dataclass(slots=True)
class Watcher:
    """Resident memory and threads of this process, once a second."""

    rss: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watcher:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(1.0):
            if len(self.rss) % 30 == 29:
                # The replay freezes its heap now and then, and what was alive then is collected by nobody.
                gc.unfreeze()
                gc.collect()
            self.rss.append(process.memory_info().rss)
            self.threads.append(process.num_threads())

    def medians(self, values: list[int]) -> tuple[float, float]:
        """Of the second quarter and of the last: what grows between them leaks."""
        quarter = max(1, len(values) // 4)
        return statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])


def soak(seconds: float, seed: int = 0, trace: Path | None = None) -> dict[str, Any]:
    """Run it: the replay's figures, and what memory and threads did."""
    requests = max(60, round(seconds * REQUESTS_A_SECOND))
    plain = ReplayOptions(trace=trace, requests=requests).read_requests()
    # Faults are planned for all of the time, so the requests have to take as long.
    options = ReplayOptions(
        trace=trace, requests=requests, store=STORE, admission=AdmissionMode.PREFETCH, draft=DraftKind.SIDECAR,
        integrity=Integrity.FULL, deadline=0.5, landing=64 << 20, max_running=8,
        speed=max(1e-3, plain[-1].timestamp / 1e3 / seconds),
        faults=(*CALLS, f"hang={requests // 60}:1", *random_faults(seconds, seed)), seed=seed,
    )  # fmt: skip
    began = time.monotonic()
    with Watcher() as watcher:
        figures = asyncio.run(replay(options, options.read_requests()))
    rss, threads = watcher.medians(watcher.rss), watcher.medians(watcher.threads)
    return figures | {
        "soak_s": time.monotonic() - began,
        "rss_second_quarter": rss[0],
        "rss_last_quarter": rss[1],
        "threads_second_quarter": threads[0],
        "threads_last_quarter": threads[1],
        "threads_peak": max(watcher.threads),
    }


def complaints(figures: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    found = [f"{name} is {figures[name]}, expected 0" for name in (*ZEROS, "stuck_threads") if figures[name]]
    if figures["finished_requests"] != figures["requests"]:
        found.append(f"{figures['finished_requests']} of {figures['requests']} requests finished")
    grown = figures["rss_last_quarter"] - figures["rss_second_quarter"]
    if grown > 0.1 * figures["rss_second_quarter"]:
        found.append(f"resident memory grew by {grown / 2**20:.0f} MiB")
    if figures["threads_last_quarter"] > figures["threads_second_quarter"] + 24:
        found.append(f"threads grew to {figures['threads_last_quarter']:.0f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    figures = soak(arguments.seconds, arguments.seed, arguments.trace)
    for name, value in figures.items():
        print(f"{name}: {value}")
    found = complaints(figures)
    print("\n".join(found) or "nothing was lost, nothing grew")
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main())
