"""Ranged reads: sessions are held for them, and renewed, before they are submitted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import Final, Protocol

import anyio

from softload.cost_model import CostModel
from softload.fetches import Fetch, Part, PartState, Turn
from softload.outcomes import PageStatus
from softload.protocols import Clock
from softload.session_states import Session
from softload.sessions import SessionTable

__all__ = ["SESSIONS_AT_A_TIME", "RangedReads"]

SESSIONS_AT_A_TIME: Final = 256
"""What one question starts ahead of the reads: the first ones are read from while others are started."""


class Reads(Protocol):
    """What ranged reads ask of the reader; see there."""

    def submit(self, parts: Sequence[Part], turn: Turn, *, ranged: bool) -> None:
        """Submit calls for parts."""

    def fail(self, parts: Sequence[Part], status: PageStatus) -> None:
        """Objects that cannot be had."""


class RangedReads:
    """The ranged reads of one loader, until they are submitted.

    Args:
        reads: which submits them.
        sessions: that they need.
        costs: told what it took to have them.
        clock: seconds, monotonic.
    """

    def __init__(
        self, reads: Reads, sessions: SessionTable, costs: CostModel, *, clock: Clock = time.monotonic
    ) -> None:
        self._reads = reads
        self._sessions = sessions
        self._costs = costs
        self._clock = clock

    def __repr__(self) -> str:
        return f"<RangedReads {self._sessions!r}>"

    @property
    def session_starts(self) -> int:
        """Sessions started so far; see `SessionTable.starts`."""
        return self._sessions.starts

    async def warm(self, keys: Sequence[str], started: anyio.Event) -> None:
        """Have sessions started that `begin` will want in a moment, and hold them until it has, or nobody will."""
        answers = await self._sessions.acquire(keys)
        try:
            await started.wait()
        finally:
            self._sessions.release(answer for answer in answers.values() if isinstance(answer, Session))

    async def begin(self, parts: Sequence[Part], turn: Turn, started: anyio.Event | None = None) -> None:
        """Hold sessions for the parts' objects, then have them read.

        Later parts of objects may come while the sessions of the first ones are being started.

        Args:
            parts: of objects.
            turn: their unit's place among others.
            started: of `warm`, if that was called for them.
        """
        parts = [part for part in parts if part.state is PartState.QUEUED and part in part.fetch.parts]
        new = {part.fetch.key: part.fetch for part in parts if part.fetch.session is None}
        since = self._clock()
        try:
            answers = await self._sessions.acquire(list(new)) if new else {}
        finally:
            if started is not None:
                started.set()
        if new and turn.is_first and all(isinstance(answer, Session) for answer in answers.values()):
            self._costs.record_start(len(new), self._clock() - since)
        for key, fetch in new.items():
            answer = answers[key]
            if fetch.session is not None or fetch.failed or any(part.layers is None for part in fetch.parts):
                if isinstance(answer, Session):  # the other parts of it have had their answer meanwhile
                    self._sessions.release([answer])
            elif isinstance(answer, Session):
                fetch.session = answer
                if not fetch.listeners:  # everybody left meanwhile
                    self.release(fetch)
            elif answer in (PageStatus.NO_MEMORY_REPLICA, PageStatus.REPLICA_CHANGED) and fetch.listeners:
                # No session without a memory replica, but a whole read may bring it in. Nor for as long as others hold
                # one from before an outage, which may have been no more than one question that failed beside this one:
                # a whole read asks the master anew.
                fetch.parts = [Part(fetch)]
                self._reads.submit(fetch.parts, turn, ranged=False)
            else:
                self._reads.fail(fetch.parts, answer)
        await self.go_on([part for part in parts if part.fetch.session is not None], turn)

    async def go_on(self, parts: Sequence[Part], turn: Turn, *, force_up_to: int = 0) -> None:
        """Have parts read whose objects have sessions, once these are fit for it; see `SessionTable.renew`."""
        held = [part for part in parts if part.fetch.session is not None and part.fetch.listeners]
        sessions = list({id(part.fetch.session): part.fetch.session for part in held}.values())
        renewed = self._sessions.renew([each for each in sessions if each is not None], force_up_to=force_up_to)
        answers = await renewed
        found = {id(session): answer for session, answer in zip(sessions, answers, strict=True)}
        for part in held:
            answer = found.get(id(part.fetch.session), PageStatus.LOADED)  # none: freed meanwhile
            if answer is not PageStatus.LOADED:
                self._reads.fail([part], answer)
        # Calls of their own: the first layers of all objects do not wait for any byte of later ones.
        queued = [
            (part.layers.start, part) for part in held if part.state is PartState.QUEUED and part.layers is not None
        ]
        queued.sort(key=lambda each: each[0])
        for _, same in groupby(queued, key=lambda each: each[0]):
            self._reads.submit([part for _, part in same], turn, ranged=True)

    def put_off(self, parts: Sequence[Part]) -> bool:
        """Whether a read that is about to go out should wait until its sessions were renewed."""
        return self._sessions.put_off([part.fetch.session for part in parts if part.fetch.session is not None])

    def release(self, fetch: Fetch) -> None:
        """Let go of the session, if one is held."""
        if fetch.session is not None:
            session, fetch.session = fetch.session, None
            self._sessions.release([session])
