"""What the scheduler's half makes of what several workers tell, with vLLM's own requests and its own aggregator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from engines import BLOCK, hashed_request, prompts
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from softload.adapters.vllm.messages import BlockIds, Orders, Reports, Ticket
from softload.adapters.vllm.options import ConnectorOptions
from softload.adapters.vllm.scheduler_side import ScheduledStep, SchedulerSide

WORKERS = 2
DEADLINE = 2.0
NO_TOKENS = ScheduledStep(num_tokens={}, block_ids=lambda name: (), written=())
ASKED_AGAIN = (None, False)
NOTHING = (0, False)


@pytest.fixture(autouse=True)
def hashing() -> None:
    """As an engine does at its start."""
    init_none_hash(get_hash_fn_by_name("sha256"))


@dataclass(slots=True)
class Told:
    """What one worker tells after one step."""

    landed: Mapping[Ticket, int]
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    bad_blocks: frozenset[int] = frozenset()
    staged: tuple[int, ...] = ()


class Half:
    """The scheduler's half of an engine with two workers, whose steps are taken by hand."""

    def __init__(self, **extra: Any) -> None:
        self.now = 100.0
        options = ConnectorOptions.parse({"store": "memory://", "deadline": DEADLINE, **extra})
        self.side = SchedulerSide(options, BLOCK, WORKERS, landing_pages=1000, clock=lambda: self.now)
        self._aggregator = KVOutputAggregator(WORKERS)

    def orders(self) -> Orders:
        return self.side.take_orders(NO_TOKENS)

    def told(self, *by_worker: Told) -> None:
        """One step's output of every worker, as the engine hands it on."""
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                req_ids=[],
                req_id_to_index={},
                kv_connector_output=KVConnectorOutput(
                    finished_recving=set(told.received) or None,
                    failed_recving=set(told.failed),
                    invalid_block_ids=set(told.bad_blocks),
                    kv_connector_worker_meta=Reports(
                        {ticket: [pages] for ticket, pages in told.landed.items()}, Counter(told.staged)
                    ),
                ),
            )
            for told in by_worker
        ]
        output = self._aggregator.aggregate(outputs)
        assert output is not None
        told = output.kv_connector_output
        self.side.reported(
            told.kv_connector_worker_meta, told.finished_recving or (), told.failed_recving, told.invalid_block_ids
        )

    def landed(self, *pages: int) -> None:
        """Every worker answers the one question that is open."""
        (order,) = self.orders().prefetches
        self.told(*(Told({order.ticket: count}) for count in pages))

    def loading(self, request: Request, block_ids: BlockIds) -> None:
        """Its blocks are allocated, and ordered to be filled."""
        tokens, asynchronous = self.side.matched_tokens(request, 0)
        assert tokens == len(block_ids[0]) * BLOCK and asynchronous
        self.side.allocated(request, block_ids, tokens)
        orders = self.orders()
        assert len(orders.places) + len(orders.loads) == 1


def test_the_worker_with_the_fewest_pages_decides() -> None:
    half, request = Half(), hashed_request("one", *prompts(330))
    assert half.side.matched_tokens(request, 0) == ASKED_AGAIN
    (order,) = half.orders().prefetches
    half.told(Told({order.ticket: 9}), Told({}))
    assert half.side.matched_tokens(request, 0) == ASKED_AGAIN
    half.told(Told({}), Told({order.ticket: 4}))
    assert half.side.matched_tokens(request, 0) == (4 * BLOCK, True)
    half.side.allocated(request, ((11, 12, 13, 14),), 4 * BLOCK)
    assert [place.block_ids for place in half.orders().places] == [((11, 12, 13, 14),)]


def test_one_worker_without_anything_means_computing() -> None:
    half, request = Half(), hashed_request("one", *prompts(330))
    half.side.matched_tokens(request, 0)
    half.landed(9, 0)
    assert half.side.matched_tokens(request, 0) == NOTHING
    half.side.allocated(request, ((),), 0)
    assert half.side.matched_tokens(request, 0) == NOTHING


