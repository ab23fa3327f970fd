"""Landing memory: the only memory of this process that the network reads into or writes from.

Memory is granted whole, per unit and in order, before the unit's first read; who holds some never waits for more.
Quarantined bytes are replaced by fresh arenas, so that a hung peer does not shrink what others may use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from softload.arena import PAGE, Arena, aligned
from softload.segments import Segment, SegmentState, Share

__all__ = ["LandingMemory", "LandingStatistics", "Segment", "SegmentState", "Share", "check_capacity"]


@dataclass(frozen=True, slots=True)
class LandingStatistics:
    """Bytes by use; `waiting` units and saves wait for a grant."""

    capacity: int
    in_use: int
    quarantined: int
    quarantined_peak: int
    replaced: int
    waiting: int


@dataclass(slots=True, eq=False)
class _Waiter:
    sizes: Sequence[tuple[int, int]]
    total: int
    granted: list[Segment] | None
    event: anyio.Event


class LandingMemory:
    """Grants segments of registered memory and takes them back.

    Args:
        capacity: bytes that may be in use, quarantine not counted.
        pinned: page-lock the memory, for copies to an accelerator.
        reclaim: asked to free landed bytes that nobody pins, at least as many as it is told, oldest first.
        retire: told of fresh arenas that are not needed any more, to unregister them.
        arena: the memory, where it was allocated already: that may take a while and should not hold up an event loop.
    """

    def __init__(
        self,
        capacity: int,
        *,
        pinned: bool = False,
        reclaim: Callable[[int], None] = lambda _: None,
        retire: Callable[[Arena], None] = lambda _: None,
        arena: Arena | None = None,
    ) -> None:
        self.capacity = capacity
        self._reclaim = reclaim
        self._retire = retire
        self._serving = self._is_closed = False
        self._replacement = max(aligned(capacity // 16), PAGE)
        self.arenas = [arena or Arena(aligned(capacity), pinned=pinned)]
        self._limits = _limits(capacity)
        self._used = dict.fromkeys(Share, 0)
        self._queues: dict[Share, deque[_Waiter]] = {share: deque() for share in Share}
        self._waiting = 0
        self._quarantined: dict[str, int] = {}
        self._quarantined_bytes = 0
        self._quarantined_peak = 0
        self._none_quarantined = anyio.Event()

    def __repr__(self) -> str:
        return (
            f"<LandingMemory {sum(self._used.values())} of {self.capacity} bytes in use, "
            f"{self._quarantined_bytes} quarantined>"
        )

    def limit(self, share: Share) -> int:
        """The most bytes that a share can ever be granted at a time."""
        return self._limits[share]

    @staticmethod
    def cost(sizes: Sequence[tuple[int, int]]) -> int:
        """Bytes that a grant of `(object bytes, count)` pairs takes."""
        return sum(aligned(size) * count for size, count in sizes)

    def try_grant(self, sizes: Sequence[tuple[int, int]], share: Share) -> list[Segment] | None:
        """Grant one segment per object now, or nothing; see `try_grant_runs`."""
        runs = self.try_grant_runs(sizes, share)
        return None if runs is None else _singles(runs)

    async def grant(self, sizes: Sequence[tuple[int, int]], share: Share) -> list[Segment] | None:
        """Grant one segment per object, in turn; see `grant_runs`."""
        runs = await self.grant_runs(sizes, share)
        return None if runs is None else _singles(runs)

    def try_grant_runs(
        self, sizes: Sequence[tuple[int, int]], share: Share, *, may_reclaim: bool = True
    ) -> list[Segment] | None:
        """Grant memory for objects now, or nothing.

        Args:
            sizes: runs of equal objects as `(object bytes, count)`; segments come in this order, one for a run where
                the memory allows it.
            share: who asks.
            may_reclaim: whether landed bytes that nobody pins are given up for it.
        """
        total = self.cost(sizes)
        if self._queues[share] or (self._over(total, share) if not may_reclaim else not self._fits(total, share)):
            return None
        return self._allocate(sizes, total, share, may_reclaim=may_reclaim)

    async def grant_runs(self, sizes: Sequence[tuple[int, int]], share: Share) -> list[Segment] | None:
        """Grant memory for objects, in turn with others of the share; ``None`` if it can never fit.

        Waits as long as the caller lets it; a cancelled wait leaves the queue and keeps nothing.
        """
        total = self.cost(sizes)
        if total > self._limits[share]:
            return None
        granted = self.try_grant_runs(sizes, share)
        if granted is not None:
            return granted
        waiter = _Waiter(sizes, total, None, anyio.Event())
        self._queues[share].append(waiter)
        self._waiting += 1
        try:
            await waiter.event.wait()
        except BaseException:
            if waiter.granted is not None:
                for segment in waiter.granted:
                    self.release(segment)
            else:
                self._queues[share].remove(waiter)
                self._waiting -= 1
                self._serve_queues()
            raise
        return waiter.granted

    def release(self, segment: Segment) -> None:
        """Give a segment back that no call can write any more."""
        if segment.state is SegmentState.FREE:
            raise RuntimeError(f"segment at {segment.offset} was released twice")
        if segment.state is SegmentState.QUARANTINED:
            self._quarantined_bytes -= segment.reserved
            self._quarantined[segment.endpoint] -= segment.reserved
            if not self._quarantined[segment.endpoint]:
                del self._quarantined[segment.endpoint]
            if not self._quarantined_bytes:
                self._none_quarantined.set()
        else:
            self._used[segment.share] -= segment.reserved
        segment.state = SegmentState.FREE
        segment.arena.give(segment.offset, segment.reserved)
        if len(self.arenas) > 1:
            self._retire_arenas()
        if self._waiting:
            self._serve_queues()

    def release_all(self, segments: Sequence[Segment]) -> None:
        """`release` of many: those that lie side by side in one piece."""
        first = last = None
        for segment in segments:
            if segment.state in (SegmentState.FREE, SegmentState.QUARANTINED):
                self.release(segment)
                continue
            self._used[segment.share] -= segment.reserved
            segment.state = SegmentState.FREE
            if first is None or last is None:
                first = segment
            elif segment.arena is not last.arena or segment.offset != last.offset + last.reserved:
                first.arena.give(first.offset, last.offset + last.reserved - first.offset)
                first = segment
            last = segment
        if first is None or last is None:
            return
        first.arena.give(first.offset, last.offset + last.reserved - first.offset)
        if len(self.arenas) > 1:
            self._retire_arenas()
        if self._waiting:
            self._serve_queues()

    def quarantine(self, segment: Segment, endpoint: str) -> None:
        """Nobody waits for the call that may still write this segment: set it aside until the call returns."""
        self._used[segment.share] -= segment.reserved
        segment.state = SegmentState.QUARANTINED
        segment.endpoint = endpoint
        self._quarantined_bytes += segment.reserved
        self._quarantined_peak = max(self._quarantined_peak, self._quarantined_bytes)
        self._quarantined[endpoint] = self._quarantined.get(endpoint, 0) + segment.reserved
        self._serve_queues()

    def serve_waiting(self) -> None:
        """Grant what fits by now; called when there is something that `reclaim` can free."""
        if any(self._queues.values()):
            self._serve_queues()

    def quarantined(self, endpoint: str | None = None) -> int:
        """Bytes that calls to `endpoint`, or any calls, may still write although nobody waits for them."""
        return self._quarantined_bytes if endpoint is None else self._quarantined.get(endpoint, 0)

    async def wait_none_quarantined(self) -> None:
        """Wait until every call that was abandoned has returned."""
        while self._quarantined_bytes:
            if self._none_quarantined.is_set():  # of an earlier time; else others wait for it too
                self._none_quarantined = anyio.Event()
            await self._none_quarantined.wait()

    def refuses(self, endpoint: str) -> bool:
        """Whether so much is quarantined for an endpoint, an eighth, that it gets no more reads."""
        return self.quarantined(endpoint) > self.capacity // 8

    @property
    def sheds(self) -> bool:
        """Whether half of the memory is quarantined: then no new loads are taken."""
        return self._quarantined_bytes > self.capacity // 2

    def missing_replacement(self) -> int:
        """Bytes of a fresh arena that should stand in for quarantined ones; 0 where none is needed."""
        fresh = sum(arena.nbytes for arena in self.arenas[1:])
        lacking = min(self._quarantined_bytes, self.capacity // 2) - fresh
        return -(-lacking // self._replacement) * self._replacement if lacking > 0 else 0

    def add_arena(self, arena: Arena) -> None:
        """Let grants use a fresh arena, which is registered."""
        self.arenas.append(arena)
        self._serve_queues()

    def close(self) -> list[Arena]:
        """Retire nothing any more; answers with the arenas to unregister.

        Memory that a call may still write stays registered and allocated: the call holds it.
        """
        self._is_closed = True
        return [arena for arena in self.arenas if arena.is_unused]

    def statistics(self) -> LandingStatistics:
        """What is used for what now."""
        return LandingStatistics(
            self.capacity,
            sum(self._used.values()),
            self._quarantined_bytes,
            self._quarantined_peak,
            sum(arena.nbytes for arena in self.arenas[1:]),
            self._waiting,
        )

    def _fits(self, total: int, share: Share) -> bool:
        if share is not Share.SAVE and self._over(total, share):
            self._reclaim(max(total, self._replacement))
        return not self._over(total, share)

    def _over(self, total: int, share: Share) -> bool:
        if share is not Share.STREAMING and self._used[share] + total > self._limits[share]:
            return True
        loads = self._used[Share.STREAMING] + self._used[Share.PREFETCH]
        return share is not Share.SAVE and loads + total > self._limits[Share.STREAMING]

    def _allocate(
        self, sizes: Sequence[tuple[int, int]], total: int, share: Share, *, may_reclaim: bool = True
    ) -> list[Segment] | None:
        segments = self._allocate_runs(sizes, share)
        if segments is None and may_reclaim:  # enough bytes are free, but not side by side
            self._reclaim(total)
            # Those who waited come first, and may have been granted what that has freed.
            segments = None if self._over(total, share) else self._allocate_runs(sizes, share)
        if segments is not None:
            self._used[share] += total
        return segments

    def _allocate_runs(self, sizes: Sequence[tuple[int, int]], share: Share) -> list[Segment] | None:
        segments: list[Segment] = []
        for size, count in sizes:
            if not self._allocate_run(size, count, share, segments):
                for segment in segments:
                    segment.arena.give(segment.offset, segment.reserved)
                return None
        return segments

    def _allocate_run(self, size: int, count: int, share: Share, segments: list[Segment]) -> bool:
        stride = aligned(size)
        left, run = count, count
        while left:
            run = min(run, left)
            for arena in self.arenas:
                offset = arena.take(run * stride)
                if offset is not None:
                    segments.append(Segment(arena, offset, size, run * stride, share, count=run))
                    left -= run
                    break
            else:
                if run == 1:
                    return False
                run = (run + 1) // 2
        return True

    def _serve_queues(self) -> None:
        if self._serving or not self._waiting:  # asking for room releases segments, which comes back here
            return
        self._serving = True
        try:
            for share, queue in self._queues.items():
                while queue and self._fits(queue[0].total, share):
                    waiter = queue[0]
                    granted = self._allocate(waiter.sizes, waiter.total, share)
                    if granted is None:
                        break
                    queue.popleft()
                    self._waiting -= 1
                    waiter.granted = granted
                    waiter.event.set()
        finally:
            self._serving = False

    def _retire_arenas(self) -> None:
        if self._is_closed:
            return
        fresh = sum(arena.nbytes for arena in self.arenas[1:])
        for arena in self.arenas[1:]:
            if arena.is_unused and fresh - arena.nbytes >= self._quarantined_bytes:
                self.arenas.remove(arena)
                fresh -= arena.nbytes
                self._retire(arena)


def check_capacity(capacity: int, object_sizes: Sequence[int]) -> None:
    """Make sure that each share has room for what it is for: one page to load, one object to save.

    Args:
        capacity: bytes of landing memory.
        object_sizes: bytes of the objects of one page of every pool.

    Raises:
        ValueError: too small; the message says how large it must be.
    """
    page = sum(map(aligned, object_sizes))
    largest = max(map(aligned, object_sizes), default=0)
    limits = _limits(capacity)
    if page > limits[Share.PREFETCH] or largest > limits[Share.SAVE]:
        # Of every eight bytes five are for prefetches and one is for saves.
        needed = max(-(-page * 8 // 5), largest * 8)
        raise ValueError(
            f"landing_bytes: expected at least {needed} for pages of {page} bytes in objects of up to {largest}, "
            f"got {capacity}"
        )


def _singles(runs: Sequence[Segment]) -> list[Segment]:
    return [run.piece(index, 1) for run in runs for index in range(run.count)]


def _limits(capacity: int) -> dict[Share, int]:
    return {
        Share.STREAMING: capacity - capacity // 8,
        Share.PREFETCH: capacity - capacity // 8 - capacity // 4,
        Share.SAVE: capacity // 8,
    }
