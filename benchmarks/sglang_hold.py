"""What a load costs a request that decodes meanwhile, in SGLang's real scheduler with a tiny model.

Run it alone, in the environment of `make test-sglang`: `.venv-sglang/bin/python benchmarks/sglang_hold.py`, or name
some parts: `one`, `many`.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.adapters.sglang_pools import stand_ins  # noqa: E402

stand_ins.install()  # before SGLang is imported
logging.getLogger("sglang").setLevel(logging.WARNING)

from tests.adapters.sglang.beside import LONG, Beside, computed, on_device, queueing, restored  # noqa: E402  # isort: skip
from tests.adapters.sglang.engines import Engine, Prompt, engine, prompts, tiny_llama  # noqa: E402  # isort: skip

LOADS = (
    ("`hold`", "hold", False),
    ("`hold`, the first layers are gone", "hold", True),
    ("`stream`", "stream", False),
    ("`stream`, the first layers are gone", "stream", True),
    ("`sync`", "sync", False),
)
"""Name, admission, and whether the load fails."""

MANY = 4
MANY_TOKENS = 4000
MANY_SECONDS = 1.0


def one(running: Engine, rounds: int) -> None:
    """A request that loads for 200 ms beside one that decodes."""
    (prompt,) = prompts(LONG, seed=17)
    ways: dict[str, Callable[[], Beside]] = {
        "no linker, computed": lambda: computed(running, prompt),
        "on the device": lambda: on_device(running, prompt),
    }
    for way, admission, fails in LOADS:
        ways[way] = lambda admission=admission, fails=fails: _checked(running, prompt, admission, fails=fails)  # type: ignore[misc]
    runs: dict[str, list[Beside]] = {way: [] for way in ways}
    ways["`hold`"]()  # the first of all pays for what everybody does once
    for _ in range(rounds):
        for way, run in ways.items():  # by turns, so that what else the machine does falls on all
            runs[way].append(run())
    print(f"\n## {LONG} tokens that load for 200 ms, beside a request that decodes; medians of {rounds} runs\n")
    print("| way | longest gap between the other's tokens (least to greatest) | its tokens meanwhile | first token |")
    print("| --- | ---: | ---: | ---: |")
    for way, made in runs.items():
        gaps = [run.gap for run in made]
        print(
            f"| {way} | {_ms(statistics.median(gaps))} ({_ms(min(gaps))} to {_ms(max(gaps))}) "
            f"| {statistics.median([run.steps for run in made]):.0f} "
            f"| {_ms(statistics.median([run.first for run in made]))} |",
            flush=True,
        )


def many(running: Engine, rounds: int) -> None:
    """Many long requests that are held, beside one that decodes."""
    asked = prompts(*[MANY_TOKENS] * MANY, seed=19)
    steps = [queueing(running, asked, MANY_SECONDS, admission="hold") for _ in range(rounds)]
    print(f"\n## A step of a request that decodes, beside {MANY} held requests of {MANY_TOKENS} tokens each\n")
    print("| alone | beside them |\n| ---: | ---: |")
    alone, beside_them = (statistics.median(times) for times in zip(*steps, strict=True))
    print(f"| {alone * 1e3:.1f} ms | {beside_them * 1e3:.1f} ms |", flush=True)


def _checked(running: Engine, prompt: Prompt, admission: str, *, fails: bool) -> Beside:
    run, cold = restored(running, prompt, fails=fails, admission=admission)
    assert run.loading.tokens == cold.tokens, "the answer is not that of a cold run"
    return run


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


PARTS: dict[str, Callable[[Engine, int], None]] = {"one": one, "many": many}


def main() -> None:
    """Run the parts that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5, help="of each part")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        engine(tiny_llama(Path(folder), layers=4), max_total_tokens=65536) as running,
    ):
        for part in arguments.parts or PARTS:
            PARTS[part](running, arguments.rounds)


if __name__ == "__main__":
    main()