def test_a_worker_that_does_not_answer_costs_the_deadline() -> None:
    half, request = Half(), hashed_request("one", *prompts(330))
    half.side.matched_tokens(request, 0)
    (order,) = half.orders().prefetches
    half.told(Told({order.ticket: 9}), Told({}))
    half.now += DEADLINE
    assert half.side.matched_tokens(request, 0) == ASKED_AGAIN  # the answer may be on its way
    half.now += 0.5
    assert half.side.matched_tokens(request, 0) == NOTHING
    assert half.orders().cancelled == [order.ticket]
    assert half.side.counters["unanswered_lookups"] == 1
    half.told(Told({}), Told({order.ticket: 9}))
    assert half.side.matched_tokens(request, 0) == NOTHING


@pytest.mark.parametrize("mode", ["prefetch", "async"])
def test_a_block_that_one_worker_lacks_is_known_before_the_other_has_ended(mode: str) -> None:
    half, request = Half(mode=mode), hashed_request("one", *prompts(330))
    half.side.matched_tokens(request, 0)
    half.landed(10, 10)
    half.loading(request, (tuple(range(11, 21)),))
    half.told(Told({}, frozenset({"one"}), bad_blocks=frozenset({15, 16})), Told({}))
    half.told(Told({}), Told({}, frozenset({"one"}), bad_blocks=frozenset({17})))
    assert half.side.counters["failed_loads"] == 1
    assert half.side.counters["restored_tokens"] == 4 * BLOCK
    assert half.side.matched_tokens(request, 0) == NOTHING  # not looked up again, preempted or not
    request.num_preemptions = 1
    assert half.side.matched_tokens(request, 0) == NOTHING
    assert not half.orders().prefetches


def test_several_groups_fail_as_a_request() -> None:
    half, request = Half(), hashed_request("one", *prompts(330))
    half.side.matched_tokens(request, 0)
    half.landed(10, 10)
    half.loading(request, (tuple(range(11, 21)), (0,) * 7 + (31, 32, 33)))
    half.told(Told({}), Told({}, frozenset({"one"}), failed=frozenset({"one"})))
    half.told(Told({}, frozenset({"one"})), Told({}))
    assert half.side.counters["failed_loads"] == 1
    assert half.side.counters["restored_tokens"] == 0
    assert half.side.matched_tokens(request, 0) == NOTHING


def test_what_is_told_of_an_earlier_request_of_the_same_name_is_not_taken_for_this_ones() -> None:
    half, before = Half(), hashed_request("same", *prompts(330, seed=1))
    half.side.matched_tokens(before, 0)
    (old,) = half.orders().prefetches
    half.side.finished("same")
    again = hashed_request("same", *prompts(330, seed=2))
    assert half.side.matched_tokens(again, 0) == ASKED_AGAIN
    orders = half.orders()
    assert orders.cancelled == [old.ticket]
    (new,) = orders.prefetches
    half.told(Told({old.ticket: 0}), Told({old.ticket: 3}))
    assert half.side.matched_tokens(again, 0) == ASKED_AGAIN
    half.told(Told({new.ticket: 10}), Told({new.ticket: 10}))
    assert half.side.matched_tokens(again, 0) == (10 * BLOCK, True)


def test_a_preempted_request_is_looked_up_anew() -> None:
    half, request = Half(), hashed_request("one", *prompts(330))
    half.side.matched_tokens(request, 0)
    half.landed(10, 10)
    half.loading(request, (tuple(range(11, 21)),))
    half.told(Told({}, frozenset({"one"})), Told({}, frozenset({"one"})))
    request.num_preemptions = 1
    assert half.side.matched_tokens(request, 0) == ASKED_AGAIN
    half.landed(10, 9)
    assert half.side.matched_tokens(request, 0) == (9 * BLOCK, True)


