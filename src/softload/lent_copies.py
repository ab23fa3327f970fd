"""Copies from where the store has its objects into the engine's pools, proven afterwards.

Nothing keeps such an object as it is but its lease: removed by force, another may take its place while it is copied. So
it is looked at after its last byte was copied: if what lies there by then is the object, under a lease that has not run
out, so was what was copied. That is what a digest of landed bytes says of them, and it fails where that fails.

An object without a digest is asked for once more, after its last byte was copied under that lease: if it is where it
was, so was what was copied. Nothing else will do. For bytes that were read, a master that is gone is taken for one that
gives no memory away, since the read, or its session, had just asked it. What is copied was asked for at admission, and
others may have its memory by now: from the master before it went, or from one that is out of our reach alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from softload.config import Integrity
from softload.copies import Copy, execute, objects_of, runs
from softload.geometry.layout import Fragment
from softload.integrity import check_blocks
from softload.outcomes import PageStatus
from softload.planning import Column
from softload.protocols import Clock, Descriptor
from softload.segments import Segment
from softload.store_calls import StoreCalls

__all__ = ["DIRECT", "LentCopy", "Refuted", "copy_lent", "keys_of", "lent_batches", "lent_copies", "moved"]

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

    @property
    def pages(self) -> range:
        """The objects' pages."""
        return range(self.first, self.first + self.segment.count)

    def piece(self, first: int, count: int) -> LentCopy:
        """Some of the objects."""
        piece = self.segment.piece(first, count)
        return LentCopy(self.column, self.fragments, piece, self.first + first, self.until, self.width)


@dataclass(frozen=True, slots=True)
class Refuted:
    """A page whose object was not proven after it was copied.

    Args:
        column: whose it is.
        fragments: the parts of it that were wanted.
        page: which.
        size: the object's bytes.
    """

    column: Column
    fragments: Sequence[Fragment]
    page: int
    size: int


def lent_copies(
    column: Column, fragments: Sequence[Fragment], segments: Sequence[Segment], pages: range, until: float
) -> Iterator[LentCopy]:
    """Copies of lent objects, for every page of `pages` in this order, until their lease has run out."""
    width = sum(fragment.nbytes for fragment in fragments)
    for first, run in runs(segments) if fragments else ():
        yield LentCopy(column, fragments, run, pages.start + first, until, width)


def lent_batches(copies: Sequence[LentCopy], max_bytes: int) -> Iterator[list[LentCopy]]:
    """What is copied, and then proven, between two looks at the deadline.

    Args:
        copies: split where need be.
        max_bytes: of a batch; a single object may be larger.
    """
    batch: list[LentCopy] = []
    room = max_bytes
    for copy in copies:
        width, left = copy.width, copy
        while left.nbytes > room and (some := max(room // width, 0 if batch else 1)) < left.segment.count:
            if some:
                batch.append(left.piece(0, some))
            yield batch
            left = left.piece(some, left.segment.count - some)
            batch, room = [], max_bytes
        batch.append(left)
        room -= left.nbytes
    if batch:
        yield batch


def copy_lent(
    calls: StoreCalls, copies: Sequence[LentCopy], *, integrity: Integrity | None, clock: Clock
) -> list[Refuted]:
    """On a thread: copy, then prove. What is not proven must not be used: it may be anybody's bytes.

    Args:
        calls: whose store lends.
        copies: what to copy, column by column.
        integrity: how the objects are proven; ``None`` where they have no digest: then `moved` must follow.
        clock: what leases are measured with.
    """
    until = min(copy.until for copy in copies)
    # What a column's objects have in common is looked at once; one that is copied in several steps comes several times.
    steps = [list(some) for _, some in groupby(copies, lambda copy: id(copy.fragments))]
    whole = [False] * sum(copy.segment.count for copy in copies)
    with calls.hold() as allowed:
        if allowed and clock() < until:
            execute([part for copy in copies for part in _parts(copy)])
            found = [True] * len(whole)
            if integrity is not None:
                found = [good for same in steps for good in _whole(same, integrity)]
            if clock() < until:
                whole = found
    pages = [(copy, page) for copy in copies for page in copy.pages]
    return [_refuted(copy, page) for (copy, page), good in zip(pages, whole, strict=True) if not good]


def keys_of(copies: Iterable[LentCopy]) -> list[str]:
    """The objects' keys, each once."""
    return list(dict.fromkeys(copy.column.keys[page] for copy in copies for page in copy.pages))


def moved(
    copies: Iterable[LentCopy],
    now: Mapping[str, Descriptor | PageStatus | None],
    is_lent: Callable[[Column, int], bool],
) -> list[Refuted]:
    """What is not, as far as the store has said since it was copied, where it was copied from.

    Args:
        copies: what was copied, before `now` was asked for.
        now: per object key.
        is_lent: whether a page's object is still taken from there. One that had left is no proof when it is back, and
            these copies may have been begun before it was known to have left.
    """
    found: list[Refuted] = []
    for copy in copies:
        segment = copy.segment
        for nth, page in enumerate(copy.pages):
            place = Descriptor(segment.nbytes, segment.endpoint, segment.pointer + nth * segment.stride)
            if now[copy.column.keys[page]] != place or not is_lent(copy.column, page):
                found.append(_refuted(copy, page))
    return found


def _refuted(copy: LentCopy, page: int) -> Refuted:
    return Refuted(copy.column, copy.fragments, page, copy.segment.nbytes)


def _whole(copies: Sequence[LentCopy], integrity: Integrity) -> list[bool]:
    """Which objects of one column are what they must be, where they lie."""
    keys = [copy.column.keys[page] for copy in copies for page in copy.pages]
    return check_blocks(keys, [objects_of(copy.segment) for copy in copies], integrity, needs_digest=True)


def _parts(copy: LentCopy) -> list[Copy]:
    column, segment = copy.column, copy.segment
    assert column.rows is not None
    rows, objects = column.rows[copy.pages.start : copy.pages.stop], objects_of(segment)
    return [
        Copy(column.pool.page_views[part.buffer], rows, objects[:, part.offset : part.offset + part.nbytes])
        for part in copy.fragments
    ]
