"""SGLang's own radix cache and wrapper over small pools, with a linker of ours."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest import mock

import torch
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import mamba as mamba_component
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from tests.adapters.sglang_pools import engine_pools as pools
from tests.adapters.sglang_pools.engine_pools import PAGE_SIZE

from softload.adapters.sglang import SoftloadLinker
from softload.adapters.sglang.engine import pool_group_of
from softload.adapters.sglang.plugin import register
from softload.geometry.group import DevicePoolGroup
from softload.protocols import PageStore
from softload.transfer import PoolName

Slots: TypeAlias = dict[PoolName, torch.Tensor]
"""By index source."""

register()
HookRegistry.apply_hooks()


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A family of pools, and what SGLang's tree needs for it.

    Args:
        kvcache: makes the target's pool.
        components: of the tree.
        page_size: tokens a page.
        window: tokens of the sliding window.
        packed: makes the packed draft's pools.
        sidecar: makes the draft's own pool.
    """

    kvcache: Callable[[], Any]
    components: tuple[ComponentType, ...] = (ComponentType.FULL,)
    page_size: int = PAGE_SIZE
    window: int | None = None
    packed: Callable[[], tuple[Any, ...]] = tuple
    sidecar: Callable[[], tuple[Any, ...]] = tuple


@dataclass(slots=True, eq=False)
class Tree:
    """A cache, its pools, and what a scheduler would do with them."""

    cache: Any
    linker: SoftloadLinker
    allocator: Any
    states: Any
    kind: Kind
    group: DevicePoolGroup
    """The pools as we see them."""
    number: int = 0

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.kind.page_size

    def rows(self, slots: Slots) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Every buffer of every pool, with the rows that some slots mean in it."""
        for pool in self.group.pools:
            mine = slots.get(pool.index_source)
            if mine is None:
                continue
            pages = len(mine) if pool.index_source is PoolName.MAMBA else len(mine) // self.page_size
            rows = torch.from_numpy(pool.rows(pool.translate(mine), pages))
            for index, view in enumerate(pool.page_views):
                yield f"{pool.name}.{index}", view, rows

    def bytes_of(self, slots: Slots) -> dict[str, torch.Tensor]:
        """What lies in some slots, buffer by buffer."""
        return {name: view[rows].clone() for name, view, rows in self.rows(slots)}

    def compute(self, tokens: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
        """Compute tokens as a forward would, and insert them into the tree; the bytes that a restore must bring."""
        slots: Slots = {PoolName.KV: self._full().alloc(len(tokens))}
        if ComponentType.SWA in self.kind.components:
            slots[PoolName.SWA] = self.allocator.swa_attn_allocator.alloc(len(tokens))
            self.allocator.set_full_to_swa_mapping(slots[PoolName.KV], slots[PoolName.SWA])
        if ComponentType.MAMBA in self.kind.components:
            slots[PoolName.MAMBA] = self.states.mamba_allocator.alloc(1)
        generator = torch.Generator().manual_seed(seed)
        for _, view, rows in self.rows(slots):
            view[rows] = torch.randint(0, 256, (len(rows), view.shape[1]), generator=generator, dtype=torch.uint8)
        self.cache.insert(
            InsertParams(
                key=RadixKey(array("q", tokens)),
                value=slots[PoolName.KV].to(torch.int64),
                mamba_value=slots.get(PoolName.MAMBA),
            )
        )
        return self.bytes_of(self.last_window(slots))

    def last_window(self, slots: Slots) -> Slots:
        """Without the slots that a sliding window has passed."""
        if PoolName.SWA not in slots or self.kind.window is None:
            return slots
        pages = -(-self.kind.window // self.page_size)
        return {**slots, PoolName.SWA: slots[PoolName.SWA][-pages * self.page_size :]}

    def restored(self, req: Any, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """What lies where a request's load was to put it."""
        found: Slots = {PoolName.KV: slots}
        if ComponentType.SWA in self.kind.components:
            found[PoolName.SWA] = self.allocator.full_to_swa_index_mapping[slots]
        if ComponentType.MAMBA in self.kind.components:
            found[PoolName.MAMBA] = req.kv.mamba_pool_idx.reshape(1).to(torch.int64)
        return self.bytes_of(self.last_window(found))

    def free_tokens(self) -> int:
        """Slots that nobody holds."""
        return int(self._full().available_size())

    def _full(self) -> Any:
        return getattr(self.allocator, "full_attn_allocator", self.allocator)

    def settle(self, timeout: float = 60.0) -> None:
        """Let the offloads end, as the scheduler's steps do."""
        until = time.monotonic() + timeout
        while self.cache.linker.pending_offloads:
            assert time.monotonic() < until, "offloads have not ended"
            self.cache.check_hicache_events()
            time.sleep(0.002)

    def evict_all(self) -> None:
        """Forget what is on the device, and overwrite it."""
        self.cache.evict(EvictParams(num_tokens=10**9, swa_num_tokens=10**9, mamba_num=10**9))
        for pool in self.group.pools:
            for view in pool.page_views:
                view.fill_(0xEE)

    def request(self, tokens: Sequence[int]) -> Any:
        """A request that waits."""
        self.number += 1
        parameters = SamplingParams(max_new_tokens=4)
        return Req(f"request-{self.number}", "", array("q", tokens), parameters)

    def match(self, req: Any, timeout: float = 60.0) -> int:
        """Match as a scheduler does, step by step until the request is not held; tokens found outside the device."""
        until = time.monotonic() + timeout
        while True:
            self.linker.step()
            match_kv_cache(req, self.cache, req.origin_input_ids)
            if not self.linker.is_held(req.rid):
                return int(req.host_hit_length)
            assert time.monotonic() < until, "the request is still held"
            self.linker.wait_idle()

    def start_match(self, req: Any) -> bool:
        """Match once; whether the request is held now."""
        match_kv_cache(req, self.cache, req.origin_input_ids)
        return self.linker.is_held(req.rid)

    def load_back(self, req: Any) -> torch.Tensor | None:
        """Give a matched request slots for what was found: those slots."""
        loaded, req.last_node = self.cache.init_load_back(
            InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
        )
        return self.cache.linker.private_load_indices[req.rid] if loaded else None

    def forward(self, num_layers: int) -> int:
        """Start the queued loads, and wait for the layers as a forward does."""
        index = self.cache.ready_to_load_host_cache()
        counter = self.cache.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(num_layers):
            counter.wait_until(layer)
        return int(index)


