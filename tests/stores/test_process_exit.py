"""A process that ends with a read hanging in native code ends at once, with its own status, and leaves no child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.mooncake
pytest.importorskip("mooncake")

SCRIPT = Path(__file__).with_name("hanging_script.py")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("ending", "status"),
    [("end", 0), ("status", 7), ("raises", 1), ("closed", 0), ("returns", 0), ("killed", -signal.SIGKILL)],
)
def test_the_process_ends(ending: str, status: int) -> None:
    script = subprocess.run([sys.executable, str(SCRIPT), ending], capture_output=True, text=True, timeout=50)
    ended = time.time()
    pids, last_line = script.stdout.split("\n")[:2]
    children = [int(pid) for pid in pids.split()]
    try:
        assert script.returncode == status, script.stderr
        assert ended - float(last_line) < 15.0  # and not as long as the owner is frozen
        deadline = time.monotonic() + 15.0
        while any(map(is_running, children)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not [pid for pid in children if is_running(pid)]
    finally:
        for pid in children:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
