"""A store in this process: no dependency, and the manners of the real one.

It leases, evicts, refuses and forgets as Mooncake does, and reuses memory as Mooncake does: a session or a read that is
older than a forced removal sees whatever lies at that address by then, with the full count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from softload.errors import LoaderClosedError
from softload.outcomes import PageStatus
from softload.protocols import Answer, Clock, Descriptor, PutAnswer
from softload.stores.checks import check_fraction, check_lengths, check_positive
from softload.stores.memory_objects import ObjectTable
from softload.stores.native_memory import copy_bytes, take_bytes

__all__ = ["MemoryStatistics", "MemoryStore"]

ENDPOINT = "memory"

Place = tuple[int, int, int]
"""Destination, source, bytes."""


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """A look at a `MemoryStore`; sizes in bytes, the rest are counts since it was opened or as of now."""

    capacity: int
    bytes_used: int
    objects: int
    reservations: int
    sessions: int
    evicted: int
    refused: int


class MemoryStore:
    """A `PageStore` over one arena of this process.

    Args:
        capacity: bytes of the arena; the memory is taken from the system as it is first written.
        lease: seconds that a lease lasts.
        high_watermark: the fraction of the arena above which a put evicts first.
        eviction_ratio: the fraction of the objects that one pass evicts, least recently used first. Leased objects and
            those being written are spared.
        clock: what leases are measured with.
        lends: let a loader copy objects from where they lie, as Mooncake does with memory that is this process's.

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        *,
        capacity: int = 1 << 30,
        lease: float = 5.0,
        high_watermark: float = 0.95,
        eviction_ratio: float = 0.05,
        clock: Clock = time.monotonic,
        lends: bool = False,
    ) -> None:
        self._capacity = check_positive("capacity", capacity)
        self._lease_ttl = check_positive("lease", lease)
        self._clock = clock
        self._lends = lends
        self._lock = threading.Lock()
        self._arena: np.ndarray | None = None
        self._base = 0
        self._closed = False
        self._objects = ObjectTable(
            capacity,
            high_watermark=check_fraction("high_watermark", high_watermark),
            eviction_ratio=check_fraction("eviction_ratio", eviction_ratio),
            clock=clock,
        )
        self._sessions: dict[str, tuple[int, int, float]] = {}

    def __repr__(self) -> str:
        state = "closed" if self._closed else "new" if self._arena is None else "open"
        return f"<MemoryStore {state} | {len(self)} objects | {self.bytes_used} of {self._capacity} bytes>"

    def __len__(self) -> int:
        """Objects that can be read."""
        return len(self._objects)

    @property
    def bytes_used(self) -> int:
        """Bytes of the arena that objects and reservations take."""
        return self._objects.bytes_used

    @property
    def lease_ttl(self) -> float:
        """Seconds that a lease lasts."""
        return self._lease_ttl

    def statistics(self) -> MemoryStatistics:
        """A consistent look at the store."""
        with self._lock:
            return MemoryStatistics(
                capacity=self._capacity,
                bytes_used=self._objects.bytes_used,
                objects=len(self._objects),
                reservations=self._objects.reservations,
                sessions=len(self._sessions),
                evicted=self._objects.evicted,
                refused=self._objects.refused,
            )

    def open(self) -> None:
        """Take the arena; again is no change.

        Raises:
            LoaderClosedError: after `close`.
            StoreSetupError: there is not that much memory.
        """
        with self._lock:
            if self._closed:
                raise LoaderClosedError("this store was closed; open a new one")
            if self._arena is None:
                self._arena = take_bytes(self._capacity)
                self._base = self._arena.ctypes.data

    def close(self) -> None:
        """Forget everything; the arena goes when the last call that copies has returned."""
        with self._lock:
            self._closed = True
            self._arena = None
            self._objects.clear()
            self._sessions.clear()

    def register(self, pointer: int, nbytes: int) -> bool:
        """Whether the store is open: memory of this process needs no registration."""
        return self._arena is not None

    def unregister(self, pointer: int) -> None:
        """Nothing to take back."""

    def exists(self, keys: Sequence[str]) -> Sequence[bool | PageStatus]:
        """Whether each key can be read; those that can are leased."""
        with self._lock:
            if self._arena is None:
                return [PageStatus.STORE_UNREACHABLE] * len(keys)
            lease_end = self._clock() + self._lease_ttl
            return [self._objects.touch(key, lease_end) is not None for key in keys]

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        """Size and address of each key; leased. One that is being written answers `NOT_FOUND`, as in the real store."""
        with self._lock:
            if self._arena is None:
                return [PageStatus.STORE_UNREACHABLE] * len(keys)
            lease_end = self._clock() + self._lease_ttl
            answers: list[Descriptor | PageStatus] = []
            for key in keys:
                found = self._objects.touch(key, lease_end)
                if found is None:
                    answers.append(PageStatus.NOT_FOUND)
                else:
                    answers.append(Descriptor(found.size, ENDPOINT, self._base + found.offset))
            return answers

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """Copy whole objects out; a size other than the object's answers `WRONG_SIZE` and copies nothing."""
        check_lengths(keys=keys, pointers=pointers, sizes=sizes)
        places: list[Place] = []
        answers: list[Answer] = []
        with self._lock:
            arena = self._arena
            if arena is None:
                return [PageStatus.STORE_UNREACHABLE] * len(keys)
            lease_end = self._clock() + self._lease_ttl
            for key, pointer, size in zip(keys, pointers, sizes, strict=True):
                found = self._objects.touch(key, lease_end)
                if found is None:
                    answers.append(self._objects.absence(key))
                elif found.size != size:
                    answers.append(PageStatus.WRONG_SIZE)
                else:
                    places.append((pointer, self._base + found.offset, size))
                    answers.append(size)
        _copy(places)
        return answers

    def session_start(self, keys: Sequence[str]) -> Sequence[Answer]:
        """Lease each object and remember where it lies; a start that fails forgets the key's live session."""
        answers: list[Answer] = []
        with self._lock:
            if self._arena is None:
                return [PageStatus.STORE_UNREACHABLE] * len(keys)
            lease_end = self._clock() + self._lease_ttl
            for key in keys:
                found = self._objects.touch(key, lease_end)
                if found is None:
                    self._sessions.pop(key, None)
                    answers.append(self._objects.absence(key))
                else:
                    self._sessions[key] = (self._base + found.offset, found.size, lease_end)
                    answers.append(0)
        return answers

    def session_end(self, keys: Sequence[str]) -> None:
        """Forget sessions."""
        with self._lock:
            for key in keys:
                self._sessions.pop(key, None)

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        """Copy ranges out of what the sessions remember.

        `LEASE_EXPIRED` for a session past its lease, which ends it, for no session, and for a range past the object's
        end (that one keeps the session): the real store does not tell the last two apart either.
        """
        check_lengths(keys=keys, pointers=pointers, sizes=sizes, offsets=offsets)
        places: list[Place] = []
        answers: list[Answer] = []
        with self._lock:
            arena = self._arena
            if arena is None:
                return [PageStatus.STORE_UNREACHABLE] * len(keys)
            now = self._clock()
            for key, to, nbytes, start in zip(keys, pointers, sizes, offsets, strict=True):
                check_lengths(pointers=to, sizes=nbytes, offsets=start)
                session = self._sessions.get(key)
                if session is None:
                    answers.append(PageStatus.LEASE_EXPIRED)
                    continue
                address, size, lease_end = session
                if now > lease_end:
                    del self._sessions[key]
                    answers.append(PageStatus.LEASE_EXPIRED)
                elif any(o < 0 or n < 0 or o + n > size for o, n in zip(start, nbytes, strict=True)):
                    answers.append(PageStatus.LEASE_EXPIRED)
                else:
                    places += [(p, address + o, n) for p, o, n in zip(to, start, nbytes, strict=True)]
                    answers.append(sum(nbytes))
        _copy(places)
        return answers

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[PutAnswer]:
        """Reserve room, evicting first where that is needed; a size below one byte answers `MALFORMED`."""
        check_lengths(keys=keys, sizes=sizes)
        with self._lock:
            if self._arena is None:
                return [PageStatus.STORE_UNREACHABLE] * len(keys)
            return [self._objects.reserve(key, size) for key, size in zip(keys, sizes, strict=True)]

    def put_write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """Copy bytes into reservations; `NOT_FOUND` without one, `WRONG_SIZE` for another size than was reserved."""
        check_lengths(keys=keys, pointers=pointers, sizes=sizes)
        places: list[Place] = []
        answers: list[Answer] = []
        with self._lock:
            arena = self._arena
            if arena is None:
                return [PageStatus.STORE_UNREACHABLE] * len(keys)
            for key, pointer, size in zip(keys, pointers, sizes, strict=True):
                reservation = self._objects.reservation(key)
                if reservation is None:
                    answers.append(PageStatus.NOT_FOUND)
                elif reservation.size != size:
                    answers.append(PageStatus.WRONG_SIZE)
                else:
                    places.append((self._base + reservation.offset, pointer, size))
                    reservation.written = True
                    answers.append(size)
        _copy(places)
        return answers

    def put_end(self, keys: Sequence[str]) -> Sequence[Answer]:
        """Make objects visible; `NOT_FOUND` without a reservation, `NOT_READY` for one that was not written."""
        answers: list[Answer] = []
        with self._lock:
            if self._arena is None:
                return [PageStatus.STORE_UNREACHABLE] * len(keys)
            for key in keys:
                reservation = self._objects.reservation(key)
                if reservation is None:
                    answers.append(PageStatus.NOT_FOUND)
                elif not reservation.written:
                    answers.append(PageStatus.NOT_READY)
                else:
                    self._objects.publish(key)
                    answers.append(0)
        return answers

    def put_revoke(self, keys: Sequence[str]) -> None:
        """Give reservations back."""
        with self._lock:
            for key in keys:
                self._objects.revoke(key)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> Sequence[Answer]:
        """Remove objects, their memory is free at once; `NOT_READY` where leased (unless forced) or being written."""
        answers: list[Answer] = []
        with self._lock:
            if self._arena is None:
                return [PageStatus.STORE_UNREACHABLE] * len(keys)
            now = self._clock()
            for key in keys:
                found = self._objects.get(key)
                if found is None:
                    answers.append(self._objects.absence(key))
                elif found.lease_end > now and not force:
                    answers.append(PageStatus.NOT_READY)
                else:
                    self._objects.drop(key, found)
                    answers.append(0)
        return answers

    def lend(self, key: str, descriptor: Descriptor) -> range | None:
        """All of the arena, if this store lends; see `LendingStore.lend`."""
        with self._lock:
            if not self._lends or self._arena is None or descriptor.endpoint != ENDPOINT:
                return None
            return range(self._base, self._base + self._capacity)

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Whether the store is open; the arena stays. See `LendingStore.hold`."""
        arena = self._arena
        yield arena is not None


def _copy(places: Sequence[Place]) -> None:
    for destination, source, nbytes in places:
        copy_bytes(destination, source, nbytes)
