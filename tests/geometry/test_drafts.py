"""Drafts: packed or beside, and refused when the pools are built rather than misplaced later."""

from __future__ import annotations

import re
from typing import Any

import pytest
import structlog.testing
import torch

from softload.config import Layout
from softload.geometry import (
    DevicePoolGroup,
    DraftBuffers,
    DraftMismatchError,
    DraftMode,
    attach_draft,
    build_pool_group,
    plan_draft,
    without_unfit_draft,
)
from softload.transfer import PoolName

from .engine_pools import PAGE, MLATokenToKVPool

KV, INDEXER = PoolName.KV, PoolName.INDEXER
PACKED, SIDECAR, NONE = DraftMode


def draft(layers: int = 1, *, components: int = 1, rows: int = 32, **options: Any) -> DraftBuffers:
    buffers = [[torch.zeros(rows, 2) for _ in range(layers)] for _ in range(components)]
    return DraftBuffers(**{"pools": {KV: buffers}, "page_size": 4, **options})


def test_no_draft(make_pool: Any) -> None:
    targets = [make_pool()]
    assert plan_draft(targets, None) is NONE
    assert plan_draft(targets, draft(mode=NONE, page_size=64), unified_kv=True) is NONE
    assert attach_draft(targets, None) == tuple(targets)


@pytest.mark.parametrize(
    ("asked", "layers", "components", "mapping", "planned"),
    [
        (None, 1, 1, {0: 0, 1: 1}, PACKED),
        (None, 2, 1, {0: 0, 1: 1}, PACKED),
        (None, 3, 1, {0: 0, 1: 1}, SIDECAR),  # more draft layers than target layers
        (None, 1, 2, {0: 0, 1: 1}, SIDECAR),  # K and V beside a latent
        (None, 1, 1, {1: 0, 3: 1}, SIDECAR),  # no target buffer to ride on
        (PACKED, 2, 1, {0: 0, 1: 1}, PACKED),
        (SIDECAR, 1, 1, {0: 0, 1: 1}, SIDECAR),
        (SIDECAR, 2, 1, {0: 0, 1: 1}, SIDECAR),
        (SIDECAR, 9, 1, {0: 0, 1: 1}, SIDECAR),
    ],
)
def test_plan(
    make_pool: Any, asked: DraftMode | None, layers: int, components: int, mapping: dict[int, int], planned: DraftMode
) -> None:
    targets = [make_pool(layer_mapping=mapping)]
    buffers = draft(layers, components=components, mode=asked)
    assert plan_draft(targets, buffers) is planned
    pools = attach_draft(targets, buffers)
    assert len(pools) == (1 if planned is PACKED else 2)
    assert DevicePoolGroup(pools, 4, 4).num_draft_layers == layers


def test_packed_lies_behind_the_target_in_every_component(make_pool: Any) -> None:
    target = make_pool(num_components=2)
    buffers = draft(2, components=2, mode=PACKED)
    (pool,) = attach_draft([target], buffers)
    given = [tensor for component in buffers.pools[KV] for tensor in component]  # type: ignore[union-attr]
    assert [pool.buffers[index] is tensor for index, tensor in zip((2, 3, 6, 7), given, strict=True)] == [True] * 4
    assert pool.layer_mapping == {0: (0, 2), 1: (1, 3)}
    assert pool.num_draft_layers == 2


def test_sidecar_has_names_and_layers_of_its_own(make_pool: Any) -> None:
    targets = [make_pool(), make_pool(INDEXER, widths=(3,), layer_mapping={1: 0}, rows_are_pages=True)]
    pools = {KV: [[torch.zeros(32, 2) for _ in range(3)]], INDEXER: [[torch.zeros(8, 40_000) for _ in range(3)]]}
    attached = attach_draft(targets, DraftBuffers(pools=pools, page_size=4, mode=SIDECAR))
    assert [(pool.name, pool.index_source) for pool in attached[2:]] == [
        (PoolName.DRAFT, KV),
        (PoolName.DRAFT_INDEXER, KV),
    ]
    assert [pool.rows_are_pages for pool in attached[2:]] == [False, True]
    specs = DevicePoolGroup(attached, 2, 4).specs(Layout.GROUPED)
    assert [spec.layers for spec in specs[PoolName.DRAFT_INDEXER]] == [(0,), (1,), (2,)]


UNPACKABLE = [
    (
        draft(3, mode=PACKED),
        {0: 0, 1: 1},
        "packed draft of pool kv: expected at most as many layers as the target has (2), got 3",
    ),
    (
        draft(1, mode=PACKED),
        {1: 0, 3: 1},
        "packed draft of pool kv: expected target buffers on transfer layers 0 to 0 for the draft to ride on, "
        "got none on [0]",
    ),
    (draft(1, components=2, mode=PACKED), {0: 0, 1: 1}, "expected 1 components as the target has, got 2"),
]


