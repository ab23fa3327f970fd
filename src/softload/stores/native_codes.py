"""What Mooncake's native calls answer, translated once and per key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import Any, Final

from softload.outcomes import PageStatus
from softload.protocols import Answer, Descriptor, PutRefusal

__all__ = ["INVALID_PARAMS", "NATIVE_CODES", "NATIVE_REFUSALS", "descriptor", "descriptors", "expect", "translate"]

INVALID_PARAMS: Final = -600

NATIVE_CODES: Final[Mapping[int, PageStatus]] = {
    INVALID_PARAMS: PageStatus.MALFORMED,
    -702: PageStatus.NO_MEMORY_REPLICA,
    -703: PageStatus.NOT_READY,
    -704: PageStatus.NOT_FOUND,
    -706: PageStatus.NOT_READY,
    -707: PageStatus.LEASE_EXPIRED,
    -710: PageStatus.NO_MEMORY_REPLICA,
    -712: PageStatus.NO_MEMORY_REPLICA,
    -800: PageStatus.TRANSFER_FAILED,
    -801: PageStatus.CORRUPT,
    -900: PageStatus.STORE_UNREACHABLE,
    -901: PageStatus.STORE_UNREACHABLE,
}
"""What a native code means for a page; a negative code that is not here is MALFORMED.

-600 means something else to each call, which says so: the buffer is too small (whole reads), there is no session or the
range ends past the object (ranged reads), more was written than reserved (writes).
"""

NATIVE_REFUSALS: Final[Mapping[int, PutRefusal]] = {-200: PutRefusal.FULL, -705: PutRefusal.PRESENT}
"""Codes of a put that are no failure of the store."""


def translate(code: object, invalid: PageStatus) -> int | PageStatus | PutRefusal:
    """One key's native answer: a count, a status or a refusal. What is not an int (a bool, too) is MALFORMED.

    Args:
        code: as it came.
        invalid: what -600 means to the call.
    """
    if type(code) is not int:
        return PageStatus.MALFORMED
    if code >= 0:
        return code
    if code == INVALID_PARAMS:
        return invalid
    return NATIVE_REFUSALS.get(code) or NATIVE_CODES.get(code, PageStatus.MALFORMED)


def expect(answer: object, count: int) -> Answer:
    """`answer` if it is a status or the one count that is right, else MALFORMED."""
    return answer if isinstance(answer, PageStatus) else count if answer == count else PageStatus.MALFORMED


_COMPLETE: dict[object, bool] = {}
"""By the value of a native status: its name takes longer to ask for than all the rest of a descriptor."""

_memory = methodcaller("get_memory_descriptor")
_buffer = attrgetter("buffer_descriptor")
_status_value = attrgetter("status.value")
_fields = attrgetter("size", "transport_endpoint", "buffer_address")


def _is_complete(replica: Any) -> bool:
    status = replica.status
    value = status.value
    if value not in _COMPLETE:
        _COMPLETE[value] = status.name == "COMPLETE"
    return _COMPLETE[value]


def descriptors(answers: Sequence[Any]) -> list[Descriptor | PageStatus]:
    """`descriptor` of many. Where each has one replica, in memory and complete, nothing is done in Python for each.

    Then it is for whoever asked to judge whether sizes, endpoints and addresses are what they should be.
    """
    try:
        replicas = [replica for (replica,) in answers]
        # One of each status: by value, since native statuses are objects of their own.
        if all(map(_is_complete, dict(zip(map(_status_value, replicas), replicas, strict=True)).values())):
            # A replica that is not in memory raises here: asking each of them first would take a tenth longer.
            return list(map(Descriptor._make, map(_fields, map(_buffer, map(_memory, replicas)))))
    except Exception:  # an odd one among them, or one that has several: each on its own
        pass
    return [descriptor(each) for each in answers]


def descriptor(replicas: Any) -> Descriptor | PageStatus:
    """The first complete replica in memory out of an object's native replica descriptors."""
    if not isinstance(replicas, list):
        return PageStatus.MALFORMED
    try:
        for replica in replicas:
            if replica.is_memory_replica() and _is_complete(replica):
                buffer = replica.get_memory_descriptor().buffer_descriptor
                size, endpoint, address = _fields(buffer)
                if type(size) is type(address) is int and type(endpoint) is str:
                    return Descriptor(size, endpoint, address)
                return PageStatus.MALFORMED
    except Exception:  # an odd object of the native library costs its own key, not all that were asked for with it
        return PageStatus.MALFORMED
    return PageStatus.NO_MEMORY_REPLICA
