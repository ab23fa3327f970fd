"""What is here or on its way, by key; and what is here although nobody wants it any more."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import repeat

from softload.fetches import Fetch, PartState
from softload.outcomes import PageStatus
from softload.protocols import Clock

__all__ = ["FetchTable"]


class FetchTable:
    """The fetches of one loader that may be found by their objects' keys."""

    def __init__(self) -> None:
        self._fetches: dict[str, Fetch] = {}
        self._kept: OrderedDict[float, dict[str, Fetch]] = OrderedDict()
        """By when their time is over, the oldest first: pieces of one are as old as it was."""

    def __repr__(self) -> str:
        return f"{len(self._fetches)} objects, {sum(map(len, self._kept.values()))} fetches kept"

    def find(self, key: str) -> Fetch | None:
        """The fetch of a key that may be joined: its bytes are here, or on their way and not late.

        It may bring other objects too.
        """
        fetch = self._fetches.get(key)
        if fetch is None or fetch.landed:  # what somebody gave up on may be here by now: then it is as good as any
            return fetch
        if fetch.failed or fetch.timed_out:
            return None
        late = any(part.state is PartState.IN_FLIGHT and part.call and part.call.overdue for part in fetch.parts)
        return None if late else fetch

    def knows_any(self, keys: Collection[str]) -> bool:
        """Whether any of these is here or on its way, late ones included."""
        return bool(self._fetches) and not self._fetches.keys().isdisjoint(keys)

    def knows(self, fetch: Fetch) -> bool:
        """Whether it is the one that its keys lead to."""
        return list(map(self._fetches.get, fetch.keys)).count(fetch) == fetch.count

    def add(self, fetch: Fetch) -> None:
        """Its keys lead to it from now on."""
        self._fetches.update(dict.fromkeys(fetch.keys, fetch))

    def add_back(self, fetch: Fetch) -> None:
        """Those of its keys that lead nowhere lead to it again."""
        deque(map(self._fetches.setdefault, fetch.keys, repeat(fetch)), maxlen=0)

    def forget(self, fetch: Fetch) -> None:
        """No key leads to it any more."""
        found = list(map(self._fetches.pop, fetch.keys, repeat(None)))
        if found.count(fetch) < fetch.count:  # some lead to a later read
            for key, other in zip(fetch.keys, found, strict=True):
                if other is not None and other is not fetch:
                    self._fetches[key] = other

    def piece(self, fetch: Fetch, first: int, end: int) -> Fetch:
        """A fetch of some of the objects of a fetch, by their places in it; it is split for that where need be."""
        if (first, end) == (0, fetch.count):
            return fetch
        return self.split(fetch, sorted({0, first, end, fetch.count}))[1 if first else 0]

    def split(self, fetch: Fetch, bounds: Sequence[int]) -> list[Fetch]:
        """Put pieces in the stead of a fetch, and tell all who want it; see `Fetch.split`."""
        listeners = list(dict.fromkeys(fetch.listeners))
        pieces = fetch.split(bounds)
        for piece in pieces:
            self._fetches.update((key, piece) for key in piece.keys if self._fetches.get(key) is fetch)
        kept = self._kept.get(fetch.keep_until, {})
        if kept.get(fetch.key) is fetch:
            del kept[fetch.key]
            kept.update((piece.key, piece) for piece in pieces)
        for listener in listeners:
            listener.fetch_split(fetch, pieces)
        return pieces

    def split_by_status(self, fetch: Fetch, statuses: Sequence[PageStatus]) -> None:
        """What comes back as one goes on as one if all of it has landed; else each failure goes its own way."""
        good = PageStatus.LOADED
        if fetch.count == 1 or not fetch.listeners or statuses.count(good) == fetch.count:
            return
        lasts = (None, *statuses)
        bounds = [at for at, status in enumerate(statuses) if status is not good or lasts[at] is not good]
        self.split(fetch, [*bounds, fetch.count])

    # -- what nobody wants

    def keep(self, fetch: Fetch, until: float) -> None:
        """Its bytes may serve others until then; that is no earlier than for those that are kept already."""
        fetch.keep_until = until
        self._kept.setdefault(until, {})[fetch.key] = fetch

    def join_kept(self, fetch: Fetch) -> None:
        """Somebody wants it."""
        kept = self._kept.get(fetch.keep_until, {})
        if kept.get(fetch.key) is fetch:
            self._drop(fetch)

    def take_oldest(self, nbytes: int) -> Iterator[Fetch]:
        """Kept fetches of at least so many bytes, that are not kept any more; fewer where there are no more."""
        while self._kept and nbytes > 0:
            fetch = self._oldest()
            wanted = -(-nbytes // fetch.segment.stride)
            if wanted < fetch.count:
                fetch, _ = self.split(fetch, [0, wanted, fetch.count])
            self._drop(fetch)
            nbytes -= fetch.segment.reserved
            yield fetch

    def take_expired(self, clock: Clock) -> Iterator[Fetch]:
        """Kept fetches whose time is over, that are not kept any more."""
        while self._kept:
            fetch = self._oldest()
            if fetch.keep_until > clock():
                return
            self._drop(fetch)
            yield fetch

    @property
    def kept_bytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(fetch.segment.reserved for kept in self._kept.values() for fetch in kept.values())

    def _oldest(self) -> Fetch:
        return next(iter(next(iter(self._kept.values())).values()))

    def _drop(self, fetch: Fetch) -> None:
        kept = self._kept[fetch.keep_until]
        del kept[fetch.key]
        if not kept:
            del self._kept[fetch.keep_until]
