"""A store written from the docstrings of `PageStore` alone keeps the contract, and serves a loader."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from softload import ComponentTransfer, PageLoader, PoolName, TransferUnit
from softload.geometry import mla_pool_group
from softload.outcomes import PageStatus
from softload.protocols import Answer, Descriptor, PageStore, PutAnswer, PutRefusal
from softload.testing.store_suite import StoreSuite


@dataclass
class Entry:
    data: bytes = b""
    size: int = 0
    leased_until: float = 0.0


class DictStore:
    """Bytes in a dictionary. Nothing is evicted; registration is not needed."""

    def __init__(self, capacity: int, lease: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._lease = lease
        self._clock = clock
        self._lock = threading.RLock()
        self._open = False
        self._objects: dict[str, Entry] = {}
        self._reserved: dict[str, Entry] = {}
        self._sessions: dict[str, tuple[bytes, float]] = {}

    def open(self) -> None:
        self._open = True

    def close(self) -> None:
        self._open = False

    def register(self, pointer: int, nbytes: int) -> bool:
        return True

    def unregister(self, pointer: int) -> None:
        pass

    def exists(self, keys: Sequence[str]) -> Sequence[bool | PageStatus]:
        return [
            found if found is PageStatus.STORE_UNREACHABLE else isinstance(found, Entry) for found in self._find(keys)
        ]

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        return [
            Descriptor(found.size, "dict", id(found)) if isinstance(found, Entry) else found
            for found in self._find(keys)
        ]

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        _one_length(keys, pointers, sizes)
        answers: list[Answer] = []
        for found, pointer, size in zip(self._find(keys), pointers, sizes, strict=True):
            if isinstance(found, PageStatus):
                answers.append(found)
            elif found.size != size:
                answers.append(PageStatus.WRONG_SIZE)
            else:
                ctypes.memmove(pointer, found.data, size)
                answers.append(size)
        return answers

    def session_start(self, keys: Sequence[str]) -> Sequence[Answer]:
        answers: list[Answer] = []
        for key, found in zip(keys, self._find(keys), strict=True):
            if isinstance(found, PageStatus):
                answers.append(found)
            else:
                self._sessions[key] = found.data, found.leased_until
                answers.append(0)
        return answers

    def session_end(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._sessions.pop(key, None)

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        _one_length(keys, pointers, sizes, offsets)
        answers: list[Answer] = []
        for key, to, lengths, starts in zip(keys, pointers, sizes, offsets, strict=True):
            data, until = self._sessions.get(key, (b"", 0.0))
            if self._clock() > until or any(o + n > len(data) for o, n in zip(starts, lengths, strict=True)):
                answers.append(PageStatus.LEASE_EXPIRED)
                continue
            for pointer, length, start in zip(to, lengths, starts, strict=True):
                ctypes.memmove(pointer, data[start : start + length], length)
            answers.append(sum(lengths))
        return answers

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[PutAnswer]:
        _one_length(keys, sizes)
        answers: list[PutAnswer] = []
        with self._lock:
            for key, size in zip(keys, sizes, strict=True):
                used = sum(entry.size for table in (self._objects, self._reserved) for entry in table.values())
                if size < 1:
                    answers.append(PageStatus.MALFORMED)
                elif key in self._objects or key in self._reserved:
                    answers.append(PutRefusal.PRESENT)
                elif used + size > self._capacity:
                    answers.append(PutRefusal.FULL)
                else:
                    self._reserved[key] = Entry(size=size)
                    answers.append(0)
        return answers

    def put_write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        _one_length(keys, pointers, sizes)
        answers: list[Answer] = []
        for key, pointer, size in zip(keys, pointers, sizes, strict=True):
            entry = self._reserved.get(key)
            if entry is None:
                answers.append(PageStatus.NOT_FOUND)
            elif entry.size != size:
                answers.append(PageStatus.WRONG_SIZE)
            else:
                entry.data = ctypes.string_at(pointer, size)
                answers.append(size)
        return answers

    def put_end(self, keys: Sequence[str]) -> Sequence[Answer]:
        answers: list[Answer] = []
        with self._lock:
            for key in keys:
                entry = self._reserved.get(key)
                if entry is None:
                    answers.append(PageStatus.NOT_FOUND)
                elif not entry.data:
                    answers.append(PageStatus.NOT_READY)
                else:
                    self._objects[key] = self._reserved.pop(key)
                    answers.append(0)
        return answers

    def put_revoke(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._reserved.pop(key, None)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> Sequence[Answer]:
        answers: list[Answer] = []
        with self._lock:
            for key in keys:
                entry = self._objects.get(key)
                if key in self._reserved or (entry is not None and not force and entry.leased_until >= self._clock()):
                    answers.append(PageStatus.NOT_READY)
                elif entry is None:
                    answers.append(PageStatus.NOT_FOUND)
                else:
                    del self._objects[key]
                    answers.append(0)
        return answers

    @property
    def lease_ttl(self) -> float:
        return self._lease

    def _find(self, keys: Sequence[str]) -> list[Entry | PageStatus]:
        """Each visible object, leased."""
        if not self._open:
            return [PageStatus.STORE_UNREACHABLE] * len(keys)
        found: list[Entry | PageStatus] = []
        with self._lock:
            for key in keys:
                entry = self._objects.get(key)
                if entry is not None:
                    entry.leased_until = self._clock() + self._lease
                found.append(PageStatus.NOT_FOUND if entry is None else entry)
        return found


def _one_length(*sequences: Sequence[object]) -> None:
    if len({len(sequence) for sequence in sequences}) > 1:
        raise ValueError(f"expected arguments of one length, got {[len(sequence) for sequence in sequences]}")


class TestDictStore(StoreSuite):
    now = 0.0

    @pytest.fixture
    def store(self) -> Iterator[PageStore]:
        store = DictStore(self.capacity, lease=5.0, clock=lambda: self.now)
        store.open()
        yield store
        store.close()

    def wait_lease(self, store: PageStore) -> None:
        self.now += store.lease_ttl + 0.1


@pytest.mark.asyncio
async def test_a_loader_works_with_it() -> None:
    layers, page, pages = 3, 16, 4
    kv = [torch.rand(8 * page, 1, 32) for _ in range(layers)]
    there, here = torch.arange(pages * page), torch.arange(pages * page) + pages * page

    def unit(slots: torch.Tensor | None = None) -> TransferUnit:
        return TransferUnit("r", (ComponentTransfer(PoolName.KV, tuple(f"k{i}" for i in range(pages)), slots),))

    async with PageLoader(DictStore(1 << 20, lease=5.0), mla_pool_group(kv, page)) as loader:
        await loader.save([unit(there)])
        assert (await loader.lookup(unit())).pages == pages
        async with loader.load([unit(here)]) as load:
            assert (await load.report()).outcomes["r"].restored_pages == pages
    assert all(torch.equal(buffer[there], buffer[here]) for buffer in kv)
