"""The fetches that one unit holds: what it joins, what has landed, and what it lets go of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

from softload.context import Context
from softload.fetches import Fetch, FetchListener, Turn
from softload.landing import Segment, Share
from softload.lent_copies import Refuted
from softload.outcomes import PageStatus
from softload.planning import Column
from softload.protocols import Descriptor
from softload.unit_holdings import UnitHoldings
from softload.unit_loans import UnitLoans
from softload.unit_pages import UnitPages, Wanted

__all__ = ["UnitFetches"]


class UnitListener(FetchListener, Protocol):
    """The unit."""

    def cut(self) -> None:
        """Some of what it wants cannot be had, and was marked: draw the conclusion. Called on the loop."""


class UnitFetches:
    """The fetches that one unit holds.

    Args:
        context: the loader's parts.
        pages: what the unit wants; told what cannot be had.
        listener: told when a fetch changes.
        share: whose landing memory it uses.
        layer_seconds: what the forward takes for a layer, as far as the engine says.
    """

    def __init__(
        self, context: Context, pages: UnitPages, listener: UnitListener, share: Share, layer_seconds: float = 0.0
    ) -> None:
        self._context = context
        self._pages = pages
        self._listener = listener
        self._share = share
        self.held = UnitHoldings()
        """Which of them serves which page."""
        self.loans = UnitLoans(context, pages, self.held, listener, layer_seconds)
        self._replaced: list[Fetch] = []
        self._is_marked = False
        """Whether what was found while joining costs pages, or their draft."""
        self.descriptors: dict[str, Descriptor | None] = {}
        """Where its objects are, and their sizes, as far as that is known."""

    def __iter__(self) -> Iterator[Fetch]:
        return iter(self.held)

    def of(self, fetch: Fetch) -> tuple[Wanted, ...]:
        """What the unit wants a fetch for."""
        return self.held.of(fetch)

    def segments(self, column: Column, pages: range) -> list[Segment]:
        """Where the objects' bytes are, page after page."""
        return self.held.segments(column, pages)

    def is_lent(self, column: Column, page: int) -> bool:
        """Whether an object is copied from where the store has it."""
        fetch = self.held.at(column, page)
        return fetch is not None and fetch.is_lent

    def landed(self, columns: Iterable[Column], layers: range | None = None, *, is_copying: bool = False) -> bool:
        """Whether the bytes that the unit's good pages need, for `layers` or for all, are here and checked.

        Args:
            columns: those that hold them.
            layers: all by default.
            is_copying: whether the unit, which asks, copies meanwhile. Else it copies no more from what was replaced.
        """
        if not is_copying:
            self.leave_replaced()
        for column in columns:
            for _, _, fetch in self.held.spans(column, self._pages.pages_of(column)):
                if fetch is None or not (fetch.landed if layers is None else fetch.landed_for(layers)):
                    return False
        return True

    def join(self, keys: Collection[str]) -> set[str]:
        """Hold what is here or on its way, all at once: it may be gone after the next await. Which these are."""
        joined: set[str] = set()
        if not self._context.reader.knows_any(keys):
            return joined
        for column in self._pages.all_columns():
            pages = self._pages.pages_of(column)
            page = pages.start
            while page < pages.stop:
                count = 0 if self.held.at(column, page) is not None else self.join_some(column, page, pages.stop)
                joined.update(column.keys[page : page + count])
                page += count or 1
        return joined

    def join_some(self, column: Column, page: int, stop: int) -> int:
        """Hold what is here or on its way of the pages from this one on, as far as one fetch brings it; how many."""
        reader = self._context.reader
        fetch = reader.find(column.keys[page])
        if fetch is None:
            return 0
        first = fetch.keys.index(column.keys[page]) if fetch.count > 1 else 0
        end = first + 1
        while end < fetch.count and page + end - first < stop:
            at = page + end - first
            if column.keys[at] != fetch.keys[end] or self.held.at(column, at) is not None:
                break
            end += 1
        self._context.counters.shared_objects += end - first
        self._hold(Wanted(column, page), reader.piece(fetch, first, end))
        return end - first

    def take_over(self, source: UnitFetches) -> None:
        """Hold what another unit's run landed, for this one's own columns.

        Raises:
            ValueError: other page keys than the source's.
        """
        theirs = {(c.spec, c.component): c for c in source._pages.all_columns()}
        for column in self._pages.all_columns():
            match = theirs.get((column.spec, column.component))
            if match is None or match.keys[: len(column.keys)] != column.keys:
                raise ValueError(
                    f"request {self._pages.request_id!r}, pool {column.pool.name}: expected the prefetched page keys "
                    f"or the first of them, got others"
                )
            for first, end, fetch in source.held.spans(match, range(len(column.keys))):
                if fetch is not None:
                    wanted = self._context.reader.piece(fetch, 0, min(end, len(column.keys)) - first)
                    self._hold(Wanted(column, first), wanted)

    def read_refuted(self, refuted: Sequence[Refuted], turn: Turn) -> None:
        """What was copied from where it lay was not proven: read it, unless that is done, or under way, already."""

        def join(column: Column, page: int) -> bool:
            return self.join_some(column, page, page + 1) > 0

        if self.loans.read(refuted, turn, self._share, join):  # joining marks by itself: no `|=`, which looks before
            self._is_marked = True
        self.conclude()

    def split(self, old: Fetch, new: Sequence[Fetch]) -> None:
        """`old` goes on in pieces."""
        self.held.split(old, new)

    def replace(self, old: Fetch, new: Fetch) -> None:
        """Hold `new`, which has landed, for all that `old` was held for. `old` is held until the running copy ends."""
        for wanted in self.held.take_all(old):
            self._hold(wanted, new)
            self._replaced.append(old)

    def leave_replaced(self) -> None:
        """Nothing is copied from what was replaced any more."""
        while self._replaced:
            self._context.reader.leave(self._replaced.pop(), self._listener)

    def prune(self, *, timed_out: bool = False) -> None:
        """Let go of what the unit's good pages do not need any more."""
        for column in self.held.columns():
            needed, count = self._pages.pages_of(column), len(column.keys)
            for pages in (range(min(needed.start, count)), range(needed.stop, count)):
                for first, end, fetch in self.held.spans(column, pages):
                    if fetch is not None:
                        start, stop = max(first, pages.start), min(end, pages.stop)
                        self._context.reader.piece(fetch, start - first, stop - first)
                        self._let_go(Wanted(column, start), timed_out=timed_out)

    def let_go_column(self, column: Column, *, keep: bool) -> None:
        """Let go of a whole column; landed bytes may serve later units with `keep`."""
        alone: list[Fetch] = []
        for first, _, fetch in self.held.spans(column, range(len(column.keys))):
            if fetch is not None and self.held.serves_once(fetch):
                self.held.take(column, first)
                if not fetch.is_lent:
                    alone.append(fetch)
            elif fetch is not None:
                self._let_go(Wanted(column, first), keep=keep)
        self.held.drop(column)
        self._context.reader.leave_all(alone, self._listener, keep=keep)

    def let_go_all(self, *, keep: bool) -> None:
        """Let go of everything; landed bytes may serve later units with `keep`."""
        for column in self.held.columns():
            self.let_go_column(column, keep=keep)
        self.leave_replaced()

    def let_go_landing(self) -> None:
        """Let go of all that holds landing memory."""
        for column in self.held.columns():
            for first, _, fetch in self.held.spans(column, range(len(column.keys))):
                if fetch is not None and not fetch.is_lent:
                    self._let_go(Wanted(column, first), keep=True)

    def mark_bad(self, wanted: Wanted, status: PageStatus) -> None:
        """A page cannot be had; `conclude` must follow."""
        self._pages.mark_bad(wanted.column, wanted.page, status)
        self._is_marked = True

    def conclude(self) -> None:
        """Tell the unit if pages, or their draft, were marked meanwhile."""
        if self._is_marked:
            self._is_marked = False
            self._listener.cut()

    def _hold(self, wanted: Wanted, fetch: Fetch) -> None:
        column, first = wanted
        for page in range(first, first + fetch.count):
            descriptor = self.descriptors.get(column.keys[page])
            if fetch.size != (column.spec.size if descriptor is None else descriptor.size):
                self._adopt_size(Wanted(column, page), fetch.size)  # another object under the key than was admitted
        self._context.reader.join(fetch, self._listener)
        self.held.put(column, first, fetch)

    def _let_go(self, wanted: Wanted, *, timed_out: bool = False, keep: bool = False) -> None:
        fetch = self.held.take(*wanted)
        # None where leaving another made room for a queued read that was shed, and that pruned this one.
        if fetch is not None and not fetch.is_lent:
            self._context.reader.leave(fetch, self._listener, timed_out=timed_out, keep=keep)

    def _adopt_size(self, wanted: Wanted, size: int) -> None:
        spec = wanted.column.spec
        self._is_marked = True
        if size not in (spec.size, spec.target_size):
            self._pages.mark_bad(wanted.column, wanted.page, PageStatus.WRONG_SIZE)
        elif self._pages.draft_rides and size < spec.size:
            self._pages.mark_without_draft(wanted.column, wanted.page)
