"""Ranks that are real processes: whatever one of them lacks, all take the same branch, and none waits for another."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

EXPECTED = {
    "nothing, mha, hold": (4, True, False),
    "lookup, mha, hold": (0, False, False),
    "absent, mha, hold": (3, True, False),
    "absent, swa, hold": (1, True, False),
    "landing, mha, hold": (1, True, False),
    "placing, mha, hold": (4, True, True),
    "nothing, mha, stream": (4, True, False),
    "absent, mha, stream": (3, True, False),
    "reading, mha, stream": (4, True, True),
    "nothing, mha, sync": (4, True, False),
    "absent, mha, sync": (3, True, False),
    "placing, mha, sync": (4, False, False),
}
"""Pages matched on every rank, whether they were loaded, and whether the load failed afterwards."""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.timeout(240)
def test_all_ranks_take_the_same_branch(ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "tests.adapters.sglang.ranks_script"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(port)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=220)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks
    for output in outputs:
        seen: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines() if line.startswith('{"stage"')]
        assert {each["stage"]: (each["matched"], each["loaded"], each["failed"]) for each in seen} == EXPECTED
        assert max(each["seconds"] for each in seen) < 15
