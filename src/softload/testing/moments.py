"""Something done at a named moment of a lookup, a load or a save: what a test of failures is about."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from softload.protocols import PageStore
from softload.testing._intercepting import InterceptingStore

__all__ = ["Moment", "MomentStore"]

T = TypeVar("T")


class Moment(StrEnum):
    """When, as a store sees it. The values are the names in fault specifications."""

    LOOKUP = "lookup"
    """Before the store is asked what exists."""

    ADMISSION = "admission"
    """Before it is asked for descriptors: between a lookup and the admission of what it found."""

    ADMITTED = "admitted"
    """After it has answered with descriptors, before the first read."""

    READ = "read"
    """Before a read: the first, or in mid-stream a later one."""

    LANDED = "landed"
    """After a read has written, before what landed is copied."""

    SAVE = "save"
    """After objects were reserved, before their bytes are written."""


_BEFORE: Final = {
    "exists": Moment.LOOKUP,
    "descriptors": Moment.ADMISSION,
    "read": Moment.READ,
    "read_ranges": Moment.READ,
    "put_write": Moment.SAVE,
}
_AFTER: Final = {"descriptors": Moment.ADMITTED, "read": Moment.LANDED, "read_ranges": Moment.LANDED}


@dataclass(slots=True, eq=False)
class _Due:
    left: int
    when: Callable[[Sequence[str]], bool]
    action: Callable[[], object]
    done: threading.Event


class MomentStore(InterceptingStore):
    """Runs what it is told to at a moment, on the thread whose call has come to it: the call goes on afterwards.

    Args:
        inner: the store that makes the calls.
    """

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._due: dict[Moment, list[_Due]] = {moment: [] for moment in Moment}

    def at(
        self,
        moment: Moment,
        action: Callable[[], object],
        *,
        nth: int = 1,
        when: Callable[[Sequence[str]], bool] = lambda keys: True,
    ) -> threading.Event:
        """Run `action` once, the `nth` time that a call comes to `moment`.

        Args:
            moment: which.
            action: what to do; it may block, and what it raises is raised by the store.
            nth: counted from 1, from now on.
            when: whether a call counts, by its keys.

        Returns:
            an event that is set once `action` has run.

        Raises:
            ValueError: `nth` below 1.
        """
        if nth < 1:
            raise ValueError(f"expected nth of 1 or more, got {nth}")
        due = _Due(nth, when, action, threading.Event())
        with self._lock:
            self._due[moment].append(due)
        return due.done

    def _intercept(self, method: str, keys: Sequence[str], call: Callable[[], T]) -> T:
        before, after = _BEFORE.get(method), _AFTER.get(method)
        if before is not None:
            self._pass(before, keys)
        answer = call()
        if after is not None:
            self._pass(after, keys)
        return answer

    def _pass(self, moment: Moment, keys: Sequence[str]) -> None:
        with self._lock:
            for due in self._due[moment]:
                due.left -= due.when(keys)
            now = [due for due in self._due[moment] if due.left <= 0]
            self._due[moment] = [due for due in self._due[moment] if due.left > 0]
        for due in now:
            try:
                due.action()
            finally:
                due.done.set()
