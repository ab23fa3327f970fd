"""SGLang's own radix cache and wrapper over small pools, with a linker of ours."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams

from softload.adapters.sglang import SoftloadLinker
from softload.adapters.sglang.plugin import register
from softload.protocols import PageStore
from tests.adapters.sglang_pools import engine_pools as pools
from tests.adapters.sglang_pools.engine_pools import PAGE_SIZE

register()
HookRegistry.apply_hooks()


@dataclass(slots=True, eq=False)
class Tree:
    """A cache, its pools, and what a scheduler would do with them."""

    cache: Any
    linker: SoftloadLinker
    kvcache: Any
    allocator: Any
    page_size: int
    number: int = 0

    def fill(self, slots: torch.Tensor, seed: int) -> None:
        """What a forward would write."""
        generator = torch.Generator().manual_seed(seed)
        for buffer in buffers_of(self.kvcache):
            rows = torch.randint(0, 256, (len(slots), buffer[0].numel() * buffer.element_size()), generator=generator)
            buffer.view(len(buffer), -1).view(torch.uint8)[slots] = rows.to(torch.uint8)

    def bytes_of(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """What lies in some slots, buffer by buffer."""
        return [
            buffer.view(len(buffer), -1).view(torch.uint8)[slots].clone() for buffer in buffers_of(self.kvcache)
        ]

    def compute(self, tokens: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
        """Compute tokens and insert them into the tree; their bytes."""
        slots = self.allocator.alloc(len(tokens))
        assert slots is not None
        self.fill(slots, seed)
        written = self.bytes_of(slots)
        self.cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots.to(torch.int64)))
        return written

    def settle(self, timeout: float = 10.0) -> None:
        """Let the offloads end, as the scheduler's steps do."""
        until = time.monotonic() + timeout
        while self.cache.linker.pending_offloads:
            assert time.monotonic() < until, "offloads have not ended"
            self.cache.check_hicache_events()
            time.sleep(0.002)

    def evict_all(self) -> None:
        """Forget what is on the device, and overwrite it."""
        self.cache.evict(EvictParams(num_tokens=10**9))
        for buffer in buffers_of(self.kvcache):
            buffer.view(len(buffer), -1).view(torch.uint8)[self.page_size :] = 0xEE

    def request(self, tokens: Sequence[int]) -> Any:
        """A request that waits."""
        self.number += 1
        parameters = SamplingParams(max_new_tokens=4)
        return Req(f"request-{self.number}", "", array("q", tokens), parameters)

    def match(self, req: Any, timeout: float = 10.0) -> int:
        """Match as a scheduler does, step by step until the request is not held; tokens found outside the device."""
        until = time.monotonic() + timeout
        while True:
            self.linker.step()
            match_kv_cache(req, self.cache, req.origin_input_ids)
            if not self.linker.is_held(req.rid):
                return int(req.host_hit_length)
            assert time.monotonic() < until, "the request is still held"
            self.linker.wait_idle()

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


def buffers_of(kvcache: Any) -> list[torch.Tensor]:
    """All buffers with a row per token."""
    if hasattr(kvcache, "k_buffer"):
        return [*kvcache.k_buffer, *kvcache.v_buffer]
    return list(kvcache.kv_buffer)


@contextmanager
def tree_of(
    kvcache: Any, options: dict[str, Any], *, store: PageStore | None = None, page_size: int = PAGE_SIZE
) -> Iterator[Tree]:
    """A cache with a linker over `kvcache`."""
    allocator = PagedTokenToKVPoolAllocator(
        PAGE_SIZE * pools.PAGES, page_size, torch.bfloat16, "cpu", kvcache, need_sort=False
    )
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(4, 4096, "cpu", False),
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        tree_components=(ComponentType.FULL,),
    )
    cache = UnifiedRadixCache(params)

    class Linker(SoftloadLinker):
        def make_store(self) -> PageStore:
            return store if store is not None else super().make_store()

    linker = Linker(
        None, params, components=set(cache.components), extra_config={"store": "memory://", **options}
    )
    cache.init_cache_linker(linker)
    kvcache.register_layer_transfer_counter(linker.layer_done_counter)
    try:
        yield Tree(cache, linker, kvcache, allocator, page_size)
    finally:
        cache.release_host_resources()
