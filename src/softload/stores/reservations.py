"""The puts that a Mooncake client has under way: its native library keeps the same map, and tells too little of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from softload.outcomes import PageStatus
from softload.protocols import Answer, PutAnswer, PutRefusal

__all__ = ["Pending", "Reservations"]

T = TypeVar("T")

_AT_A_TIME = 64
"""Left over keys that are revoked before a put."""


@dataclass(frozen=True, slots=True)
class Pending(Generic[T]):
    """Answers to a call, of which those at `asked` are for the native library to give.

    `keys` are the keys at `asked`.
    """

    answers: list[T]
    asked: list[int]
    keys: list[str]


@dataclass(slots=True)
class _Reservation:
    size: int
    written: bool = False


class Reservations:
    """Which keys this client has reserved, at what size, and whether they are written.

    A native session outlives a failed end or revocation and refuses its key as malformed from then on. Such keys are
    `stale` until a revocation succeeded. Those that were left over are revoked with the next puts of any keys, a few at
    a time: most of them are never put again.

    | state | entered | left by |
    | --- | --- | --- |
    | reserved | `reserve` | `finish`, `give_up`, a refused reservation |
    | stale | `finish`, `give_up` | the master ended or revoked it: `settle` |
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reserved: dict[str, _Reservation] = {}
        self._stale: set[str] = set()
        self._left_over: dict[str, None] = {}
        """Stale ones that no call is about to settle, oldest first."""

    def __len__(self) -> int:
        return len(self._reserved) + len(self._stale)

    def reserve(self, keys: Sequence[str], sizes: Sequence[int]) -> Pending[PutAnswer]:
        """Claim keys for a native start."""
        pending: Pending[PutAnswer] = Pending([PutRefusal.PRESENT] * len(keys), [], [])
        with self._lock:
            for index, (key, size) in enumerate(zip(keys, sizes, strict=True)):
                if key in self._stale:
                    pending.answers[index] = PageStatus.STORE_UNREACHABLE
                elif key not in self._reserved:
                    self._reserved[key] = _Reservation(size)
                    pending.asked.append(index)
                    pending.keys.append(key)
        return pending

    def refused(self, keys: Iterable[str]) -> None:
        """The native start of `keys` failed."""
        with self._lock:
            for key in keys:
                self._reserved.pop(key, None)

    def write(self, keys: Sequence[str], sizes: Sequence[int]) -> Pending[Answer]:
        """Which keys may be written: reserved, with this size."""
        pending: Pending[Answer] = Pending([PageStatus.NOT_FOUND] * len(keys), [], [])
        with self._lock:
            for index, (key, size) in enumerate(zip(keys, sizes, strict=True)):
                reservation = self._reserved.get(key)
                if reservation is None:
                    continue
                if reservation.size == size:
                    pending.asked.append(index)
                    pending.keys.append(key)
                else:
                    pending.answers[index] = PageStatus.WRONG_SIZE
        return pending

    def written(self, keys: Iterable[str]) -> None:
        """The native write of `keys` was whole."""
        with self._lock:
            for key in keys:
                if key in self._reserved:
                    self._reserved[key].written = True

    def finish(self, keys: Sequence[str]) -> Pending[Answer]:
        """Which keys may be ended: those that are written. They are stale until they are settled."""
        pending: Pending[Answer] = Pending([PageStatus.NOT_FOUND] * len(keys), [], [])
        with self._lock:
            for index, key in enumerate(keys):
                reservation = self._reserved.get(key)
                if reservation is None:
                    continue
                if reservation.written:
                    del self._reserved[key]
                    self._stale.add(key)
                    pending.asked.append(index)
                    pending.keys.append(key)
                else:
                    pending.answers[index] = PageStatus.NOT_READY
        return pending

    def give_up(self, keys: Iterable[str]) -> list[str]:
        """Those of `keys` that a native revocation has to follow for."""
        with self._lock:
            ours = [key for key in dict.fromkeys(keys) if key in self._reserved or key in self._stale]
            for key in ours:
                self._reserved.pop(key, None)
                self._left_over.pop(key, None)
            self._stale.update(ours)
        return ours

    def take_left_over(self, keys: Iterable[str]) -> list[str]:
        """What the caller is to revoke now, and nobody else: those of `keys` that are left over, and a few others."""
        with self._lock:
            mine = [key for key in dict.fromkeys(keys) if key in self._left_over]
            for key in mine:
                del self._left_over[key]
            others = list(islice(self._left_over, _AT_A_TIME))
            for key in others:
                del self._left_over[key]
        return mine + others

    def leave_over(self, keys: Iterable[str]) -> None:
        """The native sessions of those of `keys` that are stale were not revoked: later."""
        with self._lock:
            self._left_over.update(dict.fromkeys(key for key in keys if key in self._stale))

    def settle(self, keys: Iterable[str]) -> None:
        """The native sessions of `keys` are gone."""
        with self._lock:
            for key in keys:
                self._stale.discard(key)
                self._left_over.pop(key, None)
