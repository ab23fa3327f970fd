"""Pages on their way from the device to the store. Their nodes of the tree are locked meanwhile, for a bounded time."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog

from softload.adapters._bridge import LoaderBridge
from softload.errors import LoaderClosedError
from softload.outcomes import SaveStatus
from softload.transfer import TransferUnit

__all__ = ["Offloads"]

_log = structlog.get_logger(__name__)

_GIVE_UP_SECONDS = 5.0
"""A save that was given up ends after at most one chunk of copies; longer than this only if the device hangs."""

_KEPT = (SaveStatus.SAVED, SaveStatus.PRESENT)


@dataclass(slots=True, eq=False)
class _Offload:
    """One offload. `done` once its node may be unlocked."""

    until: float
    staged: threading.Event = field(default_factory=threading.Event)
    result: bool | None = None
    future: Future[None] | None = None


class Offloads:
    """Results come in the order of the offloads, since SGLang takes them for the oldest ones.

    Args:
        bridge: the loader, on its loop.
        limit: seconds after which an offload counts as failed although its bytes may still be on their way.
    """

    def __init__(self, bridge: LoaderBridge, limit: float) -> None:
        self._bridge = bridge
        self._limit = limit
        self._offloads: deque[_Offload] = deque()
        self._saving: set[Future[None]] = set()

    def start(self, unit: TransferUnit, *, computed: bool) -> None:
        """Save what a unit names. Where that cannot be, its result says so: all ranks have as many of them.

        Args:
            unit: with slots.
            computed: whether all of its pages are known to be computed; otherwise those are refused that a load has
                left unfilled.
        """
        offload = _Offload(time.monotonic() + self._limit)

        async def save() -> None:
            good = False
            try:
                loader = self._bridge.loader
                if loader is not None:
                    if computed:
                        loader.computed(unit)
                    report = await loader.save([unit], staged=lambda _: offload.staged.set())
                    pages = report.outcomes[unit.request_id].pages
                    good = all(page.status in _KEPT for page in pages if not page.component.is_draft)
            except LoaderClosedError:
                pass
            except Exception:
                _log.exception("save.raised", request_id=unit.request_id)
            finally:
                offload.staged.set()
                offload.result = good

        self._offloads.append(offload)
        try:
            future = self._bridge.spawn(save)
        except LoaderClosedError:
            offload.staged.set()
            offload.result = False
            return
        offload.future = future
        self._saving.add(future)
        future.add_done_callback(self._saving.discard)

    def skip(self) -> None:
        """There is nothing to save: all of it is in the store. It has its result in turn, as all ranks have one."""
        offload = _Offload(math.inf, result=True)
        offload.staged.set()
        self._offloads.append(offload)

    def completed(self) -> int:
        """How many of the oldest offloads have a result."""
        now = time.monotonic()
        count = 0
        for offload in self._offloads:
            if offload.result is None and now > offload.until:
                self._overdue(offload, now)
            if offload.result is None:
                break
            count += 1
        return count

    def pop(self) -> bool:
        """The oldest result.

        Raises:
            IndexError: there is none.
        """
        if not self.completed():
            raise IndexError("expected a completed offload, got none")
        return bool(self._offloads.popleft().result)

    def clear(self) -> None:
        """Give up what still reads slots, wait until nothing does, and forget all results."""
        offloads, self._offloads = self._offloads, deque()
        reading = [offload for offload in offloads if not offload.staged.is_set()]
        for offload in reading:
            if offload.future is not None:
                offload.future.cancel()
        _wait_staged(reading)

    def pending(self) -> Sequence[Future[None]]:
        """What has not ended."""
        return list(self._saving)

    def _overdue(self, offload: _Offload, now: float) -> None:
        """Its slots are free once they are not read any more; the bytes may still reach the store."""
        if offload.staged.is_set():
            offload.result = False
            _log.warning("offload.late")
        elif offload.future is not None:
            if not offload.future.cancelled():
                offload.future.cancel()
                _log.warning("offload.given_up")
            if now > offload.until + _GIVE_UP_SECONDS:
                _log.error("save.not_given_up")
                offload.result = False


def _wait_staged(offloads: Sequence[_Offload]) -> None:
    until = time.monotonic() + _GIVE_UP_SECONDS
    for offload in offloads:
        if not offload.staged.wait(max(0.0, until - time.monotonic())):
            _log.error("save.not_given_up")
