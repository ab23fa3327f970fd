"""Objects on their way into landing memory, shared by every unit that wants them.

Neighbours of one unit, of one size and at one endpoint, are one fetch: planned, read, landed and freed as one. It is
split where its objects part: where another unit wants some of them, where one has failed, or is not wanted any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Final, Protocol

from softload.landing import Segment, SegmentState
from softload.native_calls import NativeCall
from softload.outcomes import PageStatus
from softload.protocols import Descriptor
from softload.session_states import Session

__all__ = [
    "RETRY",
    "SECOND_READ",
    "Fetch",
    "FetchListener",
    "Part",
    "PartState",
    "ReadAnswers",
    "ReadCall",
    "Turn",
    "by_unit",
    "leaves",
]

RETRY: Final = "retry"
SECOND_READ: Final = "second read"
"""Labels of reads of what was read before."""

_JOIN_SECONDS = 0.05
"""A read may be joined for at least this long, however short it was expected to be."""

_JOIN_FACTOR = 4.0


class PartState(Enum):
    """Where a part's bytes are."""

    QUEUED = "queued"
    IN_FLIGHT = "in_flight"
    LANDED = "landed"
    FAILED = "failed"


class FetchListener(Protocol):
    """A unit that wants a fetch."""

    def fetch_failed(self, fetch: Fetch) -> None:
        """It cannot be had. Called on the loop; must not await."""

    def fetch_split(self, old: Fetch, new: Sequence[Fetch]) -> None:
        """`new` are `old`, piece by piece, and wanted as that was. Called on the loop; must not await."""

    def fetch_replaced(self, old: Fetch, new: Fetch) -> None:
        """`new` has landed what `old` was to bring: join that, and leave `old` as soon as nobody copies from it."""

    def wake(self) -> None:
        """Some of its fetches have landed, or failed. Called on the loop, once for many."""


class Part:
    """What one native call reads of a fetch: all of it, or the ranges of a group of layers of one object."""

    __slots__ = ("call", "failure", "fetch", "layers", "nbytes", "pieces", "ranges", "state", "suspects")

    def __init__(self, fetch: Fetch, ranges: Sequence[tuple[int, int]] = (), layers: range | None = None) -> None:
        self.fetch = fetch
        self.ranges = ranges
        self.layers = layers
        self.nbytes = sum(nbytes for _, nbytes in ranges) if ranges else fetch.size * fetch.count
        self.pieces: tuple[Part, ...] = ()
        """What it was split into: their states count then, while a call may still read by this one."""
        self.state = PartState.QUEUED
        self.failure: PageStatus | None = None
        """Why it was read once more."""
        self.call: ReadCall | None = None
        self.suspects: set[str] = set()
        """Its unit's, once it is submitted: see `Turn`."""

    def serves(self, layers: range) -> bool:
        """Whether any of `layers` needs it."""
        return self.layers is None or (self.layers.start < layers.stop and layers.start < self.layers.stop)


def leaves(parts: Iterable[Part]) -> Iterator[Part]:
    """These parts, or where one was split its pieces, in the same order."""
    for part in parts:
        if part.pieces:
            yield from leaves(part.pieces)
        else:
            yield part


def by_unit(parts: Iterable[Part]) -> Iterator[tuple[set[str], list[Part]]]:
    """Parts that were submitted by one unit, with its suspects, in the order in which units first come."""
    found: dict[int, list[Part]] = {}
    for part in parts:
        found.setdefault(id(part.suspects), []).append(part)
    for same in found.values():
        yield same[0].suspects, same


