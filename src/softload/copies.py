"""Copies between landing memory and the engine's pools: one vectorised copy per pool buffer and run of segments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from softload.geometry.layout import Fragment
from softload.landing import Segment
from softload.planning import Column
from softload.transfer import Fence

__all__ = ["Copy", "chunks", "copies_in", "copies_out", "execute", "objects_of", "runs", "wait_for", "zeros"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One vectorised copy. `landing` is a view of landing memory `[pages, nbytes]`; ``None`` fills with zeros.

    Args:
        pages: the pool buffer's bytes, uint8 `[num_pages, page_bytes]`, on the pool's device.
        rows: which of its rows, int64.
        landing: the other side, one row per entry of `rows`.
        outward: from the pool into landing memory (a save).
    """

    pages: torch.Tensor
    rows: npt.NDArray[np.int64]
    landing: Bytes | None
    outward: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return len(self.rows) * self.pages.shape[1] if self.landing is None else self.landing.size

    def run(self) -> None:
        """Copy; on an accelerator the copy may still be under way when this returns."""
        if self.pages.device.type == "cpu":
            # numpy scatters whole rows at memory speed, also without the GIL; torch goes element by element.
            pages = self.pages.numpy()
            if self.landing is None:
                pages[self.rows] = 0
            elif self.outward:
                self.landing[...] = pages[self.rows]
            else:
                pages[self.rows] = self.landing
            return
        rows = torch.from_numpy(self.rows).to(self.pages.device, non_blocking=True)
        if self.landing is None:
            self.pages.index_fill_(0, rows, 0)
        elif self.outward:
            torch.from_numpy(self.landing).copy_(self.pages.index_select(0, rows))
        else:
            landed = torch.from_numpy(self.landing).to(self.pages.device, non_blocking=True)
            self.pages.index_copy_(0, rows, landed)


def copies_in(column: Column, fragments: Sequence[Fragment], segments: Sequence[Segment], pages: range) -> list[Copy]:
    """Copies of landed objects into the column's pool.

    Args:
        column: whose objects these are; its `rows` are set.
        fragments: the parts of each object to copy.
        segments: the objects' memory, for every page of `pages` in this order.
        pages: the unit's pages.
    """
    return _copies(column, fragments, segments, np.arange(pages.start, pages.stop), outward=False)


def copies_out(column: Column, segments: Sequence[Segment], pages: Sequence[int]) -> list[Copy]:
    """Copies of a column's pages out of its pool, whole objects, one segment per entry of `pages`."""
    return _copies(column, column.spec.fragments, segments, np.asarray(pages, np.int64), outward=True)


def zeros(column: Column, pages: range, fragments: Iterable[Fragment]) -> list[Copy]:
    """Fills a column's pages with zeros."""
    assert column.rows is not None
    rows = column.rows[pages.start : pages.stop]
    rows = rows[rows >= 0]
    return [Copy(column.pool.page_views[fragment.buffer], rows, None) for fragment in fragments]


def chunks(copies: Iterable[Copy], max_bytes: int) -> Iterator[list[Copy]]:
    """Split copies into lists of at most `max_bytes` each; a single row may be larger."""
    batch: list[Copy] = []
    total = 0
    for copy in copies:
        for part in (copy,) if 0 < copy.nbytes <= max_bytes else _parts(copy, max_bytes):
            nbytes = part.nbytes
            if batch and total + nbytes > max_bytes:
                yield batch
                batch, total = [], 0
            batch.append(part)
            total += nbytes
    if batch:
        yield batch


def execute(copies: Sequence[Copy]) -> None:
    """Run copies and wait until they are complete on their device."""
    for copy in copies:
        copy.run()
    for device in {copy.pages.device for copy in copies}:
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()


def wait_for(fence: Fence | None) -> None:
    """Wait for the engine's fence."""
    if fence is None:
        return
    if callable(fence):
        fence()
    else:
        fence.synchronize()


def _copies(
    column: Column,
    fragments: Sequence[Fragment],
    segments: Sequence[Segment],
    pages: npt.NDArray[np.int64],
    *,
    outward: bool,
) -> list[Copy]:
    assert column.rows is not None
    rows = column.rows[pages]
    views = column.pool.page_views
    copies: list[Copy] = []
    for first, run in runs(segments):
        mine = rows[first : first + run.count]
        objects = objects_of(run)
        for fragment in fragments:
            end = fragment.offset + fragment.nbytes
            if end > run.nbytes:
                raise ValueError(
                    f"pool {column.pool.name}: expected {fragment.nbytes} bytes at {fragment.offset} within "
                    f"the object, got an object of {run.nbytes} bytes"
                )
            copies.append(Copy(views[fragment.buffer], mine, objects[:, fragment.offset : end], outward))
    return copies


def _parts(copy: Copy, max_bytes: int) -> Iterator[Copy]:
    """A copy in pieces of at most so many bytes; a single row may be larger."""
    step = max(1, max_bytes // max(1, copy.pages.shape[1]))
    for first in range(0, len(copy.rows), step):
        landing = None if copy.landing is None else copy.landing[first : first + step]
        yield Copy(copy.pages, copy.rows[first : first + step], landing, copy.outward)


def runs(segments: Sequence[Segment]) -> Iterator[tuple[int, Segment]]:
    """Neighbours as one, `(index of the first object, segment)`: to look at its bytes, not to give it back."""
    first, run = 0, segments[0].piece(0, segments[0].count) if segments else None
    for this in segments[1:]:
        assert run is not None
        follows = this.arena is run.arena and this.offset == run.offset + run.reserved
        if follows and this.nbytes == run.nbytes and this.stride == run.stride:
            run.reserved += this.reserved
            run.count += this.count
            continue
        yield first, run
        first, run = first + run.count, this.piece(0, this.count)
    if run is not None:
        yield first, run


def objects_of(run: Segment) -> Bytes:
    """The bytes of a segment's objects: a view, uint8 `[objects, bytes]`, each row contiguous."""
    return np.ndarray((run.count, run.nbytes), np.uint8, run.arena.memory, run.offset, (run.stride, 1))
