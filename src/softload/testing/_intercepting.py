"""A store around a store whose every call passes one function: what wrappers for tests are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from softload.outcomes import PageStatus
from softload.protocols import Answer, Descriptor, PutAnswer
from softload.stores.wrapper import WrapperStore

__all__ = ["InterceptingStore", "check_point"]

T = TypeVar("T")

_POINTS: Final = (
    "register",
    "unregister",
    "exists",
    "descriptors",
    "read",
    "session_start",
    "session_end",
    "read_ranges",
    "put_start",
    "put_write",
    "put_end",
    "put_revoke",
    "remove",
)


class InterceptingStore(WrapperStore):
    """Every call between `open` and `close` passes `_intercept`, which makes it, or does not."""

    def _intercept(self, method: str, keys: Sequence[str], call: Callable[[], T]) -> T:
        return call()

    def register(self, pointer: int, nbytes: int) -> bool:
        return self._intercept("register", (), lambda: self.inner.register(pointer, nbytes))

    def unregister(self, pointer: int) -> None:
        self._intercept("unregister", (), lambda: self.inner.unregister(pointer))

    def exists(self, keys: Sequence[str]) -> Sequence[bool | PageStatus]:
        return self._intercept("exists", keys, lambda: self.inner.exists(keys))

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        return self._intercept("descriptors", keys, lambda: self.inner.descriptors(keys))

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        return self._intercept("read", keys, lambda: self.inner.read(keys, pointers, sizes))

    def session_start(self, keys: Sequence[str]) -> Sequence[Answer]:
        return self._intercept("session_start", keys, lambda: self.inner.session_start(keys))

    def session_end(self, keys: Sequence[str]) -> None:
        self._intercept("session_end", keys, lambda: self.inner.session_end(keys))

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        return self._intercept("read_ranges", keys, lambda: self.inner.read_ranges(keys, pointers, sizes, offsets))

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[PutAnswer]:
        return self._intercept("put_start", keys, lambda: self.inner.put_start(keys, sizes))

    def put_write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        return self._intercept("put_write", keys, lambda: self.inner.put_write(keys, pointers, sizes))

    def put_end(self, keys: Sequence[str]) -> Sequence[Answer]:
        return self._intercept("put_end", keys, lambda: self.inner.put_end(keys))

    def put_revoke(self, keys: Sequence[str]) -> None:
        self._intercept("put_revoke", keys, lambda: self.inner.put_revoke(keys))

    def remove(self, keys: Sequence[str], *, force: bool = False) -> Sequence[Answer]:
        return self._intercept("remove", keys, lambda: self.inner.remove(keys, force=force))


def check_point(method: str) -> None:
    """Complain about what is no method of a store.

    Raises:
        ValueError: no such method.
    """
    if method not in _POINTS:
        raise ValueError(f"expected a method out of {', '.join(_POINTS)}, got {method!r}")
