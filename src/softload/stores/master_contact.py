"""Whether a master that was out of reach is back: asked of the kernel, which knows at once.

The native client tries for more than 4 s to reach a master that is gone, in every call, on a thread that nobody can
interrupt. A connection to a port on which nobody listens is refused in less than a millisecond.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from softload.stores.probe import accepts

__all__ = ["MasterContact"]

_TURN_SECONDS: Final = 0.05


class MasterContact:
    """What is known of the master at `address` (`host:port`). Nothing is asked while calls get through."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lost = False
        self._turn = threading.Lock()

    def may_ask(self) -> bool:
        """Whether a call has a chance: not where the last one failed and connections are still refused."""
        if self._lost:
            self._lost = not accepts(self._address)
        return not self._lost

    def failed(self) -> bool:
        """A call may not have reached the master: whether nobody is there."""
        self._lost = not accepts(self._address)
        return self._lost

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around a call that many threads make at a time: one after another, as long as that is quick.

        When a master dies, a call that is out then tries for 4 s, or the next one fails at once. Those behind it need
        not be made: they look whether anybody listens.
        """
        mine = self._turn.acquire(timeout=_TURN_SECONDS)
        if not mine:
            self.failed()
        try:
            yield
        finally:
            if mine:
                self._turn.release()
