"""A put session, on a thread: start, one range, end; what does not get through is revoked."""

from __future__ import annotations

import time
from collections.abc import Sequence

from softload.landing import Segment
from softload.outcomes import PageStatus, SaveStatus
from softload.protocols import PutRefusal
from softload.store_calls import StoreCalls

__all__ = ["put"]

_FULL_PAUSES = (0.02, 0.05)
"""Before an object that a full store refused is offered again."""

_STATUSES: dict[PutRefusal | PageStatus, SaveStatus] = {
    PageStatus.LOADED: SaveStatus.SAVED,
    PutRefusal.PRESENT: SaveStatus.PRESENT,
    PutRefusal.FULL: SaveStatus.STORE_FULL,
}


def put(
    calls: StoreCalls, keys: Sequence[str], segments: Sequence[Segment]
) -> tuple[list[SaveStatus], list[PageStatus]]:
    """Write one object from each segment. Blocks; also for a moment where the store is full.

    Returns:
        what became of each object, and how the master answered the start where it did not take an object.
    """
    answers = calls.put_start(keys, [segment.nbytes for segment in segments])
    for pause in _FULL_PAUSES:
        # A refusal is what makes the store evict: a moment later there is room.
        full = [index for index, answer in enumerate(answers) if answer is PutRefusal.FULL]
        if not full:
            break
        time.sleep(pause)
        again = calls.put_start([keys[index] for index in full], [segments[index].nbytes for index in full])
        for index, answer in zip(full, again, strict=True):
            answers[index] = answer
    failures = [answer for answer in answers if isinstance(answer, PageStatus)]
    statuses = [_STATUSES.get(answer, SaveStatus.FAILED) for answer in answers]
    started = [index for index, status in enumerate(statuses) if status is SaveStatus.SAVED]
    written = calls.put_write(
        [keys[index] for index in started],
        [segments[index].pointer for index in started],
        [segments[index].nbytes for index in started],
    )
    good = [index for index, answer in zip(started, written, strict=True) if answer is PageStatus.LOADED]
    ended = dict(zip(good, calls.put_end([keys[index] for index in good]), strict=True))
    failed = [index for index in started if ended.get(index) is not PageStatus.LOADED]
    calls.put_revoke([keys[index] for index in failed])
    for index in failed:
        statuses[index] = SaveStatus.FAILED
    return statuses, failures
