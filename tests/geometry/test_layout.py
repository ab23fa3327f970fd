"""How pages become objects: groups, order, offsets, ranges."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softload.config import Layout
from softload.geometry import TAIL_BYTES, DevicePool, ObjectSpec, layer_groups, object_specs, ranges_of
from softload.transfer import PoolName


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [(1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (4, [1, 1, 2]), (5, [1, 1, 2, 1]), (32, [1, 1, 2, 4, 8, 16])],
)
def test_layer_groups_double(num_layers: int, sizes: list[int]) -> None:
    groups = layer_groups(num_layers)
    assert [len(group) for group in groups] == sizes
    assert [layer for group in groups for layer in group] == list(range(num_layers))


def test_layer_groups_of_nothing() -> None:
    with pytest.raises(ValueError, match="expected at least 1 layer, got 0"):
        layer_groups(0)


WIDE = 16384
"""A page of a float16 buffer this wide has 128 KiB: each group of layers is an object of its own."""


def outline(spec: ObjectSpec) -> tuple[str, bool, list[int], tuple[int, ...]]:
    return spec.part.split(".")[0], spec.draft, [fragment.buffer for fragment in spec.fragments], spec.layers


def test_grouped_objects_are_layer_major(make_pool: Any) -> None:
    pool = make_pool(widths=(1 * WIDE, 2 * WIDE, 3 * WIDE, 4 * WIDE), num_components=2)
    specs = object_specs(pool, Layout.GROUPED, 4)
    assert [outline(spec) for spec in specs] == [
        ("g0", False, [0, 4], (0,)),
        ("g1", False, [1, 5], (1,)),
        ("g2", False, [2, 6, 3, 7], (2, 3)),
    ]
    assert [fragment.offset for fragment in specs[2].fragments] == [0, 24 * WIDE, 48 * WIDE, 80 * WIDE]
    payload = 112 * WIDE
    assert (specs[2].payload, specs[2].size, specs[2].target_size) == (
        payload,
        payload + TAIL_BYTES,
        payload + TAIL_BYTES,
    )


@pytest.mark.parametrize(
    ("kib", "parts"),
    [
        ((128,) * 7, {"g0": (0,), "g1": (1,), "g2": (2, 3), "g3": (4, 5, 6)}),
        ((4,) * 8, {"g0-2": (0, 1, 2, 3), "g3": (4, 5, 6, 7)}),  # 16 KiB are enough for the first ...
        ((8,) * 9, {"g0-1": (0, 1), "g2-4": (2, 3, 4, 5, 6, 7, 8)}),
        ((1,) * 9, {"g0-4": tuple(range(9))}),
        ((16, 64, 32, 32, 128), {"g0": (0,), "g1-2": (1, 2, 3), "g3": (4,)}),  # ... and 128 for a later one
        ((16, 128, 4, 4), {"g0": (0,), "g1-2": (1, 2, 3)}),  # what is left is not worth an object
        ((16, 4), {"g0-1": (0, 1)}),
        ((1,), {"g0": (0,)}),
    ],
)
def test_small_groups_of_layers_are_one_object(make_pool: Any, kib: tuple[int, ...], parts: dict[str, Any]) -> None:
    pool = make_pool(widths=[each * WIDE // 128 for each in kib])
    specs = object_specs(pool, Layout.GROUPED, len(kib))
    assert {spec.part: spec.layers for spec in specs} == parts
    assert [spec.payload for spec in specs] == [sum(kib[layer] << 10 for layer in spec.layers) for spec in specs]


def test_groups_without_buffers_have_no_object(make_pool: Any) -> None:
    """An indexer on some layers only: no read, and nothing to wait for, where it has no buffer."""
    widths = (4 * WIDE, 8 * WIDE, 12 * WIDE)
    pool = make_pool(PoolName.INDEXER, widths=widths, layer_mapping={0: 0, 2: 1, 9: 2}, rows_are_pages=True)
    assert [outline(spec) for spec in object_specs(pool, Layout.GROUPED, 12)] == [
        ("g0", False, [0], (0,)),
        ("g2", False, [1], (2,)),
        ("g4", False, [2], (9,)),
    ]
    (page,) = object_specs(pool, Layout.PAGE, 12)
    assert ranges_of(page, range(1, 2)) == []
    small = make_pool(PoolName.INDEXER, widths=(1, 2, 3), layer_mapping={3: 0, 5: 1, 9: 2}, rows_are_pages=True)
    assert [outline(spec) for spec in object_specs(small, Layout.GROUPED, 12)] == [
        ("g2-4", False, [0, 1, 2], (3, 5, 9))
    ]


def test_packed_draft_in_groups_has_objects_of_its_own(make_pool: Any) -> None:
    mapping = {0: (0, 3), 1: (1, 4), 2: 2}
    widths = [WIDE * width for width in (1, 1, 1, 2, 2)]
    pool = make_pool(widths=widths, num_components=2, layer_mapping=mapping, num_draft_layers=2)
    specs = object_specs(pool, Layout.GROUPED, 3)
    assert [outline(spec) for spec in specs] == [
        ("g0", False, [0, 5], (0,)),
        ("g1", False, [1, 6], (1,)),
        ("g2", False, [2, 7], (2,)),
        ("d0", True, [3, 8], (0,)),
        ("d1", True, [4, 9], (1,)),
    ]
    assert all(fragment.draft is spec.draft for spec in specs for fragment in spec.fragments)
    small = make_pool(widths=(1, 1, 1, 2, 2), num_components=2, layer_mapping=mapping, num_draft_layers=2)
    assert [outline(spec) for spec in object_specs(small, Layout.GROUPED, 3)] == [
        ("g0-2", False, [0, 5, 1, 6, 2, 7], (0, 1, 2)),
        ("d0-1", True, [3, 8, 4, 9], (0, 1)),
    ]


def test_packed_draft_in_pages_lies_behind_the_target(make_pool: Any) -> None:
    mapping = {0: (0, 2), 1: 1}
    one = make_pool(widths=(1, 1, 2), layer_mapping=mapping, num_draft_layers=1)
    (spec,) = object_specs(one, Layout.PAGE, 2)
    assert outline(spec) == ("", False, [0, 1, 2], (0, 1))
    assert (spec.payload, spec.size, spec.target_size) == (32, 32, 16)
    assert ranges_of(spec, range(1)) == [(0, 8), (16, 16)]  # the draft comes with the layer that it rides on

    two = make_pool(widths=(1, 1, 2), num_components=2, layer_mapping=mapping, num_draft_layers=1)
    (spec,) = object_specs(two, Layout.PAGE, 2)
    assert outline(spec) == ("", False, [0, 1, 3, 4, 2, 5], (0, 1))
    assert (spec.size, spec.target_size) == (64, 32)


def test_target_objects_are_the_same_with_and_without_a_draft(make_pool: Any) -> None:
    alone = make_pool(widths=(1, 1), num_components=2)
    beside = make_pool(widths=(1, 1, 2), num_components=2, layer_mapping={0: (0, 2), 1: 1}, num_draft_layers=1)

    def target(pool: DevicePool) -> list[tuple[str, int, list[tuple[int, int, int]]]]:
        specs = [spec for spec in object_specs(pool, Layout.GROUPED, 2) if not spec.draft]
        return [(s.part, s.size, [(f.offset, f.nbytes, f.layer) for f in s.fragments]) for s in specs]

    assert target(alone) == target(beside)
    assert alone.geometry(draft=False) == beside.geometry(draft=False)


def test_drafts_of_other_geometry_have_other_keys(make_pool: Any) -> None:
    def parts(width: int) -> list[str]:
        mapping = {0: (0, 2), 1: 1}
        pool = make_pool(widths=(WIDE, WIDE, width), layer_mapping=mapping, num_draft_layers=1)
        return [spec.part for spec in object_specs(pool, Layout.GROUPED, 2)]

    assert parts(2)[:2] == parts(3)[:2] == ["g0", "g1"]
    assert parts(2) == parts(2)
    assert parts(2)[2] != parts(3)[2]


def test_components_apart_are_objects_of_their_own(make_pool: Any) -> None:
    pool = make_pool(
        widths=(1, 1, 2), num_components=2, layer_mapping={0: (0, 2), 1: 1}, num_draft_layers=1, packed=False
    )
    specs = object_specs(pool, Layout.PAGE, 2)
    assert [outline(spec) for spec in specs] == [("_0", False, [0, 1, 2], (0, 1)), ("_1", False, [3, 4, 5], (0, 1))]
    assert [(spec.size, spec.target_size) for spec in specs] == [(32, 16)] * 2


@pytest.mark.parametrize("layout", Layout)
def test_objects_of_a_draft_pool_are_the_drafts(make_pool: Any, layout: Layout) -> None:
    specs = object_specs(make_pool(PoolName.DRAFT), layout, 2)
    assert all(spec.draft and spec.target_size == spec.size for spec in specs)
    assert all(fragment.draft for spec in specs for fragment in spec.fragments)


def test_layers_beyond_the_target_are_refused(make_pool: Any) -> None:
    with pytest.raises(ValueError, match="pool kv: expected transfer layers below 1, got a buffer for layer 1"):
        object_specs(make_pool(), Layout.GROUPED, 1)


def test_ranges_merge_neighbours(make_pool: Any) -> None:
    (spec,) = object_specs(make_pool(widths=(1, 2, 3), num_components=2), Layout.PAGE, 3)
    assert ranges_of(spec, range(3)) == [(0, 96)]
    assert ranges_of(spec, range(1, 3)) == [(8, 40), (56, 40)]
    assert ranges_of(spec, range(2, 3)) == [(24, 24), (72, 24)]
    assert ranges_of(spec, range(0)) == []


@st.composite
def pools(draw: st.DrawFn) -> tuple[DevicePool, int]:
    """Pools of every shape that geometry allows: sparse, several buffers a layer, with packed drafts or without."""
    num_layers = draw(st.integers(1, 20))
    draft = draw(st.integers(0, min(3, num_layers)))
    layers = sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1)) | set(range(draft)))
    mapping: dict[int, tuple[int, ...]] = {}
    count = 0
    for layer in layers:
        wanted = draw(st.integers(1, 2))
        mapping[layer] = tuple(range(count, count + wanted))
        count += wanted
    for depth in range(draft):
        mapping[depth] = (*mapping[depth], count + depth)
    width = st.integers(1, 9) | st.integers(1000, 40_000)  # of neighbours in one object, and in one of their own
    widths = draw(st.lists(width, min_size=count + draft, max_size=count + draft))
    components = [
        [torch.zeros(4, width, dtype=torch.uint8) for width in widths] for _ in range(draw(st.integers(1, 3)))
    ]
    pool = DevicePool(
        PoolName.KV,
        PoolName.KV,
        components,
        mapping,
        2,
        draw(st.booleans()),
        draw(st.booleans()),
        num_draft_layers=draft,
    )
    return pool, num_layers


@given(pools(), st.sampled_from(Layout))
def test_objects_partition_the_pages_bytes(case: tuple[DevicePool, int], layout: Layout) -> None:
    pool, num_layers = case
    specs = object_specs(pool, layout, num_layers)
    assert sorted(f.buffer for spec in specs for f in spec.fragments) == list(range(len(pool.buffers)))
    assert len({spec.part for spec in specs}) == len(specs)
    for spec in specs:
        end = 0
        for fragment in spec.fragments:
            assert (fragment.offset, fragment.nbytes) == (end, pool.page_bytes(fragment.buffer))
            assert fragment.layer in spec.layers
            end += fragment.nbytes
        assert end == spec.payload == spec.size - (TAIL_BYTES if layout is Layout.GROUPED else 0)
        drafts = [fragment.draft for fragment in spec.fragments]
        assert drafts == sorted(drafts)  # the target's bytes are a prefix
        if not spec.draft:
            behind = sum(fragment.nbytes for fragment in spec.fragments if fragment.draft)
            assert spec.target_size == spec.size - behind


@given(pools(), st.sampled_from(Layout))
def test_ranges_of_all_layers_partition_the_payload(case: tuple[DevicePool, int], layout: Layout) -> None:
    pool, num_layers = case
    for spec in object_specs(pool, layout, num_layers):
        single = [pair for layer in range(num_layers) for pair in ranges_of(spec, range(layer, layer + 1))]
        end = 0
        for offset, nbytes in sorted(single):
            assert offset == end
            end += nbytes
        assert end == spec.payload
        whole = ranges_of(spec, range(num_layers))
        assert whole == [(0, spec.payload)]


def test_parts_name_the_groups_that_an_object_holds(make_pool: Any) -> None:
    """An object of other groups under the same key would be taken for one of a wrong size, and never be replaced."""
    specs = object_specs(make_pool(widths=(WIDE,) * 9), Layout.GROUPED, 9)
    assert [spec.part for spec in specs] == [f"g{spec.group}" for spec in specs]
    packed = make_pool(widths=(1, 1), layer_mapping={0: (0, 1)}, num_draft_layers=1)
    assert re.fullmatch(r"d0\.[0-9a-f]{8}", object_specs(packed, Layout.GROUPED, 1)[1].part)


@given(pools())
def test_objects_end_where_groups_of_layers_end(case: tuple[DevicePool, int]) -> None:
    pool, num_layers = case
    groups = layer_groups(num_layers)
    found = [spec for spec in object_specs(pool, Layout.GROUPED, num_layers) if not spec.draft]
    assert found == sorted(found, key=lambda spec: spec.layers)
    for spec in found:
        first, last = (next(at for at, group in enumerate(groups) if spec.layers[end] in group) for end in (0, -1))
        assert spec.group == first
        assert spec.part == (f"g{first}" if first == last else f"g{first}-{last}")
        others = [layer for other in found if other is not spec for layer in other.layers]
        assert not any(layer in group for group in groups[first : last + 1] for layer in others)
