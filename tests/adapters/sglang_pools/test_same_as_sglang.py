"""The same pointers, sizes, offsets, transfers and page metadata as the assembler of SGLang 0.5.23, for its pools."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer
from sglang.srt.mem_cache.hicache_storage import PoolName as TheirName
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_direct_linker import _storage_suffix

from softload import ComponentTransfer, DevicePool, DevicePoolGroup, HitPolicy, Layout, LoaderConfig, PoolName
from softload.geometry import DraftMode, build_pool_group
from softload.geometry.group import ResolvedComponent
from softload.keys import KeySpace

from . import engine_pools as pools
from .engine_pools import PAGE_SIZE, V4_PAGE_SIZE, assembled_by_sglang
from .tally import COMPARED

KV, SWA, MAMBA = PoolName.KV, PoolName.SWA, PoolName.MAMBA


@dataclass(frozen=True, slots=True)
class Case:
    """Both views of the same pools."""

    theirs: Any
    ours: DevicePoolGroup
    page_size: int


def case(
    kvcache: Any,
    page_size: int,
    components: Sequence[str],
    *,
    states: Any = None,
    packed: Sequence[Any] = (),
    sidecar: Sequence[Any] = (),
) -> Case:
    theirs = assembled_by_sglang(kvcache, page_size, components, pool_of_states=states, packed=packed, sidecar=sidecar)
    mode = DraftMode.PACKED if packed else DraftMode.SIDECAR if sidecar else None
    ours = build_pool_group(
        kvcache, page_size, req_to_token_pool=states, draft_pools=[*packed, *sidecar], draft_mode=mode
    )
    return Case(theirs, ours, page_size)


def dsa_case(drafts: int) -> Case:
    return case(pools.dsa(4), PAGE_SIZE, ["FULL"], packed=[pools.dsa(1) for _ in range(drafts)])


def v4_case(drafts: int, start: int = 0, end: int = 6) -> Case:
    target = pools.deepseek_v4([0, 0, 4, 128, 4, 128], start=start, end=end)
    packed = [pools.deepseek_v4([0], draft=True) for _ in range(drafts)]
    return case(target, V4_PAGE_SIZE, ["FULL", "SWA"], packed=packed)


def mamba_mla_case(start: int = 0, draft_layers: int = 0) -> Case:
    states = pools.states([start + 1, start + 2, start + 3], start)
    sidecar = [pools.mha(draft_layers)] if draft_layers else []
    target = pools.mamba_mla([start, start + 4], states, start)
    return case(target, PAGE_SIZE, ["FULL", "MAMBA"], states=states, sidecar=sidecar)


def mamba_swa_case() -> Case:
    states = pools.states([2, 4])
    return case(pools.swa([0, 5], [1, 3, 6]), PAGE_SIZE, ["FULL", "SWA", "MAMBA"], states=states)


CASES: dict[str, Callable[[], Case]] = {
    "dsa": lambda: dsa_case(0),
    "dsa, 1 packed": lambda: dsa_case(1),
    "dsa, 3 packed": lambda: dsa_case(3),
    "dsa, packed as one pool": lambda: case(pools.dsa(4), PAGE_SIZE, ["FULL"], packed=[pools.dsa(2)]),
    "deepseek v4": lambda: v4_case(0),
    "deepseek v4, 1 packed": lambda: v4_case(1),
    "deepseek v4, 3 packed": lambda: v4_case(3),
    "deepseek v4, a stage": lambda: v4_case(0, 2, 5),
    "deepseek v4, a stage, 2 packed": lambda: v4_case(2, 1, 4),
    "mamba + mla": lambda: mamba_mla_case(),
    "mamba + mla, a stage": lambda: mamba_mla_case(start=7),
    "mamba + mla, sidecar": lambda: mamba_mla_case(draft_layers=3),
    "mamba + swa": lambda: mamba_swa_case(),
}


@functools.cache
def built(name: str) -> Case:
    return CASES[name]()


def same(name: str, kind: str, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    assert list(ours) == list(theirs)
    COMPARED[name, kind] += len(ours)


@pytest.mark.parametrize("name", CASES)
def test_pools(name: str) -> None:
    """Names, sources, layers, and each buffer's address, stride and bytes a page."""
    both = built(name)
    same(name, "pools", [pool.name for pool in both.ours.pools], [str(entry.name) for entry in both.theirs.entries])
    same(
        name,
        "pools",
        [pool.index_source for pool in both.ours.pools],
        [str(entry.indices_from_pool) for entry in both.theirs.entries],
    )
    assert both.ours.page_size == both.theirs.page_size
    assert both.ours.num_layers == both.theirs.num_layers
    assert both.ours.rank_replicated == both.theirs.rank_replicated
    for pool, entry in zip(both.ours.pools, both.theirs.entries, strict=True):
        ours = [meta for component in pool.buffer_meta for meta in component]
        same(name, "buffers", ours, [meta for component in entry.buffer_meta for meta in component])


