"""No input makes an assembly return ranges that overlap, leave their buffers, or disagree with the object's size."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import HealthCheck, event, given, settings

from softload.config import Layout
from softload.geometry import (
    TAIL_BYTES,
    DevicePool,
    DevicePoolGroup,
    DraftBuffers,
    DraftMode,
    HybridLayers,
    build_pool_group,
    deepseek_v4_pool_group,
    dsa_pool_group,
    hybrid_pool_group,
    layer_groups,
    mha_pool_group,
    mla_pool_group,
    ranges_of,
    ring_view,
)
from softload.transfer import PoolName

KV, INDEXER, SWA = PoolName.KV, PoolName.INDEXER, PoolName.SWA
ARENA = torch.zeros(1 << 14, dtype=torch.uint8)
"""What nasty tensors are views of, so that they can share bytes."""


@st.composite
def tensors(draw: st.DrawFn, rows: int, width: int) -> torch.Tensor:
    """Mostly what is asked for; now and then strided, shared, short, empty, transposed, misaligned or of other type."""
    kind = draw(st.sampled_from(["good"] * 50 + ["wide", "shared", "short", "empty", "turned", "odd", "overlapping"]))
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
    if kind == "wide":
        return torch.zeros(rows, width + draw(st.integers(1, 3)), dtype=dtype)[:, :width]
    if kind == "shared":
        offset = draw(st.integers(0, 64))
        return ARENA[offset : offset + rows * width].view(rows, width)
    if kind == "short":
        return torch.zeros(draw(st.integers(1, rows)), width, dtype=dtype)
    if kind == "empty":
        return torch.zeros(draw(st.sampled_from([(0, width), (rows, 0)])), dtype=dtype)
    if kind == "turned":
        return torch.zeros(width, rows, dtype=dtype).t()
    if kind == "odd":
        return torch.zeros(rows * width + 3, dtype=dtype)[3:].view(rows, width)
    if kind == "overlapping":
        stride = draw(st.integers(0, width))
        return ARENA.as_strided((rows, width), (stride, 1), draw(st.integers(0, 8)))
    return torch.zeros(rows, width, dtype=dtype)


@st.composite
def layers(draw: st.DrawFn, rows: int, count: int) -> list[torch.Tensor]:
    """Buffers of about `count` layers, one of them perhaps twice."""
    width = draw(st.integers(1, 9))
    extra = draw(st.sampled_from([0] * 50 + [-1, 1]))
    found = [draw(tensors(rows, width)) for _ in range(max(0, count + extra))]
    if found and draw(st.integers(0, 19)) == 0:
        found.append(found[0])
    return found


@st.composite
def drafts(draw: st.DrawFn, page_size: int, pages: int, family: str) -> DraftBuffers | None:
    """Mostly one that suits the family."""
    if draw(st.booleans()):
        return None
    count = draw(st.integers(0, 5))
    rows = {KV: pages * page_size, INDEXER: pages, SWA: pages}
    fitting = {"dsa": (KV, INDEXER), "v4": (SWA,)}.get(family, (KV,))
    names = draw(st.sampled_from([fitting] * 12 + [(KV,), (KV, INDEXER), (SWA,), (KV, SWA), (INDEXER,), ()]))
    components = draw(st.sampled_from([2 if family == "mha" else 1] * 6 + [1, 2]))
    return DraftBuffers(
        pools={name: [draw(layers(rows[name], count)) for _ in range(components)] for name in names},
        page_size=draw(st.sampled_from([page_size] * 9 + [page_size + 1])),
        mode=draw(st.sampled_from([None, *DraftMode])),
        depths=draw(st.sampled_from([None, None, tuple(range(count)), tuple(range(count))[::-1]])),
    )


@st.composite
def hybrid_layers(draw: st.DrawFn, layer_ids: list[int], rows: int, *, paged: bool) -> HybridLayers:
    """Layers of one kind; now and then with a mapping of anything to anything."""
    if draw(st.integers(0, 9)) == 0:
        mapping = draw(st.dictionaries(st.integers(-1, 6), st.integers(-1, 4), max_size=5))
    else:
        mapping = {layer: index for index, layer in enumerate(layer_ids)}
    components = [draw(layers(rows, len(layer_ids))) for _ in range(draw(st.integers(1, 2)))]
    return HybridLayers(components, mapping, rows_are_pages=paged)


@st.composite
def groups(draw: st.DrawFn) -> Callable[[], DevicePoolGroup]:
    """A call of one of the assemblies."""
    page_size, pages, count = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(0, 5))
    tokens, family = pages * page_size, draw(st.sampled_from(["mha", "mla", "dsa", "v4", "hybrid", "engine"]))
    draft = draw(drafts(page_size, pages, family))
    paged = draw(st.sampled_from([False, False, True]))
    if family == "mha":
        keys, values = (draw(layers(pages if paged else tokens, count)) for _ in range(2))
        packed = draw(st.booleans())
        return lambda: mha_pool_group(keys, values, page_size, draft=draft, rows_are_pages=paged, packed=packed)
    if family == "mla":
        latents = draw(layers(pages if paged else tokens, count))
        return lambda: mla_pool_group(latents, page_size, draft=draft, rows_are_pages=paged)
    if family == "dsa":
        some = draw(st.one_of(st.none(), st.lists(st.integers(-1, 6), max_size=5)))
        kv = draw(layers(tokens, count))
        indexer = draw(layers(pages, count if some is None else len(some)))
        return lambda: dsa_pool_group(kv, indexer, page_size, indexer_layers=some, draft=draft)
    if family == "v4":
        ratios = draw(st.lists(st.sampled_from([0, 4, 128, 4, 0, 128, 2]), max_size=5))
        counts = {
            SWA: len(ratios),
            PoolName.C4: ratios.count(4),
            PoolName.C4_INDEXER: ratios.count(4),
            PoolName.C128: ratios.count(128),
            PoolName.C4_INDEXER_STATE: ratios.count(4),
        }
        buffers = {name: draw(layers(pages, number)) for name, number in counts.items()}
        ring = draw(st.integers(0, 3))
        states = draw(layers(pages * ring + 1, ratios.count(4)))
        return lambda: deepseek_v4_pool_group(
            ratios, page_size, {**buffers, PoolName.C4_STATE: [ring_view(each, ring) for each in states]}, draft=draft
        )
    if family == "hybrid":
        kinds = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        by_kind = [[layer for layer, kind in enumerate(kinds) if kind == each] for each in range(3)]
        full = draw(hybrid_layers(by_kind[0], tokens, paged=False))
        swa = draw(hybrid_layers(by_kind[1], tokens, paged=False))
        mamba = draw(hybrid_layers(by_kind[2], pages, paged=True))
        return lambda: hybrid_pool_group(full, page_size, swa=swa, mamba=mamba, draft=draft)
    kvcache = SimpleNamespace(
        page_size=page_size, layer_num=count, kv_buffer=draw(layers(tokens, count)), index_k_with_scale_buffer=[]
    )
    kvcache.index_k_with_scale_buffer = draw(layers(pages, count))
    drafted: list[Any] = [
        SimpleNamespace(
            page_size=page_size,
            layer_num=1,
            kv_buffer=draw(layers(tokens, 1)),
            index_k_with_scale_buffer=draw(layers(pages, 1)),
        )
        for _ in range(draw(st.integers(0, 2)))
    ]
    return lambda: build_pool_group(kvcache, page_size, draft_pools=drafted)


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(groups())
def test_ranges_are_apart_inside_and_as_large_as_the_object(build: Callable[[], DevicePoolGroup]) -> None:
    try:
        group = build()
    except (ValueError, TypeError) as error:
        assert str(error), "a refusal says why"
        event("refused")
        return
    event("built" + (" with a draft" if group.has_draft else ""))
    _check_memory(group)
    for layout in Layout:
        for pool in group.pools:
            _check_objects(group, pool, layout)


def _check_memory(group: DevicePoolGroup) -> None:
    """Every page of every buffer is in that buffer's memory, and no two share a byte."""
    ranges = []
    for pool in group.pools:
        for index, buffer in enumerate(pool.buffers):
            storage = buffer.untyped_storage()
            component, at = divmod(index, len(pool.components[0]))
            pointer, row_stride, nbytes = pool.buffer_meta[component][at]
            stride = row_stride if pool.rows_are_pages else row_stride * pool.page_size
            view = pool.page_views[index]
            assert (view.data_ptr(), view.shape[1], nbytes) == (pointer, nbytes, pool.page_bytes(index))
            assert view.shape[0] == pool.num_pages and (pool.num_pages == 1 or view.stride(0) == stride)
            for page in range(pool.num_pages):
                start = pointer + page * stride
                assert storage.data_ptr() <= start
                assert start + nbytes <= storage.data_ptr() + storage.nbytes()
                ranges.append((start, start + nbytes))
    ordered = np.array(sorted(ranges))
    assert (ordered[1:, 0] >= ordered[:-1, 1]).all(), "two pages share bytes"


def _check_objects(group: DevicePoolGroup, pool: DevicePool, layout: Layout) -> None:
    """Each buffer is in exactly one object, at a place of its own, and the layers' ranges make the object up."""
    specs = group.specs(layout)[pool.name]
    assert sorted(fragment.buffer for spec in specs for fragment in spec.fragments) == list(range(len(pool.buffers)))
    assert len({spec.part for spec in specs}) == len(specs)
    for spec in specs:
        offset = 0
        for fragment in spec.fragments:
            assert (fragment.offset, fragment.nbytes) == (offset, pool.page_bytes(fragment.buffer))
            offset += fragment.nbytes
        assert spec.payload == offset
        assert spec.size == offset + (TAIL_BYTES if layout is Layout.GROUPED else 0)
        assert 0 < spec.target_size <= spec.size
        found = sorted(
            pair
            for layers in layer_groups(max(group.num_layers, spec.layers[-1] + 1))
            for pair in ranges_of(spec, layers)
        )
        assert sum(nbytes for _, nbytes in found) == spec.payload
        assert all(start + nbytes <= after for (start, nbytes), (after, _) in zip(found, found[1:], strict=False))
