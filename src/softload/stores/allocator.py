"""Places in an arena: best fit, neighbours merged as soon as they are free."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["ALIGNMENT", "Allocator"]

ALIGNMENT = 64
"""Bytes; every range starts at a multiple of it and is rounded up to one."""


class Allocator:
    """Hands out ranges of `capacity` bytes by offset.

    A range that was just freed is what the next request of the same size gets: stale addresses then point at other
    objects' bytes, which is what a remote store's memory does as well.

    Args:
        capacity: bytes; what is left over below a multiple of `ALIGNMENT` is not used.
    """

    __slots__ = ("_by_end", "_by_size", "_by_start", "_sizes", "bytes_used", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.bytes_used = 0
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        if self.capacity:
            self._add(0, self.capacity)

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a range of at least `nbytes`, or None where no free range is large enough."""
        need = _rounded(nbytes)
        index = bisect_left(self._sizes, need)
        if index == len(self._sizes):
            return None
        size = self._sizes[index]
        start = next(reversed(self._by_size[size]))
        self._take(start, size)
        if size > need:
            self._add(start + need, size - need)
        self.bytes_used += need
        return start

    def free(self, offset: int, nbytes: int) -> None:
        """Give back what `allocate(nbytes)` answered with."""
        size = _rounded(nbytes)
        self.bytes_used -= size
        end = offset + size
        after = self._by_start.get(end)
        if after is not None:
            self._take(end, after)
            size += after
        before = self._by_end.get(offset)
        if before is not None:
            self._take(before, offset - before)
            size += offset - before
            offset = before
        self._add(offset, size)

    def _add(self, start: int, size: int) -> None:
        self._by_start[start] = size
        self._by_end[start + size] = start
        starts = self._by_size.get(size)
        if starts is None:
            self._by_size[size] = {start: None}
            insort(self._sizes, size)
        else:
            starts[start] = None

    def _take(self, start: int, size: int) -> None:
        del self._by_start[start]
        del self._by_end[start + size]
        starts = self._by_size[size]
        del starts[start]
        if not starts:
            del self._by_size[size]
            del self._sizes[bisect_left(self._sizes, size)]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
