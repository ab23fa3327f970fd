"""A sliding-window model has two KV cache groups: failures are told by request, since a block id says too little."""

from __future__ import annotations

import pytest
from engines import BLOCK, assert_equal, generate, page_hashes, settle, tiny_gemma
from hooked_connector import HookedConnector
from rigs import rig


@pytest.fixture(params=["prefetch", "async"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_loads_and_their_failures(mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with rig(tmp_path_factory.mktemp("gemma"), model=tiny_gemma, extra={"mode": mode}) as one:
        prompts, cold = one.computed(330, 200, 70)
        replay = generate(one.llm, prompts)
        assert [answer.cached_tokens for answer in replay] == [len(prompt) // BLOCK * BLOCK for prompt in prompts]
        assert_equal(cold, replay)
        settle(one.llm)

        prompts, cold = one.computed(330, 331)
        one.faults.gone_while_landing.update(page_hashes(prompts[0])[page] for page in (8, 9))
        replay = generate(one.llm, prompts)
        assert_equal(cold, replay)
        assert replay[1].cached_tokens == 10 * BLOCK
        assert one.counters["failed_loads"] == (mode == "async")
        assert not HookedConnector.seen_bad_blocks
        settle(one.llm)
        statistics = one.statistics
        assert statistics.active_units == statistics.held_slots == statistics.landing_bytes_in_use == 0


def test_a_placement_that_fails_costs_the_request_its_recompute(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Held for no time at all, what has landed is given up before the scheduler has found blocks for it.
    with rig(tmp_path_factory.mktemp("gemma"), model=tiny_gemma, extra={"hold_limit": 0}) as one:
        prompts, cold = one.computed(330, 200)
        replay = generate(one.llm, prompts)
        assert_equal(cold, replay)
        assert one.counters["failed_loads"] == 2
        assert not HookedConnector.seen_bad_blocks
        settle(one.llm)
        again = generate(one.llm, prompts)
        assert_equal(cold, again)
