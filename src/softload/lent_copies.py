"""Copies from where the store has its objects into the engine's pools, proven afterwards.

Nothing keeps such an object as it is but its lease: removed by force, another may take its place while it is copied. So
it is looked at after its last byte was copied: if what lies there by then is the object, under a lease that has not run
out, so was what was copied. That is what a digest of landed bytes says of them, and it fails where that fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from softload.config import Integrity
from softload.copies import Copy, execute, objects_of, runs
from softload.geometry.layout import Fragment
from softload.integrity import check_blocks
from softload.planning import Column
from softload.protocols import Clock
from softload.segments import Segment
from softload.store_calls import StoreCalls

__all__ = ["DIRECT", "LentCopy", "Refuted", "copy_lent", "lent_batches", "lent_copies"]

DIRECT: Final = "direct read"
"""Label of copies from where the store has its bytes."""

_LANES: Final = 2
"""On which copies run."""

_APART_BYTES: Final = 256 << 10
"""Less is not worth a call of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class LentCopy:
    """Objects at a constant distance, to be copied and proven.

    Args:
        column: whose objects these are; its `rows` are set.
        fragments: the parts of each to copy.
        segment: where they are.
        first: the first one's page.
        until: when their lease has run out.
        width: bytes of each that are copied.
    """

    column: Column
    fragments: Sequence[Fragment]
    segment: Segment
    first: int
    until: float
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes that it copies."""
        return self.segment.count * self.width

    def piece(self, first: int, count: int) -> LentCopy:
        """Some of the objects."""
        piece = self.segment.piece(first, count)
        return LentCopy(self.column, self.fragments, piece, self.first + first, self.until, self.width)


@dataclass(frozen=True, slots=True)
class Refuted:
    """A page whose object was not proven after it was copied, and the parts of it that were wanted."""

    column: Column
    fragments: Sequence[Fragment]
    page: int


def lent_copies(
    column: Column, fragments: Sequence[Fragment], segments: Sequence[Segment], pages: range, until: float
) -> Iterator[LentCopy]:
    """Copies of lent objects, for every page of `pages` in this order, until their lease has run out."""
    width = sum(fragment.nbytes for fragment in fragments)
    for first, run in runs(segments) if fragments else ():
        yield LentCopy(column, fragments, run, pages.start + first, until, width)


def lent_batches(copies: Sequence[LentCopy], max_bytes: int) -> Iterator[list[LentCopy]]:
    """What is copied, and then proven, between two looks at the deadline: objects of one column.

    Args:
        copies: split where need be.
        max_bytes: of a batch; a single object may be larger. Batches are about equal, so that lanes end together.
    """
    total = sum(copy.nbytes for copy in copies)
    count = -(-total // max_bytes)
    if total >= _LANES * _APART_BYTES:
        count = -(-count // _LANES) * _LANES
    most = -(-total // max(1, count))
    batch: list[LentCopy] = []
    room = most
    for copy in copies:
        width, left = copy.width, copy
        if batch and left.column is not batch[0].column:
            yield batch
            batch, room = [], most
        while left.nbytes > room and (some := max(room // width, 0 if batch else 1)) < left.segment.count:
            if some:
                batch.append(left.piece(0, some))
            yield batch
            left = left.piece(some, left.segment.count - some)
            batch, room = [], most
        batch.append(left)
        room -= left.nbytes
    if batch:
        yield batch


def copy_lent(calls: StoreCalls, copies: Sequence[LentCopy], *, integrity: Integrity, clock: Clock) -> list[Refuted]:
    """On a thread: copy, then prove. What is not proven must not be used: it may be anybody's bytes.

    Args:
        calls: whose store lends.
        copies: of one column.
        integrity: how the objects are proven.
        clock: what leases are measured with.
    """
    pages = [(copy, page) for copy in copies for page in range(copy.first, copy.first + copy.segment.count)]
    until = min(copy.until for copy in copies)
    whole = [False] * len(pages)
    with calls.hold() as allowed:
        if allowed and clock() < until:
            for copy in copies:
                execute(_parts(copy))
            column, blocks = copies[0].column, [objects_of(copy.segment) for copy in copies]
            found = check_blocks([column.keys[page] for _, page in pages], blocks, integrity, needs_digest=True)
            if clock() < until:
                whole = found
    # Copies of one object for several groups of its layers may be in one call: each has fragments of its own.
    return [
        Refuted(copy.column, copy.fragments, page) for (copy, page), good in zip(pages, whole, strict=True) if not good
    ]


def _parts(copy: LentCopy) -> list[Copy]:
    column, segment = copy.column, copy.segment
    assert column.rows is not None
    rows, objects = column.rows[copy.first : copy.first + segment.count], objects_of(segment)
    return [
        Copy(column.pool.page_views[part.buffer], rows, objects[:, part.offset : part.offset + part.nbytes])
        for part in copy.fragments
    ]
