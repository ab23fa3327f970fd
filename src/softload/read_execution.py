"""What one native read does on its thread: read, then prove what landed while it is in the cache."""

from __future__ import annotations

from softload.config import Integrity
from softload.fetches import Part, ReadCall
from softload.integrity import check_tail
from softload.outcomes import PageStatus
from softload.protocols import Descriptor
from softload.store_calls import StoreCalls

__all__ = ["ReadAnswer", "execute_read"]

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
    unproven = [
        index
        for index, (part, status) in enumerate(zip(parts, statuses, strict=True))
        if status is PageStatus.LOADED and not (part.fetch.tailed and integrity is not Integrity.OFF)
    ]
    now = dict(zip(unproven, calls.descriptors([keys[index] for index in unproven]), strict=True))
    if now:
        call.master_answered = PageStatus.STORE_UNREACHABLE not in now.values()
    return [
        _checked(part, status, now.get(index), integrity)
        for index, (part, status) in enumerate(zip(parts, statuses, strict=True))
    ]


def _checked(part: Part, status: PageStatus, now: Descriptor | PageStatus | None, integrity: Integrity) -> ReadAnswer:
    fetch = part.fetch
    if status is not PageStatus.LOADED:
        return status, None
    if fetch.tailed and not check_tail(fetch.key, fetch.segment.memory[: fetch.size], integrity):
        return PageStatus.CORRUPT, None
    # A dead master cannot have given the memory to others: what its sessions read is good until it is back.
    if now is None or fetch.descriptor is None or now is PageStatus.STORE_UNREACHABLE or now == fetch.descriptor:
        return PageStatus.LOADED, None
    return PageStatus.REPLICA_CHANGED, now if isinstance(now, Descriptor) else None
