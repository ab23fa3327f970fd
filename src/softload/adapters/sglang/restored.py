"""Pages that have just come from the store: SGLang has them saved, like all that enters its prefix tree."""

from __future__ import annotations

import time
from typing import Final

from softload.planning import needed_pages
from softload.transfer import PoolName, TransferUnit

__all__ = ["RestoredPages"]

_SECONDS: Final = 5.0
"""How long after its restoration a page is taken to be in the store; reading it has leased it there about as long."""


class RestoredPages:
    """What the store need not be offered, which would cost a copy of each page, its digests and a call to the master.

    Bounded by what is restored in `_SECONDS`.
    """

    def __init__(self) -> None:
        self._until: dict[tuple[PoolName, str], float] = {}
        """In their order."""

    def __len__(self) -> int:
        return len(self._until)

    def add(self, unit: TransferUnit) -> None:
        """All pages of a unit have come."""
        now = time.monotonic()
        self._forget(now)
        for component in unit.target:
            pages = needed_pages(len(component.keys), component.hit_policy, component.window)
            for key in component.keys[pages.start : pages.stop]:
                self._until.pop((component.pool, key), None)
                self._until[component.pool, key] = now + _SECONDS

    def holds(self, pool: PoolName, key: str) -> bool:
        """Whether this page came from the store a moment ago."""
        return self._until.get((pool, key), 0.0) > time.monotonic()

    def clear(self) -> None:
        """Forget all of them."""
        self._until.clear()

    def _forget(self, now: float) -> None:
        while self._until:
            oldest = next(iter(self._until))
            if self._until[oldest] > now:
                return
            del self._until[oldest]
