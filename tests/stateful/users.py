"""Who wants what of the loader, and what they learned: requests, the tasks that hold them, and the engine's pages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from softload import LoadReport, PageStatus, TransferUnit, UnitOutcome
from softload.handles import Load, Prefetch


def page_keys(chain: int, length: int) -> tuple[str, ...]:
    """The first pages of a conversation; all conversations share their first two."""
    return tuple(f"s{page}" if page < 2 else f"c{chain}-{page}" for page in range(length))


@dataclass(slots=True, eq=False)
class Fence:
    """The engine's word that slots are free, given when the machine says so."""

    gate: threading.Event = field(default_factory=threading.Event)
    entered: bool = False

    def __call__(self) -> None:
        self.entered = True
        self.gate.wait()
        self.entered = False


@dataclass(slots=True, eq=False)
class Request:
    """One unit of one load or prefetch, as its user sees it."""

    name: str
    keys: tuple[str, ...]
    rows: list[int] | None
    unit: TransferUnit
    due: float
    fence: Fence | None = None
    clean: int | None = None
    """Pages that a load without any fault in sight must restore."""
    admitted: int | None = None
    layers_given: int = 0
    landed: int | None = None
    outcome: UnitOutcome | None = None
    draftless: str = "zero"
    """What restored pages without their draft hold in its slots: `zero`, or `any` of zeros and what was there."""

    @property
    def result(self) -> UnitOutcome:
        """The outcome of one that has ended."""
        assert self.outcome is not None
        return self.outcome


@dataclass(slots=True, eq=False)
class User:
    """A task that holds a load or a prefetch."""

    requests: list[Request]
    task: asyncio.Task[None] | None = None
    handle: Load | Prefetch | None = None
    failed: dict[str, PageStatus] = field(default_factory=dict)
    report: LoadReport | None = None
    landed_at: float | None = None
    proceed: asyncio.Event = field(default_factory=asyncio.Event)
    placing: bool = False
    cancelled: bool = False

    @property
    def streams(self) -> bool:
        return isinstance(self.handle, Load)


@dataclass(slots=True, eq=False)
class Held:
    """Pages that the engine holds: computed, or restored and completed."""

    name: str
    keys: tuple[str, ...]
    rows: list[int]
    without_draft: range = range(0)
    draftless: str = "zero"
    """What the pages `without_draft` hold in the draft's slots, see `Request`."""

    saving: int = 0


@dataclass(slots=True, eq=False)
class Pending:
    """A save or a lookup that may be held up."""

    task: asyncio.Task[Any]
    due: float
    check: Callable[[Any], None]
