"""Groups of pools: what fits together, and what logical components mean in physical pools."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from softload.config import Layout
from softload.geometry import DevicePoolGroup
from softload.transfer import ComponentTransfer, HitPolicy, PoolName

KV, INDEXER, SWA, C4, STATE, MAMBA = (
    PoolName.KV,
    PoolName.INDEXER,
    PoolName.SWA,
    PoolName.C4,
    PoolName.C4_STATE,
    PoolName.MAMBA,
)
DRAFT, DRAFT_INDEXER, DRAFT_SWA = PoolName.DRAFT, PoolName.DRAFT_INDEXER, PoolName.DRAFT_SWA


def component(pool: PoolName, pages: int = 2, *, first: int = 0, **options: Any) -> ComponentTransfer:
    """`pages` pages of 4 tokens, in a row from page `first`."""
    slots = options.pop("slots", torch.arange(first * 4, (first + pages) * 4))
    return ComponentTransfer(pool, tuple(f"{pool}-{page}" for page in range(pages)), slots, **options)


@pytest.fixture
def sparse_group(make_pool: Any) -> DevicePoolGroup:
    """Sliding window, compressed KV, and state that takes SWA's slots through a mapper."""
    pools = [
        make_pool(SWA, SWA, rows_are_pages=True),
        make_pool(C4, KV, widths=(3,), layer_mapping={1: 0}, rows_are_pages=True),
        make_pool(STATE, SWA, widths=(3,), layer_mapping={1: 0}, rows_are_pages=True, index_mapper=lambda s: s + 4),
    ]
    return DevicePoolGroup(pools, 2, 4)


@pytest.fixture
def draft_group(make_pool: Any) -> DevicePoolGroup:
    wide = 16384  # 128 KiB a page: each group of layers is an object of its own
    pools = [
        make_pool(KV, widths=(wide, wide)),
        make_pool(SWA, SWA),
        make_pool(DRAFT, KV, widths=(wide, wide, wide)),
        make_pool(DRAFT_INDEXER, KV, widths=(2,), layer_mapping={1: 0}, rows_are_pages=True),
        make_pool(DRAFT_SWA, SWA, widths=(2,)),
    ]
    return DevicePoolGroup(pools, 2, 4)


def test_faces(draft_group: DevicePoolGroup, sparse_group: DevicePoolGroup) -> None:
    assert [pool.name for pool in draft_group.pools] == [KV, SWA, DRAFT, DRAFT_INDEXER, DRAFT_SWA]
    assert [pool.name for pool in draft_group.target_pools] == [KV, SWA]
    assert [pool.name for pool in draft_group.draft_pools] == [DRAFT, DRAFT_INDEXER, DRAFT_SWA]
    assert (draft_group.has_draft, draft_group.num_draft_layers) == (True, 3)
    assert (sparse_group.has_draft, sparse_group.num_draft_layers) == (False, 0)
    assert draft_group.pool(DRAFT).name is DRAFT
    assert draft_group.device == torch.device("cpu")
    assert "3 draft layers" in repr(draft_group)
    with pytest.raises(
        ValueError, match="expected one of the pools kv, swa, draft, draft_indexer, draft_swa, got deepseek_v4_c4"
    ):
        draft_group.pool(C4)


def test_specs_use_each_models_own_layers(draft_group: DevicePoolGroup) -> None:
    specs = draft_group.specs(Layout.GROUPED)
    assert specs is draft_group.specs(Layout.GROUPED)
    assert [spec.layers for spec in specs[KV]] == [(0,), (1,)]
    assert [spec.layers for spec in specs[DRAFT]] == [(0,), (1,), (2,)]
    assert [spec.group for spec in specs[DRAFT_INDEXER]] == [1]
    assert set(draft_group.specs(Layout.PAGE)) == set(specs)


def test_logical_components_expand_to_all_pools_of_their_source(sparse_group: DevicePoolGroup) -> None:
    kv = component(KV, 3, hit_policy=HitPolicy.TRAILING_PAGES, window=2)
    swa = component(SWA, 2, first=1, hit_policy=HitPolicy.TRAILING_PAGES, window=2)
    resolved = sparse_group.resolve([kv, swa])
    assert [each.pool.name for each in resolved] == [SWA, C4, STATE]
    rows = [None if each.rows is None else each.rows.tolist() for each in resolved]
    assert rows == [[1, 2], [0, 1, 2], [2, 3]]
    assert [each.keys for each in resolved] == [swa.keys, kv.keys, swa.keys]
    assert [(each.hit_policy, each.window) for each in resolved] == [
        (HitPolicy.TRAILING_PAGES, 2),
        (HitPolicy.ALL_PAGES, 1),  # without every page of KV no prefix is whole
        (HitPolicy.TRAILING_PAGES, 2),
    ]


def test_without_slots_there_are_no_rows(sparse_group: DevicePoolGroup) -> None:
    resolved = sparse_group.resolve([component(KV, slots=None), component(SWA, slots=None)])
    assert [each.rows for each in resolved] == [None] * 3


