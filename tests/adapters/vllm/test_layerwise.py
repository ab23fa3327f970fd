"""Layer-wise loads: the forward waits for each layer, and a failure is told before any output is accepted."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator

import pytest
from engines import BLOCK, assert_equal, compare, core, generate, kv_bytes, page_hashes, settle, worker
from hooked_connector import HookedConnector, page_of
from rigs import Rig, rig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from softload.adapters.vllm import SoftloadConnector
from softload.adapters.vllm.messages import Orders

DEADLINE = 3.0
"""Long enough for a busy machine to get to the call that hangs."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("llama"), extra={"mode": "layerwise"}, async_scheduling=False) as made:
        yield made


@pytest.fixture
def one(shared: Rig) -> Iterator[Rig]:
    yield shared
    shared.heal()
    settle(shared.llm)
    assert not shared.statistics.suppressed_requests, "no attempt's name is ever used again"


LOST = pytest.mark.parametrize("lost", [[3], [1, 4, 7], None], ids=["one block", "three blocks", "all blocks"])


def test_every_whole_block_is_restored(one: Rig) -> None:
    prompts, cold = one.computed(200, 330, 70)
    replay = generate(one.llm, prompts)
    assert [answer.cached_tokens for answer in replay] == [len(prompt) // BLOCK * BLOCK for prompt in prompts]
    assert_equal(cold, replay)


@LOST
@pytest.mark.parametrize("moment", ["gone_while_landing", "removed_once_admitted"])
def test_blocks_that_fail_in_the_forward_are_computed_again(one: Rig, moment: str, lost: list[int] | None) -> None:
    prompts, cold = one.computed(330, 331, 332)
    before = one.counters
    for prompt in prompts:
        hashes = page_hashes(prompt)
        getattr(one.faults, moment).update(hashes[page] for page in (range(len(hashes)) if lost is None else lost))
    assert_equal(cold, generate(one.llm, prompts))
    assert HookedConnector.seen_bad_blocks
    assert one.counters["failed_loads"] == before["failed_loads"] + len(prompts)
    settle(one.llm)
    if moment == "removed_once_admitted":  # what was saved then is what was computed the second time
        one.heal()
        replay = generate(one.llm, prompts)
        assert [answer.cached_tokens for answer in replay] == [10 * BLOCK] * len(prompts)
        assert_equal(cold, replay)


@LOST
def test_the_same_failures_left_unreported_change_the_answer(one: Rig, lost: list[int] | None) -> None:
    prompts, cold = one.computed(330, 331, 332)
    for prompt in prompts:
        hashes = page_hashes(prompt)
        one.faults.gone_while_landing.update(hashes[page] for page in (range(len(hashes)) if lost is None else lost))
    HookedConnector.silent = True
    assert compare(cold, generate(one.llm, prompts)).different > 0


def test_what_is_computed_from_blocks_that_failed_is_not_saved(one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, cold = one.computed(330, 331, 332)
    hashes = [page_hashes(prompt) for prompt in prompts]
    # Six blocks are loaded, of which one fails, and four are computed in the same step.
    lost = {page for pages in hashes for page in pages[6:]}
    one.faults.inner.remove([key for key in one.faults.keys if page_of(key) in lost], force=True)
    one.faults.removed_once_admitted.update(pages[2] for pages in hashes)
    half = worker()._worker
    start_saves = half.start_saves

    def save_at_once(orders: Orders) -> None:  # before the next step computes the same blocks again
        start_saves(orders)
        assert half.drain(60.0)

    monkeypatch.setattr(half, "start_saves", save_at_once)
    orders = one.orders()
    assert_equal(cold, generate(one.llm, prompts))
    assert [len(load.keys) for load in orders.loads] == [6] * len(prompts)
    assert HookedConnector.seen_bad_blocks
    one.heal()
    settle(one.llm)
    replay = generate(one.llm, prompts)
    assert [answer.cached_tokens for answer in replay] == [10 * BLOCK] * len(prompts)
    assert_equal(cold, replay)


def test_requests_that_share_blocks_which_fail(one: Rig) -> None:
    (prompt,), _ = one.computed(330)
    family = [prompt[:200] + tail for tail in ([1, 2, 3], list(range(140)), [7] * 80)]
    cold = generate(one.llm, family)
    settle(one.llm)
    one.faults.gone_while_landing.add(page_hashes(prompt)[2])
    assert_equal(cold, generate(one.llm, family))
    one.heal()
    settle(one.llm)
    assert_equal(cold, generate(one.llm, family))


def test_an_engine_whose_failures_would_come_too_late_is_refused(one: Rig) -> None:
    connector = core(one.llm).scheduler.connector
    config = copy.copy(connector._vllm_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.async_scheduling = True
    with pytest.raises(ValueError, match="--no-async-scheduling"):
        SoftloadConnector(config, KVConnectorRole.SCHEDULER, connector._kv_cache_config)


def test_a_read_that_hangs_costs_the_deadline(tmp_path_factory: pytest.TempPathFactory) -> None:
    extra = {"mode": "layerwise", "deadline": DEADLINE, "lookup_deadline": DEADLINE}
    with rig(tmp_path_factory.mktemp("llama"), extra=extra, async_scheduling=False) as one:
        (prompt,), cold = one.computed(330)
        one.hanging.hold("read")
        started = time.monotonic()
        replay = generate(one.llm, [prompt])
        assert time.monotonic() - started < DEADLINE + 5.0  # the rest is for the engine's own work, on a busy machine
        assert one.hanging.held("read")
        assert_equal(cold, replay)
        before = kv_bytes()
        one.hanging.release()
        bridge = worker()._bridge
        bridge.call(lambda: bridge.loader.drain(), 60.0)
        assert all((now == then).all() for now, then in zip(kv_bytes(), before, strict=True))
