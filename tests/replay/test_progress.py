"""Progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from softload.replay import progress
from softload.replay.progress import PlainProgress, TerminalProgress


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_plain_lines_come_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr(progress, "time", clock)
    plain = PlainProgress(Console(file=out))
    for second in range(12):
        clock.now = 100.0 + second
        plain.update(10 * second, 200)
    clock.now = 120.0
    plain.update(200, 200)
    plain.update(200, 200)
    lines = out.getvalue().splitlines()
    assert lines == [
        "50/200 requests, 25%, 10.0/s, 15 s left",
        "100/200 requests, 50%, 10.0/s, 10 s left",
        "200/200 requests, 100%, 10.0/s, 0 s left",
    ]


def test_the_bar_shows_count_and_rate() -> None:
    out = io.StringIO()
    with TerminalProgress(Console(file=out, force_terminal=True, width=100)) as bar:
        bar.update(3, 12)
        bar.update(12, 12)
    assert "12/12" in out.getvalue() and "/s" in out.getvalue()
