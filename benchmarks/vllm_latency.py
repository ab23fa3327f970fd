"""What loads and their failures cost in a real engine: latencies of tiny models, each row a run of its own.

Run it in the environment of `make test-vllm`: `.venv-vllm/bin/python benchmarks/vllm_latency.py`, or name some parts:
`replay`, `many`, `faults`, `slow`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/adapters/vllm"))
import conftest  # noqa: E402, F401  # the engine's settings; before vLLM is imported

from engines import Answer, Prompt, compare, engine, generate, page_hashes, tiny_llama  # noqa: E402  # isort: skip
from family import family_of_prompts  # noqa: E402  # isort: skip
from owner_faults import FAULTS, STRUCK, strike  # noqa: E402  # isort: skip
from rigs import rig  # noqa: E402  # isort: skip
from side_by_side import SideBySide, side_by_side  # noqa: E402  # isort: skip
from vllm import LLM  # noqa: E402  # isort: skip

from softload.testing import FaultyStore, parse_fault  # noqa: E402  # isort: skip

ROUNDS = 8
SLOW_ROUNDS = 5


def replay(folder: Path) -> None:
    """One request of ten blocks at a time: computed, restored, and with blocks that fail."""
    print("\n## A request of ten blocks: computed, restored, with blocks that fail while they land\n")
    print("| mode | run | median | longest | unequal answers |\n| --- | --- | ---: | ---: | ---: |")
    for mode in ("prefetch", "async", "layerwise"):
        model = folder / mode
        with rig(model, model=lambda path: tiny_llama(path, layers=8), extra={"mode": mode}) as one:
            one.computed(330)  # what the first of all pays
            for name, lost in (
                ("every block restored", ()),
                ("one block fails", (3,)),
                ("three blocks fail", (1, 4, 7)),
                ("all blocks fail", tuple(range(10))),
            ):
                prompts, cold, cold_seconds = [], [], []
                for _ in range(ROUNDS):
                    started = time.monotonic()
                    fresh, answers = one.computed(330)
                    cold_seconds.append(time.monotonic() - started)
                    prompts += fresh
                    cold += answers
                one.faults.gone_while_landing.update(page_hashes(prompt)[page] for prompt in prompts for page in lost)
                seconds, answers = _one_by_one(one.llm, prompts)
                one.heal()
                if not lost:
                    print(_row(mode, "computed and saved", cold_seconds, 0))
                print(_row(mode, name, seconds, compare(cold, answers).different), flush=True)


def many(folder: Path) -> None:
    """200 requests that share prefixes, with few blocks, a fifth of the keys evicted."""
    print("\n## 200 requests that share prefixes, 72 blocks\n")
    print("| run | seconds | tokens not computed | unequal answers |\n| --- | ---: | ---: | ---: |")
    model, family = tiny_llama(folder / "many"), family_of_prompts()
    with engine(model, connector=False, num_gpu_blocks_override=72) as llm:
        plain = _together(llm, "no connector", family, None)
    for fault in ("evict=0", "evict=0.2"):
        faults = [parse_fault(fault)]
        with engine(
            model,
            wrap=lambda store, faults=faults: FaultyStore(store, faults),  # type: ignore[misc]
            extra={"prefetch_ttl": 0},
            num_gpu_blocks_override=72,
        ) as llm:
            _together(llm, f"{fault}, first time", family, plain)
            _together(llm, f"{fault}, second time", family, plain)


def faults(folder: Path) -> None:
    """Owners and master of a real Mooncake killed and frozen in mid-run; the deadline is 1 s."""
    print("\n## Faults of a Mooncake in mid-run, deadline 1 s: what a request takes longer than computing\n")
    print("| fault | before, longest | first after | longest after | unequal answers |")
    print("| --- | ---: | ---: | ---: | ---: |")
    model = tiny_llama(folder / "faults")
    for fault in FAULTS:
        run = strike(model, fault)
        added = run.added_seconds
        different = compare(run.cold.answers, run.struck.answers).different
        print(
            f"| {fault} | {_ms(max(added[:STRUCK]))} | {_ms(added[STRUCK])} | {_ms(max(added[STRUCK:]))} "
            f"| {different} |",
            flush=True,
        )


def slow(folder: Path) -> None:
    """50 short requests beside 10 long ones that load from a slow store."""
    print("\n## 50 short requests beside 10 long ones whose blocks are in the store\n")
    print("| a read takes | short: median | short: p99 | long: median | long: longest | blocks held while waiting |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    model = tiny_llama(folder / "slow")
    runs: dict[float, list[SideBySide]] = {0.0: [], 0.5: []}
    for _ in range(SLOW_ROUNDS):  # by turns, so that what else the machine does falls on both
        for seconds_per_read, made in runs.items():
            made.append(side_by_side(model, seconds_per_read=seconds_per_read))
    for seconds_per_read, made in runs.items():
        short = sorted(seconds for run in made for seconds in run.short_seconds)
        p99 = short[len(short) * 99 // 100]
        long = [seconds for run in made for seconds in run.long_seconds]
        print(
            f"| {seconds_per_read * 1e3:.0f} ms | {_ms(statistics.median(short))} | {_ms(p99)} "
            f"| {_ms(statistics.median(long))} | {_ms(max(long))} | {sum(run.held_while_waiting for run in made)} |",
            flush=True,
        )


def _one_by_one(llm: LLM, prompts: Sequence[Prompt]) -> tuple[list[float], list[Answer]]:
    seconds, answers = [], []
    for prompt in prompts:
        started = time.monotonic()
        answers += generate(llm, [prompt])
        seconds.append(time.monotonic() - started)
    return seconds, answers


def _together(llm: LLM, name: str, family: list[Prompt], expected: list[Answer] | None) -> list[Answer]:
    started = time.monotonic()
    answers = generate(llm, family, max_tokens=8)
    seconds = time.monotonic() - started
    different = compare(expected, answers).different if expected else 0
    print(f"| {name} | {seconds:.1f} | {sum(answer.cached_tokens for answer in answers)} | {different} |", flush=True)
    return answers


def _row(mode: str, name: str, seconds: list[float], different: int) -> str:
    return f"| {mode} | {name} | {_ms(statistics.median(seconds))} | {_ms(max(seconds))} | {different} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


PARTS = {"replay": replay, "many": many, "faults": faults, "slow": slow}


def main() -> None:
    """Run the parts that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    with tempfile.TemporaryDirectory() as folder:
        for part in parser.parse_args().parts or PARTS:
            PARTS[part](Path(folder))


if __name__ == "__main__":
    main()
