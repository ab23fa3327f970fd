"""What a worker has to tell with its next step's output. Written on the loop, emptied on the engine's thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from softload.adapters.vllm.messages import Reports, Ticket

__all__ = ["Outbox"]


class Outbox:
    """Thread-safe; every load that was expected is told as received exactly once.

    Args:
        by_block: whether failures are told by block id, as vLLM wants them with one KV cache group; otherwise by
            request.
    """

    def __init__(self, *, by_block: bool) -> None:
        self._by_block = by_block
        self._lock = threading.Lock()
        self._expected: set[Ticket] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._reports = Reports()
        self._news = threading.Event()

    def landed(self, ticket: Ticket, pages: int) -> None:
        """A prefetch has landed `pages` pages, or a lookup has found them."""
        with self._lock:
            self._reports.landed.setdefault(ticket, []).append(pages)
            self._news.set()

    def staged(self, number: int) -> None:
        """A save order's blocks are not read any more."""
        with self._lock:
            self._reports.staged[number] += 1
            self._news.set()

    def expect(self, ticket: Ticket) -> None:
        """A load into a request's blocks has been ordered."""
        with self._lock:
            self._expected.add(ticket)

    def received(self, ticket: Ticket, bad_blocks: Iterable[int] = (), *, failed: bool = False) -> None:
        """The load has ended: nothing of ours will write its blocks. What did not come is in `bad_blocks`."""
        bad = set(bad_blocks)
        with self._lock:
            if ticket not in self._expected:
                return
            self._expected.remove(ticket)
            self._received.add(ticket[0])
            self._news.set()
            if self._by_block:
                self._bad_blocks |= bad
            elif bad or failed:
                self._failed.add(ticket[0])

    def bad_blocks(self, block_ids: Iterable[int]) -> None:
        """Blocks that a load of the running step did not fill."""
        with self._lock:
            self._bad_blocks.update(block_ids)

    def wait(self, timeout: float) -> None:
        """Until there is something to tell, `timeout` seconds at most."""
        self._news.wait(timeout)

    def take_received(self) -> tuple[set[str], set[str], set[int]]:
        """Requests received, those of them that failed, and the blocks that failed."""
        with self._lock:
            taken = self._received, self._failed, self._bad_blocks
            self._received, self._failed, self._bad_blocks = set(), set(), set()
            return taken

    def take_reports(self) -> Reports | None:
        """What else there is to tell; ``None`` for nothing."""
        with self._lock:
            if not self._received:  # since they were taken
                self._news.clear()
            if not self._reports.landed and not self._reports.staged:
                return None
            reports, self._reports = self._reports, Reports({}, Counter())
            return reports
