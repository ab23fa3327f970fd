"""Landing memory that was granted for the objects of one unit, and is handed out as their reads are planned."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain, count

from softload.landing import Segment

__all__ = ["Grant"]


class Grant(Collection[str]):
    """What was granted for objects, one after another; the keys of those whose memory is not taken yet.

    Args:
        keys: of the objects, in the order of the grant.
        segments: their memory, in the same order.
    """

    def __init__(self, keys: Iterable[str] = (), segments: Sequence[Segment] = ()) -> None:
        self._keys = list(keys)
        self._known_positions: dict[str, int] | None = None
        self._segments = list(segments)
        self._starts = list(accumulate((segment.count for segment in segments[:-1]), initial=0)) if segments else []

    def __repr__(self) -> str:
        return f"<Grant of {len(self._keys)} objects, {len(self)} left>"

    def __len__(self) -> int:
        return sum(segment.count for segment in self._segments)

    def __iter__(self) -> Iterator[str]:
        left = zip(self._starts, self._segments, strict=True)
        return chain.from_iterable(self._keys[start : start + segment.count] for start, segment in left)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._find(key) is not None

    def are_neighbours(self, keys: Sequence[str]) -> bool:
        """Whether the memory of these keys, all different ones, was granted in this order."""
        first, last = self._positions.get(keys[0]), self._positions.get(keys[-1])
        # Positions are given in order: only different keys, each after the last, come that far in so many steps.
        return first is not None and last is not None and last - first == len(keys) - 1

    def take(self, key: str, most: int = 1) -> Segment | None:
        """The memory of a key and of those that follow, of `most` objects if that lies side by side.

        ``None`` where it was not granted, or is taken.
        """
        index = self._find(key)
        if index is None:
            return None
        start, segment = self._starts[index], self._segments[index]
        first = self._positions[key] - start
        end = min(first + most, segment.count)
        left = [(start, 0, first), (start + end, end, segment.count)]
        left = [each for each in left if each[1] < each[2]]
        self._starts[index : index + 1] = [at for at, _, _ in left]
        self._segments[index : index + 1] = [segment.piece(begin, stop - begin) for _, begin, stop in left]
        return segment.piece(first, end - first) if left else segment

    @property
    def _positions(self) -> dict[str, int]:
        """Of all keys; made when they are first asked for, which they never are where all is lent after all."""
        if self._known_positions is None:
            self._known_positions = dict(zip(self._keys, count(), strict=False))
        return self._known_positions

    def _find(self, key: str) -> int | None:
        """In which of the segments that are left the memory of a key lies."""
        position = self._positions.get(key)
        index = -1 if position is None else bisect_right(self._starts, position) - 1
        if position is None or index < 0 or position - self._starts[index] >= self._segments[index].count:
            return None
        return index

    def take_rest(self) -> list[Segment]:
        """All that is left."""
        rest, self._segments, self._starts = self._segments, [], []
        return rest
