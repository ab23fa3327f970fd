"""Two tensor-parallel workers, each with a store of its own in which other blocks fail: both do the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines import Answer, assert_equal, engine, generate, tiny_llama
from family import family_of_prompts

# So few blocks that the engine's own prefix cache cannot serve what comes again.
BLOCKS = 72
REQUESTS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(model: Path) -> list[Answer]:
    with engine(model, connector=False, num_gpu_blocks_override=BLOCKS) as llm:
        return generate(llm, family_of_prompts()[:REQUESTS], max_tokens=8)


@pytest.mark.timeout(300)  # three processes import the engine
@pytest.mark.parametrize(
    ("mode", "fault"), [("prefetch", "evict=0.1"), pytest.param("async", "remove=0.05", marks=pytest.mark.slow)]
)
def test_ranks_that_have_lost_different_blocks(
    mode: str, fault: str, model: Path, plain: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # by default a rank has a NUMA node of its own
    monkeypatch.setenv("SOFTLOAD_TEST_FAULTS", json.dumps([fault]))
    family = family_of_prompts()[:REQUESTS]
    with engine(
        model,
        extra={"mode": mode, "prefetch_ttl": 0},
        num_gpu_blocks_override=BLOCKS,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        disable_log_stats=False,
    ) as llm:
        first = generate(llm, family, max_tokens=8)
        second = generate(llm, family, max_tokens=8)
        failed = next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:softload_failed_loads")
    assert_equal(plain, first)
    assert_equal(plain, second)
    gained = sum(answer.cached_tokens for answer in second) - sum(answer.cached_tokens for answer in plain)
    print("tokens from the store:", gained)
    assert gained > 1000
    if mode == "async":
        assert failed > 0
