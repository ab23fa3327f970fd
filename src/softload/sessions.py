"""Counted sessions for ranged reads.

The store keeps one session per key and process, without a count: whoever ends it ends it for all. So loads share them
here. An end never waits behind another key's start; a start that takes long makes the master suspect, and then live
sessions are not started again, because a failed start erases them.

A start that does not come back takes nobody along: what is new is started once more, and whichever comes first counts;
what was open before is used for as long as its lease lasts. Otherwise a start and an end of one key never overlap; what
a late start leaves in the store is ended when it returns.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import anyio

from softload.callbacks import callback_context
from softload.health import Health
from softload.native_calls import CallGroup, NativeCall, RefusedError
from softload.outcomes import PageStatus
from softload.protocols import Clock
from softload.session_states import Session, SessionState, SessionStatistics
from softload.store_calls import StoreCalls

__all__ = ["SessionTable"]

_MAX_STARTS = 2
_SLOW_START = 0.1
_LATE_START = 0.25
"""Seconds after which a start is not relied on any more; it takes a millisecond."""

_MAX_IN_VAIN = 2
"""Renewals without a read between them: where reads queue for longer than a lease lasts, no renewal helps."""


@dataclass(slots=True, eq=False)
class _Start:
    """Sessions that are started together, in one call or two; `answers` are complete once it is `done`."""

    sessions: Sequence[Session]
    is_new: bool
    was_lost: bool
    answers: dict[str, Session | PageStatus] = field(default_factory=dict)
    calls: list[NativeCall[list[PageStatus]]] = field(default_factory=list)
    """Those that are out."""
    done: anyio.Event = field(default_factory=anyio.Event)


class SessionTable:
    """The sessions of one loader.

    Args:
        calls: the guarded store.
        health: told what the master answers; while its breaker is open nothing is started again.
        ttl: seconds that a session's lease lasts.
        max_stuck: threads that may be stuck in starts, and in ends.
    """

    def __init__(
        self, calls: StoreCalls, health: Health, *, ttl: float, max_stuck: int, clock: Clock = time.monotonic
    ) -> None:
        self._calls = calls
        self._health = health
        self._ttl = ttl
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        # Apart, so that an end never waits behind another key's start that hangs on the master.
        self._starts = CallGroup("session-start", width=_MAX_STARTS, max_stuck=max_stuck)
        self._ends = CallGroup("session-end", width=1, max_stuck=max_stuck)
        self._unheld: list[Session] = []
        self._none_open = anyio.Event()
        self._epoch = 0
        self._out: set[NativeCall[list[PageStatus]]] = set()
        self._opened = self._restarted = self._ended = 0
        self.starts = 0
        """Sessions started so far, again included."""

    def __repr__(self) -> str:
        return f"<SessionTable {len(self._sessions)} sessions>"

    @property
    def master_suspect(self) -> bool:
        """Whether a start has been out for longer than it should, or the master does not answer."""
        return (
            self._health.master.is_open
            or self._health.master_lost
            or any(call.elapsed() > _SLOW_START for call in self._out if not call.finished)
        )

    def void(self) -> None:
        """The master was out of reach: what its sessions point to may hold other objects now."""
        self._epoch += 1

    async def acquire(self, keys: Sequence[str]) -> Mapping[str, Session | PageStatus]:
        """Hold a session for each key, once each: the session, or why there is none."""
        answers: dict[str, Session | PageStatus] = {}
        pending = list(dict.fromkeys(keys))
        try:
            while pending:
                new = [key for key in pending if key not in self._sessions]
                if new:
                    answers.update(await self._start_new([Session(key, 1, self._epoch) for key in new]))
                    pending = [key for key in pending if key not in answers]
                    continue
                busy = None
                for key in pending:
                    session = self._sessions[key]
                    if session.state is SessionState.OPEN and session.epoch == self._epoch:
                        session.holders += 1
                        answers[key] = session
                    elif session.state is SessionState.OPEN:
                        answers[key] = PageStatus.REPLICA_CHANGED  # from before an outage; its holders will end it
                    else:
                        busy = session
                pending = [key for key in pending if key not in answers]
                if busy is not None:
                    await busy.changed.wait()
        except BaseException:
            self.release(session for session in answers.values() if isinstance(session, Session))
            raise
        return answers

    def release(self, sessions: Iterable[Session]) -> None:
        """Let go of sessions; the end of each that nobody holds any more is on its way when this returns."""
        for session in sessions:
            session.holders -= 1
            if not session.holders and session.state is SessionState.OPEN:
                if not self._unheld:  # one call for all that are let go of in this step of the loop
                    asyncio.get_running_loop().call_soon(self._end_unheld, context=callback_context())
                self._unheld.append(session)

    def put_off(self, sessions: Sequence[Session]) -> bool:
        """Whether a read that is about to go out should wait until its sessions were started again, and they can be.

        A read is put off a few times at most, then it goes out: the store says if the lease still holds.
        """
        stale = any(
            session.epoch == self._epoch
            and (
                session.state is SessionState.STARTING  # again, for another read
                or (session.state is SessionState.OPEN and self._runs_out(session))
            )
            for session in sessions
        )
        # A renewal that is under way is not in vain yet.
        hopeful = all(each.in_vain - (each.state is SessionState.STARTING) < _MAX_IN_VAIN for each in sessions)
        wait = stale and hopeful and not self.master_suspect
        for session in () if wait else sessions:
            session.in_vain = 0
        return wait

    async def renew(self, sessions: Sequence[Session], *, force_up_to: int = 0) -> list[PageStatus]:
        """Make held sessions fit for a read: start again those whose lease runs out soon.

        Args:
            sessions: held ones.
            force_up_to: those started as this number or before are started again in any case: `starts`, when a read
                went out that they were not fit for. Later ones are not: other reads of theirs may be out.

        Returns:
            per session `LOADED`, or why it must not be read: one from before an outage answers `REPLICA_CHANGED`.
        """
        again = [
            session
            for session in sessions
            if session.state is SessionState.OPEN
            and session.epoch == self._epoch
            and (session.started_as <= force_up_to or self._runs_out(session))
        ]
        # A failed start erases the live session, so nothing is risked while the master does not answer.
        if again and not self.master_suspect:
            self._restarted += len(again)
            for session in again:
                session.in_vain += 1
            await self._start_again(again)
        for session in sessions:
            while session.state is SessionState.STARTING:  # again, maybe: others that share it may force that too
                await session.changed.wait()
        return [
            PageStatus.REPLICA_CHANGED
            if session.epoch != self._epoch
            else PageStatus.LOADED
            if session.state is SessionState.OPEN
            else PageStatus.LEASE_EXPIRED
            for session in sessions
        ]

    async def wait_none_open(self) -> None:
        """Wait until every session has been ended."""
        while self._sessions:
            if self._none_open.is_set():  # of an earlier time; else others wait for it too
                self._none_open = anyio.Event()
            await self._none_open.wait()

    def close(self) -> None:
        """No more starts and ends; the store forgets what is left when it closes."""
        self._starts.close()
        self._ends.close()

    def statistics(self) -> SessionStatistics:
        """What is open now."""
        return SessionStatistics(len(self._sessions), self._opened, self._restarted, self._ended)

    def groups(self) -> tuple[CallGroup, CallGroup]:
        """The threads that start and end sessions."""
        return self._starts, self._ends

    def _runs_out(self, session: Session) -> bool:
        """Whether less than a third of its lease is left."""
        return session.started_at < self._clock() - self._ttl * 2 / 3

    async def _start_new(self, sessions: list[Session]) -> dict[str, Session | PageStatus]:
        start = _Start(sessions, is_new=True, was_lost=self._health.master_lost)
        try:
            first = self._ask(start)
        except RefusedError:
            self._not_started(start)
            return {session.key: PageStatus.SHED for session in sessions}
        is_second_due = True
        try:
            while not start.done.is_set():
                with anyio.move_on_after(_LATE_START):
                    await start.done.wait()
                if is_second_due and not start.done.is_set() and first.elapsed() > _SLOW_START:
                    is_second_due = False
                    with suppress(RefusedError):
                        self._ask(start)
        except BaseException:  # cancelled, maybe in the step in which it was done: nobody gets to hold them
            if start.done.is_set():
                self.release(session for session in start.answers.values() if isinstance(session, Session))
            else:
                for session in sessions:
                    session.holders -= 1
            raise
        finally:
            self._give_up(start)
        return start.answers

    async def _start_again(self, sessions: list[Session]) -> None:
        start = _Start(sessions, is_new=False, was_lost=self._health.master_lost)
        try:
            self._ask(start)
            with anyio.move_on_after(_LATE_START):
                await start.done.wait()
        except RefusedError:
            self._not_started(start)
        finally:
            self._give_up(start)
            self._not_started(start)

    def _ask(self, start: _Start) -> NativeCall[list[PageStatus]]:
        """Submit a call that starts them.

        Raises:
            RefusedError: there is no thread for it.
        """
        keys = [session.key for session in start.sessions]
        asked_at = -math.inf

        def ask() -> list[PageStatus]:
            nonlocal asked_at
            asked_at = self._clock()  # leases begin between that and the answer, which may wait for the loop
            return self._calls.session_start(keys)

        call = NativeCall(ask, lambda call: self._returned(start, call, asked_at))
        for session in start.sessions:
            self._sessions[session.key] = session
            session.state = SessionState.STARTING
        self._starts.submit(call)
        self._out.add(call)
        start.calls.append(call)
        return call

    def _give_up(self, start: _Start) -> None:
        """Nobody waits for its calls any more."""
        for call in list(start.calls):
            if call.withdraw():
                self._out.discard(call)
                start.calls.remove(call)
            else:
                call.abandon()
        if not start.calls:
            self._not_started(start)

    def _returned(self, start: _Start, call: NativeCall[list[PageStatus]], asked_at: float) -> None:
        self._out.discard(call)
        start.calls.remove(call)
        statuses = call.value or [PageStatus.MALFORMED] * len(start.sessions)
        self._health.record_master(statuses)
        for session, status in zip(start.sessions, statuses, strict=True):
            live = self._sessions.get(session.key)
            if live is session and session.state is SessionState.STARTING:
                if start.was_lost and start.is_new:
                    session.epoch = self._epoch  # asked since the outage began and answered: of the master that is back
                start.answers[session.key] = self._started(session, status, asked_at, new=start.is_new)
            elif status is PageStatus.LOADED:
                self._came_late(session.key, live)
            elif live is not None:
                live.started_at = -math.inf  # a failed start erases the live session: start it before it is read
        self._end_unheld_of(start.sessions)
        start.done.set()

    def _came_late(self, key: str, live: Session | None) -> None:
        """The store has a session from a start that was not relied on any more."""
        if live is None:
            self._opened += 1
            self._sessions[key] = live = Session(key, 0, self._epoch, SessionState.OPEN)
            self._end([live])
        elif live.state is SessionState.ENDING:
            live.ends_again = True

    def _started(self, session: Session, status: PageStatus, asked_at: float, *, new: bool) -> Session | PageStatus:
        if status is not PageStatus.LOADED:
            self._drop(session, opened=not new)
            return status
        if new:
            self._opened += 1
        session.started_at = asked_at
        self.starts += 1
        session.started_as = self.starts
        session.become(SessionState.OPEN)
        return session

    def _not_started(self, start: _Start) -> None:
        """The store was not asked, or does not answer: those that were open before still are."""
        if start.done.is_set():  # it was, and did: what starts now does so by another's will
            return
        for session in start.sessions:
            if session.state is SessionState.STARTING:
                if start.is_new:
                    self._drop(session, opened=False)
                else:
                    session.become(SessionState.OPEN)
        self._end_unheld_of(start.sessions)

    def _drop(self, session: Session, *, opened: bool) -> None:
        if opened:
            self._ended += 1
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]
        session.become(SessionState.GONE)
        if not self._sessions:
            self._none_open.set()

    def _end_unheld(self) -> None:
        # Each once: one may have been let go of, held again and let go of in the same step.
        unheld, self._unheld = dict.fromkeys(self._unheld), []
        self._end_unheld_of(unheld)

    def _end_unheld_of(self, sessions: Iterable[Session]) -> None:
        self._end([session for session in sessions if not session.holders and session.state is SessionState.OPEN])

    def _end(self, sessions: Sequence[Session]) -> None:
        if not sessions:
            return
        for session in sessions:
            session.become(SessionState.ENDING)

        def returned(_: NativeCall[None]) -> None:
            again = [session for session in sessions if session.ends_again]
            for session in sessions:
                if session in again:
                    session.ends_again = False
                else:
                    self._drop(session, opened=True)
            self._end(again)

        keys = [session.key for session in sessions]
        try:
            self._ends.submit(NativeCall(lambda: self._calls.session_end(keys), returned))
        except RefusedError:
            for session in sessions:
                self._drop(session, opened=True)
