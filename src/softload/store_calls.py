"""A page store behind a guard: whatever it returns or raises becomes one trusted status per key.

These calls block; they run on threads of `native_calls`. A store of a third party, or a native library with a bug, may
answer too few results, results of a wrong type, or byte counts that nobody asked for. Such answers are `MALFORMED`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog

from softload import events
from softload.outcomes import PageStatus
from softload.protocols import Descriptor, PageStore, PutRefusal

__all__ = ["StoreCalls"]

_log = structlog.get_logger(__name__)


class StoreCalls:
    """Guarded calls of one store."""

    def __init__(self, store: PageStore) -> None:
        self.store = store

    def register(self, pointer: int, nbytes: int) -> bool:
        """Make memory known to the transport; False where it refused, or raised."""
        try:
            return self.store.register(pointer, nbytes) is True
        except Exception:
            _log.exception(events.STORE_RAISED, method="register")
            return False

    def unregister(self, pointer: int) -> None:
        """Take back `register`."""
        try:
            self.store.unregister(pointer)
        except Exception:
            _log.exception(events.STORE_RAISED, method="unregister")

    def close(self) -> None:
        """Disconnect; a store that fails to is left alone."""
        try:
            self.store.close()
        except Exception:
            _log.exception(events.STORE_RAISED, method="close")

    def exists(self, keys: Sequence[str]) -> list[bool | PageStatus]:
        """Whether each key is known, or why that is not known."""
        return [
            answer if isinstance(answer, bool) else _failure(answer)
            for answer in self._call(self.store.exists, len(keys), keys)
        ]

    def descriptors(self, keys: Sequence[str]) -> list[Descriptor | PageStatus]:
        """Each key's replica, or why there is none."""
        return [
            answer if isinstance(answer, Descriptor) and _is_count(answer.size) else _failure(answer)
            for answer in self._call(self.store.descriptors, len(keys), keys)
        ]

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> list[PageStatus]:
        """Read whole objects: `LOADED` where exactly the object's bytes came."""
        answers = self._call(self.store.read, len(keys), keys, pointers, sizes)
        return [_moved(answer, size) for answer, size in zip(answers, sizes, strict=True)]

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[PageStatus]:
        """Read ranges: `LOADED` where exactly the ranges' bytes came."""
        answers = self._call(self.store.read_ranges, len(keys), keys, pointers, sizes, offsets)
        return [_moved(answer, sum(wanted)) for answer, wanted in zip(answers, sizes, strict=True)]

    def session_start(self, keys: Sequence[str]) -> list[PageStatus]:
        """Start sessions: `LOADED` where one is open."""
        return [_moved(answer, 0) for answer in self._call(self.store.session_start, len(keys), keys)]

    def session_end(self, keys: Sequence[str]) -> None:
        """End sessions."""
        self._quietly(self.store.session_end, keys)

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[PutRefusal | PageStatus]:
        """Reserve objects: `LOADED` where that succeeded."""
        return [
            answer if isinstance(answer, PutRefusal) else _moved(answer, 0)
            for answer in self._call(self.store.put_start, len(keys), keys, sizes)
        ]

    def put_write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> list[PageStatus]:
        """Write reserved objects: `LOADED` where exactly the object's bytes went."""
        answers = self._call(self.store.put_write, len(keys), keys, pointers, sizes)
        return [_moved(answer, size) for answer, size in zip(answers, sizes, strict=True)]

    def put_end(self, keys: Sequence[str]) -> list[PageStatus]:
        """Make objects visible: `LOADED` where they are."""
        return [_moved(answer, 0) for answer in self._call(self.store.put_end, len(keys), keys)]

    def put_revoke(self, keys: Sequence[str]) -> None:
        """Give reservations back."""
        self._quietly(self.store.put_revoke, keys)

    def remove(self, keys: Sequence[str], *, force: bool) -> list[PageStatus]:
        """Remove objects: `LOADED` where they are gone by this call."""
        return [_moved(answer, 0) for answer in self._call(self.store.remove, len(keys), keys, force=force)]

    def _call(self, method: Callable[..., Any], count: int, *args: Any, **options: Any) -> Sequence[Any]:
        if not count:
            return []
        try:
            answers = method(*args, **options)
        except Exception:
            _log.exception(events.STORE_RAISED, method=getattr(method, "__name__", str(method)))
            return [PageStatus.MALFORMED] * count
        if not isinstance(answers, (list, tuple)) or len(answers) != count:
            return [PageStatus.MALFORMED] * count
        return answers

    def _quietly(self, method: Callable[[Sequence[str]], None], keys: Sequence[str]) -> None:
        if not keys:
            return
        try:
            method(keys)
        except Exception:
            _log.exception(events.STORE_RAISED, method=getattr(method, "__name__", str(method)))


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _failure(answer: object) -> PageStatus:
    return answer if isinstance(answer, PageStatus) and answer is not PageStatus.LOADED else PageStatus.MALFORMED


def _moved(answer: object, expected: int) -> PageStatus:
    # bool is an int to isinstance: True would pass for one byte.
    if type(answer) is int and answer == expected:
        return PageStatus.LOADED
    return _failure(answer)
