"""The puts that a Mooncake client has under way: its native library keeps the same map, and tells too little of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from softload.outcomes import PageStatus
from softload.protocols import Answer, PutAnswer, PutRefusal

__all__ = ["Pending", "Reservations"]

T = TypeVar("T")


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
    `stale` until a revocation succeeded.

    | state | entered | left by |
    | --- | --- | --- |
    | reserved | `reserve` | `finish`, `give_up`, a refused reservation |
    | stale | `finish`, `give_up` | the master ended or revoked it: `settle` |
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reserved: dict[str, _Reservation] = {}
        self._stale: set[str] = set()

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
            self._stale.update(ours)
        return ours

    def stale(self, keys: Iterable[str]) -> list[str]:
        """Those of `keys` whose native session is left over."""
        with self._lock:
            return [key for key in dict.fromkeys(keys) if key in self._stale]

    def settle(self, keys: Iterable[str]) -> None:
        """The native sessions of `keys` are gone."""
        with self._lock:
            self._stale.difference_update(keys)
