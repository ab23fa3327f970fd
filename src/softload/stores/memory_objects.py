"""What a `MemoryStore` holds: objects in an arena, their leases, reservations, and what is evicted for new ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from softload.outcomes import PageStatus
from softload.protocols import Clock, PutAnswer, PutRefusal
from softload.stores.allocator import Allocator

__all__ = ["ObjectTable", "StoredObject"]


@dataclass(slots=True, eq=False)
class StoredObject:
    """An object, or room for one: `size` bytes at `offset` in the arena."""

    size: int
    offset: int
    used: int = 0
    lease_end: float = 0.0
    written: bool = False


class ObjectTable(Mapping[str, StoredObject]):
    """The objects of one store that can be read, by key. Not for several threads: the store's lock is around it.

    Args:
        capacity: bytes of the arena.
        high_watermark: the fraction of the arena above which a reservation evicts first.
        eviction_ratio: the fraction of the objects that one pass evicts.
        clock: what leases are measured with.
    """

    def __init__(self, capacity: int, *, high_watermark: float, eviction_ratio: float, clock: Clock) -> None:
        self._capacity = capacity
        self._watermark = high_watermark
        self._ratio = eviction_ratio
        self._clock = clock
        self._tick = 0
        self.evicted = 0
        self.refused = 0
        self._allocator = Allocator(capacity)
        self._objects: dict[str, StoredObject] = {}
        self._reserved: dict[str, StoredObject] = {}
        # Leases end in the order in which objects were touched: both are sorted by use, a pass looks at heads only.
        self._untouched: OrderedDict[str, StoredObject] = OrderedDict()
        self._touched: OrderedDict[str, StoredObject] = OrderedDict()

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __getitem__(self, key: str) -> StoredObject:
        return self._objects[key]

    @property
    def bytes_used(self) -> int:
        """Bytes of the arena that objects and reservations take."""
        return self._allocator.bytes_used

    @property
    def reservations(self) -> int:
        """Objects that are being written."""
        return len(self._reserved)

    def reservation(self, key: str) -> StoredObject | None:
        """The room that is reserved for it."""
        return self._reserved.get(key)

    def publish(self, key: str) -> None:
        """What was reserved can be read from now on."""
        reservation = self._reserved.pop(key)
        self._tick += 1
        reservation.used = self._tick
        self._objects[key] = self._untouched[key] = reservation

    def revoke(self, key: str) -> None:
        """Give a reservation back, if there is one."""
        reservation = self._reserved.pop(key, None)
        if reservation is not None:
            self._allocator.free(reservation.offset, reservation.size)

    def clear(self) -> None:
        """Forget everything."""
        self._allocator = Allocator(self._capacity)
        for table in (self._objects, self._reserved, self._untouched, self._touched):
            table.clear()

    def absence(self, key: str) -> PageStatus:
        """Why an object cannot be read: it is being written, or not there."""
        return PageStatus.NOT_READY if key in self._reserved else PageStatus.NOT_FOUND

    def touch(self, key: str, lease_end: float) -> StoredObject | None:
        """The object, if it is there: it is used, and leased until then."""
        found = self._objects.get(key)
        if found is None:
            return None
        self._tick += 1
        found.used = self._tick
        found.lease_end = lease_end
        if key in self._touched:
            self._touched.move_to_end(key)
        else:
            del self._untouched[key]
            self._touched[key] = found
        return found

    def reserve(self, key: str, size: int) -> PutAnswer:
        """Room for an object, evicting first where that is needed."""
        if key in self._objects or key in self._reserved:
            return PutRefusal.PRESENT
        if size < 1:
            return PageStatus.MALFORMED
        if self._allocator.bytes_used > self._watermark * self._capacity:
            self._evict()
        offset = self._allocator.allocate(size)
        if offset is None and size <= self._allocator.capacity:
            self._evict()
            offset = self._allocator.allocate(size)
        if offset is None:
            self.refused += 1
            return PutRefusal.FULL
        self._reserved[key] = StoredObject(size, offset)
        return 0

    def drop(self, key: str, found: StoredObject) -> None:
        """It is not there any more, and its memory is free."""
        del self._objects[key]
        if self._untouched.pop(key, None) is None:
            del self._touched[key]
        self._allocator.free(found.offset, found.size)

    def _evict(self) -> None:
        now = self._clock()
        for _ in range(ceil(self._ratio * len(self._objects))):
            untouched = next(iter(self._untouched.items()), None)
            touched = next(iter(self._touched.items()), None)
            if touched is not None and touched[1].lease_end > now:
                touched = None
            if touched is None or (untouched is not None and untouched[1].used < touched[1].used):
                touched = untouched
            if touched is None:
                return
            self.drop(*touched)
            self.evicted += 1
