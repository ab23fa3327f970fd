"""The connector's half in the scheduler: asks, answers, orders, and remembers what failed. It never waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from softload.adapters.vllm.messages import (
    BlockIds,
    LoadOrder,
    Orders,
    PlaceOrder,
    PrefetchOrder,
    Reports,
    SaveOrder,
    Ticket,
    blocks_of,
)
from softload.adapters.vllm.options import ConnectorOptions, LoadMode

__all__ = ["EngineRequest", "SchedulerSide", "ScheduledStep"]

_GRACE_SECONDS = 0.25
"""How long after the deadline workers may take to say what landed by it."""


class EngineRequest(Protocol):
    """What is used of vLLM's request."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    block_hashes: Sequence[bytes]
    skip_reading_prefix_cache: bool
    """All of its prompt is to be computed, because something is asked of its tokens' logits."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What a step computes, as far as saves are concerned.

    Args:
        num_tokens: tokens whose KV is certain after the step (speculated ones are not), by request.
        block_ids: a request's block table.
        written: blocks that the step writes, or may.
    """

    num_tokens: Mapping[str, int]
    block_ids: Callable[[str], BlockIds]
    written: Iterable[int]


class _Phase(Enum):
    IDLE = "idle"
    ASKED = "asked"
    LANDED = "landed"
    LOADING = "loading"
    ANSWERED = "answered"
    """Nothing more to load until the request is preempted."""

    FAILED = "failed"
    """A load failed: not looked up again."""


@dataclass(slots=True, eq=False)
class _State:
    """One request."""

    request: EngineRequest
    phase: _Phase = _Phase.IDLE
    attempt: int = 0
    """Which of all requests' attempts is its last: what is told of an earlier one says nothing about this one."""

    preemptions: int = 0
    asked_at: float | None = None
    """When its deadline began."""

    ordered_at: float = 0.0
    """When its last attempt began."""

    seconds_left: float = 0.0
    """Of its deadline, when the last worker answered; waiting for blocks does not count."""

    first_page: int = 0
    keys: tuple[str, ...] = ()
    reports: list[int] = field(default_factory=list)
    loading: BlockIds = ()
    loading_tokens: int = 0
    loaded_pages: int = 0
    """Pages of `loading` before the first that is known to have failed, on any worker."""

    lands_first: bool = False
    """Whether it was asked to land, so that blocks are taken for what has landed."""

    saved_pages: int | None = None
    """Pages that need no save; ``None`` until it is known what the engine computes first."""

    @property
    def ticket(self) -> Ticket:
        return self.request.request_id, self.attempt


