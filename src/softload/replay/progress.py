"""How a replay tells that it goes on: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

__all__ = ["PlainProgress", "Progress", "TerminalProgress"]

_PLAIN_SECONDS = 5.0


class Progress(Protocol):
    """Told how many requests of how many have ended."""

    def update(self, done: int, total: int) -> None:
        """Take the present state."""


class PlainProgress:
    """Prints a line every few seconds: done, share, rate, time left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started: float | None = None
        self._printed = 0.0
        self._last = 0

    def update(self, done: int, total: int) -> None:
        """Print, if the last line is some seconds old or all is done."""
        now = time.monotonic()
        if self._started is None:
            self._started = self._printed = now
        if done == self._last or (done < total and now - self._printed < _PLAIN_SECONDS):
            return
        self._printed, self._last = now, done
        rate = done / max(now - self._started, 1e-9)
        left = f"{(total - done) / rate:.0f} s left" if rate else "time left unknown"
        self._console.print(
            f"{done}/{total} requests, {done / max(total, 1):.0%}, {rate:.1f}/s, {left}", soft_wrap=True
        )


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0.0:.1f}/s")


class TerminalProgress:
    """A bar with rate and time left; a context manager."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("requests", total=None)

    def __enter__(self) -> TerminalProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done, total=total)
