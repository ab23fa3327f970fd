"""200 requests that share prefixes, a fifth of the keys evicted under them: equal tokens to a run without connector."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines import Answer, assert_equal, engine, generate, tiny_llama
from family import family_of_prompts

pytestmark = pytest.mark.slow

# So few blocks that the engine's own prefix cache cannot serve what comes again.
BLOCKS = 72


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(model: Path) -> list[Answer]:
    with engine(model, connector=False, num_gpu_blocks_override=BLOCKS) as llm:
        return generate(llm, family_of_prompts(), max_tokens=8)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("multiprocessing", [False, True], ids=["in process", "engine process"])
def test_a_fifth_of_the_keys_is_evicted(
    multiprocessing: bool, model: Path, plain: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(multiprocessing)))
    monkeypatch.setenv("SOFTLOAD_TEST_FAULTS", json.dumps(["evict=0.2"]))
    family = family_of_prompts()
    with engine(model, extra={"prefetch_ttl": 0}, num_gpu_blocks_override=BLOCKS) as llm:
        first = generate(llm, family, max_tokens=8)
        second = generate(llm, family, max_tokens=8)
    assert_equal(plain, first)
    assert_equal(plain, second)
    gained = sum(answer.cached_tokens for answer in second) - sum(answer.cached_tokens for answer in plain)
    print("tokens from the store:", gained)
    assert gained > 2000
