"""The LRU bound against a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softload.replay.lru_bound import LruBound

KEYS = st.lists(st.integers(0, 9).map(str), unique=True, max_size=6)
EVENTS = st.lists(st.tuples(st.booleans(), KEYS), max_size=40)


def brute_force(capacity: int, events: list[tuple[bool, list[str]]]) -> int:
    """Hits of a list of keys, youngest first; keys of one event age from the first to the last."""
    cache: list[str] = []
    hits = 0
    for is_save, keys in events:
        if is_save:
            touched = keys
        else:
            touched = keys[: next((i for i, key in enumerate(keys) if key not in cache), len(keys))]
            hits += len(touched)
        cache = (list(touched) + [key for key in cache if key not in touched])[:capacity]
    return hits


@given(capacity=st.integers(0, 8), events=EVENTS)
def test_equals_brute_force(capacity: int, events: list[tuple[bool, list[str]]]) -> None:
    bound = LruBound(capacity)
    for is_save, keys in events:
        if is_save:
            bound.save(keys)
        else:
            bound.lookup(keys)
        assert len(bound) <= capacity
    assert bound.hit_pages == brute_force(capacity, events)


@given(events=EVENTS)
def test_without_a_capacity_nothing_is_lost(events: list[tuple[bool, list[str]]]) -> None:
    bound, saved = LruBound(None), set()
    for is_save, keys in events:
        if is_save:
            bound.save(keys)
            saved.update(keys)
        else:
            assert (bound.lookup(keys) == len(keys)) is (saved >= set(keys))


def test_hits_end_at_the_first_miss() -> None:
    bound = LruBound(10)
    bound.save(["a", "c"])
    assert bound.lookup(["a", "b", "c"]) == 1
    assert "b" not in bound


def test_bad_capacity_is_named() -> None:
    with pytest.raises(ValueError, match="capacity: expected 0 or more pages, got -1"):
        LruBound(-1)
