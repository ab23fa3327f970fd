"""Speculation: a draft is restored with its target, and losing it costs accepted tokens, never the target's blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import assert_equal
from hooked_connector import HookedConnector
from speculating import METHODS, speculating
from speculation import passages, train
from structlog.testing import capture_logs


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    train(folder, steps=120)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_dropped_draft_leaves_the_target(models: Path, method: str) -> None:
    HookedConnector.seen_bad_blocks.clear()
    prompts = passages(16, 300, seed=3)
    with speculating(models, method, "drop") as speculation:
        cold = speculation.run(prompts)
        replay = speculation.run(prompts)
        assert_equal(cold.answers, replay.answers)
        assert {answer.cached_tokens for answer in replay.answers} == {288}
        assert replay.length >= 0.98 * cold.length
        assert speculation.dropped == 0

        speculation.lose_draft(prompts)
        with capture_logs() as lines:
            lost = speculation.run(prompts)
        assert_equal(cold.answers, lost.answers)
        assert {answer.cached_tokens for answer in lost.answers} == {288}
        assert speculation.dropped == len(prompts)
        dropped = [line["request_id"] for line in lines if line["event"] == "draft.dropped"]
        assert len(dropped) == len(set(dropped)) == len(prompts)
        assert not HookedConnector.seen_bad_blocks
        print(f"{method}: accept length {cold.length:.3f} cold, {replay.length:.3f} replayed, {lost.length:.3f} lost")
        assert lost.length < 0.95 * cold.length


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("policy", ["truncate", "require"])
def test_a_draft_that_ends_early(models: Path, method: str, policy: str) -> None:
    HookedConnector.seen_bad_blocks.clear()
    prompts = passages(8, 300, seed=3)
    with speculating(models, method, policy) as speculation:
        cold = speculation.run(prompts)
        # The last three blocks' draft: by `truncate_pages` no more than may be given up.
        speculation.lose_draft(prompts, from_page=6)
        lost = speculation.run(prompts)
        assert_equal(cold.answers, lost.answers)
        assert {answer.cached_tokens for answer in lost.answers} == {192}
        assert not HookedConnector.seen_bad_blocks
