"""Loads into allocated blocks: a failure after allocation is told block by block, and costs those blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engines import BLOCK, assert_equal, assert_told_once, compare, core, generate, page_hashes, settle
from hooked_connector import HookedConnector
from rigs import Rig, rig


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("llama"), extra={"mode": "async"}) as made:
        yield made


@pytest.fixture
def one(shared: Rig) -> Iterator[Rig]:
    yield shared
    assert_told_once()
    shared.heal()
    settle(shared.llm)


LOST = pytest.mark.parametrize("lost", [[3], [1, 4, 7], None], ids=["one block", "three blocks", "all blocks"])


def test_every_whole_block_is_restored(one: Rig) -> None:
    prompts, cold = one.computed(200, 330, 70)
    replay = generate(one.llm, prompts)
    assert [answer.cached_tokens for answer in replay] == [len(prompt) // BLOCK * BLOCK for prompt in prompts]
    assert_equal(cold, replay)


@LOST
@pytest.mark.parametrize("moment", ["gone_while_landing", "removed_once_admitted"])
def test_blocks_that_fail_after_allocation_are_computed_again(one: Rig, moment: str, lost: list[int] | None) -> None:
    (prompt,), cold = one.computed(330)
    hashes = page_hashes(prompt)
    chosen = range(len(hashes)) if lost is None else lost
    before = one.counters
    getattr(one.faults, moment).update(hashes[page] for page in chosen)
    replay = generate(one.llm, [prompt])
    assert_equal(cold, replay)
    assert len(HookedConnector.seen_bad_blocks) == 1
    assert len(HookedConnector.seen_bad_blocks[0]) == len(hashes) - min(chosen)
    assert one.counters["failed_loads"] == before["failed_loads"] + 1
    if moment == "removed_once_admitted":  # what is saved then is what was computed the second time
        assert_told_once()
        one.heal()
        settle(one.llm)
        replay = generate(one.llm, [prompt])
        assert replay[0].cached_tokens == 10 * BLOCK
        assert_equal(cold, replay)


@LOST
def test_the_same_failures_left_unreported_change_the_answer(one: Rig, lost: list[int] | None) -> None:
    """Or else the tests above would show nothing."""
    prompts, cold = one.computed(330, 331, 332)
    one.faults.gone_while_landing.update(
        hashes[page]
        for prompt in prompts
        for hashes in [page_hashes(prompt)]
        for page in (range(len(hashes)) if lost is None else lost)
    )
    HookedConnector.silent = True
    replay = generate(one.llm, prompts)
    assert HookedConnector.seen_bad_blocks
    assert compare(cold, replay).different > 0


def test_a_request_whose_first_block_always_fails_is_computed_at_once(one: Rig) -> None:
    (prompt,), cold = one.computed(330)
    one.faults.gone_while_landing.add(page_hashes(prompt)[0])
    steps: list[tuple[str, int]] = []
    scheduler = core(one.llm).scheduler
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def scheduled(*args: object) -> object:
        output = schedule(*args)
        steps.append(("scheduled", output.total_num_scheduled_tokens))
        return output

    def updated(output: object, result: Any) -> object:
        told = result.kv_connector_output
        steps.append(("failed", len(told.invalid_block_ids) if told is not None else 0))
        return update(output, result)

    scheduler.schedule, scheduler.update_from_output = scheduled, updated
    try:
        replay = generate(one.llm, [prompt])
    finally:
        del scheduler.schedule, scheduler.update_from_output
    assert_equal(cold, replay)
    reported = [index for index, (kind, count) in enumerate(steps) if kind == "failed" and count]
    assert len(reported) == 1
    following = [count for kind, count in steps[reported[0] :] if kind == "scheduled"]
    assert any(following[:2])
