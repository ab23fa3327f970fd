"""What losing a draft costs: accept lengths of EAGLE and of a draft model, cold, replayed and with the draft lost.

Run it in the environment of `make test-vllm`: `.venv-vllm/bin/python benchmarks/vllm_drafts.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/adapters/vllm"))
import conftest  # noqa: E402, F401  # the engine's settings; before vLLM is imported

from engines import compare  # noqa: E402  # isort: skip
from speculating import METHODS, Accepted, speculating  # noqa: E402  # isort: skip
from speculation import passages, train  # noqa: E402  # isort: skip

PROMPT_TOKENS = 300


def main() -> None:
    """Train, run every method under every policy, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="sets of prompts, whose figures are added up")
    parser.add_argument("--requests", type=int, default=64, help="requests per seed")
    parser.add_argument("--steps", type=int, default=200, help="training steps of each model")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--models", type=Path, help="a folder of models that were trained before")
    options = parser.parse_args()
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        models = options.models or Path(folder)
        if options.models is None:
            train(models, steps=options.steps)
        for method in options.methods:
            for policy in ("drop", "truncate", "require"):
                rows += _measure(models, method, policy, options.seeds, options.requests)
    print("| method | policy | run | accept length | of cold | drafts | restored tokens a request | unequal answers |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(rows))


def _measure(models: Path, method: str, policy: str, seeds: int, requests: int) -> list[str]:
    runs: dict[str, list[Accepted]] = defaultdict(list)
    different: dict[str, int] = defaultdict(int)
    with speculating(models, method, policy) as speculation:
        for seed in range(seeds):
            prompts = passages(requests, PROMPT_TOKENS, seed=seed)
            runs["cold"].append(speculation.run(prompts))
            runs["replayed"].append(speculation.run(prompts))
            speculation.lose_draft(prompts, from_page=6)
            runs["draft ends at block 6 of 9"].append(speculation.run(prompts))
            speculation.lose_draft(prompts)
            runs["draft lost"].append(speculation.run(prompts))
            speculation.heal()
            for name, made in runs.items():
                different[name] += compare(runs["cold"][-1].answers, made[-1].answers).different
    rows = []
    cold_length = _length(runs["cold"])
    for name, made in runs.items():
        restored = sum(answer.cached_tokens for run in made for answer in run.answers) / (seeds * requests)
        rows.append(
            f"| {method} | {policy} | {name} | {_length(made):.3f} | {_length(made) / cold_length:.3f} "
            f"| {sum(run.drafts for run in made)} | {restored:.0f} | {different[name]} |"
        )
    print("\n".join(rows), flush=True)
    return rows


def _length(runs: list[Accepted]) -> float:
    return 1 + sum(run.tokens for run in runs) / sum(run.drafts for run in runs)


if __name__ == "__main__":
    main()
