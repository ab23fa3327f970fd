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
