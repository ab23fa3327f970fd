"""Copies on their way: chunks on the lanes of a call group, to be waited for, or ended between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import anyio

from softload.lent_copies import DIRECT, Refuted
from softload.native_calls import CallGroup, NativeCall, RefusedError

__all__ = ["Chunk", "Copying"]

Chunk = Callable[[], list[Refuted] | None]
"""What is copied between two looks at the deadline; what of it was not proven."""


class Copying:
    """Chunks that run on as many lanes as there are, begun at once; they never touch the same bytes.

    `wait` or `end` must follow.

    Args:
        group: whose lanes.
        chunks: in their order.
        priority: their turn, lower ones first.
        direct: how many of the first ones copy from where the store has its bytes.
    """

    def __init__(self, group: CallGroup, chunks: Sequence[Chunk], priority: float, *, direct: int = 0) -> None:
        self.refuted: list[Refuted] = []
        self.error: Exception | None = None
        """Of one that has failed, or was refused: those after it are not begun."""
        self._running: set[NativeCall[list[Refuted] | None]] = set()
        self._returned = asyncio.Event()
        calls = [NativeCall(chunk, self._back, priority=priority) for chunk in chunks]
        for call in calls[:direct]:
            call.label = call.kind = DIRECT
            call.alone = True  # one of them has all of the memory's rate; two would wait for one another's interpreter
        for call in calls:
            try:
                group.submit(call)
            except RefusedError as error:
                self.error = error
                break
            self._running.add(call)

    async def wait(self, following: Copying | None = None) -> bool:
        """Until all have run. False once one has failed; then, and where this is cancelled, it ends as by `end`.

        Args:
            following: what is not to start any more where this is cancelled.
        """
        is_cancelled = True
        try:
            if self._running and self.error is None:
                await self._returned.wait()
            is_cancelled = False
        finally:
            if is_cancelled and following is not None:
                following._withdraw()
            await self.end()
        return self.error is None

    async def end(self) -> None:
        """What has not started never will, what has started ends before anybody goes on."""
        self._withdraw()
        if self._running:
            with anyio.CancelScope(shield=True):
                while self._running:
                    self._returned = asyncio.Event()
                    await self._returned.wait()

    def _withdraw(self) -> None:
        self._running.difference_update([call for call in list(self._running) if call.withdraw()])

    def _back(self, call: NativeCall[list[Refuted] | None]) -> None:
        self._running.discard(call)
        self.refuted += call.value or ()
        if call.error is not None:
            self.error = self.error or call.error
        if self.error is not None or not self._running:
            self._returned.set()
