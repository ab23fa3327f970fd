"""Which objects lie in memory of this process that the store lends: they can be copied from there, without a read."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from softload.arena import Arena
from softload.outcomes import PageStatus
from softload.protocols import Clock, Descriptor
from softload.segments import Segment, SegmentState, Share
from softload.store_calls import StoreCalls

__all__ = ["Lender"]

_AGAIN_SECONDS: Final = 30.0
"""Until the store is asked once more about an endpoint whose memory it did not lend."""

_MOST_ENDPOINTS: Final = 4096

_MOST_LENT: Final = 64
"""Endpoints in memory of this process: one as a rule, and another one whenever that starts again."""

_END: Final = 1 << 62
"""No process has so many addresses, but a store may say anything."""

_WORTH_BYTES: Final = 64 << 10
"""Of each of the parts in which objects are copied: less of them side by side comes by landing memory, which lets many
runs be copied as one. A quarter of it, where there are as many objects as parts, is neither faster nor slower.
"""


class Lender:
    """What one loader's store lends.

    Args:
        calls: the guarded store.
        lease_ttl: seconds for which an object stays where it is after it was asked for.
        is_wanted: whether anything is to be copied from the store's memory at all.
        clock: what leases are measured with.
        apart: on a thread, runs what the store may be stuck in on another one, and waits a moment for it.
    """

    def __init__(
        self,
        calls: StoreCalls,
        *,
        lease_ttl: float,
        is_wanted: bool,
        clock: Clock = time.monotonic,
        apart: Callable[[Callable[[], None]], object] = lambda ask: ask(),
    ) -> None:
        self._calls = calls
        self._apart = apart
        self.clock = clock
        self.lease_ttl = lease_ttl
        self.is_wanted = is_wanted and calls.may_lend
        """Not any more once the loader closes: then its store must not be asked."""
        self.lent_all = False
        """Whether all that the last streaming unit wanted was lent: then as a rule so is all of the next one."""
        self._lent: dict[str, Arena] = {}
        self._ask_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Lender of {', '.join(self._lent) or 'nothing'}>"

    @property
    def lends_any(self) -> bool:
        """Whether there is any such memory, as far as that is known."""
        return bool(self._lent)

    def learn(self, keys: Sequence[str], answers: Sequence[Descriptor | PageStatus]) -> None:
        """On the thread that has just asked for these descriptors: whether the store lends what is at new endpoints.

        That takes a read of one object, once in a while for each endpoint; apart, for it may be read from another one,
        and the answers are here.
        """
        if not self.is_wanted:
            return
        unknown: list[tuple[str, Descriptor]] = []
        for endpoint in {answer.endpoint for answer in answers if isinstance(answer, Descriptor)}:
            now = self.clock()
            if endpoint in self._lent or self._ask_at.get(endpoint, now) > now:
                continue
            if len(self._ask_at) >= _MOST_ENDPOINTS:
                self._ask_at.clear()
            self._ask_at[endpoint] = now + _AGAIN_SECONDS
            for key, answer in zip(keys, answers, strict=True):
                if isinstance(answer, Descriptor) and answer.endpoint == endpoint:
                    unknown.append((key, answer))
                    break
        if unknown:
            self._apart(partial(self._ask, unknown))

    def _ask(self, objects: Sequence[tuple[str, Descriptor]]) -> None:
        for key, descriptor in objects:
            if not self.is_wanted:  # the loader was closed while the store was stuck in the one before
                return
            lent = self._calls.lend(key, descriptor)
            if lent is not None:
                self._lent[descriptor.endpoint] = Arena.of_others(lent)
                for oldest in list(self._lent)[:-_MOST_LENT]:
                    self._lent.pop(oldest, None)

    def runs(self, places: Sequence[object], size: int, parts: int) -> Iterator[tuple[int, Segment]]:
        """Those of these objects that can be copied from where they lie, as `(index of the first, segment)`.

        Neighbours at a constant distance are one segment.

        Args:
            places: their descriptors, of this admission; anything else for those that have none.
            size: bytes of each object.
            parts: in which each is copied.
        """
        for endpoint, arena in list(self._lent.items()):
            addresses = _addresses(places, size, endpoint)
            inside = (addresses >= arena.pointer) & (addresses <= arena.pointer + arena.nbytes - size)
            bounds = [0, len(places)]
            if not inside.all():
                bounds = np.flatnonzero(np.diff(inside, prepend=False, append=False)).tolist()
            for first, end in zip(bounds[::2], bounds[1::2], strict=True):
                for start, count, stride in _strided(addresses[first:end], size):
                    if count * size >= parts * _WORTH_BYTES:
                        at = int(addresses[first + start]) - arena.pointer
                        yield (
                            first + start,
                            Segment(
                                arena, at, size, stride * count, Share.STREAMING, SegmentState.LENT, endpoint, count
                            ),
                        )


def _addresses(places: Sequence[object], size: int, endpoint: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Of the objects of this size that are at this endpoint; 0 for all others."""
    found = [place for place in places if type(place) is Descriptor]
    if found and len(found) == len(places):  # the common case, without a look at each
        sizes, endpoints, addresses = zip(*found, strict=True)
        alike = sizes.count(size) == len(sizes) and endpoints.count(endpoint) == len(endpoints)
        if alike and max(addresses) < _END:
            return np.array(addresses, np.int64)
    wanted = (size, endpoint)
    known = [type(place) is Descriptor and place[:2] == wanted and place.address < _END for place in places]
    return np.array([place.address if is_it else 0 for place, is_it in zip(places, known, strict=True)], np.int64)  # type: ignore[attr-defined]


def _strided(addresses: np.ndarray[tuple[int], np.dtype[np.int64]], size: int) -> Iterator[tuple[int, int, int]]:
    """Runs at a constant distance, `(first, count, distance)`; objects that do not follow the last one are alone."""
    steps = addresses[1:] - addresses[:-1]
    if len(steps) and steps[0] >= size and (steps == steps[0]).all():  # as a rule
        yield 0, len(addresses), int(steps[0])
        return
    changes = (np.flatnonzero(np.diff(steps)) + 1).tolist()
    distances = steps.tolist()
    first = 0
    while first < len(addresses):
        count = 1
        if first < len(distances) and distances[first] >= size:
            after = bisect_right(changes, first)
            last = changes[after] if after < len(changes) else len(distances)
            count = last - first + 1
        yield first, count, distances[first] if count > 1 else size
        first += count
