"""Two tensor-parallel workers in processes of their own do the same, whatever each of them finds in its store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import Answer, assert_equal, engine, generate, tiny_llama
from family import family_of_prompts
from vllm.v1.metrics.reader import Counter

from softload.adapters.vllm.stats import METRICS

pytestmark = pytest.mark.timeout(300)  # three processes import the engine

# So few blocks that the engine's own prefix cache cannot serve what comes again.
BLOCKS = 72
REQUESTS = 40


def computed(model: Path) -> list[Answer]:
    with engine(model, connector=False, num_gpu_blocks_override=BLOCKS) as llm:
        return generate(llm, family_of_prompts()[:REQUESTS], max_tokens=8)


def check_twice(model: Path, monkeypatch: pytest.MonkeyPatch, **extra: Any) -> dict[str, float]:
    """Two ranks answer everything twice, as one rank without a connector does; the metrics."""
    plain, family = computed(model), family_of_prompts()[:REQUESTS]
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # by default a rank has a NUMA node of its own
    with engine(
        model,
        extra={"prefetch_ttl": 0, **extra},
        num_gpu_blocks_override=BLOCKS,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        disable_log_stats=False,
    ) as llm:
        first = generate(llm, family, max_tokens=8)
        second = generate(llm, family, max_tokens=8)
        metrics = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
    assert_equal(plain, first)
    assert_equal(plain, second)
    gained = sum(answer.cached_tokens for answer in second) - sum(answer.cached_tokens for answer in plain)
    print("tokens from the store:", gained)
    assert gained > 1000
    assert {f"vllm:softload_{name}" for name in METRICS} <= set(metrics)
    for name in ("restored_tokens", "restored_pages", "loaded_bytes", "saved_pages", "saved_bytes"):
        assert metrics[f"vllm:softload_{name}"] > 0
    return metrics


@pytest.mark.parametrize(
    ("mode", "fault"), [("prefetch", "evict=0.1"), pytest.param("async", "remove=0.05", marks=pytest.mark.slow)]
)
def test_ranks_that_have_lost_different_blocks(
    mode: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTLOAD_TEST_FAULTS", json.dumps([fault]))
    metrics = check_twice(tiny_llama(tmp_path), monkeypatch, mode=mode)
    assert (metrics["vllm:softload_failed_loads"] > 0) == (mode == "async")
