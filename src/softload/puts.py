"""A put session, on a thread: start, one range, end; what does not get through is revoked."""

from __future__ import annotations

import time
from collections.abc import Sequence

from softload.landing import Segment
from softload.outcomes import PageStatus, SaveStatus
from softload.protocols import PutRefusal
from softload.store_calls import StoreCalls

__all__ = ["Puts", "Starts", "put", "start_all", "write"]

Starts = tuple[list[SaveStatus], list[PageStatus]]
"""What became of each object, and what the master answered where it did not do as asked."""

Puts = tuple[list[SaveStatus], list[PageStatus] | None]
"""The same; ``None`` where the master was not asked."""

_FULL_PAUSES = (0.02, 0.05)
"""Before an object that a full store refused is offered again."""

_STATUSES: dict[PutRefusal | PageStatus, SaveStatus] = {
    PageStatus.LOADED: SaveStatus.SAVED,
    PutRefusal.PRESENT: SaveStatus.PRESENT,
    PutRefusal.FULL: SaveStatus.STORE_FULL,
}


def put(calls: StoreCalls, keys: Sequence[str], segments: Sequence[Segment]) -> Puts:
    """Write one object from each segment. Blocks; also for a moment where the store is full."""
    statuses, failures = _start(calls, keys, [segment.nbytes for segment in segments])
    started = [index for index, status in enumerate(statuses) if status is SaveStatus.SAVED]
    written, unended = write(calls, [keys[index] for index in started], [segments[index] for index in started])
    for index, status in zip(started, written, strict=True):
        statuses[index] = status
    return statuses, failures + (unended or [])


def start_all(calls: StoreCalls, keys: Sequence[str], sizes: Sequence[int]) -> Starts:
    """Start the puts of many objects, for `write` to end. Where the store is too full for all of them, of none."""
    statuses, failures = _start(calls, keys, sizes)
    if SaveStatus.STORE_FULL in statuses:
        calls.put_revoke([key for key, status in zip(keys, statuses, strict=True) if status is SaveStatus.SAVED])
        statuses = [SaveStatus.STORE_FULL if status is SaveStatus.SAVED else status for status in statuses]
    return statuses, failures


def write(calls: StoreCalls, keys: Sequence[str], segments: Sequence[Segment]) -> Puts:
    """Write and end objects whose puts were started. Blocks."""
    written = calls.put_write(keys, [segment.pointer for segment in segments], [segment.nbytes for segment in segments])
    good = [key for key, answer in zip(keys, written, strict=True) if answer is PageStatus.LOADED]
    ended = calls.put_end(good)
    saved = {key for key, answer in zip(good, ended, strict=True) if answer is PageStatus.LOADED}
    calls.put_revoke([key for key in keys if key not in saved])
    statuses = [SaveStatus.SAVED if key in saved else SaveStatus.FAILED for key in keys]
    return statuses, [answer for answer in ended if answer is not PageStatus.LOADED] if good else None


def _start(calls: StoreCalls, keys: Sequence[str], sizes: Sequence[int]) -> Starts:
    answers = calls.put_start(keys, sizes)
    for pause in _FULL_PAUSES:
        # A refusal is what makes the store evict: a moment later there is room.
        full = [index for index, answer in enumerate(answers) if answer is PutRefusal.FULL]
        if not full:
            break
        time.sleep(pause)
        again = calls.put_start([keys[index] for index in full], [sizes[index] for index in full])
        for index, answer in zip(full, again, strict=True):
            answers[index] = answer
    failures = [answer for answer in answers if isinstance(answer, PageStatus)]
    return [_STATUSES.get(answer, SaveStatus.FAILED) for answer in answers], failures
