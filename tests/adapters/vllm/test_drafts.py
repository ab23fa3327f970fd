"""Speculation: a draft is restored with its target, and losing it costs accepted tokens, never the target's blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engines import Answer, Prompt, assert_equal, engine, generate, page_hashes, settle, worker
from hooked_connector import HookedConnector, PageFaults, page_of
from speculation import text_prompts, train
from vllm import LLM

from softload.protocols import PageStore

METHODS = ["eagle", "draft_model"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    train(folder, seconds=40.0)
    return folder


@dataclass(slots=True)
class Speculation:
    """An engine that speculates, and what it accepts."""

    llm: LLM
    faults: PageFaults
    prompts: list[Prompt]
    told: dict[str, float] = field(default_factory=dict)

    def run(self) -> tuple[list[Answer], float]:
        """Answers, and the mean accept length."""
        answers = generate(self.llm, self.prompts, max_tokens=64)
        settle(self.llm)
        drafts = self._added("vllm:spec_decode_num_drafts")
        return answers, 1 + self._added("vllm:spec_decode_num_accepted_tokens") / drafts

    def _added(self, name: str) -> float:
        total = next(metric.value for metric in self.llm.get_metrics() if metric.name == name)
        added = total - self.told.get(name, 0.0)
        self.told[name] = total
        return float(added)


def speculating(models: Path, method: str, policy: str, use: Callable[[Speculation], None]) -> None:
    wrapped: list[PageFaults] = []

    def wrap(store: PageStore) -> PageStore:
        wrapped.append(PageFaults(store))
        return wrapped[0]

    HookedConnector.seen_bad_blocks.clear()
    with engine(
        models / "target",
        wrap=wrap,
        extra={"prefetch_ttl": 0, "draft_policy": policy},
        num_gpu_blocks_override=256,
        max_num_seqs=8,
        disable_log_stats=False,
        speculative_config={"method": method, "model": str(models / method), "num_speculative_tokens": 4},
    ) as llm:
        use(Speculation(llm, wrapped[0], text_prompts(8, 300, seed=3)))
        assert not HookedConnector.seen_bad_blocks


@pytest.mark.parametrize("method", METHODS)
def test_a_dropped_draft_leaves_the_target(models: Path, method: str) -> None:
    def use(speculation: Speculation) -> None:
        cold, cold_length = speculation.run()
        replay, replay_length = speculation.run()
        assert_equal(cold, replay)
        assert {answer.cached_tokens for answer in replay} == {288}
        assert replay_length >= 0.98 * cold_length
        assert worker()._bridge.statistics().draft_dropped == 0

        speculation.faults.draft_gone = lambda key: True
        lost, lost_length = speculation.run()
        assert_equal(cold, lost)
        assert {answer.cached_tokens for answer in lost} == {288}
        assert worker()._bridge.statistics().draft_dropped == len(speculation.prompts)
        print(f"{method}: accept length {cold_length:.3f} cold, {replay_length:.3f} replayed, {lost_length:.3f} lost")

    speculating(models, method, "drop", use)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("policy", "cached"), [("truncate", 192), ("require", 192)])
def test_a_draft_that_ends_early(models: Path, method: str, policy: str, cached: int) -> None:
    def use(speculation: Speculation) -> None:
        cold, _ = speculation.run()
        # The last three blocks' draft: by `truncate_pages` no more than may be given up.
        pages = {page_of(key) for key in speculation.faults.keys}
        first = _first_pages(speculation.prompts, 6)
        assert first < pages
        speculation.faults.draft_gone = lambda key: page_of(key) not in first
        lost, _ = speculation.run()
        assert_equal(cold, lost)
        assert {answer.cached_tokens for answer in lost} == {cached}

    speculating(models, method, policy, use)


def _first_pages(prompts: list[Prompt], count: int) -> set[str]:
    return {page for prompt in prompts for page in page_hashes(prompt)[:count]}
