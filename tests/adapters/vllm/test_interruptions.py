"""Abort, preemption, shutdown and hung calls in mid-load: nothing hangs, and blocks given up are never written."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from engines import (
    BLOCK,
    add,
    answer_of,
    assert_equal,
    assert_told_once,
    core,
    generate,
    kv_bytes,
    page_hashes,
    prompts,
    scheduler_side,
    settle,
    step_to_the_end,
    step_until,
    worker,
)
from rigs import Rig, rig

DEADLINE = 3.0
"""Long enough for a busy machine to get to the call that hangs."""

OWN_SECONDS = 5.0
"""For the engine's own work, on such a machine."""

PATIENCE = {"deadline": 120.0, "lookup_deadline": 120.0}
"""For calls that a test holds and releases."""


@pytest.fixture(scope="module", params=["prefetch", "async"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("llama"), extra={"mode": request.param, **PATIENCE}) as made:
        yield made


@pytest.fixture
def one(shared: Rig) -> Iterator[Rig]:
    yield shared
    assert_told_once()
    shared.heal()
    drained(shared)
    settle(shared.llm)
    assert not shared.statistics.suppressed_requests, "no attempt's name is ever used again"


def drained(one: Rig) -> None:
    """Saves have ended, and every native call has returned."""
    assert worker()._worker.drain(60.0)
    bridge = worker()._bridge
    bridge.call(lambda: bridge.loader.drain(), 60.0)


def assert_unwritten_since(before: list[torch.Tensor]) -> None:
    assert all(torch.equal(now, then) for now, then in zip(kv_bytes(), before, strict=True))


@pytest.mark.parametrize("mode", ["prefetch", "async"])
def test_a_read_that_hangs_costs_the_deadline(mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    extra = {**PATIENCE, "mode": mode, "deadline": DEADLINE}
    with rig(tmp_path_factory.mktemp("llama"), extra=extra) as one:
        (prompt,), cold = one.computed(330)
        one.hanging.hold("read")
        started = time.monotonic()
        replay = generate(one.llm, [prompt])
        assert time.monotonic() - started < DEADLINE + OWN_SECONDS
        assert one.hanging.held("read")
        assert_equal(cold, replay)
        before = kv_bytes()
        one.hanging.release()
        drained(one)
        assert_unwritten_since(before)


def test_an_engine_that_has_only_a_load_to_wait_for_does_not_spin(one: Rig) -> None:
    (prompt,), _ = one.computed(330)
    one.hanging.hold("read")
    add(one.llm, "waits", prompt)
    step_until(one.llm, lambda: one.hanging.held("read") > 0)
    processor, wall = time.thread_time(), time.monotonic()
    for _ in range(100):
        one.llm.llm_engine.step()
    assert time.thread_time() - processor < (time.monotonic() - wall) / 2
    one.hanging.release()
    step_to_the_end(one.llm)


@pytest.mark.parametrize("mode", ["prefetch", "async"])
def test_a_lookup_that_hangs_costs_its_own_deadline(mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    extra = {**PATIENCE, "mode": mode, "lookup_deadline": DEADLINE}
    with rig(tmp_path_factory.mktemp("llama"), extra=extra) as one:
        (prompt,), cold = one.computed(330)
        one.hanging.hold("exists")
        started = time.monotonic()
        replay = generate(one.llm, [prompt])
        assert time.monotonic() - started < DEADLINE + OWN_SECONDS
        assert replay[0].cached_tokens == 0
        assert_equal(cold, replay)
        one.hanging.release()


def test_an_aborted_request_takes_no_bytes_any_more(one: Rig) -> None:
    (prompt, other), cold = one.computed(330, 300)
    one.hanging.hold("read")
    add(one.llm, "aborted", prompt)
    step_until(one.llm, lambda: one.hanging.held("read") > 0)
    one.llm.llm_engine.abort_request(["aborted"])
    one.faults.gone_at_admission.update(page_hashes(other))  # it is computed, into whatever blocks are free
    replay = generate(one.llm, [other])
    assert_equal(cold[1:], replay)
    step_to_the_end(one.llm)
    step_until(one.llm, lambda: not core(one.llm).scheduler.requests)
    before = kv_bytes()
    one.hanging.release()
    drained(one)
    assert_unwritten_since(before)


def test_an_aborted_request_gives_its_blocks_back_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    with rig(tmp_path_factory.mktemp("llama"), extra={"mode": "async", **PATIENCE}) as one:
        (prompt,), _ = one.computed(330)
        one.hanging.hold("read")
        add(one.llm, "aborted", prompt)
        step_until(one.llm, lambda: one.hanging.held("read") > 0)
        one.llm.llm_engine.abort_request(["aborted"])
        one.hanging.hold("exists")
        add(one.llm, "other", prompts(40, seed=9)[0])  # only a request that is there makes the engine step
        known = core(one.llm).scheduler.requests
        step_until(one.llm, lambda: not any(name.startswith("aborted") for name in known))
        one.hanging.release("exists")
        step_until(one.llm, lambda: not known)
        assert one.llm.reset_prefix_cache()
        before = kv_bytes()
        one.hanging.release()
        drained(one)
        assert_unwritten_since(before)


def test_a_request_that_is_aborted_before_it_was_answered(one: Rig) -> None:
    (prompt,), _ = one.computed(330)
    one.hanging.hold("exists")
    add(one.llm, "aborted early", prompt)
    step_until(one.llm, lambda: one.hanging.held("exists") > 0)
    one.llm.llm_engine.abort_request(["aborted early"])
    one.hanging.release()
    generate(one.llm, prompts(40, seed=9))
    step_until(one.llm, lambda: not core(one.llm).scheduler.requests)
    drained(one)
    assert one.statistics.landing_bytes_in_use == 0


def test_a_request_that_has_the_name_of_an_aborted_one(one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    (prompt, other), (_, cold) = one.computed(330, 300)
    one.hanging.hold("exists")
    add(one.llm, "same", prompt)
    step_until(one.llm, lambda: one.hanging.held("exists") > 0)
    one.llm.llm_engine.abort_request(["same"])
    one.hanging.release()
    add(one.llm, "same", other)
    outputs = []
    while one.llm.llm_engine.has_unfinished_requests():
        outputs += one.llm.llm_engine.step()
    answer = answer_of(outputs[-1])
    assert answer.cached_tokens == 300 // BLOCK * BLOCK
    assert_equal([cold], [answer])


def test_puts_that_hang_hold_no_block_and_no_request(one: Rig) -> None:
    one.hanging.hold("put_start")
    started = time.monotonic()
    answers = generate(one.llm, prompts(300, 301, 302, 303, 304, 305, 306, 307, seed=77))
    assert time.monotonic() - started < 20  # a save has 30
    assert one.llm.reset_prefix_cache()
    one.hanging.release()
    settle(one.llm)
    assert_equal(answers, generate(one.llm, prompts(300, 301, 302, 303, 304, 305, 306, 307, seed=77)))


@pytest.mark.parametrize("mode", ["prefetch", "async"])
def test_preempted_requests_resume_from_what_was_saved(mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    lengths = (200, 210, 220, 230)
    with rig(
        tmp_path_factory.mktemp("llama"), extra={"mode": mode}, num_gpu_blocks_override=256, max_num_seqs=4
    ) as one:
        expected = generate(one.llm, prompts(*lengths, seed=31), max_tokens=200)
    with rig(
        tmp_path_factory.mktemp("llama"),
        extra={"mode": mode},
        num_gpu_blocks_override=36,
        max_num_seqs=4,
        disable_log_stats=False,
    ) as one:
        for _ in range(2):
            assert_equal(expected, generate(one.llm, prompts(*lengths, seed=31), max_tokens=200))
            settle(one.llm)
        preempted = next(metric.value for metric in one.llm.get_metrics() if metric.name == "vllm:num_preemptions")
        assert preempted > 0
        # More than the prompts' blocks: what was preempted comes back too, also what the engine had when it was first
        # asked and lost while the request waited for blocks.
        assert one.counters["restored_tokens"] > sum(length // BLOCK * BLOCK for length in lengths)
        drained(one)
        assert one.statistics.held_slots == 0


@pytest.mark.parametrize("mode", ["prefetch", "async"])
def test_blocks_of_preempted_requests_are_not_written_late(mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What was preempted is looked up again; its reads hang, and return when its blocks have been computed."""
    lengths = (200, 210, 220, 230)
    extra = {**PATIENCE, "mode": mode, "deadline": DEADLINE}
    with rig(tmp_path_factory.mktemp("llama"), extra=extra, num_gpu_blocks_override=36, max_num_seqs=4) as one:
        expected = generate(one.llm, prompts(*lengths, seed=31), max_tokens=200)
        settle(one.llm)
        scheduler = core(one.llm).scheduler
        one.hanging.hold("read", lambda keys: any(r.num_preemptions for r in list(scheduler.requests.values())))
        assert_equal(expected, generate(one.llm, prompts(*lengths, seed=31), max_tokens=200))
        assert one.hanging.held("read")
        assert worker()._worker.drain(60.0)
        before = kv_bytes()
        one.hanging.release()
        drained(one)
        assert_unwritten_since(before)


def test_a_save_that_does_not_read_its_blocks_in_time_is_given_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The device does not get to the point where blocks may be read, and others want them."""
    with rig(tmp_path_factory.mktemp("llama"), num_gpu_blocks_override=24, max_model_len=512) as one:
        family = prompts(330, 331, 332, seed=41)
        reached = threading.Event()
        worker()._worker._fence = lambda: reached.wait
        cold = generate(one.llm, family)  # there is room for two of them
        reached.set()
        settle(one.llm)
        replay = generate(one.llm, family)
        assert_equal(cold, replay)
        assert any(not answer.cached_tokens for answer in replay)
        assert any(answer.cached_tokens for answer in replay)


def test_saves_have_read_their_blocks_when_their_step_ends_where_new_blocks_are_zeroed(
    one: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = worker()._worker
    monkeypatch.setattr(type(worker()._kv_cache_config), "needs_kv_cache_zeroing", True)
    monkeypatch.setattr(half, "_fence", lambda: lambda: time.sleep(0.02))  # a device that is slower than its host
    (prompt,) = prompts(330, seed=43)
    add(one.llm, "saved", prompt, max_tokens=40)
    ordered = scheduler_side(one.llm)._saves_ordered
    while one.llm.llm_engine.has_unfinished_requests():
        one.llm.llm_engine.step()
        assert not half._saves
    assert scheduler_side(one.llm)._saves_ordered >= ordered + 2


@pytest.mark.parametrize("mode", ["prefetch", "async"])
def test_shutdown_in_mid_load_is_bounded(mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with rig(tmp_path_factory.mktemp("llama"), extra={"mode": mode, **PATIENCE}) as one:
        (prompt,), _ = one.computed(330)
        one.hanging.hold("read")
        add(one.llm, "in flight", prompt)
        step_until(one.llm, lambda: one.hanging.held("read") > 0)
        started = time.monotonic()
    assert time.monotonic() - started < 60
    one.hanging.release()
