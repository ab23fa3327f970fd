"""What the parts of one loader share."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio

from softload.callbacks import tell_loop
from softload.config import Integrity, Layout, LoaderConfig, ReadMode
from softload.connection import Connection
from softload.errors import LoaderClosedError
from softload.geometry.group import DevicePoolGroup
from softload.health import Health
from softload.keys import KeySpace
from softload.landing import LandingMemory
from softload.lending import Lender
from softload.native_calls import CallGroup, RefusedError
from softload.outcomes import PageStatus
from softload.pacing import Pacer
from softload.protocols import Descriptor, RankConsensus, SoloConsensus
from softload.questions import Question, SmallQuestions, heard_master
from softload.reading import Reader
from softload.request_log import RequestLog
from softload.sessions import SessionTable
from softload.slots import SlotTable
from softload.store_calls import StoreCalls
from softload.telemetry import Counters
from softload.transfer import PoolName

__all__ = ["Context", "PlannedPages", "PromisedKeys"]

T = TypeVar("T")

_LEND_SECONDS = 0.5
"""For which answers wait for the store to find out whether it lends what is there: that reads one object."""

_FAIR_SECONDS = 0.05
"""A call to the master that its caller gave up on sooner says nothing about the master."""


class PromisedKeys:
    """Keys that a lookup found: the store said that it has them. Bounded; the oldest are forgotten."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[str, None] = OrderedDict()

    def add(self, keys: Iterable[str]) -> None:
        """The store said that it has these."""
        for key in keys:
            self._keys[key] = None
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys


class PlannedPages:
    """Pages of units that have not joined or started all their reads yet: what others have copied may be theirs too."""

    def __init__(self) -> None:
        self._units: dict[object, frozenset[str]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, unit: object, pages: Iterable[str]) -> None:
        """A unit is about to plan these page keys; once more is no change."""
        if unit not in self._units:
            self._units[unit] = frozenset(pages)
            self._counts.update(self._units[unit])

    def discard(self, unit: object) -> None:
        """It has planned all, or wants nothing any more."""
        pages = self._units.pop(unit, None)
        if not self._units:
            self._counts.clear()
        elif pages is not None:
            self._counts.subtract(pages)
            for page in pages:
                if not self._counts[page]:
                    del self._counts[page]

    def other_wants(self, unit: object, pages: Iterable[str]) -> bool:
        """Whether any unit but this one is about to plan one of these page keys."""
        own = unit in self._units
        return len(self._units) > own and any(self._counts[page] > own for page in pages)


