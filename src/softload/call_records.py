"""What is told of blocking calls: a span for each that has returned, and how many there are in a group."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CallGroupStatistics", "CallSpan"]


@dataclass(frozen=True, slots=True)
class CallSpan:
    """One blocking call that has returned, as a trace shows it.

    Args:
        group: the calls that it shares lanes with.
        lane: which of them it took, from 0; those that stand in for stuck ones come last.
        label: what it did; empty where the group says enough.
        started: when a thread got it, `time.monotonic`.
        ended: when it returned.
        abandoned: whether nobody waited for it any more.
    """

    group: str
    lane: int
    label: str
    started: float
    ended: float
    abandoned: bool


@dataclass(frozen=True, slots=True)
class CallGroupStatistics:
    """A snapshot: threads alive, calls running (stuck ones included), stuck, and queued; the totals of all calls."""

    threads: int
    running: int
    stuck: int
    queued: int
    calls: int
    refused: int
