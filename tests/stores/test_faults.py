"""Faults happen as often as asked, to the same keys for the same seed, and are written down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from softload.outcomes import PageStatus
from softload.protocols import Descriptor, PageStore
from softload.stores import MemoryStore
from softload.testing import Fault, FaultKind, FaultyStore, Moment, parse_fault
from softload.testing.store_suite import Buffer

SIZE = 100
KEYS = [f"k{index}" for index in range(400)]


def faulty(*specs: str, seed: int = 0, is_draft: Callable[[str], bool] | None = None) -> FaultyStore:
    store = FaultyStore(
        MemoryStore(capacity=1 << 20), [parse_fault(spec) for spec in specs], seed=seed, is_draft=is_draft
    )
    store.open()
    return store


def fill(store: PageStore, keys: list[str] = KEYS) -> bytes:
    data = bytes(range(SIZE))
    source = Buffer.of(data)
    store.put_start(keys, [SIZE] * len(keys))
    store.put_write(keys, [source.pointer] * len(keys), [SIZE] * len(keys))
    store.put_end(keys)
    return data


def read(store: PageStore, keys: list[str] = KEYS) -> tuple[list[object], list[bytes]]:
    target = Buffer(SIZE * len(keys))
    answers = store.read(keys, [target.pointer + SIZE * index for index in range(len(keys))], [SIZE] * len(keys))
    return list(answers), [target.data[SIZE * index :][:SIZE] for index in range(len(keys))]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("evict=0.05", Fault(FaultKind.EVICT, probability=0.05)),
        ("remove=1", Fault(FaultKind.REMOVE, probability=1.0)),
        ("late=.5", Fault(FaultKind.LATE, probability=0.5)),
        ("slow=0.1:0.25", Fault(FaultKind.SLOW, probability=0.1, seconds=0.25)),
        ("hang=3:2", Fault(FaultKind.HANG, calls=3, seconds=2.0)),
        ("corrupt=0.01", Fault(FaultKind.CORRUPT, probability=0.01)),
        ("draft-loss=0.2", Fault(FaultKind.DRAFT_LOSS, probability=0.2)),
        ("kill-owner@10", Fault(FaultKind.KILL_OWNER, seconds=10.0)),
        ("kill-owner@landed:.5", Fault(FaultKind.KILL_OWNER, moment=Moment.LANDED, lasts=0.5)),
        ("freeze-owner@3:2", Fault(FaultKind.FREEZE_OWNER, seconds=3.0, lasts=2.0)),
        ("freeze-master@admission", Fault(FaultKind.FREEZE_MASTER, moment=Moment.ADMISSION)),
        ("kill-master@1:5", Fault(FaultKind.KILL_MASTER, seconds=1.0, lasts=5.0)),
        ("malformed=0.1", Fault(FaultKind.MALFORMED, probability=0.1)),
        ("part-owner@read:10", Fault(FaultKind.PART_OWNER, moment=Moment.READ, lasts=10.0)),
        ("part-master@3", Fault(FaultKind.PART_MASTER, seconds=3.0)),
        ("kill-loader@read", Fault(FaultKind.KILL_LOADER, moment=Moment.READ)),
        ("restart-master@2.5", Fault(FaultKind.RESTART_MASTER, seconds=2.5)),
    ],
)
def test_parsing(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("explode=1", "expected one of evict=P.*kill-master@SECONDS.*; got 'explode'"),
        ("evict", "expected evict=P"),
        ("evict@3", "expected evict=P"),
        ("evict=1.5", "expected a probability of at most 1, got 1.5"),
        ("evict=-1", "expected evict=P"),
        ("slow=0.5", "expected slow=P:SECONDS"),
        ("hang=0.5:1", "expected hang=N:SECONDS"),
        ("kill-owner=3", "expected kill-owner@SECONDS"),
        ("kill-owner@sunset", "expected kill-owner@SECONDS"),
        ("freeze-master@3:", "expected freeze-master@SECONDS"),
        ("restart-master@3:5", "expected restart-master@SECONDS"),
        ("kill-loader@3:5", "expected kill-loader@SECONDS"),
        ("", "got ''"),
    ],
)
def test_what_does_not_parse(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_fault(text)


def test_faults_that_a_store_cannot_do() -> None:
    with pytest.raises(ValueError, match="kill-owner"):
        faulty("kill-owner@3")
    with pytest.raises(ValueError, match="expected is_draft"):
        faulty("draft-loss=1")


def test_evicted_objects_are_gone() -> None:
    store = faulty("evict=0.2")
    fill(store)
    answers = store.descriptors(KEYS)
    lost = {key for key, answer in zip(KEYS, answers, strict=True) if answer == PageStatus.NOT_FOUND}
    assert 40 < len(lost) < 120
    assert store.touched == store.touched_by[FaultKind.EVICT] == lost
    assert list(store.inner.exists(KEYS)) == [key not in lost for key in KEYS]


def test_each_look_at_a_key_is_a_chance_of_its_own() -> None:
    store = faulty("evict=0.2")
    fill(store)
    for _ in range(30):
        store.descriptors(KEYS)
    assert not any(store.inner.exists(KEYS))


def test_the_seed_decides() -> None:
    def lost(seed: int) -> set[str]:
        store = faulty("evict=0.2", seed=seed)
        fill(store)
        store.descriptors(KEYS)
        return store.touched

    assert lost(1) == lost(1) != lost(2)


def test_removed_after_a_good_answer() -> None:
    store = faulty("remove=0.3")
    fill(store)
    answers = store.descriptors(KEYS)
    assert all(isinstance(answer, Descriptor) for answer in answers)
    assert 60 < len(store.touched) < 180
    assert list(store.inner.exists(KEYS)) == [key not in store.touched for key in KEYS]


def test_late_once() -> None:
    store = faulty("late=1")
    data = fill(store)
    assert read(store)[0] == [PageStatus.LEASE_EXPIRED] * len(KEYS)
    assert read(store) == ([SIZE] * len(KEYS), [data] * len(KEYS))


def test_late_among_others() -> None:
    store = faulty("late=0.3")
    data = fill(store)
    answers, landed = read(store)
    late = store.touched_by[FaultKind.LATE]
    assert 60 < len(late) < 180
    assert answers == [PageStatus.LEASE_EXPIRED if key in late else SIZE for key in KEYS]
    assert all(bytes_ == data for key, bytes_ in zip(KEYS, landed, strict=True) if key not in late)


def test_late_ends_the_session_of_a_ranged_read() -> None:
    store = faulty("late=1")
    fill(store)
    target = Buffer(10)
    ask = ["k0"], [[target.pointer]], [[10]], [[0]]
    store.session_start(["k0"])
    assert list(store.read_ranges(*ask)) == [PageStatus.LEASE_EXPIRED]
    store.session_start(["k0"])
    assert list(store.read_ranges(*ask)) == [10]


def test_corrupt_objects_stay_corrupt_by_one_byte() -> None:
    store = faulty("corrupt=0.2")
    data = fill(store)
    corrupt = store.touched_by[FaultKind.CORRUPT]
    assert 40 < len(corrupt) < 120
    for _ in range(2):
        answers, landed = read(store)
        assert answers == [SIZE] * len(KEYS)
        for key, got in zip(KEYS, landed, strict=True):
            assert sum(a != b for a, b in zip(got, data, strict=True)) == (key in corrupt)


def test_corruption_leaves_the_source_alone() -> None:
    store = faulty("corrupt=1")
    source = Buffer.of(bytes(SIZE))
    store.put_start(["k"], [SIZE])
    assert list(store.put_write(["k"], [source.pointer], [SIZE])) == [SIZE]
    assert source.data == bytes(SIZE)


def test_lost_drafts_are_never_found_and_the_target_always() -> None:
    store = faulty("draft-loss=0.5", is_draft=lambda key: int(key[1:]) % 2 == 1)
    fill(store)
    first, second = list(store.descriptors(KEYS)), list(store.descriptors(KEYS))
    assert first == second
    assert list(store.exists(KEYS)) == [isinstance(answer, Descriptor) for answer in first]
    lost = {key for key, answer in zip(KEYS, first, strict=True) if answer == PageStatus.NOT_FOUND}
    assert 50 < len(lost) < 150
    assert store.touched == lost
    assert all(int(key[1:]) % 2 for key in lost)


def test_malformed_answers_miss_in_every_way_what_was_asked_for() -> None:
    store = faulty("malformed=0.5")
    fill(store)
    answers = set()
    for _ in range(200):
        try:
            answers.add(repr(store.descriptors(KEYS[:2])))
        except RuntimeError:
            answers.add("raised")
    assert repr(store.inner.descriptors(KEYS[:2])) in answers
    assert len(answers) == 9
    assert store.touched_by[FaultKind.MALFORMED] == set(KEYS[:2])
    assert list(store.exists([])) == []


@pytest.mark.parametrize("seed", range(8))
def test_every_call_that_asks_or_reads_is_malformed(seed: int) -> None:
    store = faulty("malformed=1", seed=seed)
    fill(store)
    target = Buffer(2 * SIZE)
    pointers = [target.pointer, target.pointer + SIZE]
    keys = KEYS[:2]
    calls: list[tuple[Callable[[], object], list[object]]] = [
        (lambda: store.exists(keys), [True, True]),
        (lambda: store.session_start(keys), [0, 0]),
        (lambda: store.read(keys, pointers, [SIZE] * 2), [SIZE] * 2),
        (lambda: store.read_ranges(keys, [[at] for at in pointers], [[SIZE]] * 2, [[0]] * 2), [SIZE] * 2),
    ]
    for call, truth in calls:
        try:
            answer = call()
        except RuntimeError:
            continue
        assert type(answer) is not list or [(type(each), each) for each in answer] != [(type(t), t) for t in truth]


def test_slow_reads_take_their_time() -> None:
    store = faulty("slow=1:0.05")
    fill(store)
    began = time.monotonic()
    assert read(store)[0] == [SIZE] * len(KEYS)
    assert time.monotonic() - began >= 0.05
    assert store.touched == set(KEYS)


def test_as_many_reads_hang_as_asked_and_close_ends_them() -> None:
    store = faulty("hang=2:0.02")
    fill(store, ["k0"])
    durations = []
    for _ in range(80):
        began = time.monotonic()
        read(store, ["k0"])
        durations.append(time.monotonic() - began >= 0.02)
    assert sum(durations) >= 2
    assert len(store._hangs) == 2

    store = faulty("slow=1:60")
    fill(store, ["k0"])
    answers: list[object] = []
    reader = threading.Thread(target=lambda: answers.extend(read(store, ["k0"])[0]))
    reader.start()
    store.close()
    reader.join(5)
    assert answers == [PageStatus.STORE_UNREACHABLE]
