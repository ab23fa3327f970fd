"""50 short requests beside 10 long ones whose blocks are in the store."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from engines import (
    BLOCK,
    Answer,
    Prompt,
    answer_of,
    core,
    engine,
    generate,
    prompts,
    sampling,
    scheduler_side,
    settle,
)
from hooked_connector import PageFaults
from vllm import LLM
from vllm.v1.request import RequestStatus

from softload.protocols import PageStore
from softload.testing import Fault, FaultKind, FaultyStore

SHORT, LONG = 50, 10
_LONG_TOKENS = 30 * BLOCK + 5


@dataclass(slots=True)
class SideBySide:
    """What one run showed.

    Args:
        answers: of the short requests, then of the long ones.
        short_seconds: from a short request's arrival to its end.
        long_seconds: the same of the long ones.
        seen_waiting: requests that waited for bytes, summed over steps.
        held_while_waiting: those of them that held a block.
        restored_tokens: tokens that came from the store.
    """

    answers: list[Answer] = field(default_factory=list)
    short_seconds: list[float] = field(default_factory=list)
    long_seconds: list[float] = field(default_factory=list)
    long_tokens: int = _LONG_TOKENS
    seen_waiting: int = 0
    held_while_waiting: int = 0
    restored_tokens: int = 0

    @property
    def short_p99(self) -> float:
        """Of 50, that is the longest."""
        return max(self.short_seconds)


def side_by_side(model: Path, *, seconds_per_read: float, seed: int = 7) -> SideBySide:
    """Save the long prompts, forget them, and run all requests; the short ones arrive one every 40 ms."""
    run = SideBySide()
    wrapped: list[PageFaults] = []

    def wrap(store: PageStore) -> PageStore:
        slow = FaultyStore(store, [Fault(FaultKind.SLOW, probability=1.0, seconds=seconds_per_read)])
        wrapped.append(PageFaults(slow))
        return wrapped[0]

    # Blocks for about five of the long requests: if one took its blocks before its bytes, short ones would wait.
    extra = {"prefetch_ttl": 0, "deadline": 30, "landing_bytes": "128MiB"}
    with engine(model, wrap=wrap, extra=extra, num_gpu_blocks_override=180, max_num_seqs=16) as llm:
        long_prompts = prompts(*[_LONG_TOKENS] * LONG, seed=seed)
        chosen = random.Random(seed)
        short_prompts = prompts(*[chosen.randrange(20, 100) for _ in range(SHORT)], seed=seed + 1)
        generate(llm, long_prompts, max_tokens=1)
        settle(llm)
        before = scheduler_side(llm).counters["restored_tokens"]
        _run(llm, run, wrapped[0], short_prompts, long_prompts)
        run.restored_tokens = scheduler_side(llm).counters["restored_tokens"] - before
    return run


def _run(llm: LLM, run: SideBySide, store: PageFaults, short_prompts: list[Prompt], long_prompts: list[Prompt]) -> None:
    started = time.monotonic()
    arrivals = [(0.0, f"long {index}", prompt) for index, prompt in enumerate(long_prompts)]
    arrivals += [(0.04 * index, f"short {index}", prompt) for index, prompt in enumerate(short_prompts)]
    arrivals.sort(key=lambda arrival: arrival[0])
    due: dict[str, float] = {}
    answers: dict[str, Answer] = {}
    while arrivals or llm.llm_engine.has_unfinished_requests():
        now = time.monotonic() - started
        while arrivals and arrivals[0][0] <= now:
            at, name, prompt = arrivals.pop(0)
            due[name] = at
            llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling(8))
        for output in llm.llm_engine.step():
            if output.finished:
                ended = time.monotonic() - started
                seconds = run.short_seconds if output.request_id.startswith("short") else run.long_seconds
                seconds.append(ended - due[output.request_id])
                answers[output.request_id] = answer_of(output)
        _look(llm, run, store)
        time.sleep(0.001)  # as the engine's own loop does when nothing was computed
    names = [f"short {index}" for index in range(SHORT)] + [f"long {index}" for index in range(LONG)]
    run.answers = [answers[name] for name in names]


def _look(llm: LLM, run: SideBySide, store: PageFaults) -> None:
    """Between two steps: the long requests whose bytes were not all read, and whether they hold blocks for them."""
    scheduler = core(llm).scheduler
    for request in scheduler.requests.values():
        if request.status is RequestStatus.RUNNING or request.num_prompt_tokens < _LONG_TOKENS:
            continue
        unread = [bool(store.unread[bytes(digest).hex()]) for digest in request.block_hashes]
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        run.seen_waiting += any(unread)
        run.held_while_waiting += any(unread[: len(blocks)])
