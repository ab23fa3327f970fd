"""A sliding-window model has two KV cache groups: failures are told by request, since a block id says too little."""

from __future__ import annotations

import pytest
from engines import (
    BLOCK,
    assert_equal,
    assert_told_once,
    engine,
    generate,
    page_hashes,
    prompts,
    scheduler_side,
    settle,
    tiny_gemma,
)
from hooked_connector import HookedConnector
from rigs import rig

from softload.protocols import PageStore
from softload.testing import FaultyStore, parse_fault


@pytest.fixture(params=["prefetch", "async"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_loads_and_their_failures(mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with rig(tmp_path_factory.mktemp("gemma"), model=tiny_gemma, extra={"mode": mode}) as one:
        asked, cold = one.computed(330, 200, 70)
        replay = generate(one.llm, asked)
        assert [answer.cached_tokens for answer in replay] == [len(prompt) // BLOCK * BLOCK for prompt in asked]
        assert_equal(cold, replay)
        settle(one.llm)

        asked, cold = one.computed(330, 331)
        one.faults.gone_while_landing.update(page_hashes(asked[0])[page] for page in (8, 9))
        replay = generate(one.llm, asked)
        assert_equal(cold, replay)
        assert replay[1].cached_tokens == 10 * BLOCK
        assert one.counters["failed_loads"] == len(HookedConnector.failed) == (mode == "async")
        assert not HookedConnector.seen_bad_blocks
        assert_told_once()
        settle(one.llm)
        statistics = one.statistics
        assert statistics.active_units == statistics.held_slots == statistics.landing_bytes_in_use == 0


def test_a_placement_that_fails_costs_the_request_its_recompute(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Held for no time at all, what has landed is given up before the scheduler has found blocks for it.
    with rig(tmp_path_factory.mktemp("gemma"), model=tiny_gemma, extra={"hold_limit": 0}) as one:
        asked, cold = one.computed(330, 200)
        replay = generate(one.llm, asked)
        assert_equal(cold, replay)
        assert one.counters["failed_loads"] == len(HookedConnector.failed) == 2
        assert not HookedConnector.seen_bad_blocks
        assert_told_once()
        settle(one.llm)
        again = generate(one.llm, asked)
        assert_equal(cold, again)


@pytest.mark.slow
@pytest.mark.parametrize("faults", ["remove=0.02", "late=0.2", "corrupt=0.05"])
def test_a_store_that_fails_at_random(mode: str, faults: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Removed after admission, past their lease, or another byte than was saved: found in mid-load."""
    # Every byte is checked: a single one between two samples would not be seen. The faults are decided by key.
    extra = {"mode": mode, "prefetch_ttl": 0, "integrity": "full", "namespace": "gemma"}

    def wrap(store: PageStore) -> PageStore:
        return FaultyStore(store, [parse_fault(faults)], seed=3)

    with engine(tiny_gemma(tmp_path_factory.mktemp("gemma")), wrap=wrap, extra=extra) as llm:
        family = prompts(*range(300, 330, 3), seed=17)
        cold = generate(llm, family)
        for _ in range(2):
            settle(llm)
            assert_equal(cold, generate(llm, family))
        counters = scheduler_side(llm).counters
        assert counters["restored_tokens"]
        if mode == "async" and faults != "late=0.2":  # a lease that ran out is good the second time
            assert counters["failed_loads"]
        assert not HookedConnector.seen_bad_blocks
