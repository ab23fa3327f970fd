"""Faults of a store, injected on purpose and by seed: what a replay and a test survive is written down as a line."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import xxhash

from softload.outcomes import PageStatus
from softload.protocols import Answer, Descriptor, PageStore
from softload.stores.native_memory import copy_bytes
from softload.stores.wrapper import WrapperStore
from softload.testing.moments import Moment

__all__ = ["Fault", "FaultKind", "FaultyStore", "parse_fault"]


class FaultKind(StrEnum):
    """What goes wrong. The values are the names in fault specifications."""

    EVICT = "evict"
    """`descriptors` finds the object gone, and gone it is."""

    REMOVE = "remove"
    """The object is removed by force right after `descriptors` was answered well; its memory may be reused."""

    LATE = "late"
    """A read answers `LEASE_EXPIRED` once; the next try is good."""

    SLOW = "slow"
    """A read starts late."""

    HANG = "hang"
    """A read returns late, having written its bytes at the end."""

    CORRUPT = "corrupt"
    """One byte of the object is flipped as it is stored."""

    DRAFT_LOSS = "draft-loss"
    """`descriptors` never finds a draft's object."""

    KILL_OWNER = "kill-owner"
    """A process that owns memory is killed; another takes its place after a while."""

    FREEZE_OWNER = "freeze-owner"
    """It stops where it is, and goes on after a while."""

    KILL_MASTER = "kill-master"
    FREEZE_MASTER = "freeze-master"
    RESTART_MASTER = "restart-master"
    """The master is killed and started again at once, with an empty memory."""

    @property
    def is_scheduled(self) -> bool:
        """Whether it happens to a cluster's process, not to a call: `ClusterFaults` does that, no `FaultyStore`."""
        return self in _SCHEDULED

    @property
    def needs_owner(self) -> bool:
        """Whether it happens to a process that owns memory."""
        return self in (FaultKind.KILL_OWNER, FaultKind.FREEZE_OWNER)


