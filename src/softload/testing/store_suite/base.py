"""What the tests of a store's contract need: memory to read into, keys, and objects that are there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import pytest

from softload.protocols import Descriptor, PageStore

__all__ = ["Buffer", "SuiteBase", "pattern", "registered"]

Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"

_names = itertools.count()


class Buffer:
    """Memory that a store reads into or writes from, filled with 0xEE until something else comes.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self.array: Bytes = np.full(size, 0xEE, dtype=np.uint8)
        self.size = size
        self.pointer = int(self.array.ctypes.data)

    @classmethod
    def of(cls, data: bytes) -> Buffer:
        """A buffer that holds `data`."""
        buffer = cls(len(data))
        buffer.array[:] = np.frombuffer(data, dtype=np.uint8)
        return buffer

    @property
    def data(self) -> bytes:
        """What is in it."""
        return self.array.tobytes()

    @property
    def untouched(self) -> bool:
        """Whether nothing was written to it."""
        return bool((self.array == 0xEE).all())


def pattern(key: str, size: int) -> bytes:
    """The bytes of an object: others for other keys."""
    seed = int.from_bytes(key.encode()[-8:], "little")
    return np.random.default_rng(seed).integers(0, 200, size, dtype=np.uint8).tobytes()


@contextmanager
def registered(store: PageStore, *buffers: Buffer) -> Iterator[None]:
    """Around calls that read into, or write from, these buffers."""
    for buffer in buffers:
        assert store.register(buffer.pointer, buffer.size)
    try:
        yield
    finally:
        for buffer in buffers:
            store.unregister(buffer.pointer)


class SuiteBase:
    """What the tests of a store have in common: the fixtures, and ways to its objects' bytes."""

    capacity: int = 64 << 20
    """Bytes that the store under test holds."""

    @pytest.fixture
    def store(self) -> Iterator[PageStore]:
        """The store under test, open."""
        raise NotImplementedError("a subclass of StoreSuite supplies the fixture 'store'")

    def put_bytes(self, store: PageStore, key: str, data: bytes) -> None:
        """Bring an object into the store, past the methods under test where there is a way."""
        source = Buffer.of(data)
        with registered(store, source):
            assert list(store.put_start([key], [source.size])) == [0]
            assert list(store.put_write([key], [source.pointer], [source.size])) == [source.size]
            assert list(store.put_end([key])) == [0]

    def get_bytes(self, store: PageStore, key: str) -> bytes | None:
        """An object's bytes, past the methods under test where there is a way; None for one that is not there."""
        descriptor = store.descriptors([key])[0]
        if not isinstance(descriptor, Descriptor):
            return None
        buffer = Buffer(descriptor.size)
        with registered(store, buffer):
            store.read([key], [buffer.pointer], [buffer.size])
        return buffer.data

    def wait_lease(self, store: PageStore) -> None:
        """Let every lease run out. Real time, unless a subclass turns its store's clock."""
        time.sleep(store.lease_ttl * 1.2 + 0.1)

    @pytest.fixture
    def key(self) -> Callable[[], str]:
        """Makes keys that no other test uses."""
        return lambda: f"suite-{next(_names)}"

    def _stored(self, store: PageStore, key: Callable[[], str], count: int = 1, size: int = 1000) -> dict[str, bytes]:
        objects = {name: pattern(name, size + index) for index, name in enumerate(key() for _ in range(count))}
        # A store that was full just now may be about to evict, but not what somebody has looked at: that is leased.
        lost = list(objects)
        for _ in range(20):
            for name in lost:
                self.put_bytes(store, name, objects[name])
            there = store.exists(list(objects))
            lost = [name for name, answer in zip(objects, there, strict=True) if answer is False]
            if not lost:
                break
        return objects
