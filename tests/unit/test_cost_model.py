"""What reads should cost, from what they did cost; and which way of reading follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softload.cost_model import CostModel, Costs, SharedTime, Way, best_way, stall
from softload.geometry.layout import layer_groups, range_groups

ITEM, BYTE = 30e-6, 1 / 4e9


class Clock:
    """Stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def fed(clock: Clock | None = None, *, ranged: bool = False, item: float = ITEM, byte: float = BYTE) -> CostModel:
    """A model that has seen calls of many sizes."""
    model = CostModel(clock=clock or Clock())
    for items, nbytes in [(64, 4 << 20), (64, 16 << 20), (256, 1 << 20), (8, 16 << 20), (32, 2 << 20)] * 4:
        model.record("a", ranged=ranged, items=items, nbytes=nbytes, seconds=items * item + nbytes * byte)
    return model


def close(costs: Costs, item: float, byte: float, within: float = 0.1) -> bool:
    return costs.item == pytest.approx(item, rel=within) and costs.byte == pytest.approx(byte, rel=within)


@pytest.mark.parametrize("ranged", [False, True])
def test_costs_of_an_item_and_of_a_byte_are_told_apart(ranged: bool) -> None:
    assert close(fed(ranged=ranged).costs("a", ranged=ranged), ITEM, BYTE)


def test_before_the_first_read_costs_are_sane_and_ranges_dearer_by_the_item() -> None:
    model = CostModel()
    whole, ranges = model.costs("a", ranged=False), model.costs("a", ranged=True)
    assert ranges.item > whole.item > 0
    assert ranges.byte == whole.byte > 0


@pytest.mark.parametrize("ranged", [False, True])
def test_a_kind_of_read_that_was_never_tried_is_hoped_to_be_somewhat_faster_than_the_other(ranged: bool) -> None:
    model = fed(ranged=not ranged, item=0.0, byte=1 / 1e9)
    assert 1 / 2e9 < model.costs("a", ranged=ranged).byte < 1 / 1.2e9


def test_a_link_that_became_slow_is_known_after_some_loads() -> None:
    model = fed()
    for _ in range(30):
        model.record("a", ranged=False, items=64, nbytes=16 << 20, seconds=64 * ITEM + (16 << 20) * BYTE * 10)
    assert model.costs("a", ranged=False).seconds(64, 16 << 20) > 5 * (64 * ITEM + (16 << 20) * BYTE)


def test_what_was_slow_long_ago_is_tried_again() -> None:
    clock = Clock()
    model = fed(clock, ranged=True, item=5e-3)
    assert model.costs("a", ranged=True).item > 1e-3
    clock.now += 600
    assert model.costs("a", ranged=True).item < 1e-4


@pytest.mark.parametrize("ranged", [False, True])
def test_first_reads_that_took_long_are_forgotten_as_soon_as_others_do_not(ranged: bool) -> None:
    model = CostModel(clock=Clock())
    for nbytes in (4 << 20, 4 << 20, 16 << 20):  # into memory that was never touched
        model.record("a", ranged=ranged, items=64, nbytes=nbytes, seconds=0.06)
    for nbytes in (4 << 20, 16 << 20):
        model.record("a", ranged=ranged, items=64, nbytes=nbytes, seconds=64 * ITEM + nbytes * BYTE)
    assert model.costs("a", ranged=ranged).seconds(64, 8 << 20) < 2 * (64 * ITEM + (8 << 20) * BYTE)


def test_one_read_that_was_held_up_says_little() -> None:
    model = fed()
    before = model.costs("a", ranged=False).seconds(64, 16 << 20)
    model.record("a", ranged=False, items=64, nbytes=16 << 20, seconds=50 * before)
    assert model.costs("a", ranged=False).seconds(64, 16 << 20) < 1.5 * before


def test_calls_of_one_size_that_take_now_more_now_less_come_out_as_long_as_together() -> None:
    """Else what the endpoint with the more even calls brings would look dear beside the other."""
    model = CostModel(clock=Clock())
    for index in range(40):
        model.record("a", ranged=False, items=1, nbytes=9 << 20, seconds=0.006 if index % 2 else 0.012)
    assert model.costs("a", ranged=False).seconds(32, 32 * (9 << 20)) > 0.8 * 32 * 0.009


