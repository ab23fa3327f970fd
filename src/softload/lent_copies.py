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


@dataclass(frozen=True, slots=True, eq=False)
class LentCopy:
    """Objects at a constant distance, to be copied and proven.

    Args:
        column: whose objects these are; its `rows` are set.
        fragments: the parts of each to copy.
        segment: where they are.
        first: the first one's page.
        until: when their lease has run out.
        nbytes: bytes that it copies.
    """

    column: Column
    fragments: Sequence[Fragment]
    segment: Segment
    first: int
    until: float
    nbytes: int


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
            yield LentCopy(column, fragments, piece, pages.start + first + at, until, piece.count * width)


def lent_batches(copies: Sequence[LentCopy], max_bytes: int) -> Iterator[list[LentCopy]]:
    """What is copied, and then proven, between two looks at the deadline: objects of one column."""
    batch: list[LentCopy] = []
    total = 0
    for copy in copies:
        if batch and (total + copy.nbytes > max_bytes or copy.column is not batch[0].column):
            yield batch
            batch, total = [], 0
        batch.append(copy)
        total += copy.nbytes
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
    pages = [page for copy in copies for page in range(copy.first, copy.first + copy.segment.count)]
    until = min(copy.until for copy in copies)
    whole = [False] * len(pages)
    with calls.hold() as allowed:
        if allowed and clock() < until:
            for copy in copies:
                execute(_parts(copy))
            column, blocks = copies[0].column, [objects_of(copy.segment) for copy in copies]
            found = check_blocks([column.keys[page] for page in pages], blocks, integrity, needs_digest=True)
            if clock() < until:
                whole = found
    return [
        Refuted(copies[0].column, copies[0].fragments, page)
        for page, good in zip(pages, whole, strict=True)
        if not good
    ]


def _parts(copy: LentCopy) -> list[Copy]:
    column, segment = copy.column, copy.segment
    assert column.rows is not None
    rows, objects = column.rows[copy.first : copy.first + segment.count], objects_of(segment)
    return [
        Copy(column.pool.page_views[part.buffer], rows, objects[:, part.offset : part.offset + part.nbytes])
        for part in copy.fragments
    ]
