"""Boundaries against a brute force that reads the definition aloud; batches against what a call may hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softload.planning import ComponentPages, boundaries, cut, needed_pages, read_batches
from softload.transfer import HitPolicy

components = st.integers(0, 12).flatmap(
    lambda pages: st.lists(
        st.builds(
            ComponentPages,
            good=st.lists(st.booleans() | st.just(True), min_size=pages, max_size=pages),
            hit_policy=st.sampled_from(HitPolicy),
            window=st.integers(1, 5),
        ),
        max_size=4,
    )
)


def holds(component: ComponentPages, pages: int) -> bool:
    """Whether every page that a prefix of `pages` pages needs of the component is good."""
    if component.hit_policy is HitPolicy.ALL_PAGES:
        return all(component.good[:pages])
    return all(component.good[max(0, pages - component.window) : pages])


def by_definition(parts: Sequence[ComponentPages]) -> tuple[int, ...]:
    pages = min((len(part.good) for part in parts), default=0)
    return tuple(n for n in range(1, pages + 1) if all(holds(part, n) for part in parts))


@given(components)
def test_boundaries_are_those_where_every_component_has_what_it_needs(parts: list[ComponentPages]) -> None:
    assert boundaries(parts) == by_definition(parts)


@given(components, st.integers(0, 14))
def test_a_cut_is_the_longest_boundary_within_the_limit(parts: list[ComponentPages], limit: int) -> None:
    assert cut(limit, parts) == max((n for n in by_definition(parts) if n <= limit), default=0)


@given(st.integers(0, 12), st.sampled_from(HitPolicy), st.integers(1, 5), st.integers(0, 11))
def test_the_needed_pages_decide_and_no_others(pages: int, policy: HitPolicy, window: int, bad: int) -> None:
    needed = needed_pages(pages, policy, window)
    good = [page != bad for page in range(12)]
    assert holds(ComponentPages(good, policy, window), pages) == (bad not in needed)


objects = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=40)


@given(objects, st.integers(1, 100), st.integers(1, 6))
def test_read_batches_keep_every_object_its_endpoint_and_its_order(
    wanted: list[tuple[str, int]], max_bytes: int, max_objects: int
) -> None:
    batches = read_batches(
        ((endpoint, nbytes, index) for index, (endpoint, nbytes) in enumerate(wanted)),
        max_bytes=max_bytes,
        max_objects=max_objects,
    )
    for endpoint, items in batches:
        assert items
        assert {wanted[index][0] for index in items} == {endpoint}
        assert len(items) <= max_objects
        assert len(items) == 1 or sum(wanted[index][1] for index in items) <= max_bytes
    for endpoint in "abc":
        of_endpoint = [index for name, items in batches for index in items if name == endpoint]
        assert of_endpoint == [index for index, (name, _) in enumerate(wanted) if name == endpoint]
    firsts = [items[0] for _, items in batches]
    assert firsts == sorted(firsts), "calls come in the order in which their first objects are wanted"


@given(objects, st.integers(1, 100), st.integers(1, 6))
def test_read_batches_are_no_smaller_than_they_have_to_be(
    wanted: list[tuple[str, int]], max_bytes: int, max_objects: int
) -> None:
    batches = read_batches(
        ((endpoint, nbytes, index) for index, (endpoint, nbytes) in enumerate(wanted)),
        max_bytes=max_bytes,
        max_objects=max_objects,
    )
    for _, group in groupby(sorted(batches, key=lambda batch: batch[0]), key=lambda batch: batch[0]):
        calls = [items for _, items in group]
        for items, following in zip(calls, calls[1:], strict=False):
            total = sum(wanted[index][1] for index in items)
            assert len(items) == max_objects or total + wanted[following[0]][1] > max_bytes


def test_no_components_have_no_boundary() -> None:
    assert boundaries([]) == ()
    assert cut(5, []) == 0


@pytest.mark.parametrize(
    ("kv", "swa", "window", "expected"),
    [
        ([True] * 10, [page in (3, 7) for page in range(10)], 1, (4, 8)),
        ([True] * 10, [page in (2, 3, 7) for page in range(10)], 2, (4,)),
        ([True] * 5 + [False] + [True] * 4, [True] * 10, 1, (1, 2, 3, 4, 5)),
        ([False] + [True] * 9, [True] * 10, 1, ()),
    ],
)
def test_sparse_boundaries(kv: list[bool], swa: list[bool], window: int, expected: tuple[int, ...]) -> None:
    parts = [ComponentPages(kv), ComponentPages(swa, HitPolicy.TRAILING_PAGES, window)]
    assert boundaries(parts) == expected
