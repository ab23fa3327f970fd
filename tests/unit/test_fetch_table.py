"""Neighbours that are one fetch, and what becomes of them where their ways part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softload import PageStatus
from softload.fetch_table import FetchTable
from softload.fetches import Fetch, PartState, ReadCall, Turn, leaves
from softload.landing import LandingMemory, Share

SIZE = 100


class Unit:
    """Wants a fetch, and goes on with its pieces."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetches = [fetch]
        fetch.listeners.append(self)
        fetch.issuer = fetch.issuer or self

    def fetch_failed(self, fetch: Fetch) -> None:
        raise AssertionError(f"{fetch} failed")

    def fetch_split(self, old: Fetch, new: Sequence[Fetch]) -> None:
        at = self.fetches.index(old)
        self.fetches[at : at + 1] = new

    def fetch_replaced(self, old: Fetch, new: Fetch) -> None:
        raise AssertionError(f"{old} was replaced by {new}")

    def wake(self) -> None:
        raise AssertionError("nothing has landed")


def named(prefix: str, count: int) -> Fetch:
    segments = LandingMemory(1 << 16).try_grant_runs([(SIZE, count)], Share.STREAMING)
    assert segments is not None
    keys = [f"{prefix}{index}" for index in range(count)]
    return Fetch(keys, segments[0], [None] * count, size=SIZE, tailed=True)


def made(count: int) -> tuple[FetchTable, Fetch]:
    fetch = named("k", count)
    table = FetchTable()
    table.add(fetch)
    return table, fetch


@given(st.integers(2, 9), st.data())
def test_pieces_of_pieces_lead_to_every_object_once(count: int, data: st.DataObject) -> None:
    table, whole = made(count)
    places = [whole.segment.piece(index, 1).pointer for index in range(count)]
    first, second = Unit(whole), Unit(whole)
    call = ReadCall("", list(whole.parts), Turn(), ranged=False)
    call.live, call.relied_on = call.parts, set(call.parts)
    whole.parts[0].call, whole.parts[0].state = call, PartState.IN_FLIGHT
    for _ in range(data.draw(st.integers(1, 5))):
        fetch = table.find(f"k{data.draw(st.integers(0, count - 1))}")
        assert fetch is not None
        start = data.draw(st.integers(0, fetch.count - 1))
        end = data.draw(st.integers(start + 1, fetch.count))
        assert table.piece(fetch, start, end).keys == fetch.keys[start:end]
    assert first.fetches == second.fetches
    assert [key for fetch in first.fetches for key in fetch.keys] == [f"k{index}" for index in range(count)]
    assert [part.fetch for part in leaves(call.live)] == first.fetches
    assert call.relied_on == set(leaves(call.live))
    at = 0
    for fetch in first.fetches:
        assert fetch.listeners == [first, second] and fetch.issuer is first and fetch.in_flight
        assert all(table.find(key) is fetch for key in fetch.keys)
        assert fetch.segment.pointer == places[at] and fetch.segment.count == fetch.count
        at += fetch.count


@pytest.mark.parametrize(
    ("statuses", "counts"),
    [("LLLL", [4]), ("LFLL", [1, 1, 2]), ("FFLL", [1, 1, 2]), ("LLLF", [3, 1]), ("FFFF", [1, 1, 1, 1])],
)
def test_what_has_landed_stays_together_and_each_failure_goes_its_own_way(statuses: str, counts: list[int]) -> None:
    table, whole = made(len(statuses))
    unit = Unit(whole)
    answers = {"L": PageStatus.LOADED, "F": PageStatus.NOT_FOUND}
    table.split_by_status(whole, [answers[status] for status in statuses])
    assert [fetch.count for fetch in unit.fetches] == counts


def test_kept_bytes_are_given_back_oldest_first_and_no_more_than_are_asked_for() -> None:
    table, whole = made(4)
    table.keep(whole, 10.0)
    stride = whole.segment.stride
    assert [fetch.keys for fetch in table.take_oldest(stride + 1)] == [["k0", "k1"]]
    assert table.kept_bytes == 2 * stride
    assert table.find("k2") is table.find("k3")
    assert not list(table.take_expired(lambda: 9.0))
    assert [fetch.keys for fetch in table.take_expired(lambda: 10.0)] == [["k2", "k3"]]
    assert table.kept_bytes == 0


def test_pieces_of_what_is_kept_are_kept() -> None:
    table, whole = made(4)
    table.keep(whole, 10.0)
    table.join_kept(table.piece(whole, 1, 2))
    kept = list(table.take_expired(lambda: 10.0))
    assert [fetch.keys for fetch in kept] == [["k0"], ["k2", "k3"]]
    assert all(a.segment.offset < b.segment.offset for a, b in pairwise(kept))


def test_pieces_of_what_is_kept_are_as_old_as_it_was() -> None:
    table, whole = made(4)
    later = named("later", 2)
    table.add(later)
    table.keep(whole, 10.0)
    table.keep(later, 20.0)
    table.join_kept(table.piece(whole, 1, 2))
    assert [fetch.keys for fetch in table.take_expired(lambda: 10.0)] == [["k0"], ["k2", "k3"]]
    assert [fetch.keys for fetch in table.take_oldest(1)] == [["later0"]]
    assert [fetch.keys for fetch in table.take_expired(lambda: 20.0)] == [["later1"]]


@pytest.mark.parametrize("wanted", [0, 1])
def test_the_oldest_goes_first_also_in_pieces(wanted: int) -> None:
    table, whole = made(4)
    later = named("later", 4)
    table.add(later)
    table.keep(whole, 10.0)
    table.keep(later, 20.0)
    piece = table.piece(whole, 0, 2)
    if wanted:
        table.join_kept(piece)
    taken = [key for fetch in table.take_oldest((5 - 2 * wanted) * whole.segment.stride) for key in fetch.keys]
    assert taken == [*["k0", "k1"][: 2 - 2 * wanted], "k2", "k3", "later0"]
