"""How one unit is admitted: cut to what may be read, at once where the store's word is enough, and let go on."""

from __future__ import annotations

import asyncio
from typing import Protocol

from softload.admission import Answers, Endpoints, first_columns, readable, revalidate
from softload.context import Context
from softload.fetches import Turn
from softload.planning import Column
from softload.unit_fetches import UnitFetches
from softload.unit_pages import UnitPages
from softload.unit_planning import UnitPlanning

__all__ = ["UnitAdmission"]


class AdmittedUnit(Protocol):
    """The unit. All of it is called on the loop."""

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants it any more."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or ends, for whatever reason."""

    def cut(self) -> None:
        """Some of what it wants was marked: draw the conclusion."""

    def wake(self) -> None:
        """There may be more to plan, or to copy."""


class UnitAdmission:
    """The admission of one unit.

    Args:
        context: the loader's parts.
        wants: the unit's pages; cut to what may be read.
        fetches: what it holds; told where the objects are.
        planning: starts what is read ahead of the admission.
        unit: told when something has changed after it was admitted.
        turn: the load's place among others.
        is_streaming: whether it is copied while it is read, so that its first layers may be read first.
    """

    def __init__(
        self,
        context: Context,
        wants: UnitPages,
        fetches: UnitFetches,
        planning: UnitPlanning,
        unit: AdmittedUnit,
        turn: Turn,
        *,
        is_streaming: bool,
    ) -> None:
        self._context = context
        self._wants = wants
        self._fetches = fetches
        self._planning = planning
        self._unit = unit
        self._turn = turn
        self._is_streaming = is_streaming
        self._is_lacking = False
        """Whether some of its first layers' objects cannot be read."""
        self._is_early = False
        """Admitted on the store's word that all of it is there: where the others are than the first layers follows."""
        self.decided = asyncio.Event()
        self.go = asyncio.Event()

    def decide(self, answers: Answers, endpoints: Endpoints) -> None:
        """Cut the unit to what was revalidated: its own first bad page, boundaries, draft policy.

        Args:
            answers: per object key.
            endpoints: what was decided about endpoints so far in this admission; added to.
        """
        if self.decided.is_set() and (not self._is_early or self._unit.is_over):
            return
        found = revalidate(self._context, self._wants, answers, endpoints)
        if self._is_streaming:
            self._fetches.loans.admit(answers)
        if self._is_early:
            self._unit.cut()
            self._planning.learn(found)
            self._unit.wake()
            return
        self._fetches.descriptors.update(found)
        self._decide()

    def admit_early(self) -> bool:
        """All of it is there and leased, as the store says: if there is memory for it, too, the unit goes on.

        Where its objects are, and that they are what they must be, is told by `read_ahead` and `decide` before they are
        read. What is wrong with them then is a late failure.
        """
        if self.decided.is_set() or self._unit.is_cancelled or self._is_lacking or not self.first_columns():
            return False
        self._planning.announce()
        if not (self._planning.is_granted or self._planning.reserve()):
            return False
        self._is_early = True
        self._planning.admit_early()
        self._decide()
        self.go.set()
        return True

    @property
    def starts_early(self) -> bool:
        """Whether it was admitted early, and what its first layers need is here, or being read."""
        return self._is_early and self._planning.has_begun

    def _decide(self) -> None:
        self._wants.recut()
        config = self._context.config
        self._wants.apply_draft_policy(config.draft_policy, config.truncate_pages)
        self.decided.set()

    def first_columns(self) -> list[Column]:
        """What may be read ahead of the admission."""
        return first_columns(self._context, self._wants) if self._is_streaming else []

    def read_ahead(self, answers: Answers, endpoints: Endpoints) -> None:
        """The first layers' objects are there: read them while the master is asked for the rest.

        Landing memory is all that this writes into. Slots are written once the unit is admitted, as ever.

        Args:
            answers: per object key of `first_columns`.
            endpoints: what was decided about endpoints so far in this admission; added to.
        """
        if self._unit.is_over or not self._wants.pages or (self.decided.is_set() and not self._is_early):
            return
        columns = self.first_columns()
        if not columns:  # others of its load are simple
            return
        found = readable(self._context, columns, answers, endpoints)
        if found is None:
            self._is_lacking = True
            return
        self._planning.read_ahead(columns, found, self._turn)
        self._unit.wake()