def test_no_pages_are_no_error(sparse_group: DevicePoolGroup, draft_group: DevicePoolGroup) -> None:
    assert sparse_group.resolve([]) == ()
    assert sparse_group.resolve([component(KV, 0), component(SWA, 0)]) == ()
    assert sparse_group.resolve([component(KV, 0)]) == ()
    assert draft_group.resolve_draft([]) == ()
    assert draft_group.resolve_draft([component(DRAFT, 0)]) == ()


def test_partial_transfers_are_refused_unless_asked_for(sparse_group: DevicePoolGroup) -> None:
    kv, swa = component(KV), component(SWA)
    with pytest.raises(
        ValueError, match="components for kv, swa, got only kv: swa, deepseek_v4_c4_state would be left"
    ):
        sparse_group.resolve([kv])
    with pytest.raises(ValueError, match="got only kv: swa"):
        sparse_group.resolve([kv, component(SWA, 0)], allow_missing_kv=True)
    with pytest.raises(ValueError, match="expected a kv component, got only swa"):
        sparse_group.resolve([swa], allow_partial=True)
    assert [each.pool.name for each in sparse_group.resolve([kv], allow_partial=True)] == [C4]
    assert [each.pool.name for each in sparse_group.resolve([swa], allow_missing_kv=True)] == [SWA, STATE]


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([component(MAMBA)], "expected a target component of kv, swa, got mamba"),
        ([component(C4)], "expected a target component of kv, swa, got deepseek_v4_c4"),
        ([component(DRAFT)], "expected a target component of kv, swa, got draft"),
        ([component(KV), component(KV)], "expected one target component of kv, got two"),
        (
            [component(KV, 2, slots=torch.arange(12))],
            "pool kv: expected 8 token slots, or 2 rows, for 2 keys, got 12 slots",
        ),
        ([component(KV, 0, slots=torch.arange(4))], "pool kv: expected 0 token slots, or 0 rows, for 0 keys, got 4"),
        ([component(SWA, 1, slots=torch.arange(-4, 0))], "pool swa: expected slots from 0, got -4"),
        (
            [component(KV), component(SWA, 1, first=7)],
            "pool deepseek_v4_c4_state: expected page rows in [0, 8), got 8 for page 0",
        ),
    ],
)
def test_resolve_refuses(sparse_group: DevicePoolGroup, components: list[ComponentTransfer], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sparse_group.resolve(components)


def test_pools_of_one_source_have_the_same_rows_each_within_its_own_bounds(make_pool: Any) -> None:
    pools = [
        make_pool(KV),
        make_pool(INDEXER, KV, widths=(2,), rows_are_pages=True, pages=4, layer_mapping={1: 0}),
        make_pool(C4, KV, widths=(3,), layer_mapping={1: 0}, rows_are_pages=True),
    ]
    group = DevicePoolGroup(pools, 2, 4)
    for resolved in group.resolve([component(KV, first=2)]):
        assert resolved.rows is not None and resolved.rows.tolist() == [2, 3]
    with pytest.raises(ValueError, match=re.escape("pool indexer: expected page rows in [0, 4), got 4 for page 1")):
        group.resolve([component(KV, first=3)])


def test_rows_of_their_own(make_pool: Any) -> None:
    """A hybrid's state has one row a page, named by slots of its own."""
    group = DevicePoolGroup([make_pool(KV), make_pool(MAMBA, MAMBA, rows_are_pages=True)], 2, 4)
    state = component(MAMBA, slots=torch.tensor([5, 3]), hit_policy=HitPolicy.TRAILING_PAGES)
    resolved = group.resolve([component(KV), state])
    assert [None if each.rows is None else each.rows.tolist() for each in resolved] == [[0, 1], [5, 3]]


def test_draft_components_expand_to_the_whole_draft(draft_group: DevicePoolGroup) -> None:
    resolved = draft_group.resolve_draft([component(DRAFT_SWA, 1, first=3), component(DRAFT, 2, first=1)])
    assert [each.pool.name for each in resolved] == [DRAFT, DRAFT_INDEXER, DRAFT_SWA]
    assert [None if each.rows is None else each.rows.tolist() for each in resolved] == [[1, 2], [1, 2], [3]]


def test_a_draft_with_slots_of_its_own(make_pool: Any) -> None:
    pools = [make_pool(KV), make_pool(DRAFT, DRAFT), make_pool(DRAFT_SWA, DRAFT_SWA)]
    resolved = DevicePoolGroup(pools, 2, 4).resolve_draft([component(DRAFT, 1), component(DRAFT_SWA, 1)])
    assert [each.pool.name for each in resolved] == [DRAFT, DRAFT_SWA]


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([component(DRAFT)], "components for draft, draft_swa, got only draft: draft_swa would be left out"),
        ([component(DRAFT_SWA)], "got only draft_swa: draft, draft_indexer would be left out"),
        ([component(DRAFT_INDEXER)], "expected a draft component of draft, draft_swa, got draft_indexer"),
        ([component(KV)], "expected a draft component of draft, draft_swa, got kv"),
    ],
)
def test_resolve_draft_refuses(draft_group: DevicePoolGroup, components: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        draft_group.resolve_draft(components)


def test_draft_components_without_draft_pools(make_pool: Any, sparse_group: DevicePoolGroup) -> None:
    with pytest.raises(ValueError, match=re.escape("no draft components (there is no draft), got draft")):
        sparse_group.resolve_draft([component(DRAFT)])
    packed = DevicePoolGroup([make_pool(layer_mapping={0: (0, 1)}, num_draft_layers=1)], 1, 4)
    assert (packed.has_draft, packed.num_draft_layers) == (True, 1)
    with pytest.raises(ValueError, match=re.escape("(the draft is packed and comes with the target), got draft")):
        packed.resolve_draft([component(DRAFT)])


@pytest.mark.parametrize(
    ("specs", "num_layers", "message"),
    [
        ([], 2, "expected at least one target pool, got []"),
        ([{"name": DRAFT}], 2, "expected at least one target pool, got ['draft']"),
        ([{}, {}], 2, "expected every pool once, got kv more than once"),
        ([{}, {"name": SWA, "page_size": 2}], 2, "pool swa: expected page size 4, got 2"),
        ([{}, {"name": DRAFT, "page_size": 8}], 2, "pool draft: expected page size 4, got 8"),
        ([{"layer_mapping": {0: 0, 4: 1}}], 4, "pool kv: expected transfer layers below 4, got a buffer for layer 4"),
        ([{}, {"name": DRAFT, "index_source": C4}], 2, "pool draft: expected an index source of draft, draft_swa, kv"),
        ([{}, {"name": SWA, "index_source": DRAFT}], 2, "pool swa: expected a target pool as index source, got draft"),
        (
            [
                {"layer_mapping": {0: (0, 1)}, "num_draft_layers": 1},
                {
                    "name": INDEXER,
                    "widths": (1,) * 4,
                    "layer_mapping": {0: (0, 2), 1: (1, 3)},
                    "num_draft_layers": 2,
                },
            ],
            2,
            "equally many packed draft layers in every pool that has some, got kv: 1, indexer: 2",
        ),
        (
            [{"layer_mapping": {0: (0, 1)}, "num_draft_layers": 1}, {"name": DRAFT}],
            2,
            "either packed or in pools of its own, got it packed in kv and the pools draft",
        ),
    ],
)
def test_refuses_pools(make_pool: Any, specs: list[dict[str, Any]], num_layers: int, message: str) -> None:
    pools = [make_pool(**spec) for spec in specs]
    with pytest.raises(ValueError, match=re.escape(message)):
        DevicePoolGroup(pools, num_layers, 4)


def test_a_sidecar_may_have_more_layers_than_the_target(make_pool: Any) -> None:
    group = DevicePoolGroup([make_pool(KV), make_pool(DRAFT, widths=(16384,) * 5)], 2, 4)
    assert group.num_draft_layers == 5
    assert [spec.layers for spec in group.specs(Layout.GROUPED)[DRAFT]] == [(0,), (1,), (2, 3), (4,)]


def test_fingerprint_is_the_targets_geometry(make_pool: Any) -> None:
    group = DevicePoolGroup([make_pool(KV), make_pool(SWA, SWA)], 2, 4)
    text = group.fingerprint(Layout.GROUPED)
    same = [
        DevicePoolGroup([make_pool(SWA, SWA, pages=3), make_pool(KV)], 2, 4),
        DevicePoolGroup([make_pool(KV), make_pool(SWA, SWA), make_pool(DRAFT)], 2, 4),
        DevicePoolGroup(
            [make_pool(widths=(4, 4, 9), layer_mapping={0: (0, 2), 1: 1}, num_draft_layers=1), make_pool(SWA, SWA)],
            2,
            4,
        ),
    ]
    assert [other.fingerprint(Layout.GROUPED) for other in same] == [text] * 3
    different = [
        group.fingerprint(Layout.PAGE),
        DevicePoolGroup([make_pool(KV), make_pool(SWA, SWA)], 3, 4).fingerprint(Layout.GROUPED),
        DevicePoolGroup([make_pool(KV), make_pool(SWA, SWA)], 2, 4, True).fingerprint(Layout.GROUPED),
        DevicePoolGroup([make_pool(KV)], 2, 4).fingerprint(Layout.GROUPED),
    ]
    assert text not in different
    assert len(set(different)) == len(different)


def test_notices_a_moved_buffer(make_pool: Any) -> None:
    group = DevicePoolGroup([make_pool(KV), make_pool(SWA, SWA)], 2, 4)
    group.check_alive()
    group.pool(SWA).buffers[1].set_(torch.zeros(32, 4, dtype=torch.float16))  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match="pool swa: buffer 1 has moved"):
        group.check_alive()