class Fetch:
    """One object, or neighbours of one size and endpoint: their segment, their parts, and who waits for them.

    Without listeners it is withdrawn if it has not started, quarantined while a call may still write it, kept for a
    while if a prefetch brought it, and freed otherwise.
    """

    __slots__ = (
        "count",
        "descriptors",
        "endpoint",
        "has_second",
        "issuer",
        "keep_until",
        "keys",
        "listeners",
        "parts",
        "segment",
        "session",
        "size",
        "status",
        "tailed",
        "timed_out",
    )

    def __init__(
        self,
        keys: Sequence[str],
        segment: Segment,
        descriptors: Sequence[Descriptor | None],
        *,
        size: int,
        tailed: bool,
    ) -> None:
        self.keys = keys
        self.count = len(keys)
        self.segment = segment
        self.descriptors = descriptors
        first = descriptors[0]
        self.endpoint = first.endpoint if first is not None else ""
        self.size = size
        self.tailed = tailed
        self.parts: list[Part] = [Part(self)]
        self.listeners: list[FetchListener] = []
        self.issuer: FetchListener | None = None
        """Who had it read, until it leaves; all other listeners joined."""
        self.has_second = False
        """Whether it was read a second time, or is a second read itself: there is no third."""
        self.session: Session | None = None
        self.status = PageStatus.LOADED
        self.timed_out = False
        self.keep_until = 0.0

    def __repr__(self) -> str:
        states = ",".join(part.state.value for part in self.parts)
        return f"<Fetch {self.key} and {self.count - 1} more: {states}, {len(self.listeners)} listeners>"

    @property
    def key(self) -> str:
        """Of its object, or of the first one."""
        return self.keys[0]

    @property
    def failed(self) -> bool:
        """Whether a part has failed: then the whole object has."""
        return self.status is not PageStatus.LOADED

    @property
    def is_lent(self) -> bool:
        """Whether its bytes are where the store has them, and not proven before they are copied."""
        return self.segment.state is SegmentState.LENT

    @property
    def landed(self) -> bool:
        """Whether all of it is here and checked."""
        parts = self.parts
        if len(parts) == 1:
            return parts[0].state is PartState.LANDED and self.status is PageStatus.LOADED
        return not self.failed and all(part.state is PartState.LANDED for part in parts)

    @property
    def in_flight(self) -> bool:
        """Whether a call may still write its segment."""
        parts = self.parts
        if len(parts) == 1:
            return parts[0].state is PartState.IN_FLIGHT
        return any(part.state is PartState.IN_FLIGHT for part in parts)

    @property
    def joiners(self) -> list[FetchListener]:
        """Who waits for a read that somebody else had started; each once."""
        return [listener for listener in dict.fromkeys(self.listeners) if listener is not self.issuer]

    def split(self, bounds: Sequence[int]) -> list[Fetch]:
        """Fetches in the stead of this one, which is read as a whole: nobody wants it any more, they are wanted.

        Args:
            bounds: where the pieces begin, from 0, and the end of the last.
        """
        (part,) = self.parts
        pieces: list[Fetch] = []
        for first, end in pairwise(bounds):
            segment = self.segment.piece(first, end - first)
            descriptors = self.descriptors[first:end]
            piece = Fetch(self.keys[first:end], segment, descriptors, size=self.size, tailed=self.tailed)
            piece.endpoint, piece.status, piece.timed_out = self.endpoint, self.status, self.timed_out
            piece.listeners, piece.issuer = list(self.listeners), self.issuer
            piece.has_second, piece.keep_until = self.has_second, self.keep_until
            mine = piece.parts[0]
            mine.state, mine.failure, mine.call = part.state, part.failure, part.call
            mine.suspects = part.suspects
            pieces.append(piece)
        part.pieces = tuple(piece.parts[0] for piece in pieces)
        if part.call is not None and part in part.call.relied_on:
            part.call.relied_on.remove(part)
            part.call.relied_on.update(part.pieces)
        self.listeners.clear()
        self.issuer = None
        self.parts.clear()  # no circle for the collector
        return pieces

    def give_up_calls(self) -> None:
        """Nobody relies on the calls that may still write its segment."""
        for part in self.parts:
            if part.state is PartState.IN_FLIGHT and part.call is not None:
                part.call.give_up(part)

    def landed_for(self, layers: range) -> bool:
        """Whether the bytes that `layers` need are here and checked."""
        if len(self.parts) == 1 and self.parts[0].layers is None:
            return self.landed
        return not self.failed and all(part.state is PartState.LANDED for part in self.parts if part.serves(layers))


