"""Stores for tests: one that records, one that hangs at a named point, one whose answers are written beforehand."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from softload.protocols import PageStore
from softload.stores.wrapper import LendingWrapperStore
from softload.testing._intercepting import InterceptingStore, check_point

__all__ = ["HangingStore", "RecordedCall", "RecordingStore", "ScriptedStore"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call: the method's name and its keys (none for `register` and `unregister`)."""

    method: str
    keys: tuple[str, ...]


class RecordingStore(InterceptingStore, LendingWrapperStore):
    """Keeps a list of the calls made, in the order in which they were made. It lends what `inner` lends.

    Args:
        inner: the store that answers them.
    """

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._calls: list[RecordedCall] = []

    @property
    def calls(self) -> tuple[RecordedCall, ...]:
        """All calls so far."""
        with self._lock:
            return tuple(self._calls)

    def keys_of(self, method: str) -> tuple[str, ...]:
        """The keys of all calls of one method, one call after another."""
        check_point(method)
        return tuple(key for call in self.calls if call.method == method for key in call.keys)

    def count(self, method: str) -> int:
        """How often one method was called."""
        check_point(method)
        return sum(call.method == method for call in self.calls)

    def clear(self) -> None:
        """Forget the calls."""
        with self._lock:
            self._calls.clear()

    def _intercept(self, method: str, keys: Sequence[str], call: Callable[[], T]) -> T:
        with self._lock:
            self._calls.append(RecordedCall(method, tuple(keys)))
        return call()


class HangingStore(InterceptingStore):
    """Holds calls at named points until they are released: `hold("read")`, `wait_held("read")`, `release()`.

    A held read has written nothing; once it is released it writes, as a call on a frozen peer does when that thaws.

    Args:
        inner: the store that makes the calls.
    """

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self._changed = threading.Condition()
        self._holding: dict[str, Callable[[Sequence[str]], bool]] = {}
        self._held: dict[str, int] = defaultdict(int)

    def hold(self, method: str, when: Callable[[Sequence[str]], bool] = lambda keys: True) -> None:
        """From now on calls of `method` wait, those whose keys `when` says yes to; what was held before goes on.

        Raises:
            ValueError: no such method.
        """
        check_point(method)
        with self._changed:
            self._holding[method] = when
            self._changed.notify_all()

    def held(self, method: str) -> int:
        """How many calls of `method` are waiting."""
        with self._changed:
            return self._held[method]

    def wait_held(self, method: str, calls: int = 1, timeout: float = 10.0) -> bool:
        """Wait until at least `calls` calls of `method` are waiting; False where that took longer than `timeout` s."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held[method] >= calls, timeout)

    def release(self, method: str | None = None) -> None:
        """Let the waiting calls of `method` go on, and later ones pass; None for all methods."""
        with self._changed:
            if method is None:
                self._holding.clear()
            else:
                self._holding.pop(method, None)
            self._changed.notify_all()

    def _intercept(self, method: str, keys: Sequence[str], call: Callable[[], T]) -> T:
        with self._changed:
            when = self._holding.get(method)
            if when is not None and when(keys):
                self._held[method] += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._holding.get(method) is not when)
                self._held[method] -= 1
        return call()


class ScriptedStore(InterceptingStore):
    """Gives answers that were written beforehand, also such as no store should give.

    Args:
        inner: answers what is not scripted.
    """

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._scripts: dict[str, deque[Any]] = defaultdict(deque)

    def script(self, method: str, *answers: object) -> None:
        """The next answers of `method`, one per call: a value, an exception to raise, or a function of the true answer.

        Where the answer is a value or an exception, the inner store is not called.

        Raises:
            ValueError: no such method.
        """
        check_point(method)
        with self._lock:
            self._scripts[method].extend(answers)

    @property
    def pending(self) -> int:
        """Scripted answers that were not given yet."""
        with self._lock:
            return sum(map(len, self._scripts.values()))

    def _intercept(self, method: str, keys: Sequence[str], call: Callable[[], T]) -> T:
        with self._lock:
            script = self._scripts[method]
            if not script:
                answer: Any = _TRUE_ANSWER
            else:
                answer = script.popleft()
        if answer is _TRUE_ANSWER:
            return call()
        if isinstance(answer, Exception):
            raise answer
        result: T = answer(call()) if callable(answer) else answer
        return result


_TRUE_ANSWER: Final = object()
