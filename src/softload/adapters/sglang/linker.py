"""`SoftloadLinker`: what SGLang's radix cache calls, on the scheduler's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName as SglangPoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from softload.adapters._bridge import LoaderBridge
from softload.adapters.consensus import TorchDistributedConsensus
from softload.adapters.sglang.batches import LayerCounter, LoadBatch, PlacementBatch, StreamBatch
from softload.adapters.sglang.engine import admission_of, check_engine, namespace_of_model, page_prefix, pool_group_of
from softload.adapters.sglang.holds import Hold, Holds, Placement
from softload.adapters.sglang.offloads import Offloads
from softload.adapters.sglang.options import Admission, LinkerOptions
from softload.adapters.sglang.restored import RestoredPages
from softload.adapters.sglang.units import UnitMaker
from softload.errors import LoaderClosedError
from softload.loader import PageLoader
from softload.protocols import PageStore
from softload.stores import open_store
from softload.transfer import Fence, PoolName, TransferUnit

__all__ = ["SoftloadLinker"]

_log = structlog.get_logger(__name__)

_PLACE_SECONDS = 2.0
"""How long copying landed bytes into slots may take."""

_IDLE_SECONDS = 0.005
"""How long an idle scheduler waits for a held request before it looks for new ones."""

_DRAIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class _Queued:
    """A load that has slots and starts with its batch."""

    transfers: Sequence[Any]
    hold: Hold


class SoftloadLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """An external cache linker that restores pages from a store, fail-soft.

    Named in `--unified-cache-external-linker-config` as ``"linker": "SoftloadLinker"`` with ``"linker_module_path":
    "softload.adapters.sglang"``; its settings are those of `LinkerOptions`, in ``linker_extra_config``.

    Raises:
        ValueError: settings, pools or an engine that it does not support; the message names what was expected.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        self.options = options = LinkerOptions.parse(extra_config or {})
        check_engine(params)
        self.admission = admission_of(options)
        self.forward_stream = forward_stream
        self.pool_group = pools = pool_group_of(params, components)
        self.pools = {SglangPoolName(pool.name.value): pool for pool in pools.pools}
        self.layer_done_counter = LayerCounter()
        if PoolName.MAMBA.value in {name.value for name in self.pools}:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        attention = [params.attn_cp_cache_group, params.attn_tp_cache_group]
        self._ranks = TorchDistributedConsensus(*attention)
        if self._ranks.is_alone:
            self._ranks = TorchDistributedConsensus(params.tp_cache_group)
        group = params.attn_tp_cache_group or params.tp_cache_group
        config = options.loader_config(
            options.namespace or namespace_of_model(),
            tp_rank=0 if group is None else torch.distributed.get_rank(group=group),
            cp_rank=params.attn_cp_rank,
            pp_rank=params.pp_rank,
        )
        self._bridge = LoaderBridge(lambda: PageLoader(self.make_store(), pools, config=config))
        self._units = UnitMaker(pools, page_prefix(options))
        self._holds = Holds(
            self._bridge,
            self._units,
            # Without hooks nobody comes by on every rank alike: SGLang intersects the answers of a lookup by itself.
            TorchDistributedConsensus() if self.admission is Admission.SYNC else self._ranks,
            deadline=options.deadline,
            hold_limit=options.hold_limit,
            limit=options.max_holds,
            lookup_only=self.admission is Admission.STREAM,
        )
        self._offloads = Offloads(self._bridge, options.offload_limit)
        self._restored = RestoredPages()
        self._queued: dict[str, _Queued] = {}
        self._loading: dict[int, Mapping[str, TransferUnit]] = {}
        self._failed: dict[str, TransferUnit | None] = {}
        self._asked: tuple[int, int] = (0, 0)
        """What is matched now: tokens on the device, and whole pages in all."""
        self._held: dict[str, tuple[int, int]] = {}
        """By request, that of the match for which it is held."""
        self.leaving: list[Any] = []
        """Requests that failed in the batch that ran last, which they leave before the next one is chosen."""
        self._blocked = 0.0
        self._number = 0
        opened = self._bridge.start(options.start_timeout)
        if not opened and options.require_store:
            self._bridge.close()
            raise self._bridge.setup_error or TimeoutError(
                f"the store {options.store} was not set up within {options.start_timeout} s"
            )
        _log.info("linker.started", store=options.store, admission=self.admission, pools=repr(pools), opened=opened)

    def make_store(self) -> PageStore:
        """The store of one loader, not opened; a subclass may wrap it."""
        return open_store(self.options.store)

    # -- what SGLang calls

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """The prefixes that can be restored now, in pages. A held request has none yet."""
        if rid in self._failed:
            return []
        wanted = self._units.wanted(transfers)
        if not wanted.keys:
            return []
        hold = self._holds.look(rid, wanted)
        if hold is not None and self.admission is Admission.SYNC:
            self._block(partial(self._holds.wait, hold))
        if hold is None or self._holds.is_undecided(rid):
            # By this answer, not by what is known a moment later, the request is admitted or stays in the queue.
            self._held[rid] = self._asked
            return []
        return hold.boundaries(len(wanted.keys))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a load into slots; False makes SGLang compute the pages. The same on every rank."""
        if self.admission is not Admission.SYNC:
            hold = self._holds.take(rid)
            if hold is None:
                return False
            self._queued[rid] = _Queued(transfers, hold)
            return True
        hold = self._holds.take(rid)
        restored = hold is not None and self._load_now(rid, transfers, hold)
        (agreed,) = self._ranks.minimum_now([int(restored)])
        return bool(agreed)

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that has not started."""
        queued = self._queued.pop(rid, None)
        if queued is not None:
            self._holds.give_up(queued.hold)
        return queued is not None

    def start_layer_wise_loading(self) -> int:
        """Start the queued loads; the number of their batch, -1 for none."""
        queued, self._queued = self._queued, {}
        if not queued:
            return -1
        fence = self._fence()
        if self.admission is Admission.STREAM:
            deadline = self.options.deadline
            units = {rid: self._unit(item, deadline, fence) for rid, item in queued.items()}
            batch: LoadBatch = StreamBatch(
                self._bridge, units, self.pool_group.num_layers, deadline, self.layer_done_counter.layer_seconds
            )
        else:
            units = {rid: self._unit(item, _PLACE_SECONDS, fence) for rid, item in queued.items()}
            batch = self._place(queued, units, _PLACE_SECONDS)
        index = self.layer_done_counter.add(batch)
        self._loading[index] = units
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait, bounded, for the end of a batch's loads: whether all of them came."""
        self._loading.pop(counter_index, None)
        return all(self.layer_done_counter.finish(counter_index).values())

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Save pages once they are computed; False where nothing is to be saved."""
        if not self.options.save:
            return False
        self._number += 1
        unit = self._units.offload(f"offload#{self._number}", transfers, self._fence(), self._restored.holds)
        if unit is None:
            self._offloads.skip()
        else:
            # Slots that a load has left unfilled are refused until their request was computed, which hooks alone tell.
            self._offloads.start(unit, computed=self.admission is Admission.SYNC)
        return True

    def num_completed_offloads(self) -> int:
        """How many offloads have a result. SGLang asks once a step."""
        self._blocked = 0.0
        if self.admission is Admission.SYNC:
            self._holds.expire()
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        """The oldest result."""
        return self._offloads.pop()

    def reset(self) -> None:
        """Forget everything; slots are neither read nor written any more when it returns, bounded."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._holds.clear()
        self.layer_done_counter.reset()
        self._loading.clear()
        self._offloads.clear()
        self._failed.clear()
        self._restored.clear()
        self._held.clear()
        self.leaving.clear()

    def close(self) -> None:
        """Close the loader; bounded, as are the saves that are still out."""
        wait(self._offloads.pending(), _DRAIN_SECONDS)
        self.reset()
        if not self._bridge.close():
            _log.error("loader.not_closed")

    # -- what the plugin's hooks call

    def is_held(self, rid: str) -> bool:
        """Whether the request's bytes are on their way: it stays in the queue, and others pass it."""
        return self.admission is not Admission.SYNC and rid in self._held

    def starts_match(self, rid: str, asked: tuple[int, int]) -> bool:
        """The request is matched anew; False where a lookup would find nothing.

        So it is if its load failed and the engine has not computed it since; and while it is held for these very pages:
        naming and looking them up takes some tenths of a millisecond, in each step for every held request.

        Args:
            rid: the request. SGLang need not look it up: all of it may be on the device by now.
            asked: how many tokens of it are on the device, and how many whole pages there are.
        """
        if self.is_held(rid) and self._held[rid] == asked and self._holds.stays(rid):
            return False
        self._held.pop(rid, None)
        self._asked = asked
        return rid not in self._failed

    def step(self) -> None:
        """Once a step of the scheduler, on every rank alike."""
        self._holds.tick()

    def wait_idle(self) -> None:
        """The scheduler has nothing to run: wait a moment for held requests, instead of taking their threads' time."""
        self._holds.wait_change(_IDLE_SECONDS)

    def failed_loads(self, counter_index: int, rids: Sequence[str]) -> list[str]:
        """Wait, bounded, for a batch's end: the requests that did not get all of it on every rank."""
        if self.admission is Admission.SYNC:
            return []  # what had failed was not loaded
        verdicts = self.layer_done_counter.finish(counter_index)
        agreed = self._ranks.minimum_now([int(verdicts.get(rid, False)) for rid in rids])
        failed = [rid for rid, good in zip(rids, agreed, strict=True) if not good]
        units = self._loading.pop(counter_index, {})
        self._failed |= {rid: units.get(rid) for rid in failed}
        for rid in units.keys() - set(failed):
            self._restored.add(units[rid])
        return failed

    def computed(self, rids: Sequence[str]) -> None:
        """A forward over these requests was accepted."""
        for rid in rids:
            unit = self._failed.get(rid)
            if unit is not None:
                self._tell_computed(unit)
            self.ended(rid)

    def ended(self, rid: str) -> None:
        """The request is gone, or needs nothing any more."""
        self._failed.pop(rid, None)
        self._held.pop(rid, None)
        self._holds.drop(rid)

    # -- its own

    def _unit(self, item: _Queued, deadline: float, fence: Fence | None) -> TransferUnit:
        hold = item.hold
        return self._units.load(hold.unit_id, item.transfers, hold.wanted, deadline, fence)

    def _place(
        self, queued: Mapping[str, _Queued], units: Mapping[str, TransferUnit], deadline: float
    ) -> PlacementBatch:
        batch = PlacementBatch(list(queued), deadline)
        self._holds.place(
            [(item.hold, Placement(units[rid], partial(batch.ended, rid))) for rid, item in queued.items()]
        )
        return batch

    def _load_now(self, rid: str, transfers: Sequence[Any], hold: Hold) -> bool:
        """Fill slots at once, in the time that this step may still wait."""
        item = _Queued(transfers, hold)
        restored = False

        def load(seconds: float) -> None:
            nonlocal restored
            unit = self._unit(item, seconds, self._fence())
            restored = self._place({rid: item}, {rid: unit}, seconds).verdicts()[rid]
            if restored:
                self._restored.add(unit)

        self._block(load)
        return restored

    def _tell_computed(self, unit: TransferUnit) -> None:
        async def tell() -> None:
            if self._bridge.loader is not None:
                self._bridge.loader.computed(unit)

        try:
            self._bridge.spawn(tell)
        except LoaderClosedError:
            pass  # its slots are known to nobody any more

    def _block(self, waiting: Callable[[float], object]) -> None:
        """Wait for the store, as long as this step may still do so."""
        left = self.options.blocking_limit - self._blocked
        if left > 0:
            since = time.monotonic()
            waiting(left)
            self._blocked += time.monotonic() - since

    def _fence(self) -> Fence | None:
        """What the device has to reach before slots may be read or written; a CPU's are free at once."""
        if self.pool_group.device.type == "cpu":
            return None
        ready = self.record_offload_ready()

        def reached() -> None:
            for event in ready:
                event.synchronize()

        return reached
