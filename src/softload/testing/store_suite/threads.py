"""Registered memory, and many threads at a time."""
# ruff: noqa: D102  (the name of a test says what it shows)

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from softload.outcomes import PageStatus
from softload.protocols import PageStore
from softload.testing.store_suite.base import Buffer, SuiteBase, pattern, registered

__all__ = ["ThreadTests"]


class ThreadTests(SuiteBase):
    """Memory is registered, and many threads use one store."""

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
            with registered(store, buffer):
                for turn in range(rounds):
                    self.put_bytes(store, names[thread][turn], pattern(names[thread][turn], size))
                    name = names[(thread + 1) % threads][turn]
                    answer = store.read([name], [buffer.pointer], [size])[0]
                    if answer == size:
                        assert buffer.data == pattern(name, size)
                        checked += 1
                    else:
                        assert answer in (PageStatus.NOT_FOUND, PageStatus.NOT_READY)
            return checked

        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(work, thread) for thread in range(threads)]:
                future.result()
        for name in itertools.chain.from_iterable(names):
            assert self.get_bytes(store, name) == pattern(name, size)

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
