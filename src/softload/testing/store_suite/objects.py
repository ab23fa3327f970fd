"""Whole objects, leases and removal."""
# ruff: noqa: D102  (the name of a test says what it shows)

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from softload.outcomes import PageStatus
from softload.protocols import Descriptor, PageStore
from softload.testing.store_suite.base import Buffer, SuiteBase, pattern, registered

__all__ = ["ObjectTests"]


class ObjectTests(SuiteBase):
    """Objects are there, are read whole, are leased, and are removed."""

    def test_is_a_page_store(self, store: PageStore) -> None:
        assert isinstance(store, PageStore)
        assert store.lease_ttl > 0

    def test_what_was_put_is_read(self, store: PageStore, key: Callable[[], str]) -> None:
        name, data = key(), pattern("round-trip", 70_001)
        self.put_bytes(store, name, data)
        assert self.get_bytes(store, name) == data
        target = Buffer(len(data))
        with registered(store, target):
            assert list(store.read([name], [target.pointer], [target.size])) == [target.size]
        assert target.data == data

    def test_large_object(self, store: PageStore, key: Callable[[], str]) -> None:
        name, data = key(), pattern("large", 5_000_003)
        self.put_bytes(store, name, data)
        assert self.get_bytes(store, name) == data

    def test_answers_are_in_the_order_of_keys(self, store: PageStore, key: Callable[[], str]) -> None:
        objects = self._stored(store, key, 5)
        names = list(reversed(objects))
        absent = key()
        asked = [names[0], absent, *names[1:]]
        targets = [Buffer(len(objects.get(name, b"x"))) for name in asked]
        with registered(store, *targets):
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
        with registered(store, target):
            assert list(store.read([name], [target.pointer], [100])) == [PageStatus.NOT_FOUND]
        assert list(store.session_start([name])) == [PageStatus.NOT_FOUND]
        assert list(store.remove([name])) == [PageStatus.NOT_FOUND]
        assert target.untouched

    @pytest.mark.parametrize("difference", [-300, 300])
    def test_wrong_size(self, store: PageStore, key: Callable[[], str], difference: int) -> None:
        (name,) = self._stored(store, key, size=1000)
        target = Buffer(1000 + difference)
        with registered(store, target):
            answers = store.read([name], [target.pointer], [target.size])
        assert list(answers) == [PageStatus.WRONG_SIZE]

    def test_same_key_twice_in_one_read(self, store: PageStore, key: Callable[[], str]) -> None:
        ((name, data),) = self._stored(store, key).items()
        one, two = Buffer(len(data)), Buffer(len(data))
        with registered(store, one, two):
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
