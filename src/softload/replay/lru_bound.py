"""Upper bound of what a store of a given size can give back: an LRU of whole pages, fed the run's own events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["LruBound"]


class LruBound:
    """An LRU cache of `capacity` pages that sees lookups and saves in the order in which the run had them.

    A save counts from when it was offered, before any byte was written, and nothing is ever refused, leased or lost:
    a run that restores as much as this has lost nothing to its store. Strictly a bound where nothing is evicted; a
    store that evicts in another order, or protects what is leased, may by luck keep what this has let go.

    Raises:
        ValueError: a negative capacity.
    """

    def __init__(self, capacity: int | None) -> None:
        if capacity is not None and capacity < 0:
            raise ValueError(f"capacity: expected 0 or more pages, got {capacity}")
        self.capacity = capacity
        self.hit_pages = 0
        self._pages: OrderedDict[str, None] = OrderedDict()

    def lookup(self, keys: Sequence[str]) -> int:
        """Pages of `keys` that are here, counted from the first to the first miss; they become the youngest."""
        hits = 0
        for key in keys:
            if key not in self._pages:
                break
            hits += 1
        # The first page of a prefix is of use to more requests than the last, so it becomes the youngest of all.
        for key in reversed(keys[:hits]):
            self._pages.move_to_end(key)
        self.hit_pages += hits
        return hits

    def save(self, keys: Sequence[str]) -> None:
        """Insert `keys`; those that are here already become the youngest."""
        for key in reversed(keys):
            self._pages[key] = None
            self._pages.move_to_end(key)
        if self.capacity is not None:
            while len(self._pages) > self.capacity:
                self._pages.popitem(last=False)

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: str) -> bool:
        return key in self._pages

    def __repr__(self) -> str:
        return f"<LruBound {len(self._pages)} of {self.capacity} pages, {self.hit_pages} hit>"
