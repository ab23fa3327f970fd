"""Blocking calls on daemon threads of our own.

A native call cannot be interrupted, so a caller that gives up leaves it running. Such a call is *stuck*: its thread no
longer counts as one of the group's lanes and another takes its place, up to a bound; past the bound new calls are
refused at once. A call that only takes long lends its lane, within the same bound, to calls of other kinds: what holds
up one endpoint holds up no other, and no more of it is started than there are lanes. Threads are daemons: a stuck one
never keeps the process from ending. All bookkeeping happens on the event loop; threads only run calls.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import structlog

from softload import events
from softload.call_queue import CallQueue
from softload.call_records import CallGroupStatistics, CallSpan
from softload.callbacks import callback_context, tell_loop, wait_out
from softload.request_log import tell
from softload.shared_lanes import SharedLanes

__all__ = ["CallGroup", "CallGroupStatistics", "CallSpan", "NativeCall", "RefusedError"]

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_STUCK_SECONDS = 1.0
"""A call that nobody waits for and that has been out for longer is worth a warning."""

_STUCK_AGAIN_SECONDS = 30.0
"""Between two warnings of one group."""


class RefusedError(Exception):
    """The group takes no more calls: it is closed, or as many threads are stuck as it may have."""


class NativeCall(Generic[T]):
    """One call.

    `on_return` runs on the event loop exactly once if the call ran, also long after it was abandoned; and once, with a
    `RefusedError` for `error`, if its group was closed while somebody still waited for it to start.
    """

    __slots__ = (
        "_on_return",
        "_prepare",
        "_run",
        "abandoned",
        "alone",
        "ended_at",
        "error",
        "finished",
        "group",
        "kind",
        "label",
        "lane",
        "priority",
        "series",
        "started_at",
        "value",
    )

    def __init__(
        self,
        run: Callable[[], T],
        on_return: Callable[[NativeCall[T]], None],
        *,
        prepare: Callable[[], bool] = lambda: True,
        priority: float = 0.0,
        kind: str = "",
        alone: bool = False,
        series: object | None = None,
    ) -> None:
        self._run = run
        self._on_return = on_return
        self._prepare = prepare
        self.priority = priority
        self.kind = kind
        self.alone = alone  # of its kind
        self.series = series  # of its kind, calls of one run one at a time
        self.group: CallGroup | None = None
        self.label = ""
        """What it does, for traces."""
        self.lane = 0
        self.started_at: float | None = None
        self.ended_at = 0.0
        self.finished = False
        self.abandoned = False
        self.value: T | None = None
        self.error: Exception | None = None

    def prepare(self) -> bool:
        """Run on the loop, right before a thread gets the call; False where nobody wants it any more."""
        return not self.abandoned and self._prepare()

    def elapsed(self) -> float:
        """Seconds since the call started, 0 while it is queued."""
        return 0.0 if self.started_at is None else time.monotonic() - self.started_at

    def execute(self) -> None:
        """Run on a thread; what it raises is kept for the loop.

        Whatever it raises: a call that is not told about would hold its lane, its memory and its waiters for ever, and
        native code has panics of its own that are no `Exception`.
        """
        try:
            self.value = self._run()
        except Exception as error:  # handed to the awaiting task, or logged by whoever abandoned the call
            self.error = error
        except BaseException as error:  # of this thread: it must not end the loop's
            self.error = RuntimeError(f"a blocking call raised {error!r}")
            self.error.__cause__ = error
        self.ended_at = time.monotonic()

    def complete(self) -> None:
        """Run on the loop, once the call has returned."""
        self.finished = True
        on_return = self._on_return
        # What the call refers to refers to the call: left to the collector, every read would become its garbage.
        self._run, self._on_return, self._prepare = _gone, _nothing, _no
        on_return(self)

    def withdraw(self) -> bool:
        """Take the call back if it has not started; False if it has."""
        if self.started_at is not None:
            return False
        self.abandoned = True
        return True

    def abandon(self) -> None:
        """Stop waiting: a call that has started counts as stuck until it returns."""
        if not self.abandoned:
            self.abandoned = True
            if self.group is not None and self.started_at is not None and not self.finished:
                self.group.count_stuck(self)

    def step_aside(self) -> None:
        """Run on its thread: it needs what its kind shares no more, and still has its lane for a while."""
        if self.group is not None and self.group._loop is not None:
            tell_loop(self.group._loop, self._step_aside)

    def _step_aside(self) -> None:
        if self.group is not None and not self.finished and not self.abandoned:
            self.group.step_aside(self)

    def lend_lane(self) -> None:
        """It takes long, and is waited for: calls of other kinds may run in its lane until it returns."""
        if self.group is not None and self.started_at is not None and not self.finished and not self.abandoned:
            self.group.lend_lane(self)


class CallGroup:
    """A bounded number of lanes for blocking calls, lowest priority value first.

    Args:
        name: of its threads.
        width: calls that run at a time, stuck ones not counted; and calls of one kind, whatever lanes are lent.
        max_stuck: stuck calls that are replaced, and with them lanes that are lent; with more stuck calls, submitting
            is refused.
        at_a_time: calls of one kind that run at a time, late ones not counted; as many as there are lanes by default.
        shared: lanes that it shares with other groups, within its own width.
    """

    def __init__(
        self,
        name: str,
        *,
        width: int,
        max_stuck: int,
        at_a_time: int | None = None,
        shared: SharedLanes | None = None,
    ) -> None:
        self.name = name
        self.width = width
        self.max_stuck = max_stuck
        self.on_span: Callable[[CallSpan], object] | None = None
        """Told of every call that has returned, on the loop; for traces."""
        self._shared = shared
        self._lanes: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: CallQueue[NativeCall[Any]] = CallQueue(width=width, at_a_time=at_a_time or width)
        self._idle: list[SimpleQueue[NativeCall[Any] | None]] = []
        self._threads = 0
        self._running = 0
        self._stuck: set[NativeCall[Any]] = set()
        self._lent: set[NativeCall[Any]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._when_free: list[Callable[[], object]] = []
        self._calls = 0
        self._refused = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<CallGroup {self.name}: {self._running} running, {len(self._stuck)} stuck, {len(self._queue)} queued>"

    @property
    def saturated(self) -> bool:
        """Whether stuck calls have used up every replacement."""
        return len(self._stuck) > self.max_stuck

    @property
    def running(self) -> int:
        """Calls that run now and that somebody waits for."""
        return self._running - len(self._stuck)

    def submit(self, call: NativeCall[Any]) -> None:
        """Queue a call.

        Raises:
            RefusedError: closed, or saturated with stuck calls.
        """
        if self._closed or self.saturated:
            self._refused += 1
            raise RefusedError(self.name)
        self._loop = asyncio.get_running_loop()
        call.group = self
        self._queue.push(call)
        self.dispatch()

    def when_free(self, callback: Callable[[], object]) -> None:
        """Tell who was refused, once, as soon as there are threads for calls again; never where it is closed before."""
        self._when_free.append(callback)

    async def run(self, function: Callable[[], T], *, priority: float = 0.0, to_its_end: bool = False) -> T:
        """Run a call and wait for it; a cancelled wait withdraws or abandons it, or goes on `to_its_end`.

        Raises:
            RefusedError: closed, or saturated with stuck calls.
        """
        returned = asyncio.Event()
        call = NativeCall(function, lambda _: returned.set(), priority=priority)
        self.submit(call)
        try:
            await (wait_out(returned) if to_its_end else returned.wait())
        finally:
            if not call.finished and not call.withdraw():
                call.abandon()
        if call.error is not None:
            raise call.error
        return call.value  # type: ignore[return-value]  # set by execute(), and may be None itself

    def count_stuck(self, call: NativeCall[Any]) -> None:
        """A running call was abandoned: another thread may take its lane."""
        self._leave_lane(call)
        self._stuck.add(call)
        # Not at once: who gives up one call is about to give up others, and those that are queued must not start first.
        assert self._loop is not None
        self._loop.call_soon(self.dispatch, context=callback_context())
        if self._alarm is None:
            self._alarm = self._loop.call_later(_STUCK_SECONDS, self._warn, context=callback_context())

    def lend_lane(self, call: NativeCall[Any]) -> None:
        """A running call takes long: another may take its lane, one of its own kind only within the group's width."""
        self._lent.add(call)
        self._queue.step_aside(call)
        assert self._loop is not None
        self._loop.call_soon(self.dispatch, context=callback_context())

    def step_aside(self, call: NativeCall[Any]) -> None:
        """A running call keeps others of its kind waiting no more."""
        self._queue.step_aside(call)
        self.dispatch()

    def close(self) -> None:
        """Refuse new calls and queued ones, and end idle threads; running calls end theirs when they return."""
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        for call in self._queue.drain():
            if not call.abandoned:
                call.error = RefusedError(self.name)
                call.complete()
        while self._idle:
            self._idle.pop().put(None)
            self._threads -= 1

    def statistics(self) -> CallGroupStatistics:
        """What runs now."""
        return CallGroupStatistics(
            self._threads, self._running, len(self._stuck), len(self._queue), self._calls, self._refused
        )

    def dispatch(self) -> None:
        """Start what waits, as far as there are lanes."""
        while self._running - len(self._stuck) - self._lanes_lent < self.width:
            if self._shared is not None and len(self._queue) and not self._shared.has_room(self):
                return
            call = self._queue.pop()
            if call is None:
                return
            if not call.prepare():
                continue
            inbox = self._idle.pop() if self._idle else self._start_thread()
            self._running += 1
            self._queue.started(call)
            if self._shared is not None:
                self._shared.entered()
            self._calls += 1
            if self.on_span is not None:
                call.lane = next(lane for lane in itertools.count() if lane not in self._lanes)
                self._lanes.add(call.lane)
            call.started_at = time.monotonic()
            inbox.put(call)

    @property
    def _lanes_lent(self) -> int:
        return min(len(self._lent), max(0, self.max_stuck - len(self._stuck)))

    def _leave_lane(self, call: NativeCall[Any]) -> None:
        self._lent.discard(call)
        self._queue.left(call)
        if self._shared is not None:
            self._shared.left()

    def _warn(self) -> None:
        """Say that calls do not come back; most that are abandoned do, a moment later."""
        self._alarm = None
        late = [seconds for call in self._stuck if (seconds := call.elapsed()) >= _STUCK_SECONDS]
        if late:
            tell(
                _log.warning,
                events.THREAD_STUCK,
                group=self.name,
                stuck=len(late),
                replaced_up_to=self.max_stuck,
                seconds=round(max(late), 3),
            )
        if self._stuck and self._loop is not None and not self._closed:
            pause = _STUCK_AGAIN_SECONDS if late else _STUCK_SECONDS
            self._alarm = self._loop.call_later(pause, self._warn, context=callback_context())

    def _start_thread(self) -> SimpleQueue[NativeCall[Any] | None]:
        inbox: SimpleQueue[NativeCall[Any] | None] = SimpleQueue()
        assert self._loop is not None
        self._threads += 1
        threading.Thread(
            target=_serve, args=(inbox, self._loop, self._returned), name=f"softload-{self.name}", daemon=True
        ).start()
        return inbox

    def _returned(self, inbox: SimpleQueue[NativeCall[Any] | None], call: NativeCall[Any]) -> None:
        self._running -= 1
        if self.on_span is not None and call.started_at is not None:
            self._lanes.discard(call.lane)
            self.on_span(CallSpan(self.name, call.lane, call.label, call.started_at, call.ended_at, call.abandoned))
        # Threads that stood in for stuck ones are surplus now.
        if self._closed or len(self._idle) >= self.width:
            inbox.put(None)
            self._threads -= 1
        else:
            self._idle.append(inbox)
        if call.abandoned:
            self._stuck.discard(call)
        else:
            self._leave_lane(call)
        try:
            call.complete()
        finally:
            self.dispatch()
            if self._when_free and not (self.saturated or self._closed):
                refused, self._when_free = self._when_free, []
                for callback in refused:
                    callback()


def _gone() -> Any:
    raise RuntimeError("this call has run")


def _nothing(_: NativeCall[Any]) -> None:
    """Nobody is told twice."""


def _no() -> bool:
    return False


def _serve(
    inbox: SimpleQueue[NativeCall[Any] | None],
    loop: asyncio.AbstractEventLoop,
    returned: Callable[[SimpleQueue[NativeCall[Any] | None], NativeCall[Any]], None],
) -> None:
    while (call := inbox.get()) is not None:
        call.execute()
        if not tell_loop(loop, returned, inbox, call):
            return  # nobody waits, and what the call held goes with it
        del call  # an idle thread must not keep the memory of its last call alive
