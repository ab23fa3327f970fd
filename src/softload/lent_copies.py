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
from softload.copies import Copy, execute, rows_of, runs
from softload.geometry.layout import Fragment
from softload.integrity import check_tails, has_digests
from softload.planning import Column
from softload.protocols import Clock
from softload.segments import Segment
from softload.store_calls import StoreCalls

__all__ = ["DIRECT", "LentCopy", "Refuted", "copy_lent", "lent_batches", "lent_copies"]

DIRECT: Final = "direct read"
"""Label of copies from where the store has its bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class LentCopy:
    """Objects at a constant distance, to be copied and proven.

    Args:
        column: whose objects these are; its `rows` are set.
        fragments: the parts of each to copy.
        segment: where they are.
        first: the first one's page.
        until: when their lease has run out.
    """

    column: Column
    fragments: Sequence[Fragment]
    segment: Segment
    first: int
    until: float

    @property
    def nbytes(self) -> int:
        """Bytes that it copies."""
        return self.segment.count * sum(fragment.nbytes for fragment in self.fragments)


@dataclass(frozen=True, slots=True)
class Refuted:
    """A page whose object was not proven after it was copied, and the parts of it that were wanted."""

    column: Column
    fragments: Sequence[Fragment]
    page: int


def lent_copies(
    column: Column,
    fragments: Sequence[Fragment],
    segments: Sequence[Segment],
    pages: range,
    *,
    until: float,
    max_bytes: int,
) -> Iterator[LentCopy]:
    """Copies of lent objects, of at most `max_bytes` each; a single object may be larger. See `LentCopy`."""
    width = sum(fragment.nbytes for fragment in fragments)
    step = max(1, max_bytes // max(1, width))
    for first, run in runs(segments) if width else ():
        for at in range(0, run.count, step):
            piece = run.piece(at, min(step, run.count - at))
            yield LentCopy(column, fragments, piece, pages.start + first + at, until)


def lent_batches(copies: Sequence[LentCopy], max_bytes: int) -> Iterator[list[LentCopy]]:
    """What is copied between two looks at the deadline."""
    batch: list[LentCopy] = []
    total = 0
    for copy in copies:
        if batch and total + copy.nbytes > max_bytes:
            yield batch
            batch, total = [], 0
        batch.append(copy)
        total += copy.nbytes
    if batch:
        yield batch


def copy_lent(calls: StoreCalls, copies: Sequence[LentCopy], *, integrity: Integrity, clock: Clock) -> list[Refuted]:
    """On a thread: copy, then prove. What is not proven must not be used: it may be anybody's bytes."""
    refuted: list[Refuted] = []
    with calls.hold() as allowed:
        for copy in copies:
            count = copy.segment.count
            whole = _copied(copy, integrity) if allowed and clock() < copy.until else [False] * count
            if clock() >= copy.until:
                whole = [False] * count
            refuted += [
                Refuted(copy.column, copy.fragments, copy.first + index) for index, good in enumerate(whole) if not good
            ]
    return refuted


def _copied(copy: LentCopy, integrity: Integrity) -> list[bool]:
    column, segment, first = copy.column, copy.segment, copy.first
    assert column.rows is not None
    rows = column.rows[first : first + segment.count]
    execute(
        [
            Copy(column.pool.page_views[part.buffer], rows, rows_of(segment, part.offset, part.nbytes))
            for part in copy.fragments
        ]
    )
    objects = rows_of(segment, 0, segment.nbytes)
    whole = check_tails(column.keys[first : first + segment.count], objects, integrity)
    return [good and told for good, told in zip(whole, has_digests(objects), strict=True)]
