"""What the faults of a Mooncake cost a real engine of SGLang: with our linker under `hold`, and with SGLang's own.

    .venv-sglang/bin/python benchmarks/sglang_faults.py [--patience 90] [--fault NAME] [--linker NAME] [--json FILE]

For each fault and linker an engine with a tiny model over a cluster of its own: a master and two processes that own the
memory, the engine's client owns none. A request decodes all the time. Two others, whose pages are in the store, come
together; the fault strikes while the first of them loads. When both have ended, a third one comes, whose pages are in
the store as well. Prints a table in Markdown. A request that was not answered within the patience is counted as "more
than" it, and what would have come after it is not waited for. Needs the environment of `make test-sglang`; takes about
eight minutes, most of which SGLang's own linker is waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

ROOM = 150.0
"""Seconds that a process may take besides waiting for answers."""

PROMPTS = (700, 580, 640)
"""Tokens of the concerned request, of the one that comes with it, and of the next."""


@dataclass(frozen=True, slots=True)
class Got:
    """What a request got. `status` is ``None`` where it was still waiting at the end, or was not sent."""

    status: int | None
    seconds: float | None
    """Until its answer was complete, or as long as it was waited for; ``None`` where it was not sent."""
    same: bool
    """Whether it has the tokens of a run without a store."""
    restored: int
    """Tokens that were not computed."""

    def __str__(self) -> str:
        if self.seconds is None:
            return "not sent"
        if self.status is None:
            return f"**nothing in {self.seconds:.0f} s**"
        if self.status != 200:
            return f"**{self.status}** after {self.seconds:.2f} s"
        return f"{'200' if self.same else '**other tokens**'}, {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Row:
    """One fault with one linker. Times in seconds."""

    fault: str
    linker: str
    concerned: Got
    beside: Got
    later: Got
    gap: float
    """The longest time without a token of the decoding request, from when the two were sent until the third ended."""
    standing: bool
    """Whether that was still going on."""


def main() -> None:
    """Run every case in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patience", type=float, default=90.0, help="seconds that an answer is waited for")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="these only")
    parser.add_argument("--linker", action="append", choices=LINKERS, help="this one only")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        run(*arguments.only, patience=arguments.patience)
    names = ("the concerned request", "one in its batch", "the next request", "longest gap of a decoding request")
    print(f"| fault | linker | {' | '.join(names)} |\n| --- | --- | --- | --- | --- | ---: |", flush=True)
    rows = []
    for fault in arguments.fault or FAULTS:
        for linker in arguments.linker or LINKERS:
            row = in_a_process(fault, linker, arguments.patience)
            rows.append(row)
            gap = f"more than {row['gap']:.0f} s" if row["standing"] else f"{row['gap'] * 1e3:.0f} ms"
            cells = [str(Got(**row[name])) for name in ("concerned", "beside", "later")]
            print(f"| {fault} | {linker} | {' | '.join(cells)} | {gap} |", flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def in_a_process(fault: str, linker: str, patience: float) -> dict[str, Any]:
    """A row. SGLang's own linker may hang for good: its process, and what that has started, is ended."""
    argv = [sys.executable, "-W", "ignore", __file__, "--patience", str(patience), "--only", fault, linker]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "GLOG_minloglevel": "3",
        # Otherwise a put of more than about a thousand slices blocks Mooncake for a minute.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=patience + ROOM)
        except subprocess.TimeoutExpired:
            output = ""
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        found = [line for line in output.splitlines() if line.startswith('{"fault"')]
        if not found:
            log.seek(0)
            raise SystemExit(f"{fault}, {linker}: no answer\n{log.read().decode(errors='replace')[-4000:]}")
    row: dict[str, Any] = json.loads(found[-1])
    return row


def run(fault: str, linker: str, *, patience: float) -> None:
    """One case, printed as a line of JSON; ends this process."""
    from tests.adapters.sglang_pools import stand_ins

    if not stand_ins.install():
        raise SystemExit("expected SGLang 0.5.23, as in the environment of `make test-sglang`; it is not there")
    from softload.stores.cluster import MooncakeCluster

    cluster = MooncakeCluster(segment=256 << 20, lease=5, owners=2)
    cluster.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            row = _measure(fault, linker, cluster, Path(folder), patience)
        print(json.dumps(asdict(row)), flush=True)
    except BaseException:
        traceback.print_exc()  # nobody would see it: this process ends below
    finally:
        cluster.close()
        sys.stderr.flush()
        os._exit(0)  # the engine may stand, and its linker's threads may be in native code for good


def _measure(fault: str, linker: str, cluster: Any, folder: Path, patience: float) -> Row:
    from peers.engine_linkers import MOMENTS  # only here: SGLang is importable now
    from tests.adapters.sglang.engines import Engine, prompts, tiny_llama

    config = {
        "linker": LINKERS[linker],
        "linker_module_path": "peers.engine_linkers",
        "linker_extra_config": _options(linker, cluster.address),
    }
    engine = Engine(tiny_llama(folder, layers=4), {}, unified_cache_external_linker_config=config)
    asked = prompts(*PROMPTS, seed=31)
    cold = engine.generate(asked)  # and saved
    engine.flush()
    decoding = engine.start(prompts(90, seed=32)[0], tokens=8000)
    until = time.monotonic() + 60
    while len(decoding.tokens) < 30:
        assert time.monotonic() < until, "the engine does not decode"
        time.sleep(0.01)
    if fault == "nothing stored":
        asked = prompts(*PROMPTS, seed=33)
    MOMENTS.hashes = frozenset(_pages(asked[0]))
    FAULTS[fault](cluster, MOMENTS)
    together = engine.start_together(asked[:2])
    began = together[0].sent
    until = began + patience
    for answer in together:
        answer.done.wait(max(0.0, until - time.monotonic()))
    later = engine.start(asked[2]) if all(answer.done.is_set() for answer in together) else None
    if later is not None:
        later.done.wait(max(0.0, until - time.monotonic()))
    ended = time.monotonic()
    times = [at for at in list(decoding.times) if began <= at <= ended]
    gaps = [after - before for before, after in zip([began, *times], [*times, ended], strict=True)]
    standing = later is None or not later.done.is_set()
    assert len(decoding.tokens) < 8000, "the decoding request has ended too early to be measured"
    got = [
        _got(answer, None if fault == "nothing stored" else before.tokens, ended)
        for answer, before in zip([*together, later], cold, strict=True)
    ]
    return Row(fault, linker, *got, max(gaps), standing and gaps[-1] == max(gaps))


def _got(answer: Any, expected: list[int] | None, ended: float) -> Got:
    if answer is None:
        return Got(None, None, False, 0)
    if not answer.done.is_set():
        return Got(None, ended - answer.sent, False, 0)
    status = 200 if answer.is_good else int(answer.finish.get("status_code") or 500)
    same = expected is None or answer.tokens == expected
    return Got(status, answer.ended - answer.sent, same, answer.cached_tokens)


def _pages(prompt: Sequence[int]) -> list[str]:
    """The hashes of a prompt's pages, as SGLang makes them."""
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from tests.adapters.sglang.engines import PAGE

    pages = (len(prompt) - 1) // PAGE
    hashes = get_storage_hash_str(RadixKey(array("q", prompt[: pages * PAGE])), None, page_size=PAGE)
    return list(hashes)


def _options(linker: str, address: str) -> dict[str, Any]:
    from tests.adapters.sglang.their_linker import config_of

    if linker == "softload":
        return {"store": f"mooncake://{address}?metadata=P2PHANDSHAKE&protocol=tcp&segment=0", "admission": "hold"}
    return config_of(address)


def _removed(cluster: Any, moments: Any) -> None:
    gone = frozenset(sorted(moments.hashes)[:2])
    moments.admitted = lambda remove: remove(gone)


def _torn(cluster: Any, moments: Any) -> None:
    moments.torn = sorted(moments.hashes)[0]


def _strikes(action: Callable[[Any], object]) -> Callable[[Any, Any], None]:
    def plan(cluster: Any, moments: Any) -> None:
        moments.reading = lambda: action(cluster)

    return plan


FAULTS: dict[str, Callable[[Any, Any], None]] = {
    "nothing stored": lambda cluster, moments: None,
    "none": lambda cluster, moments: None,
    "keys removed": _removed,
    "a read fails": _torn,
    "owner killed": _strikes(lambda cluster: cluster.owners[0].kill()),
    "owner frozen": _strikes(lambda cluster: cluster.owners[0].freeze()),
    "master frozen": _strikes(lambda cluster: cluster.master.freeze()),
}
LINKERS = {"softload": "StruckOurLinker", "SGLang's own": "StruckTheirLinker"}


if __name__ == "__main__":
    main()
