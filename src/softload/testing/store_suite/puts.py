"""Puts, from their start to their end."""
# ruff: noqa: D102  (the name of a test says what it shows)

from __future__ import annotations

from collections.abc import Callable

from softload.outcomes import PageStatus
from softload.protocols import PageStore, PutRefusal
from softload.testing.store_suite.base import Buffer, SuiteBase, pattern, registered

__all__ = ["PutTests"]


class PutTests(SuiteBase):
    """Objects are put: reserved, written, ended or revoked."""

    def test_put_is_invisible_until_its_end(self, store: PageStore, key: Callable[[], str]) -> None:
        name, source, target = key(), Buffer.of(pattern("hidden", 500)), Buffer(500)
        with registered(store, source, target):
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
        name, source = key(), Buffer.of(pattern("revoked", 300))
        with registered(store, source):
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
        with registered(store, source):
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
