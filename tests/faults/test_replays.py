"""Replays whose own cluster is struck while they run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from softload.replay import runner
from softload.replay.options import AdmissionMode, ReplayOptions
from softload.replay.runner import ZEROS, replay

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
        pytest.param(("restart-master@save", "hang=3:0.5", "evict=0.05"), ["master started"], marks=pytest.mark.long),
    ],
    ids=["owner-frozen", "master-frozen", "master-killed", "master-restarted-and-faults-of-calls"],
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
