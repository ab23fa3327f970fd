"""What the loader needs from others: a page store, an agreement between ranks, a clock.

A `PageStore` is synchronous: its methods are native calls that block and cannot be interrupted, so the loader runs them
on threads of its own and bounds the waiting, not the call. It answers per key and never raises for what a store does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from softload.outcomes import PageStatus

__all__ = [
    "Answer",
    "Clock",
    "Descriptor",
    "LendingStore",
    "PageStore",
    "PutAnswer",
    "PutRefusal",
    "RankConsensus",
    "SoloConsensus",
]

Clock: TypeAlias = Callable[[], float]
"""Seconds on a monotonic clock."""

Answer: TypeAlias = int | PageStatus
"""Per key: bytes moved (0 for calls that move none), or the status that says why not."""


class PutRefusal(StrEnum):
    """Why a key was not reserved although the store is well."""

    PRESENT = "present"
    """It is there, or another client is writing it."""

    FULL = "full"
    """There is no room."""


PutAnswer: TypeAlias = int | PutRefusal | PageStatus
"""Per key of a put: 0, or why not."""


class Descriptor(NamedTuple):
    """Where an object's complete memory replica lies: compared before and after a read.

    Never dereferenced, but where a `LendingStore` has said that its address is one of this process.

    A tuple, since there is one for every object of every load.

    Args:
        size: the object's bytes, at least 1.
        endpoint: who holds it, not empty; reads are batched and their health is counted by it.
        address: where, in the holder's own terms; 0 or more. Another object put under the key later has another one,
            where the store can tell.
    """

    size: int
    endpoint: str
    address: int = 0


@runtime_checkable
class PageStore(Protocol):
    """A store of immutable objects of 1 byte or more under string keys.

    What is said here and in the methods is all that a store owes, and what `softload.testing.store_suite` checks.

    **Answers.** One per key, in key order; no keys, no answers. A key's failure concerns that key alone, and never
    raises: it is a `PageStatus`, and an exception is a bug of the store. `NOT_FOUND`: there is no such object;
    `NOT_READY`: it is being written, or is leased (`remove`); `NO_MEMORY_REPLICA`: it cannot be read from memory;
    `TRANSFER_FAILED`: it is there, its bytes did not come; `STORE_UNREACHABLE`: nobody answered, or the store is not
    open; `MALFORMED`: what the backend answered makes no sense. The same key may come twice in a call. Parallel
    arguments of different lengths are a mistake of the caller: `ValueError`, "expected arguments of one length".

    **Memory.** Pointers are addresses in this process, inside registered memory. What they point to belongs to the
    caller and stays allocated until the call has returned; nothing is kept after that, and buffers of keys that failed
    may have been written to, but those of keys answered `NOT_FOUND`, `NOT_READY` or `LEASE_EXPIRED` have not.

    **Threads.** All methods may be called from several threads at once, for the same keys too: of many that reserve one
    key, one succeeds.

    **Leases.** `exists`, `descriptors`, `read` and `session_start` lease each object that they find for `lease_ttl`
    seconds. Until then it is not evicted, and not removed unless forced.

    **An object's life.** `put_start` reserves it, `put_write` writes it, `put_end` makes it visible, whole and at once;
    up to there every other method finds nothing. It never changes after that; once removed or evicted, its key may be
    put again, with other bytes.
    """

    def open(self) -> None:
        """Connect. Called once, off the event loop, before anything else.

        Raises:
            StoreSetupError: what is missing, and what to do about it.
        """

    def close(self) -> None:
        """Disconnect and end what `open` started. Safe to call twice, and while calls are out: those answer late."""

    def register(self, pointer: int, nbytes: int) -> bool:
        """Make memory known to the transport; False where it refused. What was unregistered may be registered again."""

    def unregister(self, pointer: int) -> None:
        """Take back `register`. No call may be using the memory."""

    def exists(self, keys: Sequence[str]) -> Sequence[bool | PageStatus]:
        """Whether each key is a visible object, and lease it. A hint: what exists need not be readable."""

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        """Each object's complete memory replica, leased by having been asked for.

        Equal from call to call while the object stays where it is; `endpoint` is not empty. `NOT_FOUND` for a key that
        is not there; `NOT_FOUND` or `NOT_READY` for one that is being written.
        """

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """Read whole objects, each into one contiguous buffer; per key the bytes read, which is the object's size.

        A buffer that is smaller or larger than the object answers `WRONG_SIZE`. `NOT_FOUND` as in `descriptors`. A key
        that comes twice fills both buffers.
        """

    def session_start(self, keys: Sequence[str]) -> Sequence[Answer]:
        """Take a lease and remember where each object lies, for `read_ranges`; 0 where that succeeded.

        One session per key and store, not counted: a second start renews it, one end ends it (the loader counts).
        `NOT_FOUND` as in `descriptors`.
        """

    def session_end(self, keys: Sequence[str]) -> None:
        """Forget sessions. Keys without one are ignored."""

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        """Read ranges of objects with sessions; per key the sum of bytes read.

        `LEASE_EXPIRED` for a key without a session, for a session that is older than `lease_ttl` (it has ended then),
        and for a key any of whose ranges lies past the object's end (its session stays). An object that was removed by
        force meanwhile may still be read, with whatever bytes lie there by then: sessions need not notice, and the
        loader checks what landed.
        """

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[PutAnswer]:
        """Reserve objects of these sizes in bytes; 0 where that succeeded.

        `PutRefusal.PRESENT` for a key that is there, or reserved, by an earlier key of this call too, whatever the
        size; `PutRefusal.FULL` where there is no room, now or ever (a reservation takes its room at once, and may evict
        objects for it); `MALFORMED` for a size below 1.
        """

    def put_write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """Write the whole of reserved objects, each from one contiguous buffer; per key the bytes written.

        `NOT_FOUND` without a reservation, `WRONG_SIZE` for another size than was reserved; the reservation stays.
        """

    def put_end(self, keys: Sequence[str]) -> Sequence[Answer]:
        """Make written objects visible; 0 where that succeeded.

        `NOT_FOUND` without a reservation, also after `put_revoke`; `NOT_READY` for one that was not written whole: it
        stays a reservation.
        """

    def put_revoke(self, keys: Sequence[str]) -> None:
        """Give reservations back, with what was written. Keys without one are ignored."""

    def remove(self, keys: Sequence[str], *, force: bool = False) -> Sequence[Answer]:
        """Remove objects, with `force` also under a lease; 0 where that succeeded.

        `NOT_FOUND` for a key that is not there; `NOT_READY` for a leased one without `force`, and for one that is being
        written, in any case.
        """

    @property
    def lease_ttl(self) -> float:
        """Seconds that a lease lasts: above 0."""


@runtime_checkable
class LendingStore(Protocol):
    """What a `PageStore` may have besides: objects in memory of this process, which it lets the loader copy from there.

    The loader then copies such an object straight into the slots, and proves afterwards that it was the right one: by
    its digest where it lies or, in `Layout.PAGE`, by asking for its descriptor again. Nothing is ever written there.
    """

    def lend(self, key: str, descriptor: Descriptor) -> range | None:
        """Whether this process may read an object where it lies, and all its neighbours; ``None`` where not.

        Called off the event loop, at most once in a while for every endpoint; it may take as long as a read.

        Args:
            key: of an object.
            descriptor: what `descriptors` has just answered for it.

        Returns:
            addresses of this process that can be read for as long as `hold` allows it, the whole object's among them.
            Whatever object `descriptors` says to be at this endpoint and in this range lies at that address, now and
            later: say so only where it is proven, for a range that is another process's ends this one.
        """

    def hold(self) -> AbstractContextManager[bool]:
        """Around looking into lent memory: whether that may be done. If so it stays readable until the end.

        Bytes may change under it all the same, when an object is removed and another takes its place.
        """


class RankConsensus(Protocol):
    """Agreement between the ranks of one engine: all of them take the smallest answer, entry by entry."""

    async def minimum(self, values: Sequence[int]) -> Sequence[int]:
        """The element-wise minimum over all ranks; -1 means that a rank has no answer yet."""


class SoloConsensus:
    """One rank agrees with itself."""

    async def minimum(self, values: Sequence[int]) -> Sequence[int]:
        """The values as they are."""
        return values