class SchedulerSide:
    """See the module.

    Args:
        options: the connector's settings.
        block_size: tokens per block.
        workers: how many workers report.
        landing_pages: pages of one request that can land before it has blocks; what is longer is loaded into blocks.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        block_size: int,
        workers: int,
        *,
        landing_pages: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._block_size = block_size
        self._workers = workers
        self._landing_pages = landing_pages
        self._clock = clock
        # A request that waits for blocks for longer is asked about anew: the workers hold what has landed no longer.
        self._held_seconds = max(options.hold_limit, options.deadline)
        self._states: dict[str, _State] = {}
        self._orders = Orders()
        self._unstaged: dict[int, tuple[int, frozenset[int]]] = {}
        self._saves_ordered = 0
        self._attempts = 0
        self.counters: dict[str, int] = {"restored_tokens": 0, "failed_loads": 0, "unanswered_lookups": 0}

    # -- questions

    def matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be had beyond the `num_computed_tokens` that the engine has; ``None``: ask again."""
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = _State(request)
        if request.skip_reading_prefix_cache:
            return 0, False
        if state.preemptions < request.num_preemptions:
            state.preemptions = request.num_preemptions
            if state.phase is not _Phase.FAILED:
                self._forget(state)
                state.phase = _Phase.IDLE
                state.asked_at = None
        first_page = num_computed_tokens // self._block_size
        last_page = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        if state.phase in (_Phase.ANSWERED, _Phase.FAILED, _Phase.LOADING):
            return 0, False
        if state.phase is not _Phase.IDLE:
            answered = len(state.reports) >= self._workers
            if state.first_page != first_page or (answered and self._clock() >= state.ordered_at + self._held_seconds):
                # While this request waited, what the engine has of the prefix changed, or what landed was let go.
                self._forget(state)
                if answered:  # in time, and it waits for blocks
                    state.asked_at = None
                state.phase = _Phase.IDLE
        if last_page <= first_page:  # not for good: while the request waits for blocks, the engine may lose what it has
            return 0, False
        if state.phase is _Phase.IDLE:
            return self._ask(state, first_page, last_page)
        if state.phase is _Phase.ASKED:
            if len(state.reports) < self._workers:
                if self._clock() < (state.asked_at or 0.0) + self._options.deadline + _GRACE_SECONDS:
                    return None, False
                self.counters["unanswered_lookups"] += 1
                self._forget(state)
                self._answer(state)
                return 0, False
            state.phase = _Phase.LANDED
        pages = min(state.reports)
        if not pages:
            self._answer(state)
            return 0, False
        return pages * self._block_size, self._options.mode is not LoadMode.LAYERWISE

    def allocated(self, request: EngineRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """The engine has allocated blocks, for `num_external_tokens` that are to be loaded."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        if num_external_tokens <= 0:
            if state.phase is not _Phase.LOADING:
                self._forget(state)
                self._answer(state)
            return
        pages = -(-num_external_tokens // self._block_size)
        first = state.first_page
        wanted: BlockIds = tuple(tuple(ids[first : first + pages]) for ids in block_ids)
        state.loading = wanted
        state.loading_tokens = num_external_tokens
        state.loaded_pages = pages
        state.saved_pages = first + pages
        state.phase = _Phase.LOADING
        if state.lands_first:
            self._orders.places.append(PlaceOrder(state.ticket, wanted))
        else:
            self._orders.loads.append(LoadOrder(state.ticket, state.keys[:pages], wanted, state.seconds_left))

    def finished(self, request_id: str) -> None:
        """The request has ended; a load into its blocks is given up, and reported as received all the same."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._forget(state)
            if state.phase is _Phase.LOADING:
                self._orders.cancelled.append(state.ticket)

    # -- orders and reports

    def take_orders(self, step: ScheduledStep) -> Orders:
        """The orders that go with a step."""
        orders, self._orders = self._orders, Orders()
        written = set(step.written)
        written.update(*(blocks_of(place.block_ids) for place in orders.places))
        written.update(*(blocks_of(load.block_ids) for load in orders.loads))
        orders.overwritten = [
            number for number, (_, blocks) in self._unstaged.items() if not blocks.isdisjoint(written)
        ]
        if self._options.save:
            # A forward that waits for its loads may learn of a failure at its end: what it computes is saved later.
            later = self._options.mode is LoadMode.LAYERWISE and bool(orders.loads)
            orders.saves = list(self._saves(step, later=later))
        return orders

    def reported(
        self, reports: Reports | None, received: Iterable[str], failed: Iterable[str], failed_blocks: Iterable[int]
    ) -> None:
        """What the workers have told: landed pages, loads that have ended, and what of them failed."""
        if reports is not None:
            for ticket, pages in reports.landed.items():
                state = self._states.get(ticket[0])
                if state is not None and state.ticket == ticket:
                    state.reports += pages
                    state.seconds_left = max(0.0, (state.asked_at or 0.0) + self._options.deadline - self._clock())
            for number, count in reports.staged.items():
                workers, blocks = self._unstaged.pop(number, (0, frozenset()))
                if workers > count:
                    self._unstaged[number] = workers - count, blocks
        loads = [state for state in self._states.values() if state.phase is _Phase.LOADING]
        if bad_blocks := frozenset(failed_blocks):
            # Told as soon as the first worker knows; received is told when the last has ended.
            for state in loads:
                state.loaded_pages = min(state.loaded_pages, _pages_before(bad_blocks, state.loading))
        for request_id in failed:
            if (state := self._states.get(request_id)) is not None:
                state.loaded_pages = 0
        if self._options.mode is LoadMode.LAYERWISE:  # the step that was ordered to load has done so
            received = [state.request.request_id for state in loads]
        for request_id in received:
            state = self._states.get(request_id)
            if state is None or state.phase is not _Phase.LOADING:
                continue
            loaded_tokens = min(state.loading_tokens, state.loaded_pages * self._block_size)
            self.counters["restored_tokens"] += loaded_tokens
            if loaded_tokens < state.loading_tokens:
                state.phase = _Phase.FAILED
                state.saved_pages = None
                self.counters["failed_loads"] += 1
            else:
                state.phase = _Phase.ANSWERED
            state.loading = ()

    # -- helpers

    def _ask(self, state: _State, first_page: int, last_page: int) -> tuple[int | None, bool]:
        now = self._clock()
        if state.asked_at is None:
            state.asked_at = now
        left = state.asked_at + self._options.deadline - now
        if left <= 0:
            self._answer(state)
            return 0, False
        self._attempts += 1
        state.attempt = self._attempts
        state.ordered_at = now
        state.first_page = first_page
        state.keys = tuple(bytes(digest).hex() for digest in state.request.block_hashes[first_page:last_page])
        state.reports = []
        state.phase = _Phase.ASKED
        state.lands_first = self._options.mode is LoadMode.PREFETCH and len(state.keys) <= self._landing_pages
        self._orders.prefetches.append(PrefetchOrder(state.ticket, state.keys, left, not state.lands_first))
        return None, False

    def _answer(self, state: _State) -> None:
        """Nothing is loaded for it, or nothing more."""
        if state.phase not in (_Phase.FAILED, _Phase.LOADING):
            state.phase = _Phase.ANSWERED

    def _forget(self, state: _State) -> None:
        """What was ordered for it and is not placed is not wanted any more."""
        if state.phase in (_Phase.ASKED, _Phase.LANDED):
            self._orders.cancelled.append(state.ticket)

    def _saves(self, step: ScheduledStep, *, later: bool) -> Iterator[SaveOrder]:
        for request_id, num_tokens in step.num_tokens.items():
            state = self._states.get(request_id)
            if state is None:
                continue
            request = state.request
            if state.saved_pages is None:
                state.saved_pages = request.num_computed_tokens // self._block_size
            first = state.saved_pages
            last = min(min(num_tokens, request.num_tokens) // self._block_size, len(request.block_hashes))
            if last <= first or later:
                continue
            table = step.block_ids(request_id)
            block_ids: BlockIds = tuple(tuple(ids[first:last]) for ids in table)
            state.saved_pages = last
            self._saves_ordered += 1
            self._unstaged[self._saves_ordered] = self._workers, blocks_of(block_ids)
            keys = tuple(bytes(digest).hex() for digest in request.block_hashes[first:last])
            yield SaveOrder(self._saves_ordered, request_id, keys, block_ids)


def _pages_before(blocks: frozenset[int], block_ids: BlockIds) -> int:
    """The pages before the first that has one of these blocks."""
    rows = enumerate(zip(*block_ids, strict=True))
    return next((page for page, ids in rows if not blocks.isdisjoint(ids)), len(block_ids[0]))
