"""One request on its way through the replay's engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from softload.outcomes import PageStatus, UnitOutcome
from softload.replay.engine_memory import Verification
from softload.replay.shapes import Shape
from softload.replay.trace import TraceRequest

__all__ = ["Job"]


@dataclass(slots=True, eq=False)
class Job:
    """A request's state. `pages` is ``None`` while it holds no slots.

    Args:
        request_id: its name towards the loader.
        keys: page keys of its full blocks, in prefix order.
        decode_steps: forward passes left after the prefill.
    """

    request_id: str
    keys: tuple[str, ...]
    decode_steps: int
    promised: int = 0
    pages: NDArray[np.int64] | None = None
    outcome: UnitOutcome | None = None
    restored: int = 0
    draft_restored: int = 0
    prefilled: bool = False
    ended: bool = False
    checked: Verification = Verification()
    saved: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, request: TraceRequest, shape: Shape, max_pages: int, max_decode_steps: int) -> Job:
        """The job of a trace's request, cut to `max_pages` pages."""
        keys = [key for block in request.full_blocks for key in shape.page_keys(block)]
        return cls(f"r{request.index}", tuple(keys[:max_pages]), min(request.output_length, max_decode_steps))

    @property
    def restored_keys(self) -> tuple[str, ...]:
        """Keys of the pages that the store gave back."""
        return self.keys[: self.restored]

    @property
    def computed_keys(self) -> tuple[str, ...]:
        """Keys of the pages that are computed here."""
        return self.keys[self.restored :]

    def slots(self) -> NDArray[np.int64]:
        """The pages held.

        Raises:
            RuntimeError: it holds none.
        """
        if self.pages is None:
            raise RuntimeError(f"request {self.request_id}: expected slots, got none")
        return self.pages

    def settle(self, outcome: UnitOutcome) -> None:
        """Take what the loader reported; pages after `restored` are the engine's to compute."""
        self.outcome = outcome
        self.restored = min(outcome.restored_pages, self.promised)
        self.draft_restored = min(outcome.draft_pages, self.restored)

    def missed_statuses(self) -> list[PageStatus]:
        """Why each promised page that was not restored was not, in prefix order."""
        known = {page.page: page.status for page in self.outcome.pages} if self.outcome is not None else {}
        missed = [known.get(page, PageStatus.AFTER_MISS) for page in range(self.restored, self.promised)]
        return [PageStatus.AFTER_MISS if status is PageStatus.LOADED else status for status in missed]
