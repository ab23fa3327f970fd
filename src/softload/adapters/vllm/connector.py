"""`SoftloadConnector`: what vLLM calls, handed to the half that runs in this process."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import structlog
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from softload.adapters._bridge import LoaderBridge
from softload.adapters.vllm.layers import (
    block_size_of,
    block_tables,
    draft_layers,
    landing_pages,
    pool_group,
    ranks_are_alike,
    transfer_layers,
)
from softload.adapters.vllm.messages import Orders, Reports
from softload.adapters.vllm.options import ConnectorOptions, LoadMode
from softload.adapters.vllm.outbox import Outbox
from softload.adapters.vllm.scheduler_side import ScheduledStep, SchedulerSide
from softload.adapters.vllm.stats import SoftloadPromMetrics, SoftloadStats, StatsDelta
from softload.adapters.vllm.units import UnitMaker
from softload.adapters.vllm.worker_side import WorkerSide
from softload.loader import PageLoader
from softload.protocols import PageStore
from softload.stores import open_store
from softload.transfer import Fence

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["SoftloadConnector"]

_log = structlog.get_logger(__name__)

_DRAIN_SECONDS = 2.0

_IDLE_SECONDS = 0.001
"""What an engine that has nothing to compute may wait for news in a step. One in the caller's own process would spin,
and hold the interpreter up for the loads that it waits for."""


class SoftloadConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A KV connector that restores blocks from a store, fail-soft.

    Named in `--kv-transfer-config` with ``"kv_connector_module_path": "softload.adapters.vllm"``; its settings are
    those of `ConnectorOptions`, in ``kv_connector_extra_config``.

    Raises:
        ValueError: settings, or an engine, that it does not support; the message names what was expected.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._options = options = ConnectorOptions.parse(transfer.kv_connector_extra_config)
        _check_engine(vllm_config, options, len(kv_cache_config.kv_cache_groups))
        self._block_size = block_size_of(kv_cache_config)
        self._tables = block_tables(kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._bridge: LoaderBridge | None = None
        self._outbox = Outbox(by_block=len(self._tables) == 1)
        self._bad_blocks: set[int] = set()
        self._stats = StatsDelta()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                options,
                self._block_size,
                vllm_config.parallel_config.world_size,
                landing_pages=landing_pages(kv_cache_config, options.landing_bytes),
            )

    def make_store(self) -> PageStore:
        """The store of one loader, not opened; a subclass may wrap it."""
        return open_store(self._options.store)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Asked by vLLM 0.33: copies may be under way when the cache's memory goes."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache delivers nothing that could not be computed again."""
        return False

    # -- in the scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be had beyond those computed, and that they come asynchronously; ``None``: ask again."""
        assert self._scheduler is not None
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated, also for `num_external_tokens` to load."""
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        """The orders that go with this step."""
        assert self._scheduler is not None
        drafted = scheduler_output.scheduled_spec_decode_tokens
        state = scheduler_output.kv_connector_block_state
        computed = dict(_computed_before(scheduler_output))
        step = ScheduledStep(
            num_tokens={
                name: computed[name] + tokens - len(drafted.get(name, ()))
                for name, tokens in scheduler_output.num_scheduled_tokens.items()
            },
            block_ids=state.resolve_block_ids,
            written=_written_blocks(scheduler_output, self._block_size),
        )
        orders = self._scheduler.take_orders(step)
        orders.idle = not step.num_tokens
        return orders

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers told with their last step."""
        assert self._scheduler is not None
        self._scheduler.reported(
            connector_output.kv_connector_worker_meta,
            connector_output.finished_recving or (),
            connector_output.failed_recving,
            connector_output.invalid_block_ids,
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; its blocks may be given to others at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; its blocks may be given to others at once: who writes them waits for saves."""
        assert self._scheduler is not None
        self._scheduler.finished(request.request_id)
        return False, None

    # -- in a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Connect the store and address the caches. Waits for the store as long as `start_timeout` says."""
        options, config = self._options, self._vllm_config
        parallel = config.parallel_config
        drafts = draft_layers(config, kv_caches)
        replicated = ranks_are_alike(self._kv_cache_config, parallel.tensor_parallel_size)
        pools = pool_group(self._kv_cache_config, kv_caches, drafts, rank_replicated=replicated)
        loader_config = options.loader_config(
            options.namespace or _namespace(config, self._kv_cache_config),
            tp_rank=get_tensor_model_parallel_rank(),
            pp_rank=get_pp_group().rank_in_group,
            local_workers=parallel.local_world_size * max(1, parallel.data_parallel_size_local),
        )
        self._bridge = LoaderBridge(lambda: PageLoader(self.make_store(), pools, config=loader_config))
        units = UnitMaker(block_tables(self._kv_cache_config, drafts), pools, loader_config)
        self._worker = WorkerSide(
            options,
            self._bridge,
            units,
            self._outbox,
            lambda: _fence(pools.device),
            transfer_layers(self._kv_cache_config, drafts),
        )
        opened = self._bridge.start(options.start_timeout)
        if not opened and options.require_store:
            self._bridge.close()
            raise self._bridge.setup_error or TimeoutError(
                f"the store {options.store} was not set up within {options.start_timeout} s"
            )
        _log.info("connector.started", store=options.store, mode=options.mode, pools=repr(pools), opened=opened)

    def handle_preemptions(self, kv_connector_metadata: Orders) -> None:
        """Before each step: blocks that it writes are not read by saves any more."""
        if self._worker is not None:
            self._worker.make_way(kv_connector_metadata.overwritten)

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        """Start what this step's orders say."""
        if self._worker is not None:
            self._worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """In layer-wise mode, wait for what this step loads of a layer, until its deadline at most."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the forward."""

    def wait_for_save(self) -> None:
        """Start the saves; nothing waits for them but who overwrites their blocks."""
        if self._worker is None:
            return
        orders = self._get_connector_metadata()
        self._worker.start_saves(orders)
        if self._kv_cache_config.needs_kv_cache_zeroing:
            # vLLM's second model runner zeroes a step's new blocks before it calls `handle_preemptions`.
            self._worker.make_way(order.number for order in orders.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Nothing was sent; requests whose loads have ended."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended, and those that failed; in layer-wise mode, waits for the step's loads."""
        if self._worker is not None:
            self._worker.end_step_loads()
            if self._get_connector_metadata().idle:
                self._outbox.wait(_IDLE_SECONDS)
        received, failed, bad_blocks = self._outbox.take_received()
        self._bad_blocks |= bad_blocks
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that did not come, of the requests that `get_transfer_results` has just told."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> Reports | None:
        """What landed, and which saves have read their blocks."""
        return self._outbox.take_reports()

    # -- in both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counts since the last call."""
        if self._scheduler is not None:
            return self._stats.of(self._scheduler.counters)
        return None if self._bridge is None else self._stats.of_loader(self._bridge, time.monotonic())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Statistics that came from another process."""
        return SoftloadStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Counters for `/metrics`; their names begin with ``vllm:softload_``."""
        return SoftloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Only waiting for layers does not survive a replayed graph."""
        return bool(extra_config.get("mode") == LoadMode.LAYERWISE)

    def shutdown(self) -> None:
        """Close the loader; bounded, as are the saves that are still out."""
        if self._worker is not None:
            self._worker.drain(_DRAIN_SECONDS)
        if self._bridge is not None and not self._bridge.close():
            _log.error("loader.not_closed")


def _check_engine(vllm_config: VllmConfig, options: ConnectorOptions, kv_cache_groups: int) -> None:
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_load_failure_policy != "recompute" and not options.allow_fail_policy:
        raise ValueError(
            f"kv_load_failure_policy: expected 'recompute', got {transfer.kv_load_failure_policy!r}, under which a "
            "missing block ends its request; to have that, set allow_fail_policy in kv_connector_extra_config"
        )
    if transfer.kv_role != "kv_both":
        raise ValueError(f"kv_role: expected 'kv_both', got {transfer.kv_role!r}")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ValueError(f"{name}: expected 1, got {getattr(parallel, name)}")
    if vllm_config.model_config.enable_sleep_mode:
        raise ValueError("--enable-sleep-mode: expected off: the connector does not follow the cache while it sleeps")
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        raise ValueError(
            f"--prefix-caching-hash-algo: expected sha256 or sha256_cbor, got {algorithm!r}, whose hashes differ from "
            "process to process; to have it, set PYTHONHASHSEED to the same value wherever the store is used"
        )
    if options.mode is LoadMode.LAYERWISE:
        _check_layerwise(vllm_config, kv_cache_groups)


def _check_layerwise(vllm_config: VllmConfig, kv_cache_groups: int) -> None:
    """A failure is known at the end of its step, and told by block id: both must be good enough for the engine."""
    if vllm_config.scheduler_config.async_scheduling:
        raise ValueError(
            "mode: 'layerwise' needs --no-async-scheduling: with it, a token computed from blocks that failed would be "
            "accepted before their failure is seen"
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise ValueError(f"mode: 'layerwise' needs pipeline_parallel_size 1, got {stages}")
    if kv_cache_groups > 1:
        raise ValueError(
            f"mode: 'layerwise' needs one KV cache group, got {kv_cache_groups}; start with "
            "--disable-hybrid-kv-cache-manager, which makes them one"
        )


def _namespace(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """The model, and everything beside the pools' geometry that decides what a block's bytes mean."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    meaning = (
        model.model,
        model.revision,
        model.quantization,
        model.hf_config.to_json_string(),
        cache.cache_dtype,
        cache.prefix_caching_hash_algo,
        kv_cache_config.kv_cache_layout,
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
    )
    digest = hashlib.blake2b(repr(meaning).encode(), digest_size=8).hexdigest()
    return f"vllm/{model.model.rstrip('/').rsplit('/', 1)[-1]}-{digest}"


def _computed_before(scheduler_output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def _written_blocks(scheduler_output: SchedulerOutput, block_size: int) -> Iterator[int]:
    """Blocks that were allocated for this step's computation."""
    for new in scheduler_output.scheduled_new_reqs:
        for ids in new.block_ids:
            yield from ids[new.num_computed_tokens // block_size :]
    cached = scheduler_output.scheduled_cached_reqs
    for name, groups, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        for ids in groups or ():
            yield from ids[computed // block_size :] if name in cached.resumed_req_ids else ids


def _fence(device: torch.device) -> Fence | None:
    """What the engine has launched so far; on a CPU that is done."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