@pytest.mark.parametrize("name", CASES)
def test_offsets_by_layer(name: str) -> None:
    """Where each layer's bytes are in the object of a page."""
    both = built(name)
    for pool, entry in zip(both.ours.pools, both.theirs.entries, strict=True):
        (spec,) = both.ours.specs(Layout.PAGE)[pool.name]
        assert spec.size == sum(size for component in entry.buffer_meta for _, _, size in component)
        for layer in range(both.ours.num_layers + 1):
            found = [f for f in spec.fragments if f.layer == layer]
            theirs = entry.get_prepared_layer_range_meta([0], layer)
            if theirs is None:
                assert not found
                continue
            pointers, sizes, offsets = (part[0] for part in theirs)
            expected = sorted(zip(offsets, sizes, pointers, strict=True))
            ours = [(f.offset, f.nbytes, pool.page_views[f.buffer].data_ptr()) for f in found]
            same(name, "offsets", sorted(ours), expected)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_transfers_and_page_metadata(name: str, data: st.DataObject) -> None:
    """For random sets of pages, in any order and twice over too."""
    both = built(name)
    ours, theirs = transfers(both, data)
    resolved = both.ours.resolve(ours)
    if both.ours.draft_pools:
        resolved += both.ours.resolve_draft(
            [ComponentTransfer(PoolName.DRAFT, each.keys, each.slots) for each in ours if each.pool is KV]
        )
    expected = both.theirs.resolve_transfers(theirs)
    same(name, "transfers", [component.pool.name for component in resolved], [str(each.name) for each in expected])
    for component, transfer in zip(resolved, expected, strict=True):
        entry = both.theirs.entry_map[transfer.name]
        assert list(component.keys) == transfer.keys
        assert str(component.hit_policy) == transfer.hit_policy.value
        same(name, "pages", page_starts(component), entry.prepare_locations(transfer.host_indices))
        pointers, sizes = entry.get_page_buffer_meta(transfer.host_indices)
        same(name, "page meta", list(page_meta(component)), list(zip(pointers, sizes, strict=True)))
        check_layers(name, both, component, entry, entry.prepare_locations(transfer.host_indices))


def transfers(both: Case, data: st.DataObject) -> tuple[list[ComponentTransfer], list[PoolTransfer]]:
    """The same logical transfers, in both's words."""
    count = data.draw(st.integers(1, 6))
    keys = [f"page{page}" for page in range(count)]
    ours, theirs = [], []
    for source in dict.fromkeys(pool.index_source for pool in both.ours.target_pools):
        most = min(pool.num_pages for pool in both.ours.pools if pool.index_source is source) - 1
        rows = torch.tensor(data.draw(st.lists(st.integers(0, most), min_size=count, max_size=count)))
        slots = rows if source is MAMBA else (rows[:, None] * both.page_size + torch.arange(both.page_size)).flatten()
        policy = data.draw(st.sampled_from(HitPolicy))
        ours.append(ComponentTransfer(source, tuple(keys), slots, policy))
        theirs.append(PoolTransfer(TheirName(source), None, slots, keys, PoolHitPolicy(policy)))
    return ours, theirs