@pytest.mark.parametrize("ranged", [False, True])
def test_what_calls_of_one_kind_do_not_tell_is_not_blamed_on_items(ranged: bool) -> None:
    """Parts of four layers alone: what one layer would take follows from their bytes, and from what ranges cost."""
    model = CostModel(clock=Clock())
    for _ in range(20):
        model.record("a", ranged=ranged, items=64, nbytes=16 << 20, seconds=64 * 30e-6 + (16 << 20) / 1e9)
    expected = 64 * 30e-6 + (4 << 20) / 1e9
    assert model.costs("a", ranged=ranged).seconds(64, 4 << 20) < 1.2 * expected


def test_the_parts_of_calls_at_a_time_add_up_to_the_time_in_which_there_was_any() -> None:
    clock = Clock()
    shared = SharedTime(clock)
    clock.now = 5.0  # nothing runs: nobody's
    first = shared.now(1)
    clock.now += 1.0
    second = shared.now(2)
    clock.now += 4.0
    seconds = [shared.now(1) - first]
    clock.now += 2.0
    seconds.append(shared.now(0) - second)
    assert seconds == [3.0, 4.0]


def test_one_endpoint_says_nothing_about_another_and_the_number_of_endpoints_is_bounded() -> None:
    model = CostModel(capacity=2)
    for endpoint in ("a", "b", "c"):
        model.record(endpoint, ranged=False, items=1, nbytes=1 << 20, seconds=1.0)
    assert model.costs("a", ranged=False) == CostModel().costs("a", ranged=False)
    assert model.costs("c", ranged=False).seconds(1, 1 << 20) > 0.5


@given(st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 1 << 30), st.floats(0.0, 100.0)), max_size=30))
def test_costs_are_never_negative_whatever_reads_took(samples: list[tuple[int, int, float]]) -> None:
    model = CostModel()
    for items, nbytes, seconds in samples:
        model.record("a", ranged=False, items=items, nbytes=nbytes, seconds=seconds)
    costs = model.costs("a", ranged=False)
    assert costs.item >= 0 and costs.byte >= 0 and costs.item + costs.byte > 0


