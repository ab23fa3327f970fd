"""Stores for these tests that lie about single keys, forge bytes, or stay open."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from softload import PageStatus, PageStore
from softload.protocols import Answer, Descriptor, PutAnswer
from softload.stores.wrapper import WrapperStore


@dataclass(slots=True)
class _Lie:
    method: str
    when: Callable[[str], bool]
    answer: object
    times: int
    skip: int


class LyingStore(WrapperStore):
    """Answers something else for single keys: `lie("read", is_of("k3"), PageStatus.TRANSFER_FAILED)`.

    The inner store is asked all the same; what it wrote stays written.
    """

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._lies: list[_Lie] = []

    def lie(
        self, method: str, when: Callable[[str], bool], answer: object, *, times: int = 1 << 30, skip: int = 0
    ) -> None:
        """Answer `answer`, or what it makes of (key, truth), for `times` keys that fit, after the first `skip`."""
        with self._lock:
            self._lies.append(_Lie(method, when, answer, times, skip))

    def be_honest(self) -> None:
        """No more lies."""
        with self._lock:
            self._lies.clear()

    def exists(self, keys: Sequence[str]) -> Sequence[bool | PageStatus]:
        return self._told("exists", keys, super().exists(keys))

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        return self._told("descriptors", keys, super().descriptors(keys))

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        return self._told("read", keys, super().read(keys, pointers, sizes))

    def session_start(self, keys: Sequence[str]) -> Sequence[Answer]:
        return self._told("session_start", keys, super().session_start(keys))

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        return self._told("read_ranges", keys, super().read_ranges(keys, pointers, sizes, offsets))

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[PutAnswer]:
        return self._told("put_start", keys, super().put_start(keys, sizes))

    def put_write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        return self._told("put_write", keys, super().put_write(keys, pointers, sizes))

    def put_end(self, keys: Sequence[str]) -> Sequence[Answer]:
        return self._told("put_end", keys, super().put_end(keys))

    def _told(self, method: str, keys: Sequence[str], truths: Sequence[Any]) -> list[Any]:
        answers = list(truths)
        with self._lock:
            for index, key in enumerate(keys):
                for lie in self._lies:
                    if lie.method == method and lie.times and lie.when(key):
                        if lie.skip:
                            lie.skip -= 1
                            continue
                        lie.times -= 1
                        answers[index] = lie.answer(key, answers[index]) if callable(lie.answer) else lie.answer
                        break
        return answers


class ForgingStore(WrapperStore):
    """Whole reads of keys in `forged` bring other bytes: `forged[key]` gets the bytes that were read, writable."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self.forged: list[tuple[Callable[[str], bool], Callable[[np.ndarray], None]]] = []

    def forge(self, when: Callable[[str], bool], change: Callable[[np.ndarray], None]) -> None:
        """From now on `change` gets the bytes read of keys that fit."""
        self.forged.append((when, change))

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        answers = super().read(keys, pointers, sizes)
        for key, pointer, size in zip(keys, pointers, sizes, strict=True):
            for when, change in self.forged:
                if when(key):
                    change(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer)))
        return answers


class Held(WrapperStore):
    """Stays open when a loader closes it, for the next loader."""

    def close(self) -> None:
        """Nothing."""
