"""What the memory store does beyond the contract: eviction, leases under a turned clock, reuse of memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softload.errors import LoaderClosedError
from softload.outcomes import PageStatus
from softload.protocols import Descriptor, PutRefusal
from softload.stores import MemoryStore
from softload.stores.allocator import ALIGNMENT, Allocator
from softload.testing.store_suite import Buffer

SIZE = 64


class TurnedClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture
def store(clock: TurnedClock) -> Iterator[MemoryStore]:
    """Room for 100 objects of 64 bytes; a pass evicts a tenth of what is there."""
    store = MemoryStore(capacity=100 * SIZE, lease=5.0, high_watermark=0.9, eviction_ratio=0.1, clock=clock)
    store.open()
    yield store
    store.close()


def put(store: MemoryStore, *keys: str, size: int = SIZE, fill: int = 1) -> list[object]:
    source = Buffer.of(bytes([fill]) * size)
    answers = list(store.put_start(keys, [size] * len(keys)))
    reserved = [key for key, answer in zip(keys, answers, strict=True) if answer == 0]
    store.put_write(reserved, [source.pointer] * len(reserved), [size] * len(reserved))
    store.put_end(reserved)
    return list(answers)


def names(count: int, prefix: str = "k") -> list[str]:
    return [f"{prefix}{index}" for index in range(count)]


def present(store: MemoryStore, keys: list[str]) -> list[str]:
    return [key for key in keys if key in store._objects]


def test_nothing_is_evicted_below_the_watermark(store: MemoryStore) -> None:
    put(store, *names(90))
    assert len(store) == 90
    assert store.bytes_used == 90 * SIZE
    assert store.statistics().evicted == 0


def test_a_pass_evicts_the_least_recently_used(store: MemoryStore, clock: TurnedClock) -> None:
    put(store, *names(91))
    store.exists(names(5))
    clock.now = 10.0
    put(store, "new")
    assert store.statistics().evicted == 10
    assert present(store, names(91)) == names(5) + names(91)[15:]


def test_leased_objects_are_spared(store: MemoryStore, clock: TurnedClock) -> None:
    put(store, *names(91))
    store.descriptors(names(80))
    put(store, "new")
    assert present(store, names(91)) == [*names(80), "k90"]
    clock.now = 5.1
    put(store, *names(40, "more"))
    assert "k0" not in present(store, names(91))


def test_where_all_is_leased_a_put_finds_no_room(store: MemoryStore, clock: TurnedClock) -> None:
    assert put(store, *names(100)) == [0] * 100
    store.exists(names(100))
    held = len(store)
    answers = put(store, *names(100, "more"))
    assert answers == [0] * (100 - held) + [PutRefusal.FULL] * held
    clock.now = 6.0
    assert put(store, "later") == [0]


def test_objects_being_written_are_spared(store: MemoryStore) -> None:
    store.put_start(names(100), [SIZE] * 100)
    assert list(store.put_start(["more"], [SIZE])) == [PutRefusal.FULL]
    assert store.statistics().reservations == 100
    store.put_revoke(names(100))
    assert store.bytes_used == 0


def test_an_object_larger_than_the_store_evicts_nothing(store: MemoryStore) -> None:
    put(store, *names(50))
    assert put(store, "large", size=101 * SIZE) == [PutRefusal.FULL]
    assert len(store) == 50


def test_an_open_session_sees_the_bytes_that_took_the_place(store: MemoryStore) -> None:
    put(store, "old", fill=1)
    target = Buffer(SIZE)
    store.session_start(["old"])
    before = store.descriptors(["old"])
    store.remove(["old"], force=True)
    put(store, "foreign", fill=2)
    assert list(store.read_ranges(["old"], [[target.pointer]], [[SIZE]], [[0]])) == [SIZE]
    assert target.data == bytes([2]) * SIZE
    assert list(store.descriptors(["foreign"])) == list(before)
    assert list(store.descriptors(["old"])) == [PageStatus.NOT_FOUND]


def test_every_look_leases(store: MemoryStore, clock: TurnedClock) -> None:
    put(store, *names(5))
    target = Buffer(SIZE)
    store.exists(["k0"])
    store.descriptors(["k1"])
    store.session_start(["k2"])
    store.read(["k3"], [target.pointer], [SIZE])
    assert list(store.remove(names(5))) == [PageStatus.NOT_READY] * 4 + [0]
    clock.now = 5.0
    assert list(store.remove(names(4))) == [0] * 4


def test_a_session_ends_with_its_lease_although_others_look(store: MemoryStore, clock: TurnedClock) -> None:
    put(store, "k")
    target = Buffer(SIZE)
    store.session_start(["k"])
    clock.now = 4.0
    store.exists(["k"])
    clock.now = 5.5
    assert list(store.read_ranges(["k"], [[target.pointer]], [[SIZE]], [[0]])) == [PageStatus.LEASE_EXPIRED]


def test_before_open_and_after_close_the_store_is_out_of_reach() -> None:
    store = MemoryStore(capacity=1 << 20)
    gone = [PageStatus.STORE_UNREACHABLE]
    target = Buffer(SIZE)

    def look() -> list[list[object]]:
        return [
            list(store.exists(["k"])),
            list(store.descriptors(["k"])),
            list(store.read(["k"], [target.pointer], [SIZE])),
            list(store.session_start(["k"])),
            list(store.read_ranges(["k"], [[target.pointer]], [[SIZE]], [[0]])),
            list(store.put_start(["k"], [SIZE])),
            list(store.put_write(["k"], [target.pointer], [SIZE])),
            list(store.put_end(["k"])),
            list(store.remove(["k"])),
        ]

    assert look() == [gone] * 9
    assert store.register(target.pointer, SIZE) is False
    store.open()
    store.open()
    assert put(store, "k") == [0]
    store.close()
    store.close()
    assert look() == [gone] * 9
    with pytest.raises(LoaderClosedError):
        store.open()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("capacity", 0), ("lease", 0.0), ("lease", float("inf")), ("high_watermark", 1.5), ("eviction_ratio", 0.0)],
)
def test_settings_out_of_range(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{setting}: expected .* got {value}"):
        MemoryStore(**{setting: value})  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=80))
def test_allocator_keeps_ranges_apart_and_merges_what_is_free(steps: list[tuple[bool, int]]) -> None:
    allocator = Allocator(4096)
    taken: dict[int, int] = {}
    used = np.zeros(4096, dtype=bool)
    for allocate, number in steps:
        if allocate:
            offset = allocator.allocate(number)
            if offset is not None:
                assert offset % ALIGNMENT == 0
                assert not used[offset : offset + number].any()
                used[offset : offset + number] = True
                taken[offset] = number
        elif taken:
            offset, size = list(taken.items())[number % len(taken)]
            allocator.free(offset, size)
            used[offset : offset + size] = False
            del taken[offset]
    for offset, size in taken.items():
        allocator.free(offset, size)
    assert allocator.bytes_used == 0
    assert allocator.allocate(4096) == 0


def test_descriptor_addresses_lie_in_the_arena(store: MemoryStore) -> None:
    put(store, "a", "b")
    descriptors = store.descriptors(["a", "b"])
    assert all(isinstance(each, Descriptor) and each.endpoint == "memory" for each in descriptors)
    assert len({each.address for each in descriptors if isinstance(each, Descriptor)}) == 2
