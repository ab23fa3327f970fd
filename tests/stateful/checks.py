"""What must hold after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from softload import PageStatus, Statistics, UnitOutcome, events
from softload.copies import Copy
from softload.geometry import DraftMode
from softload.handles import Load, Prefetch
from softload.landing import LandingMemory
from softload.slots import SlotState

from .engine import GUARDS, content
from .users import Request, User, page_keys
from .world import HELD, World


class CheckedWorld(World):
    """A world that knows what it must never see."""

    sound = False
    """Whether the last check found nothing: what comes after a failure would only hide it."""

    logs: list[Any]

    def check(self) -> None:
        """Settle, learn what has ended, and look at everything."""
        self.sound = False
        self._check()
        self.sound = True

    def _check(self) -> None:
        self.settle()
        if self.loader._context is None:  # something raised in a task of the loader's
            self._release(HELD)
            self.advance(10.0)
            self.owner.result()
        self._collect()
        assert not self.loop.errors, self.loop.errors
        assert not self.violations, self.violations
        raised = [entry for entry in self.logs if entry["event"] == events.STORE_RAISED]
        assert not raised, raised
        self._check_rows()
        self._check_segments()
        self._check_deadlines()
        self._check_store()
        statistics = self.loader.statistics()
        assert statistics.requested_pages == statistics.restored_pages + sum(statistics.missed_pages.values())
        assert statistics.sessions_ended <= statistics.sessions_opened
        assert statistics.quarantined_bytes <= statistics.quarantined_bytes_peak
        if not self.unseen and not self.users:
            assert statistics.requested_pages == self.expected["requested_pages"] + self.never_landed
            for name in ("restored_pages", "late_failures"):
                assert getattr(statistics, name) == self.expected[name], name
            missed = {str(status): pages for status, pages in statistics.missed_pages.items()}
            known = {name: count for name, count in self.expected.items() if name in list(PageStatus)}
            # What did not land was missed too; a handle tells the first reason only.
            assert sum(missed.values()) == sum(known.values()) + self.never_landed
            assert all(missed.get(name, 0) >= count for name, count in known.items())
            assert self.never_landed or missed == known
        if self.is_idle:
            self._check_idle(statistics)

    def _collect(self) -> None:
        """Learn what has ended."""
        for user in [user for user in self.users if user.task is not None and user.task.done()]:
            self.users.remove(user)
            assert user.task is not None
            if not user.task.cancelled():
                user.task.result()
            if user.report is None and isinstance(user.handle, Load):
                user.report = self.loop.run_until_complete(user.handle.report())
            for request in user.requests:
                self._end(user, request)
        for pending in [pending for pending in self.pending if pending.task.done()]:
            self.pending.remove(pending)
            pending.check(pending.task.result())

    def _end(self, user: User, request: Request) -> None:
        if request.rows is None:
            self.unseen = self.unseen or (isinstance(user.handle, Prefetch) and request.landed is None)
            return
        if user.report is None:  # cancelled while it was placed
            self.unseen = self.unseen or user.placing or user.handle is None
            self.engine.give(request.rows)
            return
        outcome = user.report.outcomes[request.name]
        request.outcome = outcome
        self._check_outcome(user, request, outcome)
        self.expected["requested_pages"] += outcome.requested_pages
        self.expected["restored_pages"] += outcome.restored_pages
        self.expected["late_failures"] += outcome.late_failure is not None
        for page in outcome.pages[outcome.restored_pages :]:
            self.expected[str(page.status)] += 1
        self.ended.append(request)

    def _check_outcome(self, user: User, request: Request, outcome: UnitOutcome) -> None:
        restored = outcome.restored_pages
        assert outcome.request_id == request.name
        assert outcome.requested_pages == len(request.keys) == len(outcome.pages)
        assert outcome.prefill_from_page == restored
        assert [page.page for page in outcome.pages] == list(range(len(request.keys)))
        assert [page.status is PageStatus.LOADED for page in outcome.pages] == [
            page < restored for page in range(len(request.keys))
        ]
        assert outcome.draft_pages <= restored
        if request.admitted is not None:
            assert restored <= request.admitted
            if restored < request.admitted and request.layers_given:
                assert outcome.late_failure is not None
                assert outcome.late_failure.page == restored or restored == 0
            if outcome.late_failure is not None:
                assert restored < request.admitted
        if not user.cancelled:
            assert PageStatus.CANCELLED not in {page.status for page in outcome.pages}, outcome
        if self.draft is DraftMode.NONE:
            assert outcome.draft_pages == 0
        if request.clean is not None and not user.cancelled:
            assert restored >= request.clean, (outcome, request.clean)
        assert request.rows is not None
        request.draftless = "zero" if self._is_zeroed(outcome) else "any"
        for page in range(restored):
            draft = "good" if page < outcome.draft_pages else request.draftless
            self.engine.check_page(request.rows[page], request.keys[page], draft)
        for pool in self.engine.pools.pools:
            good = outcome.draft_pages if pool.name.is_draft else restored
            states = [self.context.slots.state(pool, row) for row in request.rows]
            assert states == [SlotState.COMMITTED] * good + [SlotState.RELEASED] * (len(states) - good), pool.name

    def _is_zeroed(self, outcome: UnitOutcome) -> bool:
        """Whether the draft's slots past its own pages must hold zeros.

        After a deadline or a cancel one more chunk of them is written, so all of them where a chunk holds them all.
        """
        row_bytes = sum(
            view.shape[1]
            for pool in self.engine.pools.pools
            for buffer, view in enumerate(pool.page_views)
            if pool.is_draft_buffer(buffer)
        )
        lacking = (outcome.restored_pages - outcome.draft_pages) * row_bytes
        return lacking <= self.copy_chunk_bytes

    # -- parts

    def checked_run(self, run: Callable[[Copy], None]) -> Callable[[Copy], None]:
        """Copies into pools go to rows that are being filled, from their first byte to their last."""

        def checked(copy: Copy) -> None:
            if copy.outward:
                run(copy)
                return
            pool = next(pool for pool in self.engine.pools.pools for view in pool.page_views if view is copy.pages)
            before = {self.context.slots.state(pool, int(row)) for row in copy.rows}
            run(copy)
            after = {self.context.slots.state(pool, int(row)) for row in copy.rows}
            if not before | after <= {SlotState.FILLING, SlotState.ZEROING}:
                self.violations.append(f"wrote rows of {pool.name} in {before}, then in {after}")

        return checked

    def _check_rows(self) -> None:
        active: set[int] = set()
        for user in self.users:
            for request in user.requests:
                active.update(request.rows or ())
        for name, rows in self.engine.changed_rows().items():
            assert not rows & set(GUARDS), f"{name}: guard rows changed"
            assert rows <= self.touchable, f"{name}: rows {sorted(rows - self.touchable)} changed, which nobody fills"
        self.touchable = active
        for held in self.cache:
            for page, (row, key) in enumerate(zip(held.rows, held.keys, strict=True)):
                draft = held.draftless if page in held.without_draft else "good"
                self.engine.check_page(row, key, draft)

    def _check_segments(self) -> None:
        landing: LandingMemory = self.context.landing
        for arena in landing.arenas:
            free = list(zip(arena._offsets, arena._lengths, strict=True))
            assert free == sorted(free) and all(length > 0 for _, length in free)
            assert all(a + n < b for (a, n), (b, _) in zip(free, free[1:], strict=False)), "free neighbours are joined"
            assert sum(length for _, length in free) == arena.free_bytes
        used = self.busy_memory.ranges
        for (start, nbytes), (following, _) in zip(used, used[1:], strict=False):
            assert start + nbytes <= following, "two calls share landing memory"
        for arena in landing.arenas:
            for offset, length in zip(arena._offsets, arena._lengths, strict=True):
                for start, nbytes in used:
                    overlap = start < arena.pointer + offset + length and arena.pointer + offset < start + nbytes
                    assert not overlap, "memory that a call may still use is free"
        statistics = landing.statistics()
        taken = sum(arena.nbytes - arena.free_bytes for arena in landing.arenas)
        assert taken == statistics.in_use + statistics.quarantined
        assert all(0 <= used <= landing.limit(share) for share, used in landing._used.items())
        assert statistics.quarantined == sum(landing._quarantined.values())
        assert statistics.replaced <= landing.capacity // 2 + landing._replacement

    def _check_deadlines(self) -> None:
        for user in self.users:
            for request in user.requests:
                over = request.due < self.clock.now
                assert not (over and request.rows is not None), f"{request.name} waits past its deadline"
                assert not (over and user.landed_at is None), f"{request.name} waits past its deadline"
        for pending in self.pending:
            assert not pending.due < self.clock.now, "a save or a lookup waits past its deadline"

    def _check_store(self) -> None:
        """What is stored under a good key is good: whatever hung, was given up, or was written late."""
        specs = self.engine.pools.specs(self.layout)
        for pool in self.engine.pools.pools:
            for chain in range(3):
                for page_key in page_keys(chain, 6):
                    for spec in specs[pool.name]:
                        key = self.context.keys.object_key(page_key, pool.name, spec.part)
                        if key in self.memory._objects and key not in self.corrupt:
                            payload = np.concatenate([content(page_key, pool.name, f.buffer) for f in spec.fragments])
                            stored = self._stored(key)
                            assert stored.size == spec.size
                            assert np.array_equal(stored[: spec.payload], payload), f"bad bytes were stored: {key}"

    def _check_idle(self, statistics: Statistics) -> None:
        assert statistics.active_units == 0
        assert statistics.held_slots == 0
        assert statistics.landing_bytes_in_use == statistics.kept_bytes
        assert statistics.quarantined_bytes == 0
        assert statistics.waiting_grants == 0
        assert statistics.queued_calls == 0
        assert statistics.stuck_threads == 0
        assert statistics.open_sessions == 0
        assert statistics.sessions_opened == statistics.sessions_ended
        store = self.memory.statistics()
        assert store.sessions == 0
        assert store.reservations == 0
