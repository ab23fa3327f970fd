"""One-shot readiness, layer by layer, over the units of a load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

__all__ = ["LayerGate"]


class LayerGate:
    """Opens layer i once every unit has it in its slots or has failed. A layer that opened stays open.

    Args:
        num_layers: layers of the gate.
        units: names of the units that must pass each layer.
    """

    def __init__(self, num_layers: int, units: Iterable[str]) -> None:
        self.num_layers = num_layers
        self._done = dict.fromkeys(units, 0)
        self._open = 0
        self._waiters: dict[int, asyncio.Event] = {}
        self._advance()

    def __repr__(self) -> str:
        return f"<LayerGate {self._open} of {self.num_layers} layers open>"

    def passed(self, unit: str, layers: int) -> None:
        """The unit has its first `layers` layers; all of them also where it has failed and holds no layer up."""
        if layers > self._done[unit]:
            self._done[unit] = layers
            self._advance()

    async def wait(self, layer: int) -> None:
        """Wait until `layer` is open.

        Raises:
            IndexError: no such layer.
        """
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"expected a layer from 0 to {self.num_layers - 1}, got {layer}")
        if layer < self._open:
            return
        event = self._waiters.setdefault(layer, asyncio.Event())
        await event.wait()

    def _advance(self) -> None:
        opened = min(self._done.values(), default=self.num_layers)
        self._open = max(self._open, opened)
        for layer in [layer for layer in self._waiters if layer < self._open]:
            self._waiters.pop(layer).set()
