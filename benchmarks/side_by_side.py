"""The same pages brought by softload, by SGLang's own linker and by bare calls, in turn; a process for each case.

Run it in the environment of `make bench`, which has SGLang; elsewhere that side is left out. It prints tables in
Markdown, and the goals that were met or missed; `--json` keeps all figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from peers.cases import CASES  # noqa: E402
from peers.figures import FIGURES  # noqa: E402
from peers.measure import LAYER_TIMES, measure_case  # noqa: E402
from peers.tables import goals, tables  # noqa: E402

QUICK = ("mla 32x64x73728", "mha 36x32x262144", "dsv4-flash 8K", "small 43x512x4096")
QUICK_TIMES = (0.0, 0.002)
STORES = {"local": 0, "owner": 1}
_SECONDS = 600


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases, layer times and rounds: about 4 minutes")
    parser.add_argument("--case", action="append", choices=list(CASES), help="again for several; all by default")
    parser.add_argument("--figure", action="append", choices=list(FIGURES), help="again for several; all by default")
    parser.add_argument("--store", action="append", choices=list(STORES), help="again for both; both by default")
    parser.add_argument("--rounds", type=int, help="of each side; 3 with --quick, else 7")
    parser.add_argument("--layer-times", type=float, nargs="+", help="milliseconds of a forward's layer; 0 is needed")
    parser.add_argument("--json", type=Path, help="where all figures go")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        return _work(json.loads(options.work))
    rounds = options.rounds or (3 if options.quick else 7)
    times = [ms / 1000 for ms in options.layer_times or ()] or (QUICK_TIMES if options.quick else LAYER_TIMES)
    if 0.0 not in times:
        parser.error("--layer-times: expected 0 among them, for it the loads themselves are compared")
    everything = not options.case and not options.figure
    cases = options.case or (QUICK if options.quick and everything else list(CASES) if everything else [])
    figures = options.figure or (list(FIGURES) if everything else [])
    stores = options.store or list(STORES)
    result: dict[str, Any] = {"machine": _machine(), "cases": [], "figures": {}, "failed": []}
    for case in cases:
        for store in stores:
            work = {"case": case, "owners": STORES[store], "rounds": rounds, "layer_times": list(times)}
            measured = _in_a_process(work)
            if measured is not None:
                result["cases"].append(measured)
            else:
                result["failed"].append(f"{case}, {store}")
            _keep(result, options.json)
    for figure in figures:
        # What is Python's alone is the same on both, and what a quick run leaves out is the longer of the two.
        on = stores[:1] if options.quick or figure == "plan" else stores
        for store in on:
            measured = _in_a_process({"figure": figure, "owners": STORES[store], "rounds": rounds})
            if measured is not None:
                result["figures"].setdefault(figure, {})[store] = measured
            else:
                result["failed"].append(f"{figure}, {store}")
            _keep(result, options.json)
    for line in tables(result):
        print(line)
    wrong = [side for case in result["cases"] for side, good in case["bytes_as_they_must_be"].items() if not good]
    return 1 if result["failed"] or wrong else 0


def _keep(result: dict[str, Any], path: Path | None) -> None:
    """Write what there is so far, goals and all: a run that is broken off has measured something."""
    if path is not None:
        everything = {**result, "goals": [asdict(goal) for goal in goals(result)]}
        path.write_text(json.dumps(everything, indent=1))


def _machine() -> dict[str, Any]:
    packages = {}
    for name in ("torch", "numpy", "sglang", "mooncake-transfer-engine-non-cuda"):
        try:
            packages[name] = version(name)
        except ModuleNotFoundError:
            packages[name] = "not here"
    return {"cores": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release(), **packages}


def _in_a_process(work: dict[str, Any]) -> dict[str, Any] | None:
    """One piece of work in a process of its own: pools, segment and client are gone afterwards."""
    started = time.monotonic()
    name = work.get("case") or work["figure"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--work", json.dumps({**work, "out": str(out)})]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{name}: not done after {_SECONDS} s", file=sys.stderr, flush=True)
            return None
        if not out.exists():
            print(f"{name}: failed\n{done.stderr[-3000:]}", file=sys.stderr, flush=True)
            return None
        result: dict[str, Any] = json.loads(out.read_text())
    print(f"{name}, {work['owners']} owners: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return result


def _work(work: dict[str, Any]) -> int:
    out = Path(work.pop("out"))
    if "case" in work:
        measured = asyncio.run(
            measure_case(
                CASES[work["case"]],
                owners=work["owners"],
                rounds=work["rounds"],
                layer_times=work["layer_times"],
            )
        )
    else:
        measured = asyncio.run(FIGURES[work["figure"]](owners=work["owners"], rounds=work["rounds"]))
    out.write_text(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
