"""Every store of ours keeps the contract of `PageStore`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from softload.protocols import PageStore
from softload.stores import EmbeddedMooncakeStore, MemoryStore, WrapperStore
from softload.testing import FaultyStore, HangingStore, RecordingStore, ScriptedStore
from softload.testing.lending_suite import LendingSuite
from softload.testing.store_suite import StoreSuite


class TurnedClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TestMemoryStore(StoreSuite):
    clock: TurnedClock

    def wrap(self, store: MemoryStore) -> PageStore:
        return store

    @pytest.fixture
    def store(self) -> Iterator[PageStore]:
        self.clock = TurnedClock()
        store = self.wrap(MemoryStore(capacity=self.capacity, lease=5.0, clock=self.clock))
        store.open()
        yield store
        store.close()

    def wait_lease(self, store: PageStore) -> None:
        self.clock.now += store.lease_ttl + 0.1


class TestWrapperStore(TestMemoryStore):
    def wrap(self, store: MemoryStore) -> PageStore:
        return WrapperStore(store)


class TestRecordingHangingScriptedStore(TestMemoryStore):
    def wrap(self, store: MemoryStore) -> PageStore:
        return RecordingStore(HangingStore(ScriptedStore(store)))


class TestFaultyStoreWithoutFaults(TestMemoryStore):
    def wrap(self, store: MemoryStore) -> PageStore:
        return FaultyStore(store, [])


class TestLendingMemoryStore(LendingSuite):
    @pytest.fixture
    def store(self) -> Iterator[PageStore]:
        store = RecordingStore(MemoryStore(capacity=self.capacity, lease=0.2, lends=True))
        store.open()
        yield store
        store.close()


@pytest.mark.mooncake
class TestEmbeddedMooncake(LendingSuite):
    @pytest.fixture
    def store(self, mooncake_store: EmbeddedMooncakeStore) -> Iterator[PageStore]:
        yield mooncake_store


@pytest.mark.mooncake
class TestEmbeddedMooncakeWithOwners(StoreSuite):
    @pytest.fixture
    def store(self, owned_mooncake_store: EmbeddedMooncakeStore) -> Iterator[PageStore]:
        yield owned_mooncake_store
