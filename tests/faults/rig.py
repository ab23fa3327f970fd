"""A loader on a real cluster: a master and owners that are killed, frozen and started again, and nothing of its own."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np

from softload import Descriptor, PageLoader
from softload.stores import EmbeddedMooncakeStore
from softload.stores.children import Child
from softload.stores.listening import listening_ports
from softload.testing import MomentStore

from ..loader.harness import Pools, load, make_pools, opened

MODES: tuple[dict[str, Any], ...] = (
    {"layout": "grouped"},
    {"layout": "page", "read_mode": "whole"},
    {"layout": "page", "read_mode": "ranges"},
)
MODE_IDS = ("grouped", "page-whole", "page-ranges")


@dataclass(slots=True)
class Rig:
    """What a test works with."""

    loader: PageLoader
    moments: MomentStore
    embedded: EmbeddedMooncakeStore
    pools: Pools

    @property
    def master(self) -> Child:
        master = self.embedded.cluster.master
        assert master is not None
        return master

    @property
    def owners(self) -> list[Child]:
        return self.embedded.cluster.owners

    def object_keys(self, page_key: str) -> list[str]:
        """The store's keys of a page, first layers first."""
        context = self.loader._context
        assert context is not None
        specs = self.pools.group.specs(context.config.layout).values()
        return [context.keys.object_key(page_key, spec.pool, spec.part) for found in specs for spec in found]

    async def in_thread(self, function: Any, *arguments: Any) -> Any:
        """Something that blocks, like starting a process."""
        return await anyio.to_thread.run_sync(function, *arguments)

    async def where(self, page_keys: Sequence[str], owners: int = 2) -> list[list[str]]:
        """The pages that lie wholly with one owner, by owner: those of `owners[0]` come first."""
        by_page = {page: self.object_keys(page) for page in page_keys}
        names = [name for found in by_page.values() for name in found]
        answers = await self.in_thread(self.embedded.descriptors, names)
        at = dict(zip(names, answers, strict=True))
        ports = [listening_ports(owner.pid) for owner in self.owners]
        found: list[list[str]] = [[] for _ in ports]
        for page, objects in by_page.items():
            endpoints = {answer.endpoint for name in objects if isinstance(answer := at[name], Descriptor)}
            for index, mine in enumerate(ports):
                if endpoints and all(int(endpoint.rpartition(":")[2]) in mine for endpoint in endpoints):
                    found[index].append(page)
        return found

    def heal(self) -> None:
        """Let everything that is frozen go on."""
        for child in (self.master, *self.owners):
            if child.alive:
                child.thaw()


@asynccontextmanager
async def cluster(
    *,
    owners: int = 2,
    segment: int = 64 << 20,
    lease: float = 5.0,
    store: dict[str, Any] | None = None,
    pools: Pools | None = None,
    **config: Any,
) -> AsyncIterator[Rig]:
    """A loader on a cluster of its own; whatever a test froze goes on before it closes."""
    embedded = EmbeddedMooncakeStore(segment=segment, lease=lease, owners=owners, **(store or {}))
    moments = MomentStore(embedded)
    pools = pools or make_pools()
    async with opened(moments, pools, **config) as loader:
        rig = Rig(loader, moments, embedded, pools)
        try:
            yield rig
        finally:
            rig.heal()


def children_of(pid: int) -> list[int]:
    """Children of a process, none once it has ended."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class Watch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._since


async def recovered(rig: Rig, page_keys: Sequence[str], rows: Sequence[int], seconds: float = 40.0) -> None:
    """Wait until the pages can be saved, or still be loaded, and loaded, by the same loader."""
    pools, loader = rig.pools, rig.loader
    attempt = 0
    with anyio.fail_after(seconds):
        while True:
            attempt += 1
            name = f"recover{attempt}"
            pools.fill(page_keys, rows)
            loader.computed(pools.unit(name, page_keys, rows))
            await loader.save([pools.unit(name, page_keys, rows)])
            if (await loader.lookup(pools.unit(name, page_keys))).pages == len(page_keys):
                outcome = (await load(loader, pools.unit(name, page_keys, rows)))[name]
                if outcome.restored_pages == len(page_keys):
                    pools.assert_restored(page_keys, rows)
                    return
            await anyio.sleep(0.1)


def fill_store(store: EmbeddedMooncakeStore, *, seconds: float, nbytes: int = 64 << 10) -> int:
    """Put objects of other bytes until the store takes no more: how many it took. Waits for a store that is away."""
    source = np.full(nbytes, 0x5A, dtype=np.uint8)
    store.register(source.ctypes.data, nbytes)
    taken = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        names = [f"foreign{taken + index}" for index in range(16)]
        answers = store.put_start(names, [nbytes] * 16)
        good = [name for name, answer in zip(names, answers, strict=True) if answer == 0]
        store.put_write(good, [source.ctypes.data] * len(good), [nbytes] * len(good))
        store.put_end(good)
        taken += len(good)
        if taken and len(good) < 16:
            break
        if not good:
            time.sleep(0.05)
    store.unregister(source.ctypes.data)
    return taken
