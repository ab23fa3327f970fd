"""The objects of one unit that lie in memory of this process, and are copied from there instead of being read.

They are fetches that have landed where they are: held as others are, in no table that other units could find them in,
without landing memory, and good once their copies are proven. What is not proven is read like anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from softload.config import Layout
from softload.context import Context
from softload.fetches import Fetch, FetchListener, Part, PartState, Turn
from softload.landing import Segment, Share
from softload.lent_copies import LentCopy, Refuted
from softload.outcomes import PageStatus
from softload.planning import Column
from softload.protocols import Descriptor
from softload.unit_holdings import UnitHoldings
from softload.unit_pages import UnitPages

__all__ = ["UnitLoans"]

_WORTH_ASKING = 256 << 10
"""Bytes of an object without a digest, on average: the store is asked for each with every group of layers. Measured: 43
x 512 x 4,096 bytes (176 KB each) come later than by landing memory, dsv4-flash's 384 objects of 341 KB do not."""

_HIDES_ASKING = 80e-6
"""Seconds of the whole forward for each object: smaller ones come later than by landing memory, but their first layers
earlier, and a forward that takes so long does not wait for the last ones. Measured: 65 us for 43 x 512 and 43 x 1,024.
"""


class UnitLoans:
    """The objects of one unit that are copied from where they lie.

    Args:
        context: the loader's parts.
        pages: what the unit wants.
        held: what serves its pages; added to.
        listener: told when a fetch is split.
        layer_seconds: what the forward takes for a layer, as far as the engine says.
    """

    def __init__(
        self,
        context: Context,
        pages: UnitPages,
        held: UnitHoldings,
        listener: FetchListener,
        layer_seconds: float = 0.0,
    ) -> None:
        self._context = context
        self._pages = pages
        self._held = held
        self._listener = listener
        self._forward_seconds = layer_seconds * context.pools.num_layers
        self._answers: Mapping[str, Descriptor | PageStatus | None] = {}
        self.until = -math.inf
        """When the leases that came with the answers have run out."""
        self.nbytes = 0
        """Bytes of its objects that were lent, or read because they were not proven."""

    def begin(self) -> None:
        """The unit is about to be asked for: leases begin no earlier than now."""
        lender = self._context.lender
        self.until = lender.clock() + lender.lease_ttl

    def admit(self, answers: Mapping[str, Descriptor | PageStatus | None]) -> None:
        """What the store has said of its objects: only that leases them."""
        self._answers = answers

    def take(
        self, columns: Iterable[Column], answers: Mapping[str, Descriptor | PageStatus | None] | None = None
    ) -> None:
        """Hold what of these columns can be copied from where it lies, and is not here or on its way already.

        Args:
            columns: of the unit.
            answers: of these alone, where it is not admitted yet.
        """
        lender, reader = self._context.lender, self._context.reader
        known = self._answers if answers is None else answers
        if not known or not lender.lends_any:
            return
        columns, has_digests = list(columns), self._context.config.layout is Layout.GROUPED
        if not has_digests and not (self._is_worth_asking(columns) and self._is_all_lent(columns, known)):
            return
        for column in columns:
            pages = self._pages.pages_of(column)
            keys = column.keys[pages.start : pages.stop]
            if self._held.has_any(column, pages) or reader.knows_any(keys):
                places: list[object] = [
                    known.get(key) if self._held.at(column, page) is None and reader.find(key) is None else None
                    for page, key in zip(pages, keys, strict=True)
                ]
            else:
                places = list(map(known.get, keys))
            for first, segment in self._runs(column, places):
                end = first + segment.count
                fetch = Fetch(keys[first:end], segment, places[first:end], size=segment.nbytes, tailed=has_digests)  # type: ignore[arg-type]  # descriptors, all
                fetch.parts[0].state = PartState.LANDED
                fetch.listeners.append(self._listener)
                self._held.put(column, pages.start + first, fetch)
                self.nbytes += segment.nbytes * segment.count

    def _runs(self, column: Column, places: Sequence[object]) -> Iterator[tuple[int, Segment]]:
        """See `Lender.runs`; objects with and without a packed draft are of different sizes."""
        spec = column.spec
        for size in dict.fromkeys((spec.size, spec.target_size)):
            yield from self._context.lender.runs(places, size, len(spec.fragments))

    def _is_worth_asking(self, columns: Iterable[Column]) -> bool:
        """Of objects without digests: if they are large enough for so many questions, or the forward is slow enough."""
        counts = [(len(self._pages.pages_of(column)), column.spec.size) for column in columns]
        objects, nbytes = sum(count for count, _ in counts), sum(count * size for count, size in counts)
        return nbytes >= objects * _WORTH_ASKING or self._forward_seconds >= objects * _HIDES_ASKING

    def _is_all_lent(self, columns: Iterable[Column], known: Mapping[str, Descriptor | PageStatus | None]) -> bool:
        """Of objects without digests: whether none of what is wanted has to be read."""
        for column in columns:
            pages = self._pages.pages_of(column)
            places = list(map(known.get, column.keys[pages.start : pages.stop]))
            if sum(segment.count for _, segment in self._runs(column, places)) < len(pages):
                return False
        return True

    def give_up_unprovable(self, columns: Iterable[Column]) -> bool:
        """There is no time to ask the store any more: what it alone can prove is a miss. Whether there is any."""
        is_marked = False
        for column in columns:
            pages = self._pages.pages_of(column)
            for first, end, fetch in self._held.spans(column, pages):
                if fetch is not None and fetch.is_lent and not fetch.tailed:
                    for page in range(max(first, pages.start), min(end, pages.stop)):
                        self._pages.mark_bad(column, page, PageStatus.TIMED_OUT)
                        is_marked = True
        return is_marked

    def proven(self, copies: Sequence[LentCopy], refuted: Sequence[Refuted]) -> None:
        """These were copied, all but the refuted ones of them: their endpoint is well, if that was in doubt.

        No read would find that out where all of an endpoint's objects are lent.
        """
        if len(refuted) < sum(copy.segment.count for copy in copies):
            for endpoint in {copy.segment.endpoint for copy in copies}:
                breaker = self._context.health.endpoint(endpoint)
                if breaker.is_open:
                    breaker.record(True)

    def read(self, refuted: Iterable[Refuted], turn: Turn, share: Share, join: Callable[[Column, int], bool]) -> bool:
        """Have read what was not proven, as far as there is memory now.

        Args:
            refuted: what it is.
            turn: the unit's place among others.
            share: whose landing memory is used.
            join: hold an object that another unit has, or has had read; False where none has.

        Returns:
            whether a page was marked for lack of memory.
        """
        landing, reader = self._context.landing, self._context.reader
        parts: list[Part] = []
        is_marked = False
        for column, page in ((each.column, each.page) for each in refuted):
            fetch = self._give_up(column, page)
            if fetch is None:  # no longer wanted
                continue
            if join(column, page):
                continue
            segments = landing.try_grant([(fetch.size, 1)], share)  # now or never: others may wait for what it holds
            if segments is None:
                self._pages.mark_bad(column, page, PageStatus.SHED)
                is_marked = True
                continue
            anew = reader.add(
                fetch.keys, segments[0], fetch.descriptors, self._listener, size=fetch.size, tailed=fetch.tailed
            )
            self._held.put(column, page, anew)
            self.nbytes += anew.size
            parts += anew.parts
        reader.read(parts, turn)
        return is_marked

    def _give_up(self, column: Column, page: int) -> Fetch | None:
        fetch = self._held.at(column, page)
        if fetch is None or not fetch.is_lent:
            return None
        first = self._held.first(column, page, fetch)
        alone = self._context.reader.piece(fetch, page - first, page - first + 1)
        self._held.take(column, page)
        self.nbytes -= alone.size
        return alone