@pytest.mark.parametrize(("buffers", "mapping", "message"), UNPACKABLE)
def test_refuses_to_pack(make_pool: Any, buffers: DraftBuffers, mapping: dict[int, int], message: str) -> None:
    with pytest.raises(DraftMismatchError, match=re.escape(message)) as refused:
        plan_draft([make_pool(layer_mapping=mapping)], buffers)
    assert refused.value.fits == (SIDECAR, NONE)
    assert str(refused.value).endswith("; what fits: sidecar, none")


@pytest.mark.parametrize("mode", [None, PACKED, SIDECAR])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 8}, "draft of pool kv: expected page size 4, got 8"),
        ({"depths": (1, 0), "layers": 2}, "expected its layers in the order of their depths [0, 1], got [1, 0]"),
        ({"depths": (0,), "layers": 2}, "expected its layers in the order of their depths [0, 1], got [0]"),
        ({"rows": 28}, "draft of pool kv: expected the target's 8 pages, got 7"),
        ({"pools": {}}, "draft: expected buffers for at least one pool, got none"),
        ({"layers": 0}, "draft of pool kv: expected equally many layers, at least 1, in every component, got [0]"),
        ({"pools": {PoolName.C4: [[torch.zeros(32, 2)]]}}, "counterparts of the target's pools (kv), got one of deep"),
        ({"pools": {INDEXER: [[torch.zeros(32, 2)]]}}, "counterparts of the target's pools (kv), got one of indexer"),
        ({"pools": {KV: [[torch.zeros(32, 4)[:, ::2]]]}}, "pool draft: buffer 0: expected every row to be contiguous"),
    ],
)
def test_refuses_in_any_mode(make_pool: Any, mode: DraftMode | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftMismatchError, match=re.escape(message)) as refused:
        attach_draft([make_pool()], draft(mode=mode, **options))
    assert refused.value.fits == (NONE,)


def test_refuses_a_draft_beside_unified_kv(make_pool: Any) -> None:
    with pytest.raises(DraftMismatchError, match="expected a target with pools of its own .*, got one unified KV pool"):
        plan_draft([make_pool()], draft(), unified_kv=True)


def test_refuses_unequal_layers_of_a_set(make_pool: Any) -> None:
    targets = [make_pool(), make_pool(INDEXER, rows_are_pages=True)]
    pools = {KV: [[torch.zeros(32, 2) for _ in range(2)]], INDEXER: [[torch.zeros(8, 2)]]}
    with pytest.raises(DraftMismatchError, match="same number of layers in every pool, got kv: 2, indexer: 1"):
        plan_draft(targets, DraftBuffers(pools=pools, page_size=4))


def test_an_attached_draft_that_was_rebuilt_is_noticed(make_pool: Any) -> None:
    layers = [torch.zeros(32, 2)]
    (pool,) = attach_draft([make_pool()], DraftBuffers(pools={KV: lambda: [layers]}, page_size=4, mode=PACKED))
    pool.check_alive()
    layers[0] = torch.zeros(32, 2)
    with pytest.raises(RuntimeError, match="pool kv: the engine's pool was rebuilt: expected buffer 2"):
        pool.check_alive()


def test_a_draft_that_does_not_fit_is_switched_off_and_said_so(make_pool: Any) -> None:
    targets = [make_pool()]
    with structlog.testing.capture_logs() as logs:
        assert without_unfit_draft(lambda d: attach_draft(targets, d), draft(page_size=64)) == tuple(targets)
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("draft.disabled", "warning")]
    assert "64" in logs[0]["reason"]
    with structlog.testing.capture_logs() as logs:
        assert without_unfit_draft(lambda d: attach_draft(targets, d), draft()) != tuple(targets)
    assert logs == []


def test_an_engines_own_draft_pools_can_be_switched_off_as_well() -> None:
    target, fitting, other = MLATokenToKVPool(), MLATokenToKVPool(1), MLATokenToKVPool(1, page_size=8)

    def build(pools: list[MLATokenToKVPool] | None) -> DevicePoolGroup:
        return build_pool_group(target, PAGE, draft_pools=pools or ())

    assert without_unfit_draft(build, [fitting]).has_draft
    with structlog.testing.capture_logs() as logs:
        assert not without_unfit_draft(build, [other]).has_draft
    assert [entry["event"] for entry in logs] == ["draft.disabled"]
