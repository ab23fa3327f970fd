"""Requests whose bytes are on their way while they wait in the engine's queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import structlog

from softload.adapters._bridge import LoaderBridge
from softload.adapters.consensus import TorchDistributedConsensus
from softload.adapters.sglang.units import UnitMaker, Wanted
from softload.errors import LoaderClosedError
from softload.transfer import TransferUnit

__all__ = ["Hold", "Holds", "Placement"]

_log = structlog.get_logger(__name__)

_GRACE_SECONDS = 1.0
"""How long past its deadline a hold may be undecided: its loop does not run then."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """What landed is to be copied into these slots; `ended` is told whether all of it was, once."""

    unit: TransferUnit
    ended: Callable[[bool], object]


@dataclass(slots=True, eq=False)
class _Run:
    """What a hold's task waits for. Made on the loop, and used there alone."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    choice: anyio.Event = field(default_factory=anyio.Event)
    placed: anyio.Event = field(default_factory=anyio.Event)
    placement: Placement | None = None


@dataclass(slots=True, eq=False)
class Hold:
    """One request's bytes. Written on the loop, read on the engine's thread; `chosen` is the engine's to write."""

    request_id: str
    unit_id: str
    wanted: Wanted
    until: float
    """On `time.monotonic`."""
    found: tuple[int, ...] | None = None
    """The boundaries that this rank can restore; ``None`` while the store is asked."""
    chosen: int | None = None
    """The boundary that is read: the longest one that all ranks can restore."""
    landed: int | None = None
    """Pages that are here and checked; ``None`` while they are on their way."""
    agreed: bool = False
    """Whether every rank knows how much of it landed."""
    run: _Run | None = None
    """While its task runs; the loop's own."""

    def boundaries(self, pages: int) -> list[int]:
        """The prefixes of `pages` pages that what landed can restore."""
        landed = self.landed or 0
        if self.wanted.is_sparse:
            return [landed] if 0 < landed <= pages else []
        return list(range(1, min(landed, pages) + 1))


