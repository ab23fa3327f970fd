"""Run by `test_partitions` in a network namespace of its own: owners and master are cut off, and join again."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

import torch

from softload import ComponentTransfer, Descriptor, LoaderConfig, PageLoader, PoolName, TransferUnit, open_store
from softload import health as health_module
from softload.geometry import mla_pool_group
from softload.testing import Moment, MomentStore

from .hosts import FIRST_OWNER, MASTER, Hosts

PAGE_SIZE, PAGES, WIDTH = 4, 48, 4096
KEYS = tuple(f"page{page}" for page in range(PAGES))


def unit(name: str, keys: tuple[str, ...], **options: Any) -> TransferUnit:
    slots = torch.arange(len(keys) * PAGE_SIZE, dtype=torch.int64)
    return TransferUnit(name, (ComponentTransfer(PoolName.KV, keys, slots),), **options)


async def recovered(loader: PageLoader, keys: tuple[str, ...], seconds: float) -> float:
    """Seconds until pages can be saved, or still be loaded, and loaded."""
    began = time.monotonic()
    for attempt in range(1 << 30):
        whole = unit(f"recover{began}{attempt}", keys, deadline=2.0)
        loader.computed(whole)
        await loader.save([whole])
        if (await loader.lookup(whole)).pages == len(keys):
            async with loader.load([whole]) as load:
                if (await load.report()).outcomes[whole.request_id].restored_pages == len(keys):
                    return time.monotonic() - began
        assert time.monotonic() - began < seconds, "did not recover"
        await asyncio.sleep(0.1)
    raise AssertionError


async def main() -> None:
    figures: dict[str, Any] = {}
    health_module._NEGATIVE_DEFAULT = 1.5
    buffers = [torch.randint(0, 256, (PAGES * PAGE_SIZE, 1, WIDTH), dtype=torch.uint8)]
    pools = mla_pool_group(buffers, PAGE_SIZE)
    hosts = Hosts(owners=2, segment=64 << 20, lease=5.0, client_ttl=3)
    try:
        moments = MomentStore(open_store(f"mooncake://{hosts.address}"))
        config = LoaderConfig(landing_bytes=32 << 20, lookup_deadline=0.5, save_deadline=2.0, deadline=5.0)
        async with PageLoader(moments, pools, config=config) as loader:
            await loader.save([unit("save", KEYS)])
            context = loader._context
            assert context is not None
            (spec,) = next(iter(pools.specs(config.layout).values()))
            names = [context.keys.object_key(key, spec.pool, spec.part) for key in KEYS]
            found = await asyncio.to_thread(moments.inner.descriptors, names)
            lost = tuple(
                key
                for key, answer in zip(KEYS, found, strict=True)
                if isinstance(answer, Descriptor) and answer.endpoint.startswith(f"10.0.0.{FIRST_OWNER}:")
            )
            well = tuple(key for key in KEYS if key not in lost)
            figures["pages"] = [len(lost), len(well)]

            part = moments.at(
                Moment.READ,
                lambda: hosts.part(FIRST_OWNER),
                when=lambda read: any(f"/{lost[0]}/" in name for name in read),
            )
            began = time.monotonic()
            async with loader.load([unit("lost", lost[:4], deadline=1.0)]) as load:
                outcome = (await load.report()).outcomes["lost"]
            figures["owner_answered_s"] = time.monotonic() - began
            figures["owner_restored"] = outcome.restored_pages
            figures["owner_status"] = outcome.pages[0].status
            figures["owner_parted"] = part.is_set()
            figures["owner_stuck_threads"] = loader.statistics().stuck_threads
            began = time.monotonic()
            async with loader.load([unit("well", well[:8])]) as load:
                figures["well_restored"] = (await load.report()).outcomes["well"].restored_pages
            figures["well_s"] = time.monotonic() - began
            for attempt in range(3):
                async with loader.load([unit(f"learn{attempt}", lost[:4], deadline=0.3)]) as load:
                    await load.report()
            seconds = []
            for attempt in range(20):
                began = time.monotonic()
                await loader.lookup(unit(f"again{attempt}", lost[:4]))
                seconds.append(time.monotonic() - began)
            figures["owner_lookup_p50_ms"] = statistics.median(seconds) * 1e3
            hosts.join(FIRST_OWNER)
            figures["owner_recovered_s"] = await recovered(loader, KEYS, 60.0)

            hosts.part(MASTER)
            asked, statuses = [], []
            for attempt in range(3):
                began = time.monotonic()
                answer = await loader.lookup(unit(f"master{attempt}", KEYS))
                asked.append(time.monotonic() - began)
                statuses.append(answer.status)
            figures["master_status"], figures["then_status"] = statuses[0], statuses[-1]
            figures["master_lookup_s"] = max(asked)
            figures["master_breakers"] = loader.statistics().open_breakers
            seconds = []
            for attempt in range(20):
                began = time.monotonic()
                await loader.lookup(unit(f"open{attempt}", KEYS))
                seconds.append(time.monotonic() - began)
            figures["master_open_p50_ms"] = statistics.median(seconds) * 1e3
            hosts.join(MASTER)
            figures["master_recovered_s"] = await recovered(loader, KEYS, 60.0)
            began = time.monotonic()
        figures["close_s"] = time.monotonic() - began
    finally:
        hosts.close()
    print(json.dumps(figures), flush=True)


asyncio.run(main())