def page_starts(component: ResolvedComponent) -> list[int]:
    assert component.rows is not None
    span = 1 if component.pool.rows_are_pages else component.pool.page_size
    return [int(row) * span for row in component.rows]


def page_meta(component: ResolvedComponent) -> Iterator[tuple[int, int]]:
    assert component.rows is not None
    for row in component.rows:
        for view in component.pool.page_views:
            yield view[int(row)].data_ptr(), view.shape[1]


def check_layers(name: str, both: Case, component: ResolvedComponent, entry: Any, locations: list[int]) -> None:
    pool: DevicePool = component.pool
    assert component.rows is not None
    (spec,) = both.ours.specs(Layout.PAGE)[pool.name]
    for layer in range(both.ours.num_layers):
        theirs = entry.get_prepared_layer_range_meta(locations, layer)
        found = sorted((f for f in spec.fragments if f.layer == layer), key=lambda f: f.offset)
        if theirs is None:
            assert not found
            continue
        pointers, sizes, offsets = theirs
        for at, row in enumerate(component.rows):
            ours = [(f.offset, f.nbytes, pool.page_views[f.buffer][int(row)].data_ptr()) for f in found]
            same(name, "layer meta", ours, sorted(zip(offsets[at], sizes[at], pointers[at], strict=True)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [(0, 0, 0), (3, 0, 0), (1, 2, 3)])
def test_object_keys(name: str, ranks: tuple[int, int, int]) -> None:
    """The names under which SGLang's linker stores pages."""
    both = built(name)
    tp, cp, pp = ranks
    config = LoaderConfig(layout=Layout.PAGE, tp_rank=tp, cp_rank=cp, pp_rank=pp)
    space = KeySpace.create(config, "", rank_replicated=both.ours.rank_replicated)
    suffix = _storage_suffix(rank_replicated=both.theirs.rank_replicated, tp_rank=tp, attn_cp_rank=cp, pp_rank=pp)
    for pool in both.ours.pools:
        (spec,) = both.ours.specs(Layout.PAGE)[pool.name]
        expected = f"page_{suffix}_{'k' if pool.name is KV else pool.name}"
        same(name, "keys", [space.object_key("page", pool.name, spec.part)], [expected])


@pytest.mark.parametrize("name", ["dsa", "deepseek v4", "mamba + mla", "mamba + swa"])
def test_slots_that_both_refuse(name: str) -> None:
    both = built(name)
    pool, entry = both.ours.pools[0], both.theirs.entries[0]
    size = both.page_size
    last = pool.num_pages * size
    shifted = torch.arange(size) + 1
    torn = torch.cat([torch.arange(size // 2), torch.arange(size // 2) + size])
    for slots in (shifted, torn, torch.arange(size) + last, torch.arange(size) - size, torch.arange(size - 1)):
        with pytest.raises(ValueError):
            entry.prepare_locations(slots)
        with pytest.raises(ValueError, match=f"pool {pool.name}: expected .*, got "):
            pool.rows(slots, 1)


def test_what_sglang_cannot_and_we_can() -> None:
    """An indexer in some of the layers; plain MHA and MLA."""
    sparse = pools.dsa(4, without_indexer=(1, 3))
    with pytest.raises(ZeroDivisionError):
        assembled_by_sglang(sparse, PAGE_SIZE, ["FULL"])
    assert dict(build_pool_group(sparse, PAGE_SIZE).pool(PoolName.INDEXER).layer_mapping) == {0: (0,), 2: (1,)}
    for kvcache in (pools.mha(2), pools.mla(2)):
        with pytest.raises(ValueError):
            assembled_by_sglang(kvcache, PAGE_SIZE, ["FULL"])
        assert build_pool_group(kvcache, PAGE_SIZE).num_layers == 2
