"""The contract of a `PageStore` as a test class: subclass it, supply the fixtures, and a store of one's own is proven.

class TestMyStore(StoreSuite):
    @pytest.fixture
    def store(self) -> Iterator[PageStore]: ...     # opened; may be shared between tests

`put_bytes` and `get_bytes` may be overridden where there is a way to the bytes past the store under test.
"""
# ruff: noqa: D102  (the name of a test says what it shows)

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import pytest

from softload.outcomes import PageStatus
from softload.protocols import Descriptor, PageStore, PutRefusal

__all__ = ["Buffer", "StoreSuite"]

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


def _pattern(key: str, size: int) -> bytes:
    seed = int.from_bytes(key.encode()[-8:], "little")
    return np.random.default_rng(seed).integers(0, 200, size, dtype=np.uint8).tobytes()


class StoreSuite:
    """Tests of everything that `PageStore` promises: its docstrings say all that is demanded here.

    Subclasses supply the fixture `store`: opened, of `capacity` bytes, with leases of at most a few seconds. They may
    replace `put_bytes`, `get_bytes` and `wait_lease`.
    """

    capacity: int = 64 << 20
    """Bytes that the store under test holds."""

    @pytest.fixture
    def store(self) -> Iterator[PageStore]:
        """The store under test, open."""
        raise NotImplementedError("a subclass of StoreSuite supplies the fixture 'store'")

    def put_bytes(self, store: PageStore, key: str, data: bytes) -> None:
        """Bring an object into the store, past the methods under test where there is a way."""
        source = Buffer.of(data)
        with _registered(store, source):
            assert list(store.put_start([key], [source.size])) == [0]
            assert list(store.put_write([key], [source.pointer], [source.size])) == [source.size]
            assert list(store.put_end([key])) == [0]

    def get_bytes(self, store: PageStore, key: str) -> bytes | None:
        """An object's bytes, past the methods under test where there is a way; None for one that is not there."""
        descriptor = store.descriptors([key])[0]
        if not isinstance(descriptor, Descriptor):
            return None
        buffer = Buffer(descriptor.size)
        with _registered(store, buffer):
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
        objects = {name: _pattern(name, size + index) for index, name in enumerate(key() for _ in range(count))}
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

    # Whole objects

    def test_is_a_page_store(self, store: PageStore) -> None:
        assert isinstance(store, PageStore)
        assert store.lease_ttl > 0

    def test_what_was_put_is_read(self, store: PageStore, key: Callable[[], str]) -> None:
        name, data = key(), _pattern("round-trip", 70_001)
        self.put_bytes(store, name, data)
        assert self.get_bytes(store, name) == data
        target = Buffer(len(data))
        with _registered(store, target):
            assert list(store.read([name], [target.pointer], [target.size])) == [target.size]
        assert target.data == data

    def test_large_object(self, store: PageStore, key: Callable[[], str]) -> None:
        name, data = key(), _pattern("large", 5_000_003)
        self.put_bytes(store, name, data)
        assert self.get_bytes(store, name) == data

    def test_answers_are_in_the_order_of_keys(self, store: PageStore, key: Callable[[], str]) -> None:
        objects = self._stored(store, key, 5)
        names = list(reversed(objects))
        absent = key()
        asked = [names[0], absent, *names[1:]]
        targets = [Buffer(len(objects.get(name, b"x"))) for name in asked]
        with _registered(store, *targets):
            answers = store.read(asked, [target.pointer for target in targets], [target.size for target in targets])
        assert list(answers) == [len(objects[name]) if name in objects else PageStatus.NOT_FOUND for name in asked]
        assert all(target.data == objects[name] for name, target in zip(asked, targets, strict=True) if name != absent)
        assert list(store.exists(asked)) == [name != absent for name in asked]
        sizes = [answer.size if isinstance(answer, Descriptor) else answer for answer in store.descriptors(asked)]
        assert sizes == [len(objects[name]) if name in objects else PageStatus.NOT_FOUND for name in asked]

    def test_missing_key(self, store: PageStore, key: Callable[[], str]) -> None:
        name, target = key(), Buffer(100)
        assert list(store.exists([name])) == [False]
        assert list(store.descriptors([name])) == [PageStatus.NOT_FOUND]
        with _registered(store, target):
            assert list(store.read([name], [target.pointer], [100])) == [PageStatus.NOT_FOUND]
        assert list(store.session_start([name])) == [PageStatus.NOT_FOUND]
        assert list(store.remove([name])) == [PageStatus.NOT_FOUND]
        assert target.untouched

    @pytest.mark.parametrize("difference", [-300, 300])
    def test_wrong_size(self, store: PageStore, key: Callable[[], str], difference: int) -> None:
        (name,) = self._stored(store, key, size=1000)
        target = Buffer(1000 + difference)
        with _registered(store, target):
            answers = store.read([name], [target.pointer], [target.size])
        assert list(answers) == [PageStatus.WRONG_SIZE]

    def test_same_key_twice_in_one_read(self, store: PageStore, key: Callable[[], str]) -> None:
        ((name, data),) = self._stored(store, key).items()
        one, two = Buffer(len(data)), Buffer(len(data))
        with _registered(store, one, two):
            answers = store.read([name, name], [one.pointer, two.pointer], [one.size, two.size])
        assert list(answers) == [len(data)] * 2
        assert one.data == two.data == data

    def test_no_keys(self, store: PageStore) -> None:
        calls: list[Callable[[], Sequence[object]]] = [
            lambda: store.exists([]),
            lambda: store.descriptors([]),
            lambda: store.read([], [], []),
            lambda: store.session_start([]),
            lambda: store.read_ranges([], [], [], []),
            lambda: store.put_start([], []),
            lambda: store.put_write([], [], []),
            lambda: store.put_end([]),
            lambda: store.remove([]),
        ]
        assert [list(call()) for call in calls] == [[]] * len(calls)
        store.session_end([])
        store.put_revoke([])

    def test_arguments_of_different_lengths_are_a_mistake_of_the_caller(self, store: PageStore) -> None:
        with pytest.raises(ValueError, match="one length"):
            store.read(["a"], [1, 2], [1])
        with pytest.raises(ValueError, match="one length"):
            store.put_start(["a"], [])

    def test_descriptor_tells_size_and_endpoint(self, store: PageStore, key: Callable[[], str]) -> None:
        ((name, data),) = self._stored(store, key).items()
        first, second = store.descriptors([name]), store.descriptors([name])
        assert list(first) == list(second)
        descriptor = first[0]
        assert isinstance(descriptor, Descriptor)
        assert descriptor.size == len(data)
        assert descriptor.endpoint

    # Puts

    def test_put_is_invisible_until_its_end(self, store: PageStore, key: Callable[[], str]) -> None:
        name, source, target = key(), Buffer.of(_pattern("hidden", 500)), Buffer(500)
        with _registered(store, source, target):
            assert list(store.put_start([name], [500])) == [0]
            assert list(store.put_write([name], [source.pointer], [500])) == [500]
            assert list(store.exists([name])) == [False]
            assert store.descriptors([name])[0] in (PageStatus.NOT_FOUND, PageStatus.NOT_READY)
            assert store.read([name], [target.pointer], [500])[0] in (PageStatus.NOT_FOUND, PageStatus.NOT_READY)
            assert store.session_start([name])[0] in (PageStatus.NOT_FOUND, PageStatus.NOT_READY)
            assert store.remove([name], force=True)[0] == PageStatus.NOT_READY
            assert target.untouched
            assert list(store.put_end([name])) == [0]
        assert self.get_bytes(store, name) == source.data

    def test_put_of_a_present_key(self, store: PageStore, key: Callable[[], str]) -> None:
        (name,) = objects = self._stored(store, key)
        fresh = key()
        assert list(store.put_start([name, fresh], [len(objects[name]), 100])) == [PutRefusal.PRESENT, 0]
        assert list(store.put_start([name], [7])) == [PutRefusal.PRESENT]
        store.put_revoke([fresh])
        assert self.get_bytes(store, name) == objects[name]

    def test_put_of_a_key_that_is_being_put(self, store: PageStore, key: Callable[[], str]) -> None:
        name = key()
        assert list(store.put_start([name, name], [100, 100])) == [0, PutRefusal.PRESENT]
        assert list(store.put_start([name], [100])) == [PutRefusal.PRESENT]
        store.put_revoke([name])

    def test_revoked_put_leaves_nothing(self, store: PageStore, key: Callable[[], str]) -> None:
        name, source = key(), Buffer.of(_pattern("revoked", 300))
        with _registered(store, source):
            assert list(store.put_start([name], [300])) == [0]
            assert list(store.put_write([name], [source.pointer], [300])) == [300]
        store.put_revoke([name, key()])
        assert list(store.exists([name])) == [False]
        assert list(store.put_end([name])) == [PageStatus.NOT_FOUND]
        self.put_bytes(store, name, b"again")
        assert self.get_bytes(store, name) == b"again"

    def test_put_that_was_not_written_does_not_end(self, store: PageStore, key: Callable[[], str]) -> None:
        name, other, source = key(), key(), Buffer(50)
        assert list(store.put_start([name], [100])) == [0]
        assert list(store.put_end([name])) == [PageStatus.NOT_READY]
        with _registered(store, source):
            assert list(store.put_write([name, other], [source.pointer] * 2, [50, 50])) == [
                PageStatus.WRONG_SIZE,
                PageStatus.NOT_FOUND,
            ]
        assert list(store.put_end([name, other])) == [PageStatus.NOT_READY, PageStatus.NOT_FOUND]
        store.put_revoke([name])
        assert list(store.exists([name])) == [False]

    def test_put_without_bytes(self, store: PageStore, key: Callable[[], str]) -> None:
        name, other = key(), key()
        assert list(store.put_start([name, other], [0, 10])) == [PageStatus.MALFORMED, 0]
        store.put_revoke([other])

    def test_full_store_refuses_and_recovers(self, store: PageStore, key: Callable[[], str]) -> None:
        size = self.capacity // 16
        names = [key() for _ in range(24)]
        answers = list(store.put_start(names, [size] * 24))
        assert set(answers) == {0, PutRefusal.FULL}
        store.put_revoke([name for name, answer in zip(names, answers, strict=True) if answer == 0])
        assert list(store.put_start([names[0]], [size])) == [0]
        store.put_revoke([names[0]])

    def test_object_larger_than_the_store(self, store: PageStore, key: Callable[[], str]) -> None:
        assert list(store.put_start([key()], [self.capacity * 4])) == [PutRefusal.FULL]

    # Leases and removal

    @pytest.mark.parametrize("look", ["descriptors", "exists"])
    def test_removal_respects_leases_unless_forced(self, store: PageStore, key: Callable[[], str], look: str) -> None:
        for _ in range(20):  # a busy machine may take longer than a lease lasts; then that has shown nothing
            names = list(self._stored(store, key, 2))
            began = time.monotonic()
            getattr(store, look)(names)
            answers = list(store.remove(names))
            if time.monotonic() - began < store.lease_ttl:
                break
        assert answers == [PageStatus.NOT_READY] * 2
        assert list(store.remove([names[1]], force=True)) == [0]
        assert list(store.exists(names)) == [True, False]

    def test_removal_once_the_lease_is_over(self, store: PageStore, key: Callable[[], str]) -> None:
        names = list(self._stored(store, key, 2))
        store.exists(names)
        self.wait_lease(store)
        assert list(store.remove(names)) == [0, 0]
        assert list(store.exists(names)) == [False, False]

    def test_removed_key_can_be_put_again(self, store: PageStore, key: Callable[[], str]) -> None:
        (name,) = self._stored(store, key)
        assert list(store.remove([name], force=True)) == [0]
        self.put_bytes(store, name, b"another value")
        assert self.get_bytes(store, name) == b"another value"

    # Sessions and ranges

    def test_ranges(self, store: PageStore, key: Callable[[], str]) -> None:
        (one, first), (two, second) = self._stored(store, key, 2).items()
        target = Buffer(1000)
        at = target.pointer
        assert list(store.session_start([one, two])) == [0, 0]
        with _registered(store, target):
            answers = store.read_ranges([two, one], [[at, at + 100], [at + 200]], [[100, 50], [300]], [[0, 900], [17]])
        assert list(answers) == [150, 300]
        assert target.data[:100] == second[:100]
        assert target.data[100:150] == second[900:950]
        assert target.data[200:500] == first[17:317]
        store.session_end([one, two])

    def test_same_key_twice_in_one_ranged_read(self, store: PageStore, key: Callable[[], str]) -> None:
        ((name, data),) = self._stored(store, key).items()
        target = Buffer(200)
        assert list(store.session_start([name, name])) == [0, 0]
        with _registered(store, target):
            answers = store.read_ranges(
                [name, name], [[target.pointer], [target.pointer + 100]], [[100], [100]], [[0], [500]]
            )
        assert list(answers) == [100, 100]
        assert target.data == data[:100] + data[500:600]
        store.session_end([name])

    def test_ranges_need_a_session(self, store: PageStore, key: Callable[[], str]) -> None:
        with_session, without = self._stored(store, key, 2)
        target = Buffer(20)
        assert list(store.session_start([with_session])) == [0]
        with _registered(store, target):
            answers = store.read_ranges(
                [without, with_session], [[target.pointer], [target.pointer + 10]], [[10], [10]], [[0], [0]]
            )
        assert list(answers) == [PageStatus.LEASE_EXPIRED, 10]
        store.session_end([with_session])

    def test_ended_session_is_gone(self, store: PageStore, key: Callable[[], str]) -> None:
        (name,) = self._stored(store, key)
        target = Buffer(10)
        store.session_start([name])
        store.session_end([name, key()])
        with _registered(store, target):
            assert list(store.read_ranges([name], [[target.pointer]], [[10]], [[0]])) == [PageStatus.LEASE_EXPIRED]
        assert target.untouched

    def test_sessions_are_not_counted(self, store: PageStore, key: Callable[[], str]) -> None:
        (name,) = self._stored(store, key)
        target = Buffer(10)
        store.session_start([name])
        store.session_start([name])
        store.session_end([name])
        with _registered(store, target):
            assert list(store.read_ranges([name], [[target.pointer]], [[10]], [[0]])) == [PageStatus.LEASE_EXPIRED]

    def test_range_past_the_end_fails_its_key_alone_and_keeps_the_session(
        self, store: PageStore, key: Callable[[], str]
    ) -> None:
        one, two = self._stored(store, key, 2)
        target = Buffer(1000)
        at = target.pointer
        store.session_start([one, two])
        with _registered(store, target):
            answers = store.read_ranges([one, two], [[at, at + 10], [at + 500]], [[10, 20], [5]], [[0, 990], [0]])
            assert list(answers) == [PageStatus.LEASE_EXPIRED, 5]
            assert list(store.read_ranges([one], [[at]], [[10]], [[0]])) == [10]
        store.session_end([one, two])

    def test_session_past_its_lease(self, store: PageStore, key: Callable[[], str]) -> None:
        ((name, data),) = self._stored(store, key).items()
        target = Buffer(10)
        store.session_start([name])
        self.wait_lease(store)
        with _registered(store, target):
            ask = [name], [[target.pointer]], [[10]], [[0]]
            assert list(store.read_ranges(*ask)) == [PageStatus.LEASE_EXPIRED]
            assert list(store.read_ranges(*ask)) == [PageStatus.LEASE_EXPIRED]
            assert list(store.session_start([name])) == [0]
            assert list(store.read_ranges(*ask)) == [10]
        assert target.data == data[:10]
        store.session_end([name])

    def test_session_need_not_see_a_forced_removal(self, store: PageStore, key: Callable[[], str]) -> None:
        """Or does, which is as good: a full count may be of anybody's bytes, so what landed is checked."""
        (name,) = self._stored(store, key)
        target = Buffer(100)
        store.session_start([name])
        assert list(store.remove([name], force=True)) == [0]
        with _registered(store, target):
            (answer,) = store.read_ranges([name], [[target.pointer]], [[100]], [[0]])
            assert answer == 100 or isinstance(answer, PageStatus)
        assert list(store.session_start([name])) == [PageStatus.NOT_FOUND]
        store.session_end([name])

    # Memory and threads

    def test_register(self, store: PageStore) -> None:
        buffer = Buffer(1 << 16)
        assert store.register(buffer.pointer, buffer.size) is True
        store.unregister(buffer.pointer)
        assert store.register(buffer.pointer, buffer.size) is True
        store.unregister(buffer.pointer)

    def test_many_threads(self, store: PageStore, key: Callable[[], str]) -> None:
        """Every thread puts objects of its own and reads what the others have put so far."""
        threads, rounds, size = 6, 12, 4096
        names = [[key() for _ in range(rounds)] for _ in range(threads)]
        start = threading.Barrier(threads)

        def work(thread: int) -> int:
            checked = 0
            buffer = Buffer(size)
            start.wait()
            with _registered(store, buffer):
                for turn in range(rounds):
                    self.put_bytes(store, names[thread][turn], _pattern(names[thread][turn], size))
                    name = names[(thread + 1) % threads][turn]
                    answer = store.read([name], [buffer.pointer], [size])[0]
                    if answer == size:
                        assert buffer.data == _pattern(name, size)
                        checked += 1
                    else:
                        assert answer in (PageStatus.NOT_FOUND, PageStatus.NOT_READY)
            return checked

        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(work, thread) for thread in range(threads)]:
                future.result()
        for name in itertools.chain.from_iterable(names):
            assert self.get_bytes(store, name) == _pattern(name, size)

    def test_one_of_many_putters_wins(self, store: PageStore, key: Callable[[], str]) -> None:
        name, threads = key(), 8
        start = threading.Barrier(threads)

        def work(_: int) -> object:
            start.wait()
            return store.put_start([name], [100])[0]

        with ThreadPoolExecutor(threads) as pool:
            answers = sorted(map(str, pool.map(work, range(threads))))
        assert answers == ["0", *["present"] * (threads - 1)]
        store.put_revoke([name])


@contextmanager
def _registered(store: PageStore, *buffers: Buffer) -> Iterator[None]:
    for buffer in buffers:
        assert store.register(buffer.pointer, buffer.size)
    try:
        yield
    finally:
        for buffer in buffers:
            store.unregister(buffer.pointer)
