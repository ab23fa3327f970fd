"""Places in the store for objects whose bytes are still to come.

A store puts what it is asked to place together side by side. What is saved at a time is a few pages, as much as there
is memory for; the places of many are asked for before, objects of one kind after another. So whoever copies them from
where they lie (see `lent_copies`) finds long runs. A place holds the store's memory and its key: what is not written to
is given back, whatever happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence, Set
from functools import partial
from typing import Any

from softload.health import Health
from softload.native_calls import CallGroup, NativeCall, RefusedError
from softload.outcomes import SaveStatus
from softload.puts import Starts, start_all
from softload.store_calls import StoreCalls

__all__ = ["Placement", "Places"]


class Places:
    """Where one loader's saves go.

    Args:
        calls: the guarded store.
        group: threads for writes.
        health: told how the master answers.
    """

    def __init__(self, calls: StoreCalls, group: CallGroup, health: Health) -> None:
        self._calls = calls
        self._group = group
        self._health = health
        self._left_over: list[str] = []
        """Could not be given back: every thread was stuck."""
        self._in_doubt: set[str] = set()
        self._cleared = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._under_way = 0

    def __repr__(self) -> str:
        return f"<Places: {self._under_way} calls under way, {len(self._in_doubt)} keys in doubt>"

    async def start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[SaveStatus]:
        """Take places: `SAVED` where there is one; `STORE_FULL` for all but what is decided where there are too few.

        Raises:
            RefusedError: closed, or saturated with stuck calls.
        """
        returned = asyncio.Event()

        def back(call: NativeCall[Starts]) -> None:
            self._ended()
            returned.set()
            if call.value is not None:
                self._health.record_master(call.value[1])
            if call.abandoned:
                self.clear(keys)
                self.give_back(_started(keys, call.value[0]) if call.value is not None else ())

        call: NativeCall[Starts] = NativeCall(partial(start_all, self._calls, keys, sizes), back)
        self._submit(call)
        try:
            await returned.wait()
        except BaseException:
            if call.finished:  # cancelled in the step in which it came back: nobody gets to know of its places
                self.give_back(_started(keys, call.value[0]) if call.value is not None else ())
            elif call.withdraw():
                self._ended()
            else:
                self.doubt(keys)
                call.abandon()
            raise
        if isinstance(call.error, RefusedError):
            raise call.error
        return [SaveStatus.FAILED] * len(keys) if call.value is None else call.value[0]

    def give_back(self, keys: Collection[str]) -> None:
        """Nothing will be written to these places. Waits neither for the store nor, where all are stuck, a thread."""
        keys = list(keys)
        if not keys:
            return

        def back(_: NativeCall[None]) -> None:
            self._ended()
            self.clear(keys)

        self.doubt(keys)
        try:
            self._submit(NativeCall(partial(self._calls.put_revoke, keys), back))
        except RefusedError:
            if not self._left_over:
                self._begun()
                self._group.when_free(self._give_back_left_over)
            self._left_over += keys

    async def wait_idle(self) -> None:
        """Until no call is out for a place, or has to be made yet."""
        while self._under_way:  # what comes back late is given back by a call of its own
            await self._idle.wait()

    @property
    def in_doubt(self) -> Set[str]:
        """Keys that the store may have a place for although nobody waits for its bytes: it takes them for objects."""
        return self._in_doubt

    def doubt(self, keys: Iterable[str]) -> None:
        """A call that nobody waits for may begin, end or give back these; `clear` follows when it is over."""
        self._in_doubt.update(keys)

    def clear(self, keys: Iterable[str]) -> None:
        """These are objects now, or nothing: it is for the store to say."""
        self._in_doubt.difference_update(keys)
        self._cleared.set()

    async def wait_clear(self, keys: Collection[str]) -> None:
        """Until none of these is in doubt."""
        while not self._in_doubt.isdisjoint(keys):
            self._cleared.clear()
            await self._cleared.wait()

    def _give_back_left_over(self) -> None:
        keys, self._left_over = self._left_over, []
        self.give_back(keys)
        self._ended()

    def _submit(self, call: NativeCall[Any]) -> None:
        self._group.submit(call)
        self._begun()

    def _begun(self) -> None:
        self._under_way += 1
        self._idle.clear()

    def _ended(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()


class Placement:
    """The places of one unit's objects that nothing was written to yet."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._keys: set[str] = set()
        self.is_refused = False
        """Whether the store was too full for so many places at once: then the unit goes without."""

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    async def start(self, keys: Sequence[str], sizes: Sequence[int]) -> list[SaveStatus]:
        """See `Places.start`; `end` must follow."""
        statuses = await self._places.start(keys, sizes)
        self.is_refused = SaveStatus.STORE_FULL in statuses
        self._keys.update(_started(keys, statuses))
        return statuses

    def take(self, keys: Sequence[str]) -> None:
        """A call is about to write these: it gives back what it does not get through."""
        self._keys.difference_update(keys)

    def end(self) -> None:
        """The unit's save is over: give back what is left."""
        self._places.give_back(self._keys)
        self._keys = set()


def _started(keys: Sequence[str], statuses: Sequence[SaveStatus]) -> list[str]:
    return [key for key, status in zip(keys, statuses, strict=True) if status is SaveStatus.SAVED]
