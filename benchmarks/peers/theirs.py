"""SGLang's own linker over the same pools and the same client, and bare calls of that client."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from peers.cases import Workload
from peers.stopwatch import Sample
from softload import DevicePool, DevicePoolGroup

__all__ = ["Bare", "SGLangLinker", "rank_of", "sglang_is_here"]

_STAND_INS = Path(__file__).parents[2] / "tests/adapters/sglang_pools/stand_ins.py"


def sglang_is_here() -> bool:
    """Whether SGLang can be imported; stands in for what it wants of a GPU."""
    spec = importlib.util.spec_from_file_location("stand_ins", _STAND_INS)
    assert spec is not None and spec.loader is not None
    stand_ins = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_ins)
    return bool(stand_ins.install())


class SGLangLinker:
    """`MooncakeDirectLinker` of SGLang 0.5.23: its own constructor, threads, plans and native calls.

    What a server would hand it is stood in for: the pools' description is made of SGLang's own `DevicePoolEntry` over
    our buffers (its assembler refuses plain MLA and MHA), and the store is SGLang's around a client that is set up.
    """

    def __init__(self, workload: Workload, native: object) -> None:
        from sglang.srt.mem_cache.hicache_storage import PoolName as TheirName
        from sglang.srt.mem_cache.hicache_storage import PoolTransfer
        from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry
        from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolGroup as TheirGroup
        from sglang.srt.mem_cache.storage.mooncake_store import mooncake_direct_linker as module
        from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
        from sglang.srt.runtime_context import get_context

        get_context().override_server_args().install()

        def entry(pool: DevicePool) -> Any:
            return DevicePoolEntry(
                name=TheirName(pool.name),
                indices_from_pool=TheirName(pool.index_source),
                device_pool=None,
                components=pool.components,
                layer_mapping=dict(pool.layer_mapping),
                page_size=pool.page_size,
                rows_are_pages=pool.rows_are_pages,
                packed=pool.packed,
            )

        pools = workload.pools
        group = TheirGroup(
            [entry(pool) for pool in workload.kv_pools],
            pools.num_layers,
            pools.page_size,
            rank_replicated=pools.rank_replicated,
        )
        storage = MooncakeStore.__new__(MooncakeStore)
        storage.store, storage.config_prefix = native, None
        params = SimpleNamespace(
            page_size=pools.page_size,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: None),
            attn_tp_cache_group=None,
            tp_cache_group=None,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            req_to_token_pool=mock.MagicMock(),
        )
        server_args = SimpleNamespace(enable_linker_mla_dedup=False)
        with mock.patch.object(module, "resolve_hybrid_device_pool_group", lambda **_: group):
            self._linker = module.MooncakeDirectLinker(server_args, params, components=[], storage=storage)
        self._transfer = lambda keys, slots: PoolTransfer(name=TheirName.KV, keys=list(keys), device_indices=slots)
        self._num_layers = pools.num_layers
        self._count = 0

    def load(self, workload: Workload, layer_seconds: float, batch: list[tuple[int, int]] | None = None) -> Sample:
        """One load of all pages, or one batch of requests `(first, count)`."""
        sample = Sample()
        linker = self._linker
        counter = linker.layer_done_counter
        started = time.perf_counter()
        for first, count in batch or [(0, workload.pages)]:
            self._count += 1
            keys, slots = workload.keys[first:][:count], workload.slots(first, count)
            assert linker.load(f"r{self._count}", [self._transfer(keys, slots)])
        index = linker.start_layer_wise_loading()
        counter.set_consumer(index)
        for layer in range(self._num_layers):
            asked = time.perf_counter()
            counter.wait_until(layer)
            ready = time.perf_counter()
            sample.stall += ready - asked
            sample.layers.append(ready - started)
            if layer_seconds:
                time.sleep(layer_seconds)
        good = linker.finish_layer_wise_loading(index)
        sample.report = time.perf_counter() - started
        sample.pages = workload.pages if good else 0
        return sample

    def close(self) -> None:
        """End its threads."""
        linker = self._linker
        linker.reset()
        for queue, thread in ((linker.load_queue, linker.load_thread), (linker.offload_queue, linker.offload_thread)):
            queue.put(None)
            thread.join()


class Bare:
    """One whole-object read a pool, lists made beforehand, straight into the pools; and a plain copy of as many bytes.

    What any loader could reach at best, without looking at anything.
    """

    def __init__(self, workload: Workload, native: Any, rank: str) -> None:
        self._native = native
        self._calls = []
        for pool in workload.kv_pools:
            name = "k" if str(pool.name) == "kv" else str(pool.name)
            keys = [f"{key}_{rank}_{name}" for key in workload.keys]
            metas = [meta for component in pool.buffer_meta for meta in component]
            rows = [int(row) * (1 if pool.rows_are_pages else pool.page_size) for row in workload.rows()]
            pointers = [[base + row * stride for base, stride, _ in metas] for row in rows]
            sizes = [[size for _, _, size in metas]] * len(rows)
            self._calls.append((keys, pointers, sizes))
        self._source = np.full(workload.pages * workload.page_bytes, 7, np.uint8)
        self._target = np.zeros_like(self._source)

    def load(self) -> Sample:
        """Read all pages."""
        started = time.perf_counter()
        good = True
        for keys, pointers, sizes in self._calls:
            answers = self._native.batch_get_into_multi_buffers(keys, pointers, sizes)
            good &= list(answers) == [sum(each) for each in sizes]
        elapsed = time.perf_counter() - started
        return Sample(layers=[elapsed], report=elapsed, pages=len(self._calls[0][0]) if good else 0)

    def memmove(self) -> Sample:
        """Copy as many bytes as a load brings."""
        started = time.perf_counter()
        self._target[:] = self._source
        elapsed = time.perf_counter() - started
        return Sample(layers=[elapsed], report=elapsed)


def rank_of(pools: DevicePoolGroup) -> str:
    """The rank part of SGLang's keys for rank 0."""
    return "cp0_pp0" if pools.rank_replicated else "tp0_cp0_pp0"