class Holds:
    """Every method is called on the engine's thread, and none of them waits for the store but `wait`.

    Args:
        bridge: the loader, on its loop.
        units: makes transfer units.
        ranks: who must agree before a request's answer counts.
        deadline: seconds from the first look at a request until it is answered.
        hold_limit: seconds that landed bytes wait for slots.
        limit: how many holds may be undecided; later ones start when others are decided.
        lookup_only: whether nothing is read before there are slots.
    """

    def __init__(
        self,
        bridge: LoaderBridge,
        units: UnitMaker,
        ranks: TorchDistributedConsensus,
        *,
        deadline: float,
        hold_limit: float,
        limit: int,
        lookup_only: bool,
    ) -> None:
        self._bridge = bridge
        self._units = units
        self._ranks = ranks
        self._deadline = deadline
        self._hold_limit = hold_limit
        self._limit = limit
        self._lookup_only = lookup_only
        self._holds: dict[str, Hold] = {}
        self._open: list[Hold] = []
        """Those that are not decided, in their order; at most `limit`."""
        self._waiting: set[str] = set()
        self._number = 0
        self._changed = threading.Condition()
        self._changes = 0
        self._seen = 0

    def __len__(self) -> int:
        return len(self._holds)

    def get(self, request_id: str) -> Hold | None:
        """The request's hold."""
        return self._holds.get(request_id)

    def is_undecided(self, request_id: str) -> bool:
        """Whether the request's bytes are on their way, or have yet to start."""
        hold = self._holds.get(request_id)
        return request_id in self._waiting if hold is None else not self._is_decided(hold)

    def stays(self, request_id: str) -> bool:
        """Whether a look at the request, for the pages for which it is held, would change nothing."""
        return self.is_undecided(request_id) and (request_id in self._holds or not self._has_room())

    def look(self, request_id: str, wanted: Wanted) -> Hold | None:
        """The request's hold for these pages, started where there is none; ``None`` while it has to wait for others."""
        hold = self._holds.get(request_id)
        until = time.monotonic() + self._deadline
        if hold is not None:
            if self._serves(hold, wanted):
                return hold
            if not self._is_decided(hold):
                until = hold.until  # a request whose prefix keeps changing is not held for ever
            self.drop(request_id)
        if not self._has_room():
            self._waiting.add(request_id)
            return None
        self._waiting.discard(request_id)
        self._number += 1
        hold = Hold(request_id, f"{request_id}#{self._number}", wanted, until)
        self._holds[request_id] = hold
        self._open.append(hold)
        if time.monotonic() >= until or not self._spawn(lambda: self._run(hold)):
            self._tell_found(hold, ())
            self._decide(hold, 0)
        return hold

    def wait(self, hold: Hold, seconds: float) -> bool:
        """Wait until the hold is decided; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_decided(hold), seconds)

    def wait_change(self, seconds: float) -> None:
        """Wait, if anything is undecided, until something was found or has landed since the last wait."""
        with self._changed:
            if any(hold.landed is None for hold in self._undecided()):
                self._changed.wait_for(lambda: self._changes != self._seen, seconds)
            self._seen = self._changes

    def take(self, request_id: str) -> Hold | None:
        """The request gets slots: its hold goes on as a placement, which the caller orders."""
        self._waiting.discard(request_id)
        return self._holds.pop(request_id, None)

    def place(self, placements: Sequence[tuple[Hold, Placement]]) -> None:
        """Copy what landed into slots; where that cannot be, the placements are told so.

        Those of one batch come together: each hand-over may cost the engine's thread the interpreter for a moment.
        """

        async def order() -> None:
            for hold, placement in placements:
                if hold.run is None:
                    placement.ended(False)
                else:
                    hold.run.placement = placement
                    hold.run.placed.set()

        def refuse() -> None:
            for _, placement in placements:
                placement.ended(False)

        try:
            self._bridge.spawn(order).add_done_callback(lambda done: refuse() if done.cancelled() else None)
        except LoaderClosedError:
            refuse()

    def drop(self, request_id: str) -> None:
        """The request has ended, or needs nothing any more. What landed may serve others for a while."""
        self._waiting.discard(request_id)
        hold = self._holds.pop(request_id, None)
        if hold is not None:
            self.give_up(hold)

    def give_up(self, hold: Hold) -> None:
        """Nobody will place what the hold has."""
        self._spawn(lambda: _cancel(hold))

    def clear(self) -> None:
        """Drop all of them."""
        for request_id in list(self._holds):
            self.drop(request_id)
        self._waiting.clear()

    def expire(self) -> None:
        """Drop holds that nobody took: without a hook nobody tells that their request has ended."""
        now = time.monotonic()
        for hold in [hold for hold in self._holds.values() if now > hold.until + self._hold_limit]:
            self.drop(hold.request_id)

    def tick(self) -> None:
        """Once a step, on every rank alike: agree on what is decided. Alone, there is nothing to agree on."""
        if self._ranks.is_alone:
            return
        open_holds = self._undecided()
        values: list[int] = []
        for hold in open_holds:
            if hold.chosen is None:
                found = hold.found is not None or self._is_late(hold)
                values += [int(found), *_mask(hold.found or (), len(hold.wanted.keys))]
            else:
                values.append(int(hold.landed is not None or self._is_late(hold)))
        answers = iter(self._ranks.minimum_now(values))
        for hold in open_holds:
            known = next(answers)
            if hold.chosen is None:
                mask = [next(answers) for _ in hold.wanted.keys]
                if known:
                    self._choose(hold, max((page for page, both in enumerate(mask, 1) if both), default=0))
            elif known:
                if hold.landed is None:
                    self._decide(hold, 0)
                hold.agreed = True

    # -- on the engine's thread

    def _undecided(self) -> list[Hold]:
        self._open = [
            hold for hold in self._open if self._holds.get(hold.request_id) is hold and not self._is_decided(hold)
        ]
        return self._open

    def _has_room(self) -> bool:
        return len(self._undecided()) < self._limit

    def _serves(self, hold: Hold, wanted: Wanted) -> bool:
        shared = min(len(hold.wanted.keys), len(wanted.keys))
        if hold.wanted.keys[:shared] != wanted.keys[:shared]:
            return False  # the tree has more of it by now, or less
        # A shorter question than what is read: a window that ends elsewhere does not answer it. This, too, goes by what
        # all ranks know alike: they must hold the same requests.
        return not (self._is_decided(hold) and hold.wanted.is_sparse and (hold.chosen or 0) > len(wanted.keys))

    def _is_decided(self, hold: Hold) -> bool:
        if not self._ranks.is_alone:
            return hold.agreed
        if hold.landed is None and self._is_late(hold):
            self._decide(hold, 0)
        return hold.landed is not None

    def _is_late(self, hold: Hold) -> bool:
        return time.monotonic() > hold.until + _GRACE_SECONDS

    def _choose(self, hold: Hold, pages: int) -> None:
        hold.chosen = pages
        if not pages or self._lookup_only:
            # All ranks know: none of them reads anything now.
            hold.agreed = True
            self._decide(hold, pages)
        if not self._spawn(lambda: _choose(hold)):
            self._decide(hold, 0)

    def _spawn(self, function: Callable[[], Any]) -> bool:
        try:
            self._bridge.spawn(function)
        except LoaderClosedError:
            return False
        return True

    # -- on the loop, or on either

    def _decide(self, hold: Hold, pages: int) -> None:
        with self._changed:
            if hold.landed is None:
                hold.landed = pages
            self._changes += 1
            self._changed.notify_all()

    def _tell_found(self, hold: Hold, boundaries: tuple[int, ...]) -> None:
        with self._changed:
            hold.found = boundaries
            self._changes += 1
            self._changed.notify_all()

    async def _run(self, hold: Hold) -> None:
        hold.run = run = _Run()
        try:
            with run.scope:
                await self._load(hold, run)
        except LoaderClosedError:
            pass  # told below
        except Exception:
            _log.exception("hold.raised", request_id=hold.request_id)
        finally:
            if hold.found is None:
                self._tell_found(hold, ())
            self._decide(hold, 0)
            hold.run = None
            if run.placement is not None:
                run.placement.ended(False)

    async def _load(self, hold: Hold, run: _Run) -> None:
        loader = self._bridge.loader
        if loader is None:
            return
        wanted = hold.wanted
        found = await loader.lookup(self._units.lookup(hold.unit_id, wanted, len(wanted.keys), self._left(hold)))
        self._tell_found(hold, found.boundaries)
        if self._ranks.is_alone:
            hold.chosen = found.pages
        else:
            await run.choice.wait()
        if not hold.chosen or self._lookup_only:
            self._decide(hold, hold.chosen or 0)
            return
        unit = self._units.lookup(hold.unit_id, wanted, hold.chosen, self._left(hold))
        async with loader.prefetch([unit]) as prefetch:
            landed = (await prefetch.landed())[unit.request_id]
            self._decide(hold, landed)
            if not landed:
                return
            await run.placed.wait()
            placement = run.placement
            assert placement is not None
            # From here on nothing ends it but its own end: the engine waits for it to let go of the slots.
            with anyio.CancelScope(shield=True):
                report = await prefetch.place([placement.unit])
                (outcome,) = report.outcomes.values()
                placement.ended(outcome.restored_pages == outcome.requested_pages)

    def _left(self, hold: Hold) -> float:
        return max(0.0, hold.until - time.monotonic())


async def _choose(hold: Hold) -> None:
    if hold.run is not None:
        hold.run.choice.set()


async def _cancel(hold: Hold) -> None:
    if hold.run is not None and hold.run.placement is None:
        hold.run.scope.cancel()


def _mask(boundaries: Sequence[int], pages: int) -> list[int]:
    known = set(boundaries)
    return [int(page in known) for page in range(1, pages + 1)]
