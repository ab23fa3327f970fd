"""Replays whose own cluster is struck while they run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from softload.replay import runner
from softload.replay.options import AdmissionMode, ReplayOptions
from softload.replay.runner import ZEROS, replay

from ..loader.harness import eventually
from .rig import children_of, exists
from .test_partitions import why_not

pytestmark = [pytest.mark.asyncio, pytest.mark.mooncake]
pytest.importorskip("mooncake")

STORE = "mooncake://embedded?segment=64MiB&owners=2&client_ttl=2s&lease=2s"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_QUIET_SECONDS", 0.05)
    monkeypatch.setattr(runner, "_POOL_BYTES", 512 * (32 << 10))


@pytest.mark.parametrize(
    ("faults", "happened"),
    [
        (("freeze-owner@read:1",), ["owner 0 frozen", "thawed"]),
        pytest.param(("freeze-master@lookup:1",), ["master frozen", "thawed"], marks=pytest.mark.long),
        pytest.param(("kill-master@landed:0.3",), ["master killed", "master started"], marks=pytest.mark.long),
        (("malformed=0.05",), []),
        pytest.param(("restart-master@save", "hang=3:0.5", "evict=0.05"), ["master started"], marks=pytest.mark.long),
    ],
    ids=["owner-frozen", "master-frozen", "master-killed", "malformed", "master-restarted-and-faults-of-calls"],
)
async def test_a_struck_cluster_costs_pages_and_nothing_else(
    faults: tuple[str, ...], happened: list[str], report: Callable[..., None]
) -> None:
    options = ReplayOptions(
        store=STORE, requests=60, faults=faults, deadline=0.3, landing=64 << 20, max_running=3,
        admission=AdmissionMode.PREFETCH, layer_time=0.004,
    )  # fmt: skip
    figures = await replay(options, options.read_requests())
    assert {name: figures[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert figures["finished_requests"] == figures["requests"] == 60
    told = [what for _, what in figures["happened"]]  # type: ignore[attr-defined]
    for part in happened:
        assert any(part in what for what in told), told
    report(
        " ".join(faults),
        wall_s=figures["wall_s"],
        restored=figures["restored_pages"],
        computed=figures["computed_pages"],
    )


def call(*words: str) -> list[str]:
    """The command line, in a process of its own."""
    return [sys.executable, "-m", "softload", "replay", "--store", STORE, "--landing", "64MiB", *words]


@pytest.mark.timeout(180)
async def test_a_replay_that_is_killed_in_mid_load_leaves_no_process() -> None:
    children: set[int] = set()
    words = call("--requests", "60", "--fault", "kill-loader@read")
    async with await anyio.open_process(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as replaying:
        try:
            with anyio.fail_after(120):
                while replaying.returncode is None:
                    children.update(children_of(replaying.pid))
                    await anyio.sleep(0.02)
        finally:
            if replaying.returncode is None:
                replaying.kill()
    assert replaying.returncode == -9
    assert len(children) >= 3, "a master and two owners"
    await eventually(lambda: not any(map(exists, children)), 10)


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_owner_and_master_are_cut_off_and_join_again(report: Callable[..., None]) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    faults = ["--deadline", "0.5", "--fault", "part-owner@read:1.5", "--fault", "part-master@4:1"]
    words = call("--requests", "200", "--layer-time", "4", *faults, "--json", "-")
    began = time.monotonic()
    script = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *words]
    done = await anyio.run_process(script, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures: dict[str, Any] = json.loads(done.stdout)
    assert {name: figures[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    told = [what for _, what in figures["happened"]]
    assert told[0] == "owner 0 cut off"
    assert "master cut off" in told
    assert sum("joined" in what for what in told) == 2
    assert figures["restored_pages"] > 0
    report("owner and master cut off", wall_s=figures["wall_s"], seconds=time.monotonic() - began)
