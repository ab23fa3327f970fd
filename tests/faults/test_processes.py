"""A loader's process that is killed in mid-load: others of the cluster do not notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread
import pytest

from softload import LoaderConfig, PageLoader, open_store
from softload.stores import MooncakeCluster

from . import loading_script
from .rig import Watch, children_of, exists

pytestmark = [pytest.mark.asyncio, pytest.mark.mooncake]
pytest.importorskip("mooncake")

SCRIPT = Path(loading_script.__file__)


@pytest.fixture(autouse=True)
def single_groups() -> None:
    """Groups of layers share objects here as they do in the other process."""


def start_script(address: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(SCRIPT), address], stdout=subprocess.PIPE, text=True)


async def test_a_cluster_serves_others_at_once_when_a_loader_is_killed(report: Callable[..., None]) -> None:
    cluster = MooncakeCluster(segment=64 << 20, lease=5.0, owners=1)
    await anyio.to_thread.run_sync(cluster.start)
    script = await anyio.to_thread.run_sync(start_script, cluster.address)
    try:
        assert script.stdout is not None
        first = await anyio.to_thread.run_sync(script.stdout.readline)
        assert first == "loading\n"
        children = children_of(script.pid)
        script.send_signal(signal.SIGKILL)
        assert await anyio.to_thread.run_sync(script.wait) == -signal.SIGKILL
        assert not list(filter(exists, children))
        pools = loading_script.make_group()
        config = LoaderConfig(deadline=20.0)
        async with PageLoader(open_store(f"mooncake://{cluster.address}"), pools, config=config) as loader:
            watch = Watch()
            unit = loading_script.unit("other")
            assert (await loader.lookup(unit)).pages == loading_script.PAGES
            async with loader.load([unit]) as load:
                outcome = (await load.report()).outcomes["other"]
            report("load of a killed loader's pages", seconds=watch.seconds)
            assert outcome.restored_pages == loading_script.PAGES
            assert watch.seconds < 15.0
    finally:
        if script.poll() is None:
            os.kill(script.pid, signal.SIGKILL)
            script.wait()
        if script.stdout is not None:
            script.stdout.close()
        cluster.close()
