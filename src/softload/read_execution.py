"""What one native read does on its thread: read, then prove what landed while it is in the cache."""

from __future__ import annotations

from collections.abc import Sequence

from softload.config import Integrity
from softload.copies import objects_of, runs
from softload.fetches import Part, ReadAnswers, ReadCall
from softload.integrity import check_tails
from softload.outcomes import PageStatus
from softload.protocols import Descriptor
from softload.store_calls import StoreCalls

__all__ = ["execute_read"]

_WORTH_BYTES = 1 << 20
"""Fewer bytes are checked before the event loop could be told anything."""

_WORTH_ASKED = 64
"""So are fewer objects, where the master is asked for their descriptors instead."""


def execute_read(calls: StoreCalls, call: ReadCall, integrity: Integrity) -> ReadAnswers:
    """Read the live parts of a call and check each object: its digest, or where there is none, its descriptor.

    The loop may split fetches meanwhile; what is looked at here stays as it is.
    """
    parts = call.live
    keys = [key for part in parts for key in part.fetch.keys]
    statuses = _read_ranges(calls, keys, parts) if call.ranged else _read(calls, keys, parts)
    native = call.native
    tailed = all(part.fetch.tailed for part in parts)  # or none of them: that is the layout's
    is_worth = sum(part.nbytes for part in parts) >= _WORTH_BYTES or (not tailed and len(keys) >= _WORTH_ASKED)
    if native is not None and not call.is_first and is_worth:
        native.step_aside()  # the endpoint is free: its next call need not wait for the checks
    replaced: dict[int, Descriptor] = {}
    for index in _broken(keys, parts, integrity) if tailed else ():
        if statuses[index] is PageStatus.LOADED:
            statuses[index] = PageStatus.CORRUPT
    if tailed and integrity is not Integrity.OFF:
        return ReadAnswers(statuses)
    landed = [index for index, status in enumerate(statuses) if status is PageStatus.LOADED]
    now = calls.descriptors([keys[index] for index in landed])
    if now:
        call.master_answered = PageStatus.STORE_UNREACHABLE not in now
    before = [descriptor for part in parts for descriptor in part.fetch.descriptors]
    for index, found in zip(landed, now, strict=True):
        # A dead master cannot have given the memory to others: what its sessions read is good until it is back.
        known = before[index]
        if known is None or found == known or found is PageStatus.STORE_UNREACHABLE:
            continue
        statuses[index] = PageStatus.REPLICA_CHANGED
        if isinstance(found, Descriptor):
            replaced[index] = found
    return ReadAnswers(statuses, replaced)


def _read(calls: StoreCalls, keys: list[str], parts: Sequence[Part]) -> list[PageStatus]:
    pointers: list[int] = []
    sizes: list[int] = []
    for part in parts:
        segment = part.fetch.segment
        pointers += range(segment.pointer, segment.pointer + segment.reserved, segment.stride)
        sizes += [part.fetch.size] * part.fetch.count
    return calls.read(keys, pointers, sizes)


def _read_ranges(calls: StoreCalls, keys: list[str], parts: Sequence[Part]) -> list[PageStatus]:
    return calls.read_ranges(
        keys,
        [[part.fetch.segment.pointer + offset for offset, _ in part.ranges] for part in parts],
        [[nbytes for _, nbytes in part.ranges] for part in parts],
        [[offset for offset, _ in part.ranges] for part in parts],
    )


def _broken(keys: Sequence[str], parts: Sequence[Part], integrity: Integrity) -> list[int]:
    """Which objects' bytes are not whole, or not their own, as far as their tails tell."""
    broken: list[int] = []
    for first, run in runs([part.fetch.segment for part in parts]):
        whole = check_tails(keys[first : first + run.count], objects_of(run), integrity)
        if not all(whole):
            broken += [first + index for index, good in enumerate(whole) if not good]
    return broken
