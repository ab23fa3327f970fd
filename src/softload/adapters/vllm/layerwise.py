"""Loads that the running forward waits for, layer by layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import structlog

from softload.adapters._bridge import LoaderBridge
from softload.adapters.vllm.messages import LoadOrder, blocks_of
from softload.adapters.vllm.units import UnitMaker
from softload.errors import LoaderClosedError
from softload.transfer import Fence

__all__ = ["StepLoads"]

_log = structlog.get_logger(__name__)

_GRACE_SECONDS = 5.0
"""A load that has reached its deadline ends after at most one chunk of copies; longer only if the device hangs."""


class StepLoads:
    """The loads of one step. `start` and the waits are for the engine's thread; they last until the deadline at most.

    Args:
        bridge: the loader, on its loop.
        units: makes transfer units.
        orders: what to load.
        layers: the transfer layer of each of the target's layers, by the engine's name.
        num_layers: transfer layers.
    """

    def __init__(
        self,
        bridge: LoaderBridge,
        units: UnitMaker,
        orders: Sequence[LoadOrder],
        layers: Mapping[str, int],
        num_layers: int,
    ) -> None:
        self._bridge = bridge
        self._units = units
        self._orders = orders
        self._layers = layers
        self._ready = [threading.Event() for _ in range(num_layers)]
        self._ended = threading.Event()
        self._until = time.monotonic() + max(order.deadline for order in orders) + _GRACE_SECONDS
        self._restored: Mapping[str, int] = {}

    def start(self, fence: Fence | None) -> None:
        """Start loading; where the loader is closed, everything has failed."""
        try:
            self._bridge.spawn(lambda: self._run(fence))
        except LoaderClosedError:
            self._end()

    def wait_layer(self, name: str) -> None:
        """Wait until a layer is in its blocks, or has failed; for a draft's layer, until all has ended."""
        layer = self._layers.get(name)
        event = self._ended if layer is None else self._ready[layer]
        event.wait(max(0.0, self._until - time.monotonic()))

    def bad_blocks(self) -> frozenset[int]:
        """Wait for the end, and answer with the blocks that did not come."""
        if not self._ended.wait(max(0.0, self._until - time.monotonic())):
            _log.error("load.not_ended", request_ids=[order.ticket[0] for order in self._orders])
        bad: set[int] = set()
        for order in self._orders:
            pages = 0
            for name, part in self._parts(order):
                pages += self._restored.get(name, 0)
                if pages < part.stop:
                    break
            bad |= blocks_of(tuple(ids[pages:] for ids in order.block_ids))
        return frozenset(bad)

    async def _run(self, fence: Fence | None) -> None:
        try:
            loader = self._bridge.loader
            if loader is None:
                return
            units = [
                self._units.load(order, part, order.deadline, fence)
                for order in self._orders
                for _, part in self._parts(order)
            ]
            async with loader.load(units) as load:
                for layer, ready in enumerate(self._ready):
                    await load.layer(layer)
                    ready.set()
                outcomes = (await load.report()).outcomes
            self._restored = {name: outcome.restored_pages for name, outcome in outcomes.items()}
        except LoaderClosedError:
            pass  # nothing is restored
        except Exception:
            _log.exception("load.raised", request_ids=[order.ticket[0] for order in self._orders])
        finally:
            self._bridge.forget(name for order in self._orders for name, _ in self._parts(order))
            self._end()

    def _end(self) -> None:
        for ready in self._ready:
            ready.set()
        self._ended.set()

    def _parts(self, order: LoadOrder) -> Iterator[tuple[str, range]]:
        for part in self._units.load_parts(len(order.keys)):
            yield self._units.load_name(order, part), part
