"""Which fetch serves which pages of one unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from softload.fetches import Fetch
from softload.planning import Column
from softload.segments import Segment
from softload.unit_pages import Wanted

__all__ = ["UnitHoldings"]


class UnitHoldings:
    """The fetches of one unit, by column and page; a fetch of several objects serves as many pages, in their order."""

    def __init__(self) -> None:
        self._held: dict[Column, list[Fetch | None]] = {}
        self._wants: dict[Fetch, list[Wanted]] = {}

    def __iter__(self) -> Iterator[Fetch]:
        return iter(list(self._wants))

    def columns(self) -> list[Column]:
        """Those of which something is or was held."""
        return list(self._held)

    def of(self, fetch: Fetch) -> tuple[Wanted, ...]:
        """Every page that a fetch serves."""
        return tuple(
            Wanted(column, page + place) for column, page in self._wants.get(fetch, ()) for place in range(fetch.count)
        )

    def at(self, column: Column, page: int) -> Fetch | None:
        """The fetch that serves a page."""
        held = self._held.get(column)
        return None if held is None else held[page]

    def has_any(self, column: Column, pages: range) -> bool:
        """Whether one of these pages is served."""
        held = self._held.get(column)
        return held is not None and held[pages.start : pages.stop].count(None) < len(pages)

    def lacks_any(self, column: Column, pages: range) -> bool:
        """Whether nothing serves one of these pages."""
        held = self._held.get(column)
        return bool(pages) if held is None else None in held[pages.start : pages.stop]

    def unlent(self, column: Column, pages: range) -> Iterator[range]:
        """Those of these pages that are not served by what the store lends: they need landing memory."""
        if column not in self._held:
            yield pages
            return
        for first, end, fetch in self.spans(column, pages):
            if fetch is None or not fetch.is_lent:
                yield range(max(first, pages.start), min(end, pages.stop))

    def spans(self, column: Column, pages: range) -> Iterator[tuple[int, int, Fetch | None]]:
        """What serves these pages, in their order, as `(first page, page after the last, fetch)`.

        A fetch that serves pages before or after these comes with its own first or last page: not these alone.
        """
        held = self._held.get(column)
        if held is None and pages:
            yield pages.start, pages.stop, None
        page = pages.start
        while held is not None and page < pages.stop:
            fetch = held[page]
            # The page is its first as a rule; a fetch may serve twice in a row, so that its neighbour is no proof.
            is_first = fetch is None or fetch.count == 1 or not page or held[page - 1] is not fetch
            first = page if is_first or fetch is None else self.first(column, page, fetch)
            page = first + (1 if fetch is None else fetch.count)
            yield first, page, fetch

    def segments(self, column: Column, pages: range) -> list[Segment]:
        """Where these pages' bytes are, one after another.

        Raises:
            RuntimeError: nothing serves one of them.
        """
        found: list[Segment] = []
        for first, end, fetch in self.spans(column, pages):
            if fetch is None:
                raise RuntimeError(f"pool {column.pool.name}: expected a fetch for page {first}, got none")
            start, stop = max(first, pages.start), min(end, pages.stop)
            is_whole = (start, stop) == (first, end)
            found.append(fetch.segment if is_whole else fetch.segment.piece(start - first, stop - start))
        return found

    def put(self, column: Column, page: int, fetch: Fetch) -> None:
        """A fetch serves the pages from this one on."""
        held = self._held.get(column)
        if held is None:
            held = self._held[column] = [None] * len(column.keys)
        held[page : page + fetch.count] = [fetch] * fetch.count
        self._wants.setdefault(fetch, []).append(Wanted(column, page))

    def take(self, column: Column, page: int) -> Fetch | None:
        """It does not serve the pages from this one on any more; ``None`` where nothing does."""
        held = self._held.get(column)
        fetch = held[page] if held is not None else None
        if held is None or fetch is None:
            return None
        held[page : page + fetch.count] = [None] * fetch.count
        wants = self._wants[fetch]
        wants.remove(Wanted(column, page))
        if not wants:
            del self._wants[fetch]
        return fetch

    def drop(self, column: Column) -> None:
        """Nothing serves any page of it, which need not be looked at again."""
        self._held.pop(column, None)

    def take_all(self, fetch: Fetch) -> list[Wanted]:
        """It serves nothing any more; where the pages that it served begin."""
        wants = self._wants.pop(fetch, [])
        for column, page in wants:
            self._held[column][page : page + fetch.count] = [None] * fetch.count
        return wants

    def serves_once(self, fetch: Fetch) -> bool:
        """Whether the unit wants it for one thing alone."""
        return len(self._wants[fetch]) == 1

    def split(self, old: Fetch, new: Sequence[Fetch]) -> None:
        """`new` serve what `old` did, one after another."""
        for column, page in self.take_all(old):
            at = page
            for fetch in new:
                self.put(column, at, fetch)
                at += fetch.count

    def first(self, column: Column, page: int, fetch: Fetch) -> int:
        """The first of the pages that a fetch serves in one go, this one among them."""
        return next(
            first for wanted, first in self._wants[fetch] if wanted is column and first <= page < first + fetch.count
        )
