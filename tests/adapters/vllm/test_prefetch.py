"""Prefetch mode in a real engine: what fails costs its recompute and nothing else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engines import (
    BLOCK,
    Answer,
    add,
    answer_of,
    assert_equal,
    assert_told_once,
    core,
    generate,
    page_hashes,
    prompts,
    scheduler_side,
    settle,
    worker,
)
from hooked_connector import HookedConnector, page_of
from rigs import Rig, rig

from softload import saving
from softload.adapters.vllm.messages import Orders, PlaceOrder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("llama")) as made:
        yield made


@pytest.fixture
def one(shared: Rig) -> Iterator[Rig]:
    yield shared
    assert_told_once()
    shared.heal()
    settle(shared.llm)


def test_every_whole_block_is_restored(one: Rig) -> None:
    asked, cold = one.computed(200, 330, 70)
    replay = generate(one.llm, asked)
    assert [answer.cached_tokens for answer in replay] == [len(prompt) // BLOCK * BLOCK for prompt in asked]
    assert_equal(cold, replay)


@pytest.mark.parametrize("held", ["exists", "read"])
def test_a_request_whose_bytes_have_not_landed_holds_no_block_and_others_pass(
    one: Rig, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,), cold = one.computed(330)
    pages = set(page_hashes(prompt))
    one.hanging.hold(held, lambda keys: any(page_of(key) in pages for key in keys))
    add(one.llm, "waits", prompt)
    others = prompts(40, 100, 300, seed=21)
    answers: dict[str, Answer] = {}
    scheduler = core(one.llm).scheduler
    ask, questions = scheduler.connector.get_num_new_matched_tokens, []

    def asked(*args: Any) -> Any:
        started = time.monotonic()
        answer = ask(*args)
        questions.append(time.monotonic() - started)
        return answer

    monkeypatch.setattr(scheduler.connector, "get_num_new_matched_tokens", asked)

    def step() -> None:
        for output in one.llm.llm_engine.step():
            if output.finished:
                answers[output.request_id] = answer_of(output)
        for request in scheduler.requests.values():
            if request.request_id.startswith("waits") and one.hanging.held(held):
                assert not any(scheduler.kv_cache_manager.get_block_ids(request.request_id))

    while not one.hanging.held(held):
        step()
    for index, other in enumerate(others):
        add(one.llm, f"other {index}", other)
    while len(answers) < len(others):
        step()
    assert one.hanging.held(held)
    assert "waits" not in answers
    assert len(questions) > len(others)
    assert statistics.median(questions) < 0.1  # a question that waits would do so every time
    one.hanging.release()
    while one.llm.llm_engine.has_unfinished_requests():
        step()
    assert answers["waits"].cached_tokens == 10 * BLOCK
    assert_equal(cold, [answers["waits"]])


def test_the_last_token_is_always_computed(one: Rig) -> None:
    asked, cold = one.computed(4 * BLOCK)
    replay = generate(one.llm, asked)
    assert replay[0].cached_tokens == 3 * BLOCK
    assert_equal(cold, replay)


def test_generated_blocks_are_restored_as_part_of_a_longer_prompt(one: Rig) -> None:
    (prompt,), (cold,) = one.computed(50, max_tokens=60)
    longer = [*prompt, *cold.tokens]
    (expected,) = generate(one.llm, [longer])
    assert expected.cached_tokens == len(longer[:-1]) // BLOCK * BLOCK
    settle(one.llm)


@pytest.mark.parametrize("lost", [[3], [1, 4, 7], None], ids=["one block", "three blocks", "all blocks"])
@pytest.mark.parametrize("moment", ["gone_at_admission", "gone_while_landing"])
def test_a_lost_block_costs_what_follows_it(one: Rig, moment: str, lost: list[int] | None) -> None:
    (prompt,), cold = one.computed(330)
    hashes = page_hashes(prompt)
    chosen = range(len(hashes)) if lost is None else lost
    before = one.counters
    getattr(one.faults, moment).update(hashes[page] for page in chosen)
    replay = generate(one.llm, [prompt])
    assert replay[0].cached_tokens == min(chosen) * BLOCK
    assert_equal(cold, replay)
    assert one.counters["failed_loads"] == before["failed_loads"]
    assert not HookedConnector.seen_bad_blocks


@pytest.mark.parametrize("lost", [(), (3,), (20,)], ids=["nothing", "an early block", "a late block"])
def test_a_prompt_that_is_computed_in_chunks(one: Rig, lost: tuple[int, ...]) -> None:
    asked, cold = one.computed(900, 700)
    one.faults.gone_while_landing.update(page_hashes(prompt)[page] for prompt in asked for page in lost)
    replay = generate(one.llm, asked)
    assert [answer.cached_tokens for answer in replay] == [
        min([len(prompt) // BLOCK, *lost]) * BLOCK for prompt in asked
    ]
    assert_equal(cold, replay)


def test_what_the_engine_still_has_is_not_loaded(one: Rig) -> None:
    (prompt,), cold = one.computed(330)
    generate(one.llm, [prompt[:100]])
    orders = one.orders()
    replay = generate(one.llm, [prompt])
    assert [len(place.block_ids[0]) for place in orders.places] == [7]
    assert replay[0].cached_tokens == 10 * BLOCK
    assert_equal(cold, replay)


def test_a_placement_of_what_is_not_there_any_more_is_told_as_failed(one: Rig) -> None:
    half = worker()._worker
    half.start_loads(Orders(places=[PlaceOrder(("nobody", 0), ((5, 6),))]))
    until = time.monotonic() + 60
    while not (told := half._outbox.take_received())[0]:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert told == ({"nobody"}, set(), {5, 6})


def test_recomputed_blocks_are_saved_again(one: Rig) -> None:
    (prompt,), cold = one.computed(330)
    hashes = page_hashes(prompt)
    one.faults.inner.remove([key for key in one.faults.keys if hashes[4] in key], force=True)
    assert generate(one.llm, [prompt])[0].cached_tokens == 4 * BLOCK
    settle(one.llm)
    again = generate(one.llm, [prompt])
    assert again[0].cached_tokens == 10 * BLOCK
    assert_equal(cold, again)


def test_requests_that_share_a_prefix_at_the_same_time(one: Rig) -> None:
    (prompt,), _ = one.computed(330)
    family = [prompt[:200] + tail for tail in ([1, 2, 3], list(range(140)), [7] * 80)]
    cold = generate(one.llm, family)
    settle(one.llm)
    replay = generate(one.llm, family)
    assert all(answer.cached_tokens >= 192 for answer in replay)
    assert_equal(cold, replay)


def test_nothing_is_left_behind(one: Rig) -> None:
    asked, _ = one.computed(200, 330)
    generate(one.llm, asked)
    settle(one.llm)
    loader = one.statistics
    assert loader.active_units == loader.held_slots == loader.landing_bytes_in_use == 0
    assert not scheduler_side(one.llm)._states
    assert not scheduler_side(one.llm)._unstaged


def test_what_is_larger_than_the_landing_memory_loads_into_blocks(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_GRANT_SECONDS", 60.0)  # an eighth of it is for saves, which take turns
    with rig(tmp_path_factory.mktemp("llama"), extra={"landing_bytes": "512KiB"}) as small:
        asked, cold = small.computed(330, 100)
        orders = small.orders()
        replay = generate(small.llm, asked)
        assert [answer.cached_tokens for answer in replay] == [10 * BLOCK, 3 * BLOCK]
        assert_equal(cold, replay)
        assert [len(load.keys) for load in orders.loads] == [10]
        assert [len(place.block_ids[0]) for place in orders.places] == [3]


def test_what_was_let_go_before_there_were_blocks_for_it_is_computed(tmp_path_factory: pytest.TempPathFactory) -> None:
    with rig(tmp_path_factory.mktemp("llama"), extra={"hold_limit": 0}) as one:
        asked, cold = one.computed(330, 200)
        replay = generate(one.llm, asked)
        assert_equal(cold, replay)
        assert one.counters["failed_loads"] == 2
        assert len(set().union(*HookedConnector.seen_bad_blocks)) == 10 + 6
        assert not HookedConnector.failed
        assert_told_once()
        settle(one.llm)
        assert_equal(cold, generate(one.llm, asked))
