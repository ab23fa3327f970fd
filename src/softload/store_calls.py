"""A page store behind a guard: whatever it returns or raises becomes one trusted status per key.

These calls block; they run on threads of `native_calls`. A store of a third party, or a native library with a bug, may
answer too few results, results of a wrong type, or byte counts that nobody asked for. Such answers are `MALFORMED`.

Whatever a store raises ends here, `SystemExit` and the panics of native code included: those are no `Exception`, and
would end the thread and with it what the call was to tell. A `KeyboardInterrupt` comes to the main thread only, where
no such call runs.
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import structlog

from softload import events
from softload.outcomes import PageStatus
from softload.protocols import Descriptor, LendingStore, PageStore, PutRefusal
from softload.request_log import tell

__all__ = ["StoreCalls"]

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_WORD: Final = 1 << 64
"""No size and no address is as large."""

_PROCESS: Final = 1 << 62
"""No process has so many addresses."""

_QUIET_SECONDS = 10.0
"""Between two messages about what one method answers or raises."""

_SHORT: Final = reprlib.Repr()
"""For answers whose own `repr` may be endless, or raise."""
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


class StoreCalls:
    """Guarded calls of one store."""

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self._lending = store if isinstance(store, LendingStore) else None  # looked up once: it takes long
        self._quiet_until: dict[str, float] = {}

    def register(self, pointer: int, nbytes: int) -> bool:
        """Make memory known to the transport; False where it refused, or raised."""
        try:
            return self.store.register(pointer, nbytes) is True
        except BaseException:  # see the module
            self._raised("register")
            return False

    def unregister(self, pointer: int) -> None:
        """Take back `register`."""
        try:
            self.store.unregister(pointer)
        except BaseException:  # see the module
            self._raised("unregister")

    def close(self) -> None:
        """Disconnect; a store that fails to is left alone."""
        try:
            self.store.close()
        except BaseException:  # see the module
            self._raised("close")

    def exists(self, keys: Sequence[str]) -> list[bool | PageStatus]:
        """Whether each key is known, or why that is not known."""
        return self._call(self.store.exists, [None] * len(keys), _known, keys)

    def descriptors(self, keys: Sequence[str]) -> list[Descriptor | PageStatus]:
        """Each key's replica, or why there is none."""
        return self._call(self.store.descriptors, [None] * len(keys), _described, keys)

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> list[PageStatus]:
        """Read whole objects: `LOADED` where exactly the object's bytes came."""
        return self._call(self.store.read, sizes, _moved, keys, pointers, sizes)

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[PageStatus]:
        """Read ranges: `LOADED` where exactly the ranges' bytes came."""
        totals = [sum(wanted) for wanted in sizes]
        return self._call(self.store.read_ranges, totals, _moved, keys, pointers, sizes, offsets)

    def session_start(self, keys: Sequence[str]) -> list[PageStatus]:
        """Start sessions: `LOADED` where one is open."""
        return self._call(self.store.session_start, [0] * len(keys), _moved, keys)

    def session_end(self, keys: Sequence[str]) -> None:
        """End sessions."""
        self._quietly(self.store.session_end, keys)

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[PutRefusal | PageStatus]:
        """Reserve objects: `LOADED` where that succeeded."""
        return self._call(self.store.put_start, [0] * len(keys), _reserved, keys, sizes)

    def put_write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> list[PageStatus]:
        """Write reserved objects: `LOADED` where exactly the object's bytes went."""
        return self._call(self.store.put_write, sizes, _moved, keys, pointers, sizes)

    def put_end(self, keys: Sequence[str]) -> list[PageStatus]:
        """Make objects visible: `LOADED` where they are."""
        return self._call(self.store.put_end, [0] * len(keys), _moved, keys)

    def put_revoke(self, keys: Sequence[str]) -> None:
        """Give reservations back."""
        self._quietly(self.store.put_revoke, keys)

    def remove(self, keys: Sequence[str], *, force: bool) -> list[PageStatus]:
        """Remove objects: `LOADED` where they are gone by this call."""
        return self._call(self.store.remove, [0] * len(keys), _moved, keys, force=force)

    @property
    def may_lend(self) -> bool:
        """Whether the store has what it takes to lend memory."""
        return self._lending is not None

    def lend(self, key: str, descriptor: Descriptor) -> range | None:
        """Addresses of this process at which objects of an endpoint lie, that object's among them."""
        if self._lending is None:
            return None
        try:
            lent: object = self._lending.lend(key, descriptor)
            if lent is None:
                return None
            first, last = descriptor.address, descriptor.address + descriptor.size - 1
            if type(lent) is range and lent.step == 1 and 0 < lent.start < lent.stop <= _PROCESS:
                if first in lent and last in lent:
                    return lent
            self._warn(self._lending.lend, expected=f"a range around {first} to {last}", got=_SHORT.repr(lent)[:80])
        except BaseException:  # see the module; also what an answer raises that is looked at
            self._raised("lend")
        return None

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Around looking into lent memory: whether that may be done."""
        held, allowed = None, False
        try:
            if self._lending is not None:
                held = self._lending.hold()
                allowed = held.__enter__() is True
        except BaseException:  # see the module
            self._raised("hold")
            held, allowed = None, False
        try:
            yield allowed
        finally:
            try:
                if held is not None:
                    held.__exit__(None, None, None)
            except BaseException:  # see the module
                self._raised("hold")

    def _call(
        self,
        method: Callable[..., Any],
        expected: Sequence[int | None],
        judge: Callable[[list[object], Sequence[int | None]], list[T | PageStatus]],
        *args: Any,
        **options: Any,
    ) -> list[T | PageStatus]:
        """Call, and judge each answer by what is `expected` of it: bytes moved, or ``None`` where none are.

        The store gets lists of its own: one that changes or keeps them changes nothing here.
        """
        if not expected:
            return []
        try:
            answers = method(*(_copied(arg) for arg in args), **options)
            if isinstance(answers, (list, tuple)) and len(answers) == len(expected):
                return self._judged(method, list(answers), expected, judge)
            count = f" of {len(answers)}" if isinstance(answers, (list, tuple)) else ""
            self._warn(method, expected=f"list of {len(expected)}", got=f"{type(answers).__name__}{count}")
        except BaseException:  # see the module; also what an answer raises that is looked at
            self._raised(_name(method))
        return [PageStatus.MALFORMED] * len(expected)

    def _judged(
        self,
        method: Callable[..., Any],
        answers: list[object],
        expected: Sequence[int | None],
        judge: Callable[[list[object], Sequence[int | None]], list[T | PageStatus]],
    ) -> list[T | PageStatus]:
        judged = judge(answers, expected)
        if PageStatus not in set(map(type, judged)) or PageStatus.MALFORMED not in judged:  # as a rule
            return judged
        for answer, wanted, status in zip(answers, expected, judged, strict=True):
            if status is PageStatus.MALFORMED and answer is not PageStatus.MALFORMED:
                self._warn(method, expected="an answer" if wanted is None else wanted, got=_SHORT.repr(answer)[:80])
                break
        return judged

    def _warn(self, method: Callable[..., Any], *, expected: object, got: str) -> None:
        name = _name(method)
        if self._may_tell(name):
            tell(_log.warning, events.STORE_MALFORMED, method=name, expected=expected, got=got)

    def _raised(self, name: str) -> None:
        if self._may_tell(name):
            tell(_log.exception, events.STORE_RAISED, method=name)

    def _may_tell(self, name: str) -> bool:
        now = time.monotonic()
        if now < self._quiet_until.get(name, now):
            return False
        self._quiet_until[name] = now + _QUIET_SECONDS
        return True

    def _quietly(self, method: Callable[[Sequence[str]], None], keys: Sequence[str]) -> None:
        if not keys:
            return
        try:
            method(list(keys))
        except BaseException:  # see the module
            self._raised(_name(method))


def _copied(values: Sequence[Any]) -> list[Any]:
    if values and isinstance(values[0], (list, tuple)):
        return [list(value) for value in values]
    return list(values)


def _name(method: Callable[..., Any]) -> str:
    return getattr(method, "__name__", str(method))


def _failure(answer: object) -> PageStatus:
    return answer if isinstance(answer, PageStatus) and answer is not PageStatus.LOADED else PageStatus.MALFORMED


def _are_counts(values: Collection[Any]) -> bool:
    # bool is an int to isinstance: True would pass for one byte.
    return set(map(type, values)) == {int} and 0 <= min(values) and max(values) < _WORD


def _known(answers: list[object], _: Sequence[int | None]) -> list[bool | PageStatus]:
    if set(map(type, answers)) == {bool}:
        return answers  # type: ignore[return-value]  # that is what was looked at
    return [answer if isinstance(answer, bool) else _failure(answer) for answer in answers]


def _described(answers: list[object], _: Sequence[int | None]) -> list[Descriptor | PageStatus]:
    found = [answer for answer in answers if type(answer) is Descriptor]
    if len(found) == len(answers) and _are_good(found):  # as a rule; one look at each would take longer than the call
        return list(found)
    return [
        answer if isinstance(answer, Descriptor) and _are_good([answer]) else _failure(answer) for answer in answers
    ]


def _are_good(descriptors: Sequence[Descriptor]) -> bool:
    # The endpoint is a key of tables, size and address are compared: none may be of a type with ideas of its own.
    sizes, endpoints, addresses = zip(*descriptors, strict=True)
    return set(map(type, endpoints)) == {str} and _are_counts(sizes) and _are_counts(addresses)


def _moved(answers: list[object], expected: Sequence[int | None]) -> list[PageStatus]:
    if set(map(type, answers)) == {int} and answers == list(expected):
        return [PageStatus.LOADED] * len(answers)
    return [
        PageStatus.LOADED if type(answer) is int and answer == wanted else _failure(answer)
        for answer, wanted in zip(answers, expected, strict=True)
    ]


def _reserved(answers: list[object], expected: Sequence[int | None]) -> list[PutRefusal | PageStatus]:
    refused = [answer if isinstance(answer, PutRefusal) else None for answer in answers]
    return [refusal or status for refusal, status in zip(refused, _moved(answers, expected), strict=True)]