def test_groups_that_parts_are_made_of_are_small_and_few() -> None:
    for layers in range(1, 129):
        groups = range_groups(layers)
        assert [layer for group in groups for layer in group] == list(range(layers))
        assert len(groups) <= 14 and max(map(len, groups)) <= max(4, layers // 5)
        assert {group.start for group in layer_groups(layers)} <= {group.start for group in groups}


def waited(steps: list[tuple[int, float, float]], layers: int, layer_seconds: float) -> float:
    """The same by playing it through: the forward waits for each layer until its step has been copied."""
    read = copied = 0.0
    there: dict[int, float] = {}
    for index, (first, reading, copying) in enumerate(steps):
        read += reading
        copied = max(read, copied) + copying
        stop = steps[index + 1][0] if index + 1 < len(steps) else layers
        there.update(dict.fromkeys(range(first, stop), copied))
    now = waiting = 0.0
    for layer in range(layers):
        waiting += max(0.0, there[layer] - now)
        now = max(now, there[layer]) + layer_seconds
    return waiting


def test_what_sessions_take_is_learned_and_forgotten() -> None:
    clock = Clock()
    model = CostModel(clock=clock)
    before = model.start_seconds(100)
    assert 1e-4 < before < 0.05
    for _ in range(4):
        for sessions in (16, 64, 256):
            model.record_start(sessions, 5e-3 + sessions * 1e-3)
    assert model.start_seconds(100) == pytest.approx(0.105, rel=0.1)
    clock.now += 600
    assert model.start_seconds(100) == before


seconds = st.floats(0.0, 0.1)


@given(
    st.integers(1, 40).flatmap(
        lambda layers: st.tuples(
            st.just(layers), st.lists(st.tuples(seconds, seconds), min_size=7, max_size=7), seconds
        )
    )
)
def test_the_stall_is_what_a_forward_waits(case: tuple[int, list[tuple[float, float]], float]) -> None:
    layers, costs, layer_seconds = case
    steps = [(group.start, *cost) for group, cost in zip(layer_groups(layers), costs, strict=False)]
    assert stall(steps, layer_seconds) == pytest.approx(waited(steps, layers, layer_seconds))


def ways(groups: Sequence[range]) -> Iterator[tuple[range, ...]]:
    """Every way to join neighbouring groups into two parts or more."""
    for count in range(1, len(groups)):
        for cuts in combinations(range(1, len(groups)), count):
            yield tuple(range(groups[a].start, groups[b - 1].stop) for a, b in pairwise((0, *cuts, len(groups))))


@given(
    st.sampled_from([layer_groups, range_groups]),
    st.integers(1, 40),
    st.lists(seconds, min_size=42, max_size=42),
    seconds,
)
def test_no_way_is_better_than_the_best(
    grouping: Callable[[int], Sequence[range]], layers: int, some: list[float], layer_seconds: float
) -> None:
    groups = grouping(layers)
    copies = dict(zip(groups, some, strict=False))

    def part_seconds(part: range) -> float:
        return float(sum(some[layer] for layer in part) / math.sqrt(len(part)) + some[part.start + 1])

    def stall_of(parts: tuple[range, ...]) -> float:
        reads = {part.start: part_seconds(part) for part in parts}
        return stall([(group.start, reads.get(group.start, 0.0), copies[group]) for group in groups], layer_seconds)

    whole = stall([(group.start, 0.0 if group.start else some[41], copies[group]) for group in groups], layer_seconds)
    found = best_way(
        groups,
        whole_seconds=some[41],
        part_seconds=part_seconds,
        copy_seconds=lambda group: copies[group],
        layer_seconds=layer_seconds,
    )
    least = min(map(stall_of, ways(groups)), default=whole)
    assert found.stall == pytest.approx(least if found.parts else whole)
    assert bool(found.parts) == (least < 0.9 * whole)
    assert not found.parts or [layer for part in found.parts for layer in part] == list(range(layers))


def chosen(
    layer_seconds: float, *, item: float = ITEM, pages: int = 64, layers: int = 32, start: float = 0.0
) -> tuple[range, ...]:
    """What is chosen for pages of 73,728 bytes a layer at 4 GB/s."""
    whole, ranged, page = Costs(5e-6, BYTE), Costs(item, BYTE), 73_728 * pages
    return best_way(
        layer_groups(layers),
        whole_seconds=whole.seconds(pages, page * layers),
        part_seconds=lambda part: ranged.seconds(pages, page * len(part)),
        copy_seconds=lambda part: page * len(part) / 8e9,
        layer_seconds=layer_seconds,
        start_seconds=start,
    ).parts


def test_a_forward_that_takes_its_time_gets_its_first_layer_early() -> None:
    parts = chosen(0.010)
    assert parts[0] == range(1)
    assert parts[-1].stop == 32


def test_where_ranges_are_dear_all_of_it_is_read_whole_unless_there_is_time_for_them() -> None:
    assert chosen(0.0, item=2e-3) == ()
    assert len(chosen(0.010, item=2e-3)) < len(chosen(0.010, item=10e-6))


def test_what_goes_before_the_first_range_counts() -> None:
    assert chosen(0.010) and not chosen(0.010, start=0.1)


def test_nobody_waits_for_layers_of_which_nothing_is_read() -> None:
    """DeepSeek V4's first two layers have a sliding window alone: what is read is wanted from layer 2 on."""
    groups = layer_groups(43)[2:]

    def way(layer_seconds: float) -> Way:
        return best_way(
            groups,
            whole_seconds=0.006,
            part_seconds=lambda part: 0.001 + 0.00015 * len(part),
            copy_seconds=lambda _: 0.0,
            layer_seconds=layer_seconds,
        )

    assert way(0.003) == Way((), 0.0)
    assert way(0.001).parts[0] == range(2, 4)


def test_ranges_must_promise_more_than_a_little() -> None:
    way = best_way(
        layer_groups(4),
        whole_seconds=1.0,
        part_seconds=lambda part: 0.24 * len(part),
        copy_seconds=lambda _: 0.0,
        layer_seconds=0.0,
    )
    assert way.parts == () and way.stall == 1.0


def test_one_layer_leaves_no_choice() -> None:
    assert chosen(0.010, layers=1) == ()