@dataclass(slots=True, eq=False)
class Context:
    """One loader's parts, wired together by `PageLoader`."""

    config: LoaderConfig
    pools: DevicePoolGroup
    keys: KeySpace
    calls: StoreCalls
    connection: Connection
    landing: LandingMemory
    reader: Reader
    sessions: SessionTable
    health: Health
    slots: SlotTable
    counters: Counters
    consensus: RankConsensus
    control: CallGroup
    compute: CallGroup
    fences: CallGroup
    writes: CallGroup
    spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
    pacer: Pacer = field(default_factory=Pacer)
    log: RequestLog = field(default_factory=RequestLog)
    active: set[Any] = field(default_factory=set)
    """Units whose outcome is not known yet."""
    promised: PromisedKeys = field(default_factory=lambda: PromisedKeys(65_536))

    part_sizes: dict[tuple[PoolName, str, range], tuple[int, int]] = field(default_factory=dict)
    """Ranges and bytes of the layers of each kind of object; as many as there are ways to join groups of layers."""
    planned: PlannedPages = field(default_factory=PlannedPages)

    waits: set[anyio.CancelScope] = field(default_factory=set)
    """Of callers in tasks that are not the loader's own; closing ends them."""
    closing: bool = False
    small_questions: SmallQuestions = field(init=False)
    lending: CallGroup = field(default_factory=lambda: CallGroup("lending", width=1, max_stuck=1))
    lender: Lender = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        # By a digest, or by asking once more. Who wants objects read whole, or in ranges, has them read.
        has_digests = config.layout is Layout.GROUPED
        is_checked = config.integrity is not Integrity.OFF if has_digests else config.read_mode is ReadMode.AUTO
        self.lender = Lender(
            self.calls,
            lease_ttl=self.connection.lease_ttl,
            is_wanted=config.direct_reads and is_checked and self.pools.device.type == "cpu",
            apart=partial(self._apart, asyncio.get_running_loop()),
        )
        self.small_questions = SmallQuestions(self.control, self.describe, self.health.master_came_late)

    def groups(self) -> Iterator[CallGroup]:
        """All threads for blocking calls."""
        yield from (self.control, self.compute, self.fences, self.writes, self.lending)
        yield self.reader.group
        yield from self.sessions.groups()
        yield from self.connection.groups()

    def check_open(self) -> None:
        """For handles, which may outlive the loader.

        Raises:
            LoaderClosedError: it is closed, or about to be.
        """
        if self.closing:
            raise LoaderClosedError("this PageLoader is closed: use its handles inside its `async with`")

    def end_waits(self) -> None:
        """The loader closes: answer who waits for it."""
        self.closing = True
        self.lender.is_wanted = False
        for scope in self.waits:
            scope.cancel()

    @contextmanager
    def wait_until(self, until: float) -> Iterator[anyio.CancelScope]:
        """A wait that ends by `until`, or when the loader closes."""
        with anyio.move_on_at(until) as scope:
            self.waits.add(scope)
            if self.closing:
                scope.cancel()
            try:
                yield scope
            finally:
                self.waits.discard(scope)

    @property
    def admits_early(self) -> bool:
        """Whether a unit may go on once its objects are known to be there, before it is known where and what they are.

        Not where anything is broken or in doubt, nor for several ranks: what one finds out later, the others do not.
        """
        is_alone = isinstance(self.consensus, SoloConsensus)
        return is_alone and self.health.trusts_existence and not self.landing.quarantined()

    def describe(self, keys: Sequence[str]) -> list[Descriptor | PageStatus]:
        """On a thread: each key's replica, or why there is none; see `Lender.learn`."""
        answers = self.calls.descriptors(keys)
        self.lender.learn(keys, answers)
        return answers

    def _apart(self, loop: asyncio.AbstractEventLoop, ask: Callable[[], None]) -> None:
        ended = threading.Event()

        async def wait() -> None:
            try:
                with anyio.move_on_after(_LEND_SECONDS), suppress(RefusedError):
                    await self.lending.run(ask)
            finally:
                ended.set()

        heard_master()
        if tell_loop(loop, lambda: None if self.closing else self.spawn(wait)):
            ended.wait(_LEND_SECONDS)

    async def ask_master(
        self, function: Callable[[], list[T | PageStatus]], count: int, until: float
    ) -> list[T | PageStatus]:
        """Run a call that the master answers, off the loop and no longer than `until`.

        Returns:
            `count` answers; one status for all where there is no answer: `SUPPRESSED` while the master's breaker is
            open, `SHED` without a thread for it, `TIMED_OUT`.
        """

        def begin() -> tuple[Question[T], int]:
            question = Question(function, self.health.master_came_late)
            self.control.submit(question.call)
            return question, 0

        return await self._ask(begin, count, until)

    async def ask_descriptors(self, keys: Sequence[str], until: float) -> list[Descriptor | PageStatus]:
        """`ask_master` for a few different keys' descriptors, in one call with what others ask for in the same turn."""
        return await self._ask(partial(self.small_questions.add, keys), len(keys), until)

    async def _ask(
        self, begin: Callable[[], tuple[Question[T], int]], count: int, until: float
    ) -> list[T | PageStatus]:
        permit = self.health.master.allows()
        if permit is None:
            return [PageStatus.SUPPRESSED] * count
        try:
            question, first = begin()
            call = question.call
            try:
                with question.asked(), self.wait_until(until) as scope:
                    await question.returned.wait()
            except anyio.get_cancelled_exc_class():
                if anyio.current_time() >= until and not self.closing:  # its caller's own time was up at that moment
                    self._came_late(question)
                raise
            if self.closing and not call.finished:
                return [PageStatus.CANCELLED] * count
            if scope.cancelled_caught and not call.finished:
                self._came_late(question)
                return [PageStatus.TIMED_OUT] * count
            if isinstance(call.error, RefusedError):  # the loader was closed before the call had its turn
                raise call.error
            if call.value is None:
                answers: list[T | PageStatus] = [PageStatus.MALFORMED] * count
            else:
                answers = call.value[first : first + count]
            if not question.is_judged:
                question.is_judged = True
                every = call.value or answers
                some = PageStatus in set(map(type, every))  # as a rule none: then nobody looks at each
                statuses = [answer for answer in every if isinstance(answer, PageStatus)] if some else []
                self.health.record_master(statuses, started_at=call.started_at)
            return answers
        except RefusedError:
            return [PageStatus.SHED] * count
        finally:
            permit.give_back()

    def _came_late(self, question: Question[T]) -> None:
        """Nobody can wait for it any longer: what that says of the master is told once."""
        call = question.call
        if not (call.finished or question.is_late or question.has_heard) and call.elapsed() > _FAIR_SECONDS:
            question.is_late = True
            self.health.master_timed_out(call)
