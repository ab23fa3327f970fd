"""What is asked of the master: one native call for one who asks, or for several who ask little at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from softload.callbacks import callback_context
from softload.native_calls import CallGroup, NativeCall, RefusedError
from softload.outcomes import PageStatus
from softload.protocols import Descriptor

__all__ = ["MOST_OBJECTS", "Question", "SmallQuestions", "heard_master"]

T = TypeVar("T")

OnLate: TypeAlias = Callable[[Sequence[object], float], object]

MOST_OBJECTS = 512
"""Objects in one question: making their descriptors holds the interpreter for about a millisecond."""

_asking = threading.local()
"""The question that a thread asks."""


def heard_master() -> None:
    """On a thread that asks the master, which has answered: from now on it waits for something else."""
    question: Question[object] | None = getattr(_asking, "question", None)
    if question is not None:
        question.has_heard = True


class Question(Generic[T]):
    """One native call, and how many wait for it.

    Args:
        function: the call; it answers a list.
        on_late: told of answers that came when nobody waited for them any more, and after how many seconds.
    """

    __slots__ = ("_askers", "_on_late", "call", "has_heard", "is_judged", "is_late", "returned")

    def __init__(self, function: Callable[[], list[T | PageStatus]], on_late: OnLate) -> None:
        self.returned = asyncio.Event()
        self.call: NativeCall[list[T | PageStatus]] = NativeCall(partial(self._run, function), self._returned)
        self._on_late = on_late
        self._askers = 0
        self.is_judged = self.is_late = False
        """Whether what it says of the master has been told: that it answered, and before that, that it took too long.
        However many have asked, it is one call."""
        self.has_heard = False
        """Whether the master had answered when it went on to wait for something else: it is not the master that is late
        then. Set on its thread."""

    @contextmanager
    def asked(self) -> Iterator[None]:
        """While somebody waits for it. When nobody does any more, the call is taken back, or left behind."""
        self._askers += 1
        try:
            yield
        finally:
            self._askers -= 1
            if not self._askers and not self.call.finished and not self.call.withdraw():
                self.call.abandon()

    def _run(self, function: Callable[[], list[T | PageStatus]]) -> list[T | PageStatus]:
        _asking.question = self
        try:
            return function()
        finally:
            _asking.question = None

    def _returned(self, call: NativeCall[list[T | PageStatus]]) -> None:
        self.returned.set()
        if call.abandoned and call.value:  # nothing, where it was given up before it had asked
            self._on_late(call.value, call.elapsed())


class SmallQuestions:
    """Asks for the descriptors of a few objects together with others who do so in the same turn of the event loop.

    Args:
        group: whose lanes ask.
        function: the descriptors of some keys.
        on_late: see `Question`.
    """

    def __init__(
        self,
        group: CallGroup,
        function: Callable[[Sequence[str]], list[Descriptor | PageStatus]],
        on_late: OnLate = lambda _answers, _seconds: None,
    ) -> None:
        self._group = group
        self._function = function
        self._on_late = on_late
        self._keys: list[str] = []
        self._known: set[str] = set()
        self._question: Question[Descriptor] | None = None

    def add(self, keys: Sequence[str]) -> tuple[Question[Descriptor], int]:
        """The question that these different keys are part of, and the place of their first answer in its own."""
        question = self._question
        if (
            question is None
            or question.call.abandoned
            or len(self._keys) + len(keys) > MOST_OBJECTS
            or not self._known.isdisjoint(keys)
        ):
            self._send()
            question = self._begin()
        first = len(self._keys)
        self._keys += keys
        self._known.update(keys)
        return question, first

    def _begin(self) -> Question[Descriptor]:
        asked: list[str] = []
        self._keys, self._known = asked, set()
        self._question = question = Question(lambda: self._function(asked), self._on_late)
        asyncio.get_running_loop().call_soon(self._send_this, question, context=callback_context())
        return question

    def _send_this(self, question: Question[Descriptor]) -> None:
        if self._question is question:
            self._send()

    def _send(self) -> None:
        question, self._question = self._question, None
        if question is None:
            return
        try:
            self._group.submit(question.call)
        except RefusedError as error:
            question.call.error = error
            question.call.complete()