@dataclass(frozen=True, slots=True)
class ReadAnswers:
    """What one native read brought, by object in the order in which it read them.

    Args:
        statuses: `LOADED`, or why not.
        replaced: where a replica has changed, the one that is there now.
    """

    statuses: Sequence[PageStatus]
    replaced: dict[int, Descriptor] = field(default_factory=dict)


class Turn:
    """A unit's place among others: the batches of one unit come one after another, units take turns.

    Args:
        suspects: endpoints that have let the unit down already; second reads and tries share them with the first.
    """

    __slots__ = ("is_first", "suspects", "tag")

    def __init__(self, suspects: set[str] | None = None) -> None:
        self.tag = 0.0
        self.is_first = suspects is None
        """Whether its next call is the unit's first: that brings the first layers."""
        self.suspects: set[str] = set() if suspects is None else suspects
        """Endpoints that have let this unit down: however many of its calls time out, that is one outcome."""


class ReadCall:
    """One native read: the parts of objects of one endpoint, of one unit or of several whose turns it is."""

    __slots__ = (
        "alarm",
        "counted",
        "endpoint",
        "expected",
        "is_first",
        "live",
        "master_answered",
        "native",
        "overdue",
        "parts",
        "ranged",
        "relied_on",
        "session_starts",
        "timed_out",
        "work_at",
    )

    def __init__(self, endpoint: str, parts: list[Part], *, ranged: bool, is_first: bool = False) -> None:
        self.endpoint = endpoint
        self.parts = parts
        self.ranged = ranged
        self.is_first = is_first
        """Whether it brings a unit's first layers: no other of its endpoint runs until they are checked."""
        self.live: list[Part] = []
        self.relied_on: set[Part] = set()
        """Live parts that somebody waits for, and has nothing else to wait for."""
        self.expected = 0.0
        self.work_at = 0.0
        """When it started, on the clock of `SharedTime`."""
        self.session_starts = 0
        """Sessions started by then: which of them it relied on."""
        self.alarm: asyncio.TimerHandle | None = None
        self.overdue = False
        """Whether it takes much longer than such a call should. Set by the alarm, so that all agree on it."""
        self.timed_out = False
        self.counted = False
        """Whether it was one of its endpoint's outcomes when it timed out."""
        self.master_answered: bool | None = None
        """Whether the master did when it was asked for proof; ``None`` where it was not."""
        self.native: NativeCall[ReadAnswers] | None = None

    @property
    def label(self) -> str:
        """What it does, for traces: `retry`, `second read`, or nothing that its group does not say."""
        if any(part.failure is not None for part in self.parts):
            return RETRY
        # Set when the second read is made; the first one's own calls were submitted before.
        return SECOND_READ if any(part.fetch.has_second for part in self.parts) else ""

    @property
    def items(self) -> int:
        """Objects, or ranges of them, as it was submitted."""
        return sum(len(part.ranges) or part.fetch.count for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes, as it was submitted."""
        return sum(part.nbytes for part in self.parts)

    @property
    def due_seconds(self) -> float:
        """How long it may take before nobody joins it any more."""
        return max(_JOIN_SECONDS, _JOIN_FACTOR * self.expected)

    def take_in(self, other: ReadCall, max_bytes: int, max_objects: int) -> bool:
        """Read what a call of another unit would too, if both are small, and neither has begun. False where not."""
        if self.ranged or other.ranged or self.label or other.label:
            return False
        parts = [*self.parts, *other.parts]
        if sum(part.nbytes for part in parts) > max_bytes or sum(part.fetch.count for part in parts) > max_objects:
            return False
        self.parts = parts
        return True

    def give_up(self, part: Part) -> None:
        """Nobody relies on it for this part any more; a call of which that holds for every part leaves its lane."""
        self.relied_on.discard(part)
        if not self.relied_on and self.native is not None:
            self.native.abandon()
