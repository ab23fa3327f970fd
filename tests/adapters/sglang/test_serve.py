"""The launch line of docs/sglang.md, over HTTP, with a store that fails at random; the plugin by its entry point."""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from .engines import prompts, tiny_llama

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
FAULTS = "evict=0.02,remove=0.02,late=0.05,slow=0.1:0.1,hang=8:3,corrupt=0.02"


@dataclass(frozen=True, slots=True)
class Server:
    """One that was launched, on a loopback port."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path

    def wait_up(self) -> None:
        until = time.monotonic() + 150
        while not is_up(self.address):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < until, self.log.read_text()[-4000:]
            time.sleep(0.2)


@contextmanager
def launched(model: Path, linker: dict[str, Any] | None, log: Path) -> Iterator[Server]:
    """A server that is coming up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--page-size", "64", "--device", "cpu"]
    command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--skip-tokenizer-init"]
    command += ["--disable-cuda-graph", "--max-total-tokens", "8192", "--mem-fraction-static", "0.6"]
    command += ["--dtype", "float32", "--max-running-requests", "8", "--log-level", "warning", "--skip-server-warmup"]
    if linker is not None:
        command += ["--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic"]
        command += ["--unified-cache-external-linker-config", json.dumps(linker)]
    path = os.pathsep.join([str(HERE / "child"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "SOFTLOAD_TEST_FAULTS": FAULTS}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        yield Server(process, f"http://127.0.0.1:{port}", log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def server(model: Path, linker: dict[str, Any] | None, log: Path) -> Iterator[tuple[str, int]]:
    """A server that is up: its address and pid."""
    with launched(model, linker, log) as one:
        one.wait_up()
        yield one.address, one.process.pid


def is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def ask(address: str, prompt: list[int]) -> tuple[int, list[int], int]:
    """Status, tokens and cached tokens of one request."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{address}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            reply = json.loads(answer.read())
            return answer.status, reply["output_ids"], reply["meta_info"]["cached_tokens"]
    except urllib.error.HTTPError as error:
        return error.code, [], 0


def flush(address: str) -> None:
    """Empty the engine's own cache, once its saves have ended."""
    until = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{address}/flush_cache", method="POST"), timeout=30):
                return
        except urllib.error.HTTPError:
            assert time.monotonic() < until, "the cache was not flushed"
            time.sleep(0.2)


def resident_bytes(pid: int) -> int:
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(process.memory_info().rss for process in family)


def workload(count: int) -> list[list[int]]:
    """Prompts that share prefixes, in an order that makes a small device cache forget and need them again."""
    chosen = random.Random(5)
    heads = prompts(*[640] * 24, seed=41)
    return [chosen.choice(heads) + prompts(chosen.randrange(20, 300), seed=100 + n)[0] for n in range(count)]


def run(address: str, asked: list[list[int]], seconds: float) -> list[tuple[int, list[int], int]]:
    """Four at a time, spread over a while."""
    answers: list[tuple[int, list[int], int]] = []
    since = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for start in range(0, len(asked), 4):
            answers += pool.map(lambda prompt: ask(address, prompt), asked[start : start + 4])
            time.sleep(max(0.0, since + seconds * (start + 4) / len(asked) - time.monotonic()))
    return answers


def faulty_linker(capacity: str) -> dict[str, Any]:
    """Our linker, over a store of so many bytes in the server's process."""
    # One byte of an object is flipped now and then: only a digest of all bytes finds that.
    options = {"integrity": "full", "deadline": "1s", "prefetch_ttl": 1, "store": f"memory://?capacity={capacity}"}
    return {
        "linker": "FaultyLinker",
        "linker_module_path": "tests.adapters.sglang.faulty_linker",
        "linker_extra_config": options,
    }


@pytest.mark.timeout(300)
def test_a_launched_server_restores_what_it_forgot(tmp_path: Path) -> None:
    """The plugin has come by its entry point: otherwise the admission would be `sync`."""
    asked = prompts(*[200 + 60 * index for index in range(6)], seed=43)
    with server(tiny_llama(tmp_path / "model", layers=4), faulty_linker("1GiB"), tmp_path / "log") as (address, _):
        cold = [ask(address, prompt) for prompt in asked]
        flush(address)
        again = [ask(address, prompt) for prompt in asked]
    assert "admission=hold" in (tmp_path / "log").read_text()
    assert {status for status, _, _ in cold + again} == {200}
    assert [tokens for _, tokens, _ in again] == [tokens for _, tokens, _ in cold]
    assert sum(cached for _, _, cached in again)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_minutes_of_faults(tmp_path: Path) -> None:
    """No error status, every token that of a server without a linker, and memory as flat as there."""
    model = tiny_llama(tmp_path / "model", layers=4)
    asked = workload(300)
    # Full well before the middle: what a store in the server's process keeps is memory of it, too.
    small = faulty_linker("48MiB")
    answers, grown = {}, {}
    for name, linker, seconds in (("plain", None, 0.0), ("linked", small, 180.0)):
        with server(model, linker, tmp_path / f"{name}.log") as (address, pid):
            answers[name] = run(address, asked[:150], seconds / 2)
            flush(address)  # nothing is under way while memory is looked at
            middle = resident_bytes(pid)
            answers[name] += run(address, asked[150:], seconds / 2)
            flush(address)
            grown[name] = resident_bytes(pid) - middle
    log = (tmp_path / "linked.log").read_text()
    restored = sum(cached for _, _, cached in answers["linked"]) - sum(cached for _, _, cached in answers["plain"])
    print(
        f"{restored} tokens restored; in the second half memory grew by {grown['linked'] >> 10} KiB, "
        f"by {grown['plain'] >> 10} KiB without a linker"
    )
    assert {status for status, _, _ in answers["linked"]} == {200}
    assert [tokens for _, tokens, _ in answers["linked"]] == [tokens for _, tokens, _ in answers["plain"]]
    assert restored > 10_000
    assert grown["linked"] - grown["plain"] < 16 << 20
    # SGLang logs a traceback of its own where it asks itself for something before it listens.
    assert "/softload/" not in log and ".raised" not in log, log[-3000:]
