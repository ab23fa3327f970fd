"""The loads of one batch of the engine, and the counter by which its forward waits for their layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import structlog

from softload.adapters._bridge import LoaderBridge
from softload.errors import LoaderClosedError
from softload.protocols import Clock
from softload.transfer import TransferUnit

__all__ = ["LayerCounter", "LoadBatch", "PlacementBatch", "StreamBatch"]

_log = structlog.get_logger(__name__)

_NEWS = 0.1
"""Weight of the last layer in what layers take."""

_MOST_TIMES = 4
"""No layer counts for more times the others."""

_GRACE_SECONDS = 5.0
"""A load that has reached its deadline ends after at most one chunk of copies; longer only if the device hangs."""


class LoadBatch(Protocol):
    """Loads that run together. Waits are bounded by the loads' deadline."""

    def wait_layer(self, layer: int) -> None:
        """Wait until a layer is in the slots of every request that has not failed; for the last one, of drafts too."""

    def verdicts(self) -> Mapping[str, bool]:
        """Wait for the end, after which nothing of ours writes the slots; by request, whether all of it came."""


class PlacementBatch:
    """Requests whose bytes are here and are being copied into slots: a matter of milliseconds.

    Args:
        request_ids: all of them.
        deadline: seconds that copying may take.
    """

    def __init__(self, request_ids: Sequence[str], deadline: float) -> None:
        self._until = time.monotonic() + deadline + _GRACE_SECONDS
        self._changed = threading.Condition()
        self._verdicts: dict[str, bool | None] = dict.fromkeys(request_ids)

    def ended(self, request_id: str, good: bool) -> None:
        """A request's copies have ended. Only the first time counts; from any thread."""
        with self._changed:
            if self._verdicts.get(request_id, good) is None:
                self._verdicts[request_id] = good
                self._changed.notify_all()

    def wait_layer(self, layer: int) -> None:
        """Wait for all of it: copies are over before waiting for layers one by one would pay."""
        self._wait()

    def verdicts(self) -> Mapping[str, bool]:
        """See `LoadBatch`."""
        if not self._wait():
            late = [name for name, good in self._verdicts.items() if good is None]
            _log.error("placement.not_ended", request_ids=late)
        return {name: bool(good) for name, good in self._verdicts.items()}

    def _wait(self) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: None not in self._verdicts.values(), max(0.0, self._until - time.monotonic())
            )


class StreamBatch:
    """Requests that are read layer by layer while the forward runs.

    Args:
        bridge: the loader, on its loop.
        units: by request.
        num_layers: transfer layers.
        deadline: the units'.
        layer_seconds: what the forward should take for a layer.
    """

    def __init__(
        self,
        bridge: LoaderBridge,
        units: Mapping[str, TransferUnit],
        num_layers: int,
        deadline: float,
        layer_seconds: float = 0.0,
    ) -> None:
        self._bridge = bridge
        self._units = units
        self._layer_seconds = layer_seconds
        self._until = time.monotonic() + deadline + _GRACE_SECONDS
        self._ready = [threading.Event() for _ in range(num_layers - 1)]
        self._ended = threading.Event()
        self._restored: set[str] = set()
        try:
            bridge.spawn(self._run).add_done_callback(lambda _: self._end())
        except LoaderClosedError:
            self._end()

    def wait_layer(self, layer: int) -> None:
        """See `LoadBatch`."""
        event = self._ready[layer] if layer < len(self._ready) else self._ended
        event.wait(max(0.0, self._until - time.monotonic()))

    def verdicts(self) -> Mapping[str, bool]:
        """See `LoadBatch`."""
        if not self._ended.wait(max(0.0, self._until - time.monotonic())):
            _log.error("load.not_ended", request_ids=list(self._units))
            return dict.fromkeys(self._units, False)
        return {name: name in self._restored for name in self._units}

    async def _run(self) -> None:
        loader = self._bridge.loader
        if loader is None:
            return
        try:
            async with loader.load(list(self._units.values()), layer_seconds=self._layer_seconds) as load:
                for layer, ready in enumerate(self._ready):
                    await load.layer(layer)
                    ready.set()
                outcomes = (await load.report()).outcomes
            for name, unit in self._units.items():
                outcome = outcomes[unit.request_id]
                if outcome.restored_pages == outcome.requested_pages:
                    self._restored.add(name)
        except LoaderClosedError:
            pass  # nothing is restored
        except Exception:
            _log.exception("load.raised", request_ids=list(self._units))

    def _end(self) -> None:
        for ready in self._ready:
            ready.set()
        self._ended.set()


class LayerPace:
    """What a forward takes for a layer: from where it has one until it asks for the next, its waits left out.

    On a device it is the thread that launches the work whose time counts: that is who waits, and all requests with it.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.seconds = 0.0
        """0 before the first."""
        self._clock = clock
        self._at = (-1, -1)
        self._since = 0.0
        self._is_new = False

    def asks(self, batch: int, layer: int) -> None:
        """The forward of a batch is about to wait for a layer, maybe again."""
        self._is_new = self._at != (batch, layer)
        if self._at == (batch, layer - 1):
            seconds = self._clock() - self._since
            if self.seconds:  # one that was held up by something else says little
                seconds = _NEWS * (min(seconds, _MOST_TIMES * self.seconds) - self.seconds)
            self.seconds += seconds
        self._at = (batch, layer)

    def goes_on(self) -> None:
        """It has the layer."""
        if self._is_new:
            self._since = self._clock()


class LayerCounter:
    """What SGLang's pools call before they read a layer. All on the engine's thread."""

    def __init__(self) -> None:
        self.consumer_index = -1
        self._batches: dict[int, LoadBatch] = {}
        self._next = 0
        self._pace = LayerPace()

    @property
    def layer_seconds(self) -> float:
        """What forwards have taken for a layer so far, until they asked for the next one; 0 before the first."""
        return self._pace.seconds

    def add(self, batch: LoadBatch) -> int:
        """The number by which SGLang will name this batch."""
        index = self._next
        self._next += 1
        self._batches[index] = batch
        return index

    def set_consumer(self, index: int) -> None:
        """The batch whose forward runs next; -1 for one that loads nothing."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Wait for transfer layer `threshold` of the running batch. Never raises, and ends in time."""
        batch = self._batches.get(self.consumer_index)
        if batch is not None:
            self._pace.asks(self.consumer_index, threshold)
            batch.wait_layer(threshold)
            self._pace.goes_on()

    def finish(self, index: int) -> Mapping[str, bool]:
        """Wait for a batch's end: by request, whether all of it came."""
        batch = self._batches.pop(index, None)
        return {} if batch is None else batch.verdicts()

    def reset(self) -> None:
        """Wait for the end of all batches, and forget them."""
        for index in list(self._batches):
            self.finish(index)
        self.consumer_index = -1
