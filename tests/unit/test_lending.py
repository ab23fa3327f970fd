"""Which objects are copied from where they lie, as runs at a constant distance, and in which batches."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softload import lending
from softload.lending import Lender
from softload.lent_copies import LentCopy, lent_batches
from softload.outcomes import PageStatus
from softload.protocols import Descriptor
from softload.segments import SegmentState
from softload.store_calls import StoreCalls
from softload.stores import MemoryStore, WrapperStore

SIZE = 100


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Lending(WrapperStore):
    """Lends 4,096 bytes of "here", and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.memory = np.zeros(4096, np.uint8)
        self.asked: list[str] = []
        self.start = int(self.memory.ctypes.data)

    def lend(self, key: str, descriptor: Descriptor) -> range | None:
        self.asked.append(descriptor.endpoint)
        return range(self.start, self.start + 4096) if descriptor.endpoint == "here" else None

    def hold(self) -> Any:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "_WORTH_BYTES", 1)


def lender_of(store: Lending, clock: Clock | None = None) -> Lender:
    lender = Lender(StoreCalls(store), lease_ttl=5.0, is_wanted=True, clock=clock or Clock())
    lender.learn(["a"], [Descriptor(SIZE, "here", store.start)])
    return lender


def found(store: Lending, places: Sequence[object], *, parts: int = 1) -> list[tuple[int, int, int, int]]:
    """Runs as `(index, offset, objects, distance)`."""
    runs = list(lender_of(store).runs(places, SIZE, parts))
    assert all(run.state is SegmentState.LENT and run.nbytes == SIZE for _, run in runs)
    return [(first, run.pointer - store.start, run.count, run.stride) for first, run in runs]


def at(store: Lending, *offsets: int, endpoint: str = "here", size: int = SIZE) -> list[object]:
    return [Descriptor(size, endpoint, store.start + offset) for offset in offsets]


def test_neighbours_at_a_constant_distance_are_one_run() -> None:
    store = Lending()
    assert found(store, at(store, 0, 128, 256, 384)) == [(0, 0, 4, 128)]
    assert found(store, at(store, 0, 100, 200)) == [(0, 0, 3, 100)]
    assert found(store, at(store, 0, 128, 256, 1000, 1200, 1400)) == [(0, 0, 3, 128), (3, 1000, 3, 200)]


def test_what_comes_before_or_over_the_last_one_is_alone() -> None:
    store = Lending()
    assert found(store, at(store, 512, 128, 0)) == [(0, 512, 1, 100), (1, 128, 1, 100), (2, 0, 1, 100)]
    assert found(store, at(store, 0, 50, 100)) == [(0, 0, 1, 100), (1, 50, 1, 100), (2, 100, 1, 100)]
    assert found(store, at(store, 0, 0)) == [(0, 0, 1, 100), (1, 0, 1, 100)]


def test_only_whole_objects_of_that_size_there_and_of_that_endpoint() -> None:
    store = Lending()
    places = [
        *at(store, 0, 128),
        *at(store, 256, endpoint="there"),
        *at(store, 384, 512, size=SIZE + 1),
        PageStatus.NOT_FOUND,
        None,
        *at(store, 4096 - SIZE, 4096 - SIZE + 1, 4096, -SIZE),
        Descriptor(SIZE, "here", 1 << 80),
        *at(store, 640),
    ]
    assert found(store, places) == [(0, 0, 2, 128), (7, 4096 - SIZE, 1, 100), (12, 640, 1, 100)]
    assert found(store, [Descriptor(SIZE, "here", 1 << 80)]) == []
    assert found(store, []) == []


def test_short_runs_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Lending()
    monkeypatch.setattr(lending, "_WORTH_BYTES", 150)
    places = at(store, 0, 128, 2000, 1000, 1128, 1256)
    assert found(store, places) == [(0, 0, 2, 128), (3, 1000, 3, 128)]
    assert found(store, places, parts=2) == [(3, 1000, 3, 128)]
    assert found(store, places, parts=3) == []


@given(st.lists(st.integers(0, 4096 - SIZE), max_size=12))
def test_runs_hold_every_object_once_where_it_lies(offsets: list[int]) -> None:
    store = Lending()
    there = [
        (first + index, offset + index * stride)
        for first, offset, count, stride in found(store, at(store, *offsets))
        for index in range(count)
    ]
    assert there == list(enumerate(offsets))


def test_an_endpoint_is_asked_about_once_in_a_while() -> None:
    store, clock = Lending(), Clock()
    lender = lender_of(store, clock)
    there: list[Descriptor | PageStatus] = [
        Descriptor(SIZE, "there", 1),
        PageStatus.NOT_FOUND,
        Descriptor(SIZE, "here", store.start),
    ]
    for _ in range(3):
        lender.learn(["a", "b", "c"], there)
    assert store.asked == ["here", "there"]
    clock.now += 31
    lender.learn(["a", "b", "c"], there)
    assert store.asked == ["here", "there", "there"]


def test_a_store_that_cannot_lend_and_a_loader_that_would_not_borrow() -> None:
    plain = Lender(StoreCalls(WrapperStore(MemoryStore())), lease_ttl=5.0, is_wanted=True)
    plain.learn(["a"], [Descriptor(SIZE, "here", 1)])
    assert not plain.lends_any
    store = Lending()
    unwilling = Lender(StoreCalls(store), lease_ttl=5.0, is_wanted=False)
    unwilling.learn(["a"], [Descriptor(SIZE, "here", store.start)])
    assert not unwilling.lends_any and not store.asked


class Run:
    """As much of a segment as batches look at."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def piece(self, first: int, count: int) -> Run:
        return Run(self.first + first, count)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50)), max_size=8), st.integers(1, 200))
def test_batches_hold_every_object_once_and_stay_below_their_bound(
    shape: list[tuple[int, int]], max_bytes: int
) -> None:
    copies, page = [], 0
    for count, width in shape:
        column: Any = SimpleNamespace()
        segment: Any = Run(page, count)
        copies.append(LentCopy(column, (), segment, page, 0.0, width))
        page += count
    batches = list(lent_batches(copies, max_bytes))
    assert [page for batch in batches for copy in batch for page in copy.pages] == list(range(page))
    for batch in batches:
        assert batch
        assert all(copy.segment.first == copy.first for copy in batch)  # type: ignore[attr-defined]
        objects = sum(copy.segment.count for copy in batch)
        assert sum(copy.nbytes for copy in batch) <= max_bytes or objects == 1


def test_endpoints_that_are_gone_are_forgotten() -> None:
    """Each restart of a store is another endpoint; every column of every unit is looked for at each of them."""

    class Restarting(Lending):
        def lend(self, key: str, descriptor: Descriptor) -> range | None:
            return range(self.start, self.start + 4096)

    store = Restarting()
    lender = lender_of(store)
    for nth in range(500):
        lender.learn(["a"], at(store, 0, endpoint=f"here{nth}"))  # type: ignore[arg-type]  # descriptors, all
    assert len(lender._lent) <= 64
    assert list(lender.runs(at(store, 0, endpoint="here499"), SIZE, 1))
