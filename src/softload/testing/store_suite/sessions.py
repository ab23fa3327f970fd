"""Sessions, and ranges that are read in them."""
# ruff: noqa: D102  (the name of a test says what it shows)

from __future__ import annotations

from collections.abc import Callable

from softload.outcomes import PageStatus
from softload.protocols import PageStore
from softload.testing.store_suite.base import Buffer, SuiteBase, registered

__all__ = ["SessionTests"]


class SessionTests(SuiteBase):
    """Ranges of objects are read from where a session remembers them."""

    def test_ranges(self, store: PageStore, key: Callable[[], str]) -> None:
        (one, first), (two, second) = self._stored(store, key, 2).items()
        target = Buffer(1000)
        at = target.pointer
        assert list(store.session_start([one, two])) == [0, 0]
        with registered(store, target):
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
        with registered(store, target):
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
        with registered(store, target):
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
        with registered(store, target):
            assert list(store.read_ranges([name], [[target.pointer]], [[10]], [[0]])) == [PageStatus.LEASE_EXPIRED]
        assert target.untouched

    def test_sessions_are_not_counted(self, store: PageStore, key: Callable[[], str]) -> None:
        (name,) = self._stored(store, key)
        target = Buffer(10)
        store.session_start([name])
        store.session_start([name])
        store.session_end([name])
        with registered(store, target):
            assert list(store.read_ranges([name], [[target.pointer]], [[10]], [[0]])) == [PageStatus.LEASE_EXPIRED]

    def test_range_past_the_end_fails_its_key_alone_and_keeps_the_session(
        self, store: PageStore, key: Callable[[], str]
    ) -> None:
        one, two = self._stored(store, key, 2)
        target = Buffer(1000)
        at = target.pointer
        store.session_start([one, two])
        with registered(store, target):
            answers = store.read_ranges([one, two], [[at, at + 10], [at + 500]], [[10, 20], [5]], [[0, 990], [0]])
            assert list(answers) == [PageStatus.LEASE_EXPIRED, 5]
            assert list(store.read_ranges([one], [[at]], [[10]], [[0]])) == [10]
        store.session_end([one, two])

    def test_session_past_its_lease(self, store: PageStore, key: Callable[[], str]) -> None:
        ((name, data),) = self._stored(store, key).items()
        target = Buffer(10)
        store.session_start([name])
        self.wait_lease(store)
        with registered(store, target):
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
        with registered(store, target):
            (answer,) = store.read_ranges([name], [[target.pointer]], [[100]], [[0]])
            assert answer == 100 or isinstance(answer, PageStatus)
        assert list(store.session_start([name])) == [PageStatus.NOT_FOUND]
        store.session_end([name])
