"""`vllm serve` with the connector in its launch line, twice, on a store that outlives it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, prompts, tiny_llama
from launch_line import transfer_config

from softload.stores import MooncakeCluster

pytestmark = [pytest.mark.mooncake, pytest.mark.slow]
pytest.importorskip("mooncake.store", exc_type=ImportError)


@contextmanager
def server(model: Path, store: str, log: Path) -> Iterator[str]:
    """The address of a server; ended by its own process group, whatever happened."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = transfer_config(store=store, landing_bytes="64MiB", require_store=True)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--block-size", str(BLOCK), "--num-gpu-blocks-override", "64"]
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", "512", "--served-model-name", "tiny"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            until = time.monotonic() + 120
            while not _answers(f"{address}/health"):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < until, log.read_text()[-4000:]
                time.sleep(0.25)
            yield address
            process.terminate()
            process.wait(30)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def complete(address: str, prompt: list[int]) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "detokenize": False}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["choices"][0]["token_ids"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as response:
        found = re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", response.read().decode(), re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.timeout(400)
def test_a_request_is_served_from_the_store_after_a_restart(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    cluster = MooncakeCluster(segment=64 << 20, lease=5.0, owners=1)
    cluster.start()
    try:
        store = f"mooncake://{cluster.address}?segment=0&lease=5s"
        (prompt,) = prompts(330)
        with server(model, store, tmp_path / "first.log") as address:
            cold = complete(address, prompt)
            assert metric(address, "vllm:softload_restored_tokens_total") == 0
        with server(model, store, tmp_path / "second.log") as address:
            assert complete(address, prompt) == cold
            assert metric(address, "vllm:softload_restored_tokens_total") == 10 * BLOCK
    finally:
        cluster.close()
