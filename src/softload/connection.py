"""One loader's connection to its store: opened, given memory, closed, all off the event loop.

A store belongs to the loader that opened it, for that loader closes it too. Every call here may hang; what waits for
one can be cancelled, and whoever of the hung call and the loader is second tidies up.
"""

from __future__ import annotations

import math
from contextlib import suppress

import anyio

from softload.arena import Arena
from softload.errors import StoreSetupError
from softload.native_calls import CallGroup, RefusedError
from softload.protocols import PageStore
from softload.store_calls import StoreCalls

__all__ = ["Connection"]

_in_use: dict[int, Connection] = {}
"""Stores that a loader has open, by identity. Written in single operations of the dictionary: loops may be many."""


class Connection:
    """A store in the hands of one loader.

    Args:
        store: opened by `open`, closed by `close`.
    """

    def __init__(self, store: PageStore) -> None:
        self.calls = StoreCalls(store)
        self._store = store
        self._lifecycle = CallGroup("lifecycle", width=1, max_stuck=2)
        # Apart, so that closing never waits behind memory whose registration hangs.
        self._memory = CallGroup("memory", width=2, max_stuck=2)
        self._ends: list[str] = []
        self.lease_ttl = 0.0

    def __repr__(self) -> str:
        return f"<Connection to {self._store!r}>"

    async def open(self) -> None:
        """Open the store. If the wait is cancelled, the store is closed when the call returns.

        Raises:
            RuntimeError: another loader has it open.
            StoreSetupError: it cannot be set up, or says no usable lease.
        """
        if _in_use.setdefault(id(self._store), self) is not self:
            raise RuntimeError(
                f"expected a store that no other PageLoader has open, got {self._store!r}: a loader opens and closes "
                f"its store, so give each one of its own"
            )
        await self._lifecycle.run(self._open)

    def _open(self) -> None:
        """On a thread. Whoever of this thread and the loop is second sees the other's mark, and tidies up."""
        try:
            self._store.open()
        except BaseException:
            self._ends.append("failed")
            if self._ends[0] != "failed":
                self._release()
            raise
        self._ends.append("opened")
        if self._ends[0] != "opened":
            self.calls.close()
            self._release()
            return
        ttl: object = self._store.lease_ttl
        if not (isinstance(ttl, (int, float)) and math.isfinite(ttl) and ttl > 0):
            raise StoreSetupError(f"expected a store with a lease of more than 0 seconds, got {ttl!r}")
        self.lease_ttl = float(ttl)

    async def allocate(self, nbytes: int, *, pinned: bool) -> Arena:
        """Take memory from the machine.

        Raises:
            LandingMemoryError: it has not that much.
        """
        return await self._memory.run(lambda: Arena(nbytes, pinned=pinned))

    async def register(self, arena: Arena) -> bool:
        """Make memory known to the store; False where it refused.

        The call holds the arena, not its address: a wait that is cancelled must not free what it works on.
        """
        return await self._memory.run(lambda: self.calls.register(arena.pointer, arena.nbytes))

    async def unregister(self, arena: Arena) -> None:
        """Take back `register`."""
        with suppress(RefusedError):
            await self._memory.run(lambda: self.calls.unregister(arena.pointer))

    async def close(self, seconds: float) -> None:
        """Close the store if it was opened, waiting no longer than that, and let go of it."""
        self._ends.append("given up")
        self._memory.close()
        try:
            if self._ends[0] == "opened":
                with anyio.move_on_after(seconds, shield=True), suppress(RefusedError):
                    await self._lifecycle.run(self.calls.close)
        finally:  # also where a task is cancelled in spite of the shield
            if self._ends[0] != "given up":
                self._release()
            self._lifecycle.close()

    def groups(self) -> tuple[CallGroup, CallGroup]:
        """The threads that these calls run on."""
        return self._lifecycle, self._memory

    def _release(self) -> None:
        if _in_use.get(id(self._store)) is self:
            del _in_use[id(self._store)]