@pytest.mark.parametrize("asked_meanwhile", [True, False])
def test_what_landed_too_long_ago_is_asked_for_anew(asked_meanwhile: bool) -> None:
    """The engine finds no blocks for as long as the workers hold what has landed."""
    half, request = Half(hold_limit=30), hashed_request("one", *prompts(330))
    half.side.matched_tokens(request, 0)
    (order,) = half.orders().prefetches
    half.told(Told({order.ticket: 10}), Told({order.ticket: 10}))
    half.now += 29
    if asked_meanwhile:  # not where the queue stops at another request
        assert half.side.matched_tokens(request, 0) == (10 * BLOCK, True)
    half.now += 2
    assert half.side.matched_tokens(request, 0) == ASKED_AGAIN
    orders = half.orders()
    assert orders.cancelled == [order.ticket]
    assert [again.deadline for again in orders.prefetches] == [DEADLINE]


def test_a_request_whose_whole_prompt_is_to_be_computed_is_not_looked_up() -> None:
    half, request = Half(), hashed_request("one", *prompts(330), prompt_logprobs=1)
    assert half.side.matched_tokens(request, 0) == NOTHING
    assert not half.orders().prefetches


def test_a_prompt_of_whole_blocks_leaves_its_last_token_to_be_computed() -> None:
    half, request = Half(), hashed_request("one", *prompts(4 * BLOCK))
    half.side.matched_tokens(request, 0)
    (order,) = half.orders().prefetches
    assert len(order.keys) == 3


def test_a_load_into_blocks_has_what_its_lookup_left_of_the_deadline() -> None:
    half, request = Half(mode="async"), hashed_request("one", *prompts(330))
    half.side.matched_tokens(request, 0)
    half.now += 0.25
    half.landed(10, 10)
    half.now += 40  # waiting for blocks is not the store's
    half.side.matched_tokens(request, 0)
    half.side.allocated(request, (tuple(range(11, 21)),), 10 * BLOCK)
    assert [load.deadline for load in half.orders().loads] == [DEADLINE - 0.25]


def test_speculated_tokens_that_may_still_be_rejected_are_not_saved() -> None:
    """With asynchronous scheduling, a step is scheduled as if all drafts of the one before had been accepted."""
    half, request = Half(), hashed_request("one", *prompts(3 * BLOCK - 2))
    half.side.matched_tokens(request, 0)
    half.landed(0, 0)
    half.side.matched_tokens(request, 0)
    half.side.allocated(request, ((),), 0)
    table = ((11, 12, 13, 14),)

    def saved(computed: int) -> list[int]:
        step = ScheduledStep(num_tokens={"one": computed}, block_ids=lambda name: table, written=())
        return [block for save in half.side.take_orders(step).saves for block in save.block_ids[0]]

    assert saved(3 * BLOCK - 2) == [11, 12]
    assert saved(3 * BLOCK + 3) == []  # five more were scheduled, and none of them is certain
    request.append_output_token_ids([1, 2, 3])
    assert saved(3 * BLOCK + 6) == [13]


def test_blocks_are_not_given_to_others_before_every_worker_has_read_them() -> None:
    half, request = Half(), hashed_request("one", *prompts(2 * BLOCK))
    half.side.matched_tokens(request, 0)
    half.landed(0, 0)
    half.side.matched_tokens(request, 0)
    half.side.allocated(request, ((11, 12),), 0)
    computes = ScheduledStep(num_tokens={"one": 2 * BLOCK}, block_ids=lambda name: ((11, 12),), written=(11, 12))
    (save,) = half.side.take_orders(computes).saves
    half.side.finished("one")
    reuses = ScheduledStep(num_tokens={}, block_ids=lambda name: (), written=(12, 40))
    assert half.side.take_orders(reuses).overwritten == [save.number]
    half.told(Told({}, staged=(save.number,)), Told({}))
    assert half.side.take_orders(reuses).overwritten == [save.number]
    half.told(Told({}), Told({}, staged=(save.number,)))
    assert half.side.take_orders(reuses).overwritten == []
