"""Faults of a store, injected on purpose and by seed: what a replay and a test survive is written down as a line."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import xxhash

from softload.outcomes import PageStatus
from softload.protocols import Answer, Descriptor, PageStore
from softload.stores.native_memory import copy_bytes
from softload.stores.wrapper import LendingWrapperStore
from softload.testing.fault_specs import Fault, FaultKind

__all__ = ["FaultyStore"]

T = TypeVar("T")


_OF_READS: Final = (FaultKind.LATE, FaultKind.SLOW, FaultKind.HANG, FaultKind.MALFORMED)

_MOST_ASKED: Final = 65_536
"""Keys, by kind, of which is remembered how often they were asked for: a long run has no end of them."""


class FaultyStore(LendingWrapperStore):
    """A store around `inner` in which faults happen, decided by a hash of seed, kind, key and how often it was asked.

    So a run with one thread repeats exactly, and a key that was lucky once may not be so the next time. It lends what
    `inner` lends, unless reads are to fail: those would not happen.

    Args:
        inner: the store; removed and corrupted objects really are.
        faults: what goes wrong; several of a kind add up.
        seed: of every decision.
        is_draft: which keys are a draft's, for `DRAFT_LOSS`.

    Raises:
        ValueError: a scheduled fault, or `DRAFT_LOSS` without `is_draft`.
    """

    def __init__(
        self,
        inner: PageStore,
        faults: Sequence[Fault],
        *,
        seed: int = 0,
        is_draft: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(inner)
        for fault in faults:
            if fault.kind.is_scheduled:
                raise ValueError(f"expected faults of calls, got {fault.kind}, which happens to a cluster at a time")
            if fault.kind is FaultKind.DRAFT_LOSS and is_draft is None:
                raise ValueError("expected is_draft with draft-loss, got None")
        self._probability = {
            kind: sum(fault.probability for fault in faults if fault.kind is kind) for kind in FaultKind
        }
        self._fails_reads = any(fault.kind in _OF_READS for fault in faults)
        self._slow = [fault for fault in faults if fault.kind is FaultKind.SLOW]
        self._seed = seed
        self._is_draft = is_draft
        self._lock = threading.Lock()
        self._asked: OrderedDict[tuple[FaultKind, str], int] = OrderedDict()
        self._late: set[str] = set()
        self._reads = 0
        self._answered = 0
        self._hangs: dict[int, float] = {}
        for fault in faults:
            if fault.kind is FaultKind.HANG:
                self._schedule_hangs(fault)
        self._stop = threading.Event()
        self.touched: set[str] = set()
        """Keys that some fault was injected into."""
        self.touched_by: dict[FaultKind, set[str]] = {kind: set() for kind in FaultKind}
        """The same, by kind."""

    def close(self) -> None:
        """End all waiting and close the inner store."""
        self._stop.set()
        super().close()

    def lend(self, key: str, descriptor: Descriptor) -> range | None:
        """As the inner store, where no fault is one of reads."""
        return None if self._fails_reads else super().lend(key, descriptor)

    def exists(self, keys: Sequence[str]) -> Sequence[bool | PageStatus]:
        """As the inner store, and without lost drafts; or malformed."""
        lost = self._lost_drafts(keys)
        answers = zip(keys, self.inner.exists(keys), strict=True)
        return self._told(keys, [False if key in lost else answer for key, answer in answers])

    def session_start(self, keys: Sequence[str]) -> Sequence[Answer]:
        """As the inner store, or malformed."""
        return self._told(keys, self.inner.session_start(keys))

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        """As the inner store, after evictions, before removals, and without lost drafts; or malformed."""
        evicted = set(self._remove(FaultKind.EVICT, self._chosen(FaultKind.EVICT, keys)))
        answers = list(self.inner.descriptors(keys))
        lost = self._lost_drafts(keys)
        good = [key for key, answer in zip(keys, answers, strict=True) if isinstance(answer, Descriptor)]
        self._remove(FaultKind.REMOVE, self._chosen(FaultKind.REMOVE, [key for key in good if key not in lost]))
        gone = evicted | lost
        found = [PageStatus.NOT_FOUND if key in gone else answer for key, answer in zip(keys, answers, strict=True)]
        return self._told(keys, found)

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """As the inner store, late in time or past a lease, or malformed."""
        late = self._delay(keys)
        if not late:
            return self._told(keys, self.inner.read(keys, pointers, sizes))
        on_time = [index for index, key in enumerate(keys) if key not in late]
        answers: list[Answer] = [PageStatus.LEASE_EXPIRED] * len(keys)
        read = self.inner.read(
            [keys[index] for index in on_time],
            [pointers[index] for index in on_time],
            [sizes[index] for index in on_time],
        )
        for index, answer in zip(on_time, read, strict=True):
            answers[index] = answer
        return self._told(keys, answers)

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        """As the inner store, late in time or past a lease, or malformed."""
        late = self._delay(keys)
        self.inner.session_end(sorted(late))
        return self._told(keys, self.inner.read_ranges(keys, pointers, sizes, offsets))

    def put_write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """As the inner store, from a corrupted copy where the fault strikes."""
        corrupt = self._chosen(FaultKind.CORRUPT, keys)
        if not corrupt:
            return self.inner.put_write(keys, pointers, sizes)
        self._touch(FaultKind.CORRUPT, corrupt)
        sources = list(pointers)
        copies = []
        for index, key in enumerate(keys):
            if key in corrupt and sizes[index]:
                copy = _copy_of(pointers[index], sizes[index])
                copy[self._hash("place", key, 0) % copy.size] ^= 0xFF
                self.inner.register(copy.ctypes.data, copy.size)
                copies.append(copy)
                sources[index] = copy.ctypes.data
        try:
            return self.inner.put_write(keys, sources, sizes)
        finally:
            for copy in copies:
                self.inner.unregister(copy.ctypes.data)

    def _delay(self, keys: Sequence[str]) -> set[str]:
        """Wait as the faults say, and answer with the keys whose lease runs out this time."""
        with self._lock:
            call = self._reads
            self._reads += 1
        seconds = self._hangs.get(call, 0.0)
        if seconds:
            self._touch(FaultKind.HANG, keys)
        for nth, fault in enumerate(self._slow):
            if self._hash(f"slow{nth}", "", call) < fault.probability * 2**64:
                seconds += fault.seconds
                self._touch(FaultKind.SLOW, keys)
        if seconds:
            self._stop.wait(seconds)
        late = self._chosen(FaultKind.LATE, keys)
        with self._lock:
            late -= self._late
            self._late = (self._late - set(keys)) | late
        self._touch(FaultKind.LATE, late)
        return late

    def _told(self, keys: Sequence[str], answers: Sequence[T]) -> Sequence[T]:
        """The answers of a call, or what should be none."""
        with self._lock:
            nth = self._answered
            self._answered += 1
        if not keys or self._hash(FaultKind.MALFORMED, "", nth) >= self._probability[FaultKind.MALFORMED] * 2**64:
            return answers
        self._touch(FaultKind.MALFORMED, keys)
        told: Sequence[T] = _malformed(answers, self._hash("way", "", nth))
        return told

    def _chosen(self, kind: FaultKind, keys: Iterable[str]) -> set[str]:
        threshold = self._probability[kind] * 2**64
        chosen = set()
        if threshold:
            with self._lock:
                for key in keys:
                    asked = self._asked.pop((kind, key), 0)
                    self._asked[kind, key] = asked + 1
                    if len(self._asked) > _MOST_ASKED:
                        self._asked.popitem(last=False)
                    if self._hash(kind, key, asked) < threshold:
                        chosen.add(key)
        return chosen

    def _lost_drafts(self, keys: Sequence[str]) -> set[str]:
        threshold = self._probability[FaultKind.DRAFT_LOSS] * 2**64
        if not threshold or self._is_draft is None:
            return set()
        is_draft = self._is_draft
        lost = {key for key in keys if is_draft(key) and self._hash(FaultKind.DRAFT_LOSS, key, 0) < threshold}
        self._touch(FaultKind.DRAFT_LOSS, lost)
        return lost

    def _remove(self, kind: FaultKind, chosen: set[str]) -> list[str]:
        victims = sorted(chosen)
        if not victims:
            return []
        answers = self.inner.remove(victims, force=True)
        removed = [key for key, answer in zip(victims, answers, strict=True) if answer == 0]
        self._touch(kind, removed)
        return removed

    def _touch(self, kind: FaultKind, keys: Iterable[str]) -> None:
        with self._lock:
            self.touched_by[kind].update(keys)
            self.touched.update(keys)

    def _schedule_hangs(self, fault: Fault) -> None:
        call = 0
        for nth in range(fault.calls):
            call += 2 + self._hash("hang", "", nth) % 31
            self._hangs[call] = fault.seconds

    def _hash(self, kind: str, key: str, nth: int) -> int:
        return xxhash.xxh3_64_intdigest(f"{self._seed}\x00{kind}\x00{key}\x00{nth}".encode())


def _malformed(answers: Sequence[Any], way: int) -> Any:
    """One of the ways in which an answer can miss what was asked for."""
    if way % 8 == 7:
        raise RuntimeError("a fault was injected: the store raises")
    ways: tuple[Any, ...] = (
        None,
        [],
        answers[: len(answers) // 2],
        [*answers, 0],
        dict(enumerate(answers)),
        [-answer - 1 if isinstance(answer, int) else None for answer in answers],
        [float(answer) if isinstance(answer, int) else repr(answer) for answer in answers],
    )
    return ways[way % 8]


def _copy_of(pointer: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    copy = np.empty(nbytes, dtype=np.uint8)
    copy_bytes(copy.ctypes.data, pointer, nbytes)
    return copy
