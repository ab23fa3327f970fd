"""Stores for tests do what they say."""

from __future__ import annotations

import threading

import pytest

from softload.outcomes import PageStatus
from softload.stores import MemoryStore
from softload.testing import HangingStore, RecordedCall, RecordingStore, ScriptedStore


def memory() -> MemoryStore:
    return MemoryStore(capacity=1 << 20)


def test_recording() -> None:
    store = RecordingStore(memory())
    store.open()
    store.exists(["a", "b"])
    store.remove(["c"], force=True)
    store.exists(["d"])
    assert store.calls == (
        RecordedCall("exists", ("a", "b")),
        RecordedCall("remove", ("c",)),
        RecordedCall("exists", ("d",)),
    )
    assert store.keys_of("exists") == ("a", "b", "d")
    assert store.count("read") == 0
    store.clear()
    assert not store.calls
    with pytest.raises(ValueError, match="expected a method out of .*, got 'reed'"):
        store.count("reed")


def test_hanging_until_released() -> None:
    store = HangingStore(memory())
    store.open()
    store.hold("exists", lambda keys: "a" in keys)
    answers: list[object] = []
    caller = threading.Thread(target=lambda: answers.extend(store.exists(["a"])))
    caller.start()
    assert store.wait_held("exists")
    assert store.held("exists") == 1
    assert list(store.exists(["b"])) == [False]
    assert answers == []
    store.release("exists")
    caller.join(5)
    assert answers == [False]
    assert store.held("exists") == 0
    assert not store.wait_held("exists", timeout=0.01)
    with pytest.raises(ValueError, match="got 'open'"):
        store.hold("open")


def test_another_hold_lets_go_of_what_the_first_held_and_misses_nothing() -> None:
    store = HangingStore(memory())
    store.open()
    store.hold("exists", lambda keys: "a" in keys)
    answers: list[object] = []
    went_on = threading.Event()

    def ask() -> None:
        answers.extend(store.exists(["a"]))
        went_on.set()
        answers.extend(store.exists(["b"]))

    caller = threading.Thread(target=ask)
    caller.start()
    assert store.wait_held("exists")
    store.hold("exists", lambda keys: "b" in keys)
    assert went_on.wait(30)
    assert store.wait_held("exists")
    assert answers == [False]
    store.release()
    caller.join(5)
    assert answers == [False, False]


def test_scripted_answers() -> None:
    store = ScriptedStore(memory())
    store.open()
    store.script("exists", [], RuntimeError("no"), lambda answers: [*answers, True], [PageStatus.MALFORMED])
    assert store.exists(["a"]) == []
    with pytest.raises(RuntimeError, match="no"):
        store.exists(["a"])
    assert store.exists(["a"]) == [False, True]
    assert store.pending == 1
    assert store.exists(["a"]) == [PageStatus.MALFORMED]
    assert store.exists(["a"]) == [False]
