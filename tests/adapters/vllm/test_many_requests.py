"""200 requests that share prefixes, a fifth of the keys evicted under them: equal tokens to a run without connector."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from engines import Prompt, assert_equal, engine, generate, prompts, tiny_llama

REQUESTS = 200


def family_of_prompts(seed: int = 5) -> list[Prompt]:
    """Conversations: prefixes of a few long texts, each with a tail of its own."""
    chosen = random.Random(seed)
    roots = prompts(*[480] * 12, seed=seed)
    family = []
    for _ in range(REQUESTS):
        root = chosen.choice(roots)
        tail = [chosen.randrange(512) for _ in range(chosen.randrange(1, 40))]
        family.append(root[: chosen.randrange(40, len(root))] + tail)
    return family


@pytest.mark.parametrize("multiprocessing", [False, True], ids=["in process", "engine process"])
@pytest.mark.slow
def test_a_fifth_of_the_keys_is_evicted(multiprocessing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(multiprocessing)))
    monkeypatch.setenv("SOFTLOAD_TEST_FAULTS", json.dumps(["evict=0.2"]))
    model, family = tiny_llama(tmp_path), family_of_prompts()
    # So few blocks that the engine's own prefix cache cannot serve what comes again.
    blocks = 72
    with engine(model, connector=False, num_gpu_blocks_override=blocks) as llm:
        plain = generate(llm, family, max_tokens=8)
    with engine(model, extra={"prefetch_ttl": 0}, num_gpu_blocks_override=blocks) as llm:
        first = generate(llm, family, max_tokens=8)
        second = generate(llm, family, max_tokens=8)
    assert_equal(plain, first)
    assert_equal(plain, second)
    gained = sum(answer.cached_tokens for answer in second) - sum(answer.cached_tokens for answer in plain)
    print("tokens from the store:", gained)
    assert gained > 2000
