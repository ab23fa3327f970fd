"""How far one unit is, as the engine was told: pages admitted, layers given out, and the failure that ends this."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from softload.context import Context
from softload.outcomes import LateFailure, PageStatus

__all__ = ["UnitProgress"]


class UnitProgress:
    """What the engine was told of one unit.

    Args:
        context: the loader's parts.
        request_id: whose it is.
        on_layers: told how many layers the unit has in its slots, or that it holds no layer up any more.
    """

    def __init__(self, context: Context, request_id: str, on_layers: Callable[[str, int], None]) -> None:
        self._counters = context.counters
        self._num_layers = context.pools.num_layers
        self._request_id = request_id
        self._on_layers = on_layers
        self.admitted = asyncio.Event()
        self.begun = asyncio.Event()
        """Its first layers are in its slots, or it holds no layer up any more."""
        self.admitted_pages = 0
        self.layers = 0
        """Layers that are in its slots, for the pages that are good."""
        self.layers_given = 0
        """Layers that the engine was told to use."""
        self.failure: PageStatus | None = None
        """Why it has fewer pages than were admitted."""
        self.late: LateFailure | None = None
        """The failure, where layers were given out before it."""

    def admit(self, pages: int) -> None:
        """The engine may count on these pages."""
        self.admitted_pages = pages
        self.admitted.set()

    def is_short(self, pages: int) -> bool:
        """Whether these are fewer pages than the engine counts on."""
        return self.admitted.is_set() and pages < self.admitted_pages

    def copied(self, layers: int) -> None:
        """Its first `layers` layers are in its slots."""
        self.layers = layers
        self.begun.set()
        self._on_layers(self._request_id, layers)

    def fail(self, pages: int, status: PageStatus) -> None:
        """Only `pages` of what was admitted are good: what the engine computes with the others must not be used."""
        self.failure = status
        if self.layers_given:
            self.late = LateFailure(pages, min(self.layers, self._num_layers - 1), status)
            self._counters.late_failures += 1
        self.end()

    def late_failure(self, pages: int, status: PageStatus) -> LateFailure | None:
        """The late failure, if any, where only so many pages were restored: others may have failed after the first."""
        if self.late is None or pages >= self.late.page:
            return self.late
        return replace(self.late, page=pages, status=status)

    def end(self) -> None:
        """It holds no layer up any more."""
        self.begun.set()
        self._on_layers(self._request_id, self._num_layers)
