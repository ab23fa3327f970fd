"""What one native read does on its thread: read, then prove what landed while it is in the cache."""

from __future__ import annotations

from collections.abc import Sequence

from softload.config import Integrity
from softload.copies import rows_of, runs
from softload.fetches import Fetch, Part, ReadCall
from softload.integrity import check_tails
from softload.outcomes import PageStatus
from softload.protocols import Descriptor
from softload.store_calls import StoreCalls

__all__ = ["ReadAnswer", "execute_read"]

_WORTH_BYTES = 1 << 20
"""Fewer bytes are checked before the event loop could be told anything."""

ReadAnswer = tuple[PageStatus, Descriptor | None]
"""Per part: `LOADED`, or why not; and, where its replica has changed, the one that is there now."""


def execute_read(calls: StoreCalls, call: ReadCall, integrity: Integrity) -> list[ReadAnswer]:
    """Read the live parts of a call and check each: its digest, or where there is none, its descriptor."""
    parts = call.live
    keys = [part.fetch.key for part in parts]
    if call.ranged:
        statuses = calls.read_ranges(
            keys,
            [[part.fetch.segment.pointer + offset for offset, _ in part.ranges] for part in parts],
            [[nbytes for _, nbytes in part.ranges] for part in parts],
            [[offset for offset, _ in part.ranges] for part in parts],
        )
    else:
        statuses = calls.read(keys, [part.fetch.segment.pointer for part in parts], [part.fetch.size for part in parts])
    if call.native is not None and sum(part.nbytes for part in parts) >= _WORTH_BYTES:
        call.native.step_aside()  # the endpoint is free: its next call need not wait for the checks
    unproven = [
        index
        for index, (part, status) in enumerate(zip(parts, statuses, strict=True))
        if status is PageStatus.LOADED and not (part.fetch.tailed and integrity is not Integrity.OFF)
    ]
    now = dict(zip(unproven, calls.descriptors([keys[index] for index in unproven]), strict=True))
    if now:
        call.master_answered = PageStatus.STORE_UNREACHABLE not in now.values()
    whole = _whole([part.fetch for part in parts], integrity)
    return [
        _checked(part, status, now.get(index), whole[index])
        for index, (part, status) in enumerate(zip(parts, statuses, strict=True))
    ]


def _whole(fetches: Sequence[Fetch], integrity: Integrity) -> list[bool]:
    """Whether the bytes of each fetch are whole and its own, as far as its tail tells."""
    whole: list[bool] = []
    for first, run in runs([fetch.segment for fetch in fetches]):
        these = fetches[first : first + len(run)]
        if these[0].tailed:
            whole += check_tails([fetch.key for fetch in these], rows_of(run, 0, these[0].size), integrity)
        else:
            whole += [True] * len(run)
    return whole


def _checked(part: Part, status: PageStatus, now: Descriptor | PageStatus | None, whole: bool) -> ReadAnswer:
    fetch = part.fetch
    if status is not PageStatus.LOADED:
        return status, None
    if not whole:
        return PageStatus.CORRUPT, None
    # A dead master cannot have given the memory to others: what its sessions read is good until it is back.
    if now is None or fetch.descriptor is None or now is PageStatus.STORE_UNREACHABLE or now == fetch.descriptor:
        return PageStatus.LOADED, None
    return PageStatus.REPLICA_CHANGED, now if isinstance(now, Descriptor) else None
