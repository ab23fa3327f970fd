"""Which memory native calls are using right now."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from softload.protocols import Answer, Descriptor, PageStore
from softload.stores import MemoryStore, WrapperStore

Ranges = list[tuple[int, int]]


class BusyMemory(WrapperStore):
    """Remembers the `(address, bytes)` that each call in progress reads into or writes from."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._number = itertools.count()
        self._calls: dict[int, Ranges] = {}

    @property
    def ranges(self) -> Ranges:
        """Of all calls in progress, ascending."""
        with self._lock:
            return sorted(each for ranges in self._calls.values() for each in ranges)

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        with self._using(zip(pointers, sizes, strict=True)):
            return super().read(keys, pointers, sizes)

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        with self._using(zip(itertools.chain(*pointers), itertools.chain(*sizes), strict=True)):
            return super().read_ranges(keys, pointers, sizes, offsets)

    def put_write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        with self._using(zip(pointers, sizes, strict=True)):
            return super().put_write(keys, pointers, sizes)

    @contextmanager
    def _using(self, ranges: Iterable[tuple[int, int]]) -> Iterator[None]:
        with self._lock:
            number = next(self._number)
            self._calls[number] = list(ranges)
        try:
            yield
        finally:
            with self._lock:
                del self._calls[number]


class LendingBusyMemory(BusyMemory):
    """Calls go to `inner`, which may hold them or lie; what `memory` lends is looked at without a call."""

    def __init__(self, inner: PageStore, memory: MemoryStore) -> None:
        super().__init__(inner)
        self._memory = memory

    def lend(self, key: str, descriptor: Descriptor) -> range | None:
        return self._memory.lend(key, descriptor)

    def hold(self) -> AbstractContextManager[bool]:
        return self._memory.hold()