@contextmanager
def tree_of(
    kind: Kind,
    options: dict[str, Any] | None = None,
    *,
    store: Callable[[], PageStore] | None = None,
    group: Any = None,
    make_linker: Callable[..., Any] | None = None,
) -> Iterator[Tree]:
    """A cache with a linker; `store` makes another store than one in memory, `group` is that of its ranks.

    `make_linker` makes another linker than ours.
    """
    kvcache = kind.kvcache()
    common: dict[str, Any] = {
        "page_size": kind.page_size,
        "dtype": torch.bfloat16,
        "device": "cpu",
        "kvcache": kvcache,
        "need_sort": False,
    }
    states = ReqToTokenPool(4, 4096, "cpu", False)
    if ComponentType.MAMBA in kind.components:
        states = kvcache.mamba_pool_of_test
    if ComponentType.SWA in kind.components:
        full, windowed = sizes_of(kvcache, kind)
        allocator = SWATokenToKVPoolAllocator(size=full, size_swa=windowed, **common)
    else:
        allocator = PagedTokenToKVPoolAllocator(size=kind.page_size * pools.PAGES, **common)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=states,
        token_to_kv_pool_allocator=allocator,
        page_size=kind.page_size,
        sliding_window_size=kind.window,
        tp_cache_group=group,
        enable_mamba_extra_buffer=ComponentType.MAMBA in kind.components,
        tree_components=kind.components,
        mtp_draft_device_pools=kind.packed(),
        sidecar_draft_device_pools=kind.sidecar(),
    )
    cache = tree_cache_of(params)

    class Linker(SoftloadLinker):
        def make_store(self) -> PageStore:
            return store() if store is not None else super().make_store()

    patience = {"deadline": "30s", "lookup_deadline": "20s", "blocking_limit": "30s", "offload_limit": "30s"}
    extra = {"store": "memory://", "landing_bytes": "64MiB", **patience, **(options or {})}
    linker = (make_linker or Linker)(None, params, components=set(cache.components), extra_config=extra)
    cache.init_cache_linker(linker)
    kvcache.register_layer_transfer_counter(linker.layer_done_counter)
    try:
        yield Tree(cache, linker, allocator, states, kind, pool_group_of(params, set(cache.components)))
    finally:
        cache.release_host_resources()


def tree_cache_of(params: CacheInitParams) -> Any:
    """SGLang's cache. What it would ask a model's configuration for, and there is none here, is said beforehand."""
    with (
        mock.patch.object(runtime_context, "mamba_cache_chunk_size", lambda: PAGE_SIZE),
        mock.patch.object(mamba_component, "mamba_cache_chunk_size", lambda: PAGE_SIZE),
    ):
        return UnifiedRadixCache(params)


def sizes_of(kvcache: Any, kind: Kind) -> tuple[int, int]:
    """Tokens in the pools of full attention and of a sliding window."""
    if kind.page_size == pools.V4_PAGE_SIZE:
        return kind.page_size * pools.V4_PAGES, kind.page_size * pools.V4_SWA_PAGES
    return kind.page_size * pools.PAGES, kind.page_size * (pools.PAGES - 2)


def mamba() -> Any:
    """MLA in some layers, recurrent states in the others."""
    states = pools.states([1, 2, 3])
    kvcache = pools.mamba_mla([0, 4], states)
    kvcache.mamba_pool_of_test = states
    return kvcache


FULL, WINDOWED, RECURRENT = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA

KINDS: dict[str, Kind] = {
    "mha": Kind(lambda: pools.mha(3)),
    "mla": Kind(lambda: pools.mla(3)),
    "mla, sidecar draft": Kind(lambda: pools.mla(3), sidecar=lambda: (pools.mha(2),)),
    "dsa": Kind(lambda: pools.dsa(4)),
    "dsa, packed draft": Kind(lambda: pools.dsa(4), packed=lambda: (pools.dsa(1),)),
    "deepseek v4": Kind(
        lambda: pools.deepseek_v4([0, 0, 4, 128, 4, 128]),
        (FULL, WINDOWED),
        page_size=pools.V4_PAGE_SIZE,
        window=128,
        packed=lambda: (pools.deepseek_v4([0], draft=True),),
    ),
    "swa": Kind(lambda: pools.swa([0, 3], [1, 2]), (FULL, WINDOWED), window=100),
    "mamba": Kind(mamba, (FULL, RECURRENT)),
}
