"""One key's session in the store, and where it is in its life."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import anyio

__all__ = ["Session", "SessionState", "SessionStatistics"]


class SessionState(StrEnum):
    """Where a session is in its life."""

    STARTING = "starting"
    OPEN = "open"
    ENDING = "ending"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Session:
    """One key's session in the store, shared by its holders."""

    key: str
    holders: int
    epoch: int
    state: SessionState = SessionState.STARTING
    started_at: float = 0.0
    started_as: int = 0
    """Its last start's number among all starts of the table."""
    in_vain: int = 0
    """Renewals since the last read that went out."""
    ends_again: bool = False
    """ENDING: a late start may have come after the end."""
    changed: anyio.Event = field(default_factory=anyio.Event)

    def become(self, state: SessionState) -> None:
        """Change state and wake who waits for it."""
        self.state = state
        self.changed.set()
        self.changed = anyio.Event()


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """Sessions open now (starting and ending ones too), and all that were opened, started again, and ended."""

    open: int
    opened: int
    restarted: int
    ended: int
