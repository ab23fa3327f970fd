"""Silence instead of a reset: owners and master on hosts of their own, whose links are taken down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.mooncake
pytest.importorskip("mooncake")

ROOT = Path(__file__).parents[2]
TRIAL = "ip link add bridge0 type bridge && ip link add trial0 type veth peer name trial1"


def why_not() -> str | None:
    """What keeps this machine from having network namespaces."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}"
    trial = subprocess.run(["unshare", "--net", "sh", "-c", TRIAL], capture_output=True, text=True)
    return f"no network namespaces: {trial.stderr.strip()}" if trial.returncode else None


def test_owners_and_master_are_cut_off_and_join_again(report: Callable[..., None]) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    script = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", "tests.faults.partition_script"],
        capture_output=True, text=True, timeout=55, cwd=ROOT, env={**os.environ, "GLOG_minloglevel": "3"},
    )  # fmt: skip
    assert script.returncode == 0, script.stdout[-2000:] + script.stderr[-4000:]
    figures = json.loads(script.stdout.splitlines()[-1])
    report("partition", **{name: value for name, value in figures.items() if isinstance(value, float)})
    assert figures["owner_parted"] and figures["owner_restored"] == 0
    assert figures["owner_status"] == "timed_out"
    assert 1.0 <= figures["owner_answered_s"] < 15.0
    assert figures["owner_stuck_threads"] > 0, "answered before the native call returned"
    assert figures["well_restored"] == min(8, figures["pages"][1])
    assert figures["well_s"] < 5.0
    assert figures["owner_lookup_p50_ms"] < 100
    assert figures["master_status"] == "timed_out"
    assert figures["then_status"] == "suppressed", "half a second's silence is enough"
    assert figures["master_lookup_s"] < 5.0
    assert figures["master_breakers"] == ["master"]
    assert figures["master_open_p50_ms"] < 100
    assert figures["close_s"] < 10
