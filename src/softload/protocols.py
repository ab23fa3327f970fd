"""What the loader needs from others: a page store, an agreement between ranks, a clock.

A `PageStore` is synchronous: its methods are native calls that block and cannot be interrupted, so the loader runs them
on threads of its own and bounds the waiting, not the call. It answers per key and never raises for what a store does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

from softload.outcomes import PageStatus

__all__ = ["Answer", "Clock", "Descriptor", "PageStore", "PutAnswer", "PutRefusal", "RankConsensus", "SoloConsensus"]

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


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where an object's complete memory replica lies: compared before and after a read, never dereferenced.

    Args:
        size: the object's bytes.
        endpoint: who holds it; reads are batched and their health is counted by it.
        address: where, in the holder's own terms.
    """

    size: int
    endpoint: str
    address: int = 0


@runtime_checkable
class PageStore(Protocol):
    """A store of immutable objects under string keys. All methods are thread-safe, all sequences are in key order.

    Pointers are addresses in this process; what they point to belongs to the caller and stays allocated until the call
    has returned. Failures are statuses: `NOT_FOUND`, `NO_MEMORY_REPLICA`, `NOT_READY`, `LEASE_EXPIRED`,
    `TRANSFER_FAILED`, `STORE_UNREACHABLE`, `MALFORMED` and so on; an exception is a bug of the store.
    """

    def open(self) -> None:
        """Connect. Called once, off the event loop, before anything else.

        Raises:
            StoreSetupError: what is missing, and what to do about it.
        """

    def close(self) -> None:
        """Disconnect and end what `open` started. Safe to call twice, and while calls are out: those answer late."""

    def register(self, pointer: int, nbytes: int) -> bool:
        """Make memory known to the transport; False where it refused."""

    def unregister(self, pointer: int) -> None:
        """Take back `register`. No call may be using the memory."""

    def exists(self, keys: Sequence[str]) -> Sequence[bool | PageStatus]:
        """Whether each key is known. A hint: what exists need not be readable."""

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        """Each key's complete memory replica, leased by having been asked for."""

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """Read whole objects, each into one contiguous buffer of exactly its size. The same key may come twice."""

    def session_start(self, keys: Sequence[str]) -> Sequence[Answer]:
        """Take a lease and remember a replica for ranged reads. One session per key and store: callers count."""

    def session_end(self, keys: Sequence[str]) -> None:
        """Forget sessions. Unknown keys are ignored."""

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        """Read ranges of objects with open sessions; per key the sum of bytes read."""

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[PutAnswer]:
        """Reserve objects; 0 where that succeeded."""

    def put_write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """Write the whole of reserved objects, each from one contiguous buffer; per key the bytes written."""

    def put_end(self, keys: Sequence[str]) -> Sequence[Answer]:
        """Make written objects visible."""

    def put_revoke(self, keys: Sequence[str]) -> None:
        """Give reservations back."""

    def remove(self, keys: Sequence[str], *, force: bool = False) -> Sequence[Answer]:
        """Remove objects; `force` also under a lease. Without it a leased key answers `NOT_READY`."""

    @property
    def lease_ttl(self) -> float:
        """Seconds that a lease lasts."""


class RankConsensus(Protocol):
    """Agreement between the ranks of one engine: all of them take the smallest answer, entry by entry."""

    async def minimum(self, values: Sequence[int]) -> Sequence[int]:
        """The element-wise minimum over all ranks; -1 means that a rank has no answer yet."""


class SoloConsensus:
    """One rank agrees with itself."""

    async def minimum(self, values: Sequence[int]) -> Sequence[int]:
        """The values as they are."""
        return values