_SCHEDULED: Final = (
    FaultKind.KILL_OWNER,
    FaultKind.FREEZE_OWNER,
    FaultKind.KILL_MASTER,
    FaultKind.FREEZE_MASTER,
    FaultKind.RESTART_MASTER,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        kind: what goes wrong.
        probability: per key, or per call for `SLOW`; 0 for kinds that have none.
        calls: how many read calls hang, for `HANG`.
        seconds: how long it takes (`SLOW`, `HANG`), or when it happens after the start (scheduled kinds).
        moment: when it happens instead (scheduled kinds): the first time that a call comes there.
        lasts: seconds until what was killed is started again, and what was frozen goes on; ``None`` for never.
    """

    kind: FaultKind
    probability: float = 0.0
    calls: int = 0
    seconds: float = 0.0
    moment: Moment | None = None
    lasts: float | None = None


_MOST_HANGS: Final = 100_000
"""Each is planned before the run."""

_MOST_ASKED: Final = 65_536
"""Keys, by kind, of which is remembered how often they were asked for: a long run has no end of them."""

_NUMBER: Final = r"(\d+(?:\.\d+)?|\.\d+)"
_MOMENT: Final = f"({'|'.join(Moment)})"
_FORMS: Final[Mapping[FaultKind, tuple[str, re.Pattern[str]]]] = {
    **{
        kind: (f"{kind}=P", re.compile(f"={_NUMBER}"))
        for kind in (FaultKind.EVICT, FaultKind.REMOVE, FaultKind.LATE, FaultKind.CORRUPT, FaultKind.DRAFT_LOSS)
    },
    FaultKind.SLOW: ("slow=P:SECONDS", re.compile(f"={_NUMBER}:{_NUMBER}")),
    FaultKind.HANG: ("hang=N:SECONDS", re.compile(rf"=(\d+):{_NUMBER}")),
    **{
        kind: (f"{kind}@SECONDS|MOMENT[:SECONDS]", re.compile(f"@(?:{_NUMBER}|{_MOMENT})(?::{_NUMBER})?"))
        for kind in _SCHEDULED
        if kind is not FaultKind.RESTART_MASTER
    },
    FaultKind.RESTART_MASTER: ("restart-master@SECONDS|MOMENT", re.compile(f"@(?:{_NUMBER}|{_MOMENT})()")),
}


def parse_fault(text: str) -> Fault:
    """A fault from its specification: `evict=0.05`, `slow=0.1:0.25`, `hang=3:2`, `kill-owner@10:5`, `kill-master@read`.

    Raises:
        ValueError: an unknown kind, another form than the kind's, or a probability above 1.
    """
    name = re.split("[=@]", text, maxsplit=1)[0]
    try:
        kind = FaultKind(name)
    except ValueError:
        of_calls = ", ".join(form for kind, (form, _) in _FORMS.items() if not kind.is_scheduled)
        of_processes = ", ".join(form for kind, (form, _) in _FORMS.items() if kind.is_scheduled)
        raise ValueError(
            f"fault {text!r}: expected one of {of_calls}; or, of a cluster's processes, {of_processes}; got {name!r}"
        ) from None
    form, pattern = _FORMS[kind]
    match = pattern.fullmatch(text[len(name) :])
    if match is None:
        raise ValueError(f"fault {text!r}: expected {form}")
    if kind.is_scheduled:
        after, moment, lasts = match.groups()
        return Fault(
            kind,
            seconds=float(after or 0.0),
            moment=Moment(moment) if moment else None,
            lasts=float(lasts) if lasts else None,
        )
    values = [float(value) for value in match.groups()]
    if kind is FaultKind.HANG:
        if int(match[1]) > _MOST_HANGS:
            raise ValueError(f"fault {text!r}: expected at most {_MOST_HANGS} calls, got {match[1]}")
        return Fault(kind, calls=int(match[1]), seconds=values[1])
    if values[0] > 1:
        raise ValueError(f"fault {text!r}: expected a probability of at most 1, got {match[1]}")
    return Fault(kind, probability=values[0], seconds=values[1] if len(values) > 1 else 0.0)


class FaultyStore(WrapperStore):
    """A store around `inner` in which faults happen, decided by a hash of seed, kind, key and how often it was asked.

    So a run with one thread repeats exactly, and a key that was lucky once may not be so the next time.

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
        self._slow = [fault for fault in faults if fault.kind is FaultKind.SLOW]
        self._seed = seed
        self._is_draft = is_draft
        self._lock = threading.Lock()
        self._asked: OrderedDict[tuple[FaultKind, str], int] = OrderedDict()
        self._late: set[str] = set()
        self._reads = 0
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

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        """As the inner store, after evictions, before removals, and without lost drafts."""
        evicted = set(self._remove(FaultKind.EVICT, self._chosen(FaultKind.EVICT, keys)))
        answers = list(self.inner.descriptors(keys))
        lost = self._lost_drafts(keys)
        good = [key for key, answer in zip(keys, answers, strict=True) if isinstance(answer, Descriptor)]
        self._remove(FaultKind.REMOVE, self._chosen(FaultKind.REMOVE, [key for key in good if key not in lost]))
        gone = evicted | lost
        return [PageStatus.NOT_FOUND if key in gone else answer for key, answer in zip(keys, answers, strict=True)]

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """As the inner store, late in time or past a lease."""
        late = self._delay(keys)
        if not late:
            return self.inner.read(keys, pointers, sizes)
        on_time = [index for index, key in enumerate(keys) if key not in late]
        answers: list[Answer] = [PageStatus.LEASE_EXPIRED] * len(keys)
        read = self.inner.read(
            [keys[index] for index in on_time],
            [pointers[index] for index in on_time],
            [sizes[index] for index in on_time],
        )
        for index, answer in zip(on_time, read, strict=True):
            answers[index] = answer
        return answers

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        """As the inner store, late in time or past a lease."""
        late = self._delay(keys)
        self.inner.session_end(sorted(late))
        return self.inner.read_ranges(keys, pointers, sizes, offsets)

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


def _copy_of(pointer: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    copy = np.empty(nbytes, dtype=np.uint8)
    copy_bytes(copy.ctypes.data, pointer, nbytes)
    return copy
