"""The contract of a `LendingStore` as a test class, beside that of every `PageStore`: subclass it as `StoreSuite`."""
# ruff: noqa: D102  (the name of a test says what it shows)

from __future__ import annotations

import ctypes
from collections.abc import Callable

from softload.protocols import Descriptor, LendingStore, PageStore
from softload.testing.store_suite import StoreSuite

__all__ = ["LendingSuite"]


class LendingSuite(StoreSuite):
    """Tests of all that `PageStore` and `LendingStore` promise. The store under test has all its objects here."""

    def described(self, store: PageStore, key: str) -> Descriptor:
        """What the store says of an object that it has."""
        (found,) = store.descriptors([key])
        assert isinstance(found, Descriptor)
        return found

    def lent(self, store: PageStore, key: str) -> range:
        """The addresses that the store lends with an object, which are its own among others."""
        assert isinstance(store, LendingStore)
        found = self.described(store, key)
        lent = store.lend(key, found)
        assert lent is not None
        assert lent.start > 0 and lent.step == 1
        assert found.address in lent and found.address + found.size - 1 in lent
        return lent

    def seen(self, store: PageStore, found: Descriptor) -> bytes:
        """An object's bytes where they lie."""
        assert isinstance(store, LendingStore)
        with store.hold() as allowed:
            assert allowed is True
            return ctypes.string_at(found.address, found.size)

    def test_lent_memory_holds_the_objects(self, store: PageStore, key: Callable[[], str]) -> None:
        objects = self._stored(store, key, count=5)
        lent = self.lent(store, next(iter(objects)))
        for name, data in objects.items():
            found = self.described(store, name)
            assert found.address in lent
            assert self.seen(store, found) == data

    def test_lent_memory_holds_later_objects_too(self, store: PageStore, key: Callable[[], str]) -> None:
        (first,) = self._stored(store, key)
        lent = self.lent(store, first)
        ((name, data),) = self._stored(store, key, size=70_000).items()
        found = self.described(store, name)
        assert found.address in lent and found.address + found.size - 1 in lent
        assert self.seen(store, found) == data

    def test_reading_in_place_changes_nothing(self, store: PageStore, key: Callable[[], str]) -> None:
        ((name, data),) = self._stored(store, key).items()
        self.lent(store, name)
        self.seen(store, self.described(store, name))
        assert self.get_bytes(store, name) == data
        assert list(store.remove([name], force=True)) == [0]

    def test_it_is_held_more_than_once_at_a_time(self, store: PageStore, key: Callable[[], str]) -> None:
        ((name, data),) = self._stored(store, key).items()
        self.lent(store, name)
        assert isinstance(store, LendingStore)
        with store.hold() as outer:
            assert self.seen(store, self.described(store, name)) == data
            assert outer is True

    def test_what_is_elsewhere_is_not_lent(self, store: PageStore, key: Callable[[], str]) -> None:
        (name,) = self._stored(store, key)
        assert isinstance(store, LendingStore)
        found = self.described(store, name)
        assert store.lend(name, found._replace(endpoint="192.0.2.1:1")) is None
