"""What was granted is handed out once, whole runs where they lie side by side, and the rest given back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from softload.grants import Grant
from softload.landing import LandingMemory, Share

SIZE = 100


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=30),
)
def test_every_object_gets_its_own_place_once(runs: list[int], takes: list[tuple[int, int]]) -> None:
    memory = LandingMemory(1 << 16)
    segments = [memory.try_grant_runs([(SIZE, count)], Share.STREAMING) or [] for count in runs]
    places = {
        f"k{index}": pointer
        for index, pointer in enumerate(
            each.pointer for (segment,) in segments for each in (segment.piece(i, 1) for i in range(segment.count))
        )
    }
    used = memory.statistics().in_use
    grant = Grant(places, [segment for (segment,) in segments])
    taken: set[str] = set()
    held = []
    for place, most in takes:
        segment = grant.take(f"k{place}", most)
        if segment is None:
            assert f"k{place}" in taken or f"k{place}" not in places
            continue
        assert 1 <= segment.count <= most
        for index in range(segment.count):
            key = f"k{place + index}"
            assert key not in taken
            assert segment.piece(index, 1).pointer == places[key]
            taken.add(key)
        held.append(segment)
        assert list(grant) == [key for key in places if key not in taken]
        assert len(grant) == len(places) - len(taken)
        assert all((key in grant) is (key not in taken) for key in places)
    rest = grant.take_rest()
    assert sum(segment.count for segment in (*held, *rest)) == len(places)
    assert memory.statistics().in_use == used
    memory.release_all([*held, *rest])
    assert memory.statistics().in_use == 0
    assert grant.take("k0") is None and not grant.take_rest()


def test_neighbours_are_those_granted_one_after_another() -> None:
    segments = LandingMemory(1 << 16).try_grant_runs([(SIZE, 4)], Share.STREAMING)
    assert segments is not None
    grant = Grant(["a", "b", "c", "d"], segments)
    assert grant.are_neighbours(["a", "b", "c"]) and grant.are_neighbours(["d"])
    assert not grant.are_neighbours(["a", "c"]) and not grant.are_neighbours(["c", "b"])
    assert not grant.are_neighbours(["c", "d", "e"])
