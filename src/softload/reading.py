"""Reads from the store into landing memory: joined, batched by endpoint, in turn, checked after they landed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import structlog

from softload import events
from softload.config import LoaderConfig
from softload.cost_model import CostModel
from softload.fetch_table import FetchTable
from softload.fetches import Fetch, FetchListener, Part, PartState, ReadAnswers, ReadCall, Turn, by_unit, leaves
from softload.health import Health
from softload.landing import LandingMemory, Segment, SegmentState
from softload.native_calls import CallGroup, NativeCall, RefusedError
from softload.outcomes import Action, PageStatus
from softload.protocols import Clock, Descriptor
from softload.ranged_reads import SESSIONS_AT_A_TIME, RangedReads
from softload.read_health import ReadHealth
from softload.read_queue import ReadQueue
from softload.request_log import RequestLog
from softload.second_reads import SecondReads
from softload.sessions import SessionTable
from softload.store_calls import StoreCalls
from softload.telemetry import Counters

__all__ = ["Reader"]

_log = structlog.get_logger(__name__)


class Reader:
    """All reads of one loader.

    Args:
        calls: the guarded store.
        landing: where bytes land.
        sessions: for ranged reads.
        health: told what endpoints and keys turn out to be.
        counters: told what was read.
        spawn: starts a task of the loader's.
        log: of single objects.
    """

    def __init__(
        self,
        calls: StoreCalls,
        landing: LandingMemory,
        sessions: SessionTable,
        health: Health,
        counters: Counters,
        config: LoaderConfig,
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        log: RequestLog,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._calls = calls
        self._landing = landing
        self._counters = counters
        self._config = config
        self._spawn = spawn
        self._log = log
        self._clock = clock
        self._table = FetchTable()
        self._health = ReadHealth(health, counters)
        self._ranged = RangedReads(self, sessions, self._health.costs, clock=clock)
        self._seconds = SecondReads(self, landing, health, counters)
        self._queue = ReadQueue(self, calls, landing, self._ranged, self._seconds, self._health, config, spawn)
        self.group = self._queue.group
        self._removals = CallGroup("remove", width=1, max_stuck=1)

    def __repr__(self) -> str:
        return f"<Reader {self._table!r}, {self.group!r}>"

    def find(self, key: str) -> Fetch | None:
        """The fetch of a key that may be joined; see `FetchTable.find`."""
        return self._table.find(key)

    def knows_any(self, keys: Collection[str]) -> bool:
        """Whether any of these is here or on its way, late ones included."""
        return self._table.knows_any(keys)

    def piece(self, fetch: Fetch, first: int, end: int) -> Fetch:
        """A fetch of some of the objects of a fetch, by their places in it; it is split for that where need be."""
        return self._table.piece(fetch, first, end)

    def split(self, fetch: Fetch) -> list[Fetch]:
        """A fetch for each object, with all that holds for the one that brought them; whoever wants it is told."""
        return self._table.split(fetch, range(fetch.count + 1))

    @property
    def costs(self) -> CostModel:
        """What reads have cost so far."""
        return self._health.costs

    def join(self, fetch: Fetch, listener: FetchListener) -> None:
        """Want a fetch; `leave` must follow."""
        if not fetch.listeners:
            self._table.join_kept(fetch)
        fetch.listeners.append(listener)

    def add(
        self,
        keys: Sequence[str],
        segment: Segment,
        descriptors: Sequence[Descriptor | None],
        listener: FetchListener,
        *,
        size: int,
        tailed: bool,
        ranges: Sequence[tuple[range, Sequence[tuple[int, int]]]] = (),
    ) -> Fetch:
        """A fetch for objects that are not here: it takes over the segment, and waits for `read`.

        Args:
            keys: the objects' keys, at least one.
            segment: where they land.
            descriptors: where they are, as far as that is known: all at one endpoint.
            listener: who wants them, and has them read.
            size: bytes of each object.
            tailed: whether they end in a tail with digests.
            ranges: `(layers, byte ranges)` per part, for ranged reads of one object; none for whole reads.
        """
        fetch = Fetch(keys, segment, descriptors, size=size, tailed=tailed)
        if ranges:
            fetch.parts = [Part(fetch, tuple(pairs), layers) for layers, pairs in ranges]
        fetch.listeners.append(listener)
        fetch.issuer = listener
        self._table.add(fetch)
        return fetch

    def leave(self, fetch: Fetch, listener: FetchListener, *, timed_out: bool = False, keep: bool = False) -> None:
        """Stop wanting a fetch.

        Args:
            fetch: what is not wanted any more.
            listener: who wanted it.
            timed_out: because its bytes did not come in time: nobody joins it any more, its endpoint is told.
            keep: its landed bytes may serve later units for a while.
        """
        fetch.listeners.remove(listener)
        if listener is fetch.issuer and listener not in fetch.listeners:
            fetch.issuer = None
            if fetch in self._seconds:  # whoever is left waits for that
                fetch.give_up_calls()
        if timed_out and fetch.in_flight:
            fetch.timed_out = True
            self._health.time_out(fetch)
        self._seconds.left(fetch, timed_out=timed_out)
        if not fetch.listeners:
            self._settle(fetch, keep=keep)

    def leave_all(self, fetches: Sequence[Fetch], listener: FetchListener, *, keep: bool) -> None:
        """`leave` of many, which nobody waited for in vain: memory that lies side by side is given back at once."""
        freed: list[Segment] = []
        for fetch in fetches:
            if keep or len(fetch.listeners) > 1 or not fetch.landed or self._seconds:
                self.leave(fetch, listener, keep=keep)
                continue
            fetch.listeners.clear()
            fetch.issuer = None
            self._table.forget(fetch)
            fetch.parts.clear()
            freed.append(fetch.segment)
        self._landing.release_all(freed)

    def read(self, parts: Sequence[Part], turn: Turn, started: anyio.Event | None = None) -> None:
        """Queue reads of parts that are QUEUED, in the order in which they are wanted.

        Args:
            parts: all of one unit.
            turn: the unit's place among others.
            started: of `start_sessions`, if that was called for them.
        """
        ranged = [part for part in parts if part.layers is not None]
        whole = [part for part in leaves(parts) if part.layers is None]
        if ranged:
            self._spawn(lambda: self._ranged.begin(ranged, turn, started))
        elif started is not None:
            started.set()
        self.submit(whole, turn, ranged=False)

    def start_sessions(self, keys: Collection[str]) -> anyio.Event:
        """Parts of these objects will be read: start their sessions. The event must go to `read`, whatever is read."""
        wanted, started = list(keys), anyio.Event()
        for first in range(0, len(wanted), SESSIONS_AT_A_TIME):
            self._spawn(partial(self._ranged.warm, wanted[first : first + SESSIONS_AT_A_TIME], started))
        return started

    def reclaim(self, nbytes: int) -> None:
        """Free kept bytes, oldest first, at least `nbytes` of them."""
        for fetch in self._table.take_oldest(nbytes):
            self._free(fetch)

    def expire(self) -> None:
        """Free kept bytes whose time is over."""
        for fetch in self._table.take_expired(self._clock):
            self._free(fetch)

    @property
    def kept_bytes(self) -> int:
        """Landed bytes that nobody pins."""
        return self._table.kept_bytes

    def close(self) -> None:
        """Take no more reads, drop queued ones, free what is kept."""
        self._queue.close()
        self._removals.close()
        self.reclaim(self._landing.capacity * 2)

    def submit(self, parts: Sequence[Part], turn: Turn, *, ranged: bool) -> None:
        """Submit calls for parts; see `ReadQueue.submit`."""
        self._queue.submit(parts, turn, ranged=ranged)

    # -- back on the loop

    def returned(self, call: ReadCall) -> None:
        """A call is back: its objects have landed, are read again, or cannot be had."""
        assert (native := call.native) is not None
        self._seconds.returned(call)
        answers = native.value or ReadAnswers([PageStatus.MALFORMED] * sum(part.fetch.count for part in call.live))
        if native.error is not None and not isinstance(native.error, RefusedError):
            self._log.tell(_log.error, events.STORE_RAISED, error=repr(native.error))
        self._health.record(call, answers.statuses, running=self.group.running)
        again: list[Part] = []
        landed: dict[FetchListener, None] = {}
        place, left = 0, list(reversed(call.live))
        while left:  # one after another: what comes of one may split those that follow
            part = left.pop()
            fetch = part.fetch
            if not part.pieces:
                self._table.split_by_status(fetch, answers.statuses[place : place + fetch.count])
            if part.pieces:
                left += reversed(part.pieces)
                continue
            status, replaced = answers.statuses[place], answers.replaced.get(place)
            place += fetch.count
            part.call = None
            part.state = PartState.QUEUED
            if not fetch.listeners:
                part.state = PartState.FAILED
                self._settle(fetch, keep=False)
            elif status is PageStatus.LOADED:
                self._land(part)
                for listener in fetch.listeners:
                    landed[listener] = None
            elif fetch not in self._seconds and self._may_retry(part, status, replaced):
                again.append(part)
            else:
                if status is part.failure is PageStatus.CORRUPT and fetch not in self._seconds:
                    self._remove_corrupt(fetch)
                self.fail([part], status)
        for listener in landed:
            listener.wake()
        for suspects, of_one in by_unit(again):
            if call.ranged:
                starts = call.session_starts
                self._spawn(partial(self._ranged.go_on, of_one, Turn(suspects), force_up_to=starts))
            else:
                self.submit(of_one, Turn(suspects), ranged=False)

    def _land(self, part: Part) -> None:
        part.state = PartState.LANDED
        fetch = part.fetch
        self._counters.bytes_loaded += part.nbytes
        if fetch.landed:
            fetch.segment.state = SegmentState.LANDED
            self._health.confirm(fetch)
            self._ranged.release(fetch)
            if self._seconds:
                self._seconds.landed(fetch)
            self._table.add_back(fetch)  # a second read took its place, and was not needed

    def _may_retry(self, part: Part, status: PageStatus, descriptor: Descriptor | None) -> bool:
        fetch = part.fetch
        if part.failure is not None or fetch.timed_out:
            return False
        if status is PageStatus.REPLICA_CHANGED:
            if descriptor is None or descriptor.size != fetch.size:
                return False
            fetch.descriptors = (descriptor,)
            fetch.endpoint = descriptor.endpoint
        elif status is not PageStatus.CORRUPT and status.action is not Action.RETRY:
            return False
        part.failure = status
        self._counters.retries += 1
        return True

    def fail(self, parts: Sequence[Part], status: PageStatus) -> None:
        """The objects of these parts cannot be had: tell everybody who wants them, once."""
        for failed in leaves(parts):  # one after another: who is told of one may split, or let go of, those that follow
            fetch = failed.fetch
            for part in fetch.parts:
                if part.state is PartState.QUEUED:
                    part.state = PartState.FAILED
            if fetch.failed or self._seconds.stands_in(fetch, status):
                continue
            fetch.status = status
            self._table.forget(fetch)
            self._health.refute(fetch)
            for listener in dict.fromkeys(fetch.listeners):
                listener.fetch_failed(fetch)
                listener.wake()
            if not fetch.listeners:
                self._settle(fetch, keep=False)

    def _settle(self, fetch: Fetch, *, keep: bool) -> None:
        """Nobody wants it (any more): decide what becomes of its memory."""
        if fetch.segment.state is SegmentState.FREE:
            return
        if fetch.in_flight:
            if fetch.segment.state is SegmentState.QUARANTINED:
                return  # another of its parts has returned
            self._table.forget(fetch)
            self._landing.quarantine(fetch.segment, fetch.endpoint)
            fetch.give_up_calls()
        elif keep and fetch.landed and self._config.prefetch_ttl > 0 and self._table.knows(fetch):
            self._table.keep(fetch, self._clock() + self._config.prefetch_ttl)
            self._landing.serve_waiting()  # what is kept can be reclaimed: who waits for room may have it
        else:
            self._free(fetch)

    def _free(self, fetch: Fetch) -> None:
        self._table.forget(fetch)
        self._ranged.release(fetch)
        for part in fetch.parts:  # a queued call skips what has failed
            if part.state is PartState.QUEUED:
                part.state = PartState.FAILED
        fetch.parts.clear()  # no circle for the collector: parts know their fetch
        self._landing.release(fetch.segment)

    def _remove_corrupt(self, fetch: Fetch) -> None:
        """Two reads agree that the store holds bad bytes: make room for the recomputed page. Never in `page`."""
        if not fetch.tailed:
            return
        self._counters.removed_corrupt += 1
        self._log.tell(_log.warning, events.OBJECT_REMOVED, key=fetch.key)
        key = fetch.key
        with suppress(RefusedError):
            self._removals.submit(NativeCall(lambda: self._calls.remove([key], force=True), lambda _: None))
