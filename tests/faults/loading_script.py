"""Run by `test_processes`: saves pages to the cluster in its argument, then loads them until it is killed."""

from __future__ import annotations

import asyncio
import sys

import torch

from softload import ComponentTransfer, DevicePoolGroup, LoaderConfig, PageLoader, PoolName, TransferUnit, open_store
from softload.geometry import mla_pool_group

PAGE_SIZE = 4
PAGES = 64
LAYERS = 4
WIDTH = 2048


def make_group() -> DevicePoolGroup:
    buffers = [torch.zeros(PAGES * PAGE_SIZE, 1, WIDTH, dtype=torch.uint8) for _ in range(LAYERS)]
    return mla_pool_group(buffers, PAGE_SIZE)


def unit(name: str) -> TransferUnit:
    keys = tuple(f"page{page}" for page in range(PAGES))
    slots = torch.arange(PAGES * PAGE_SIZE, dtype=torch.int64)
    return TransferUnit(name, (ComponentTransfer(PoolName.KV, keys, slots),))


async def main(master: str) -> None:
    async with PageLoader(
        open_store(f"mooncake://{master}"), make_group(), config=LoaderConfig(deadline=20.0)
    ) as loader:
        await loader.save([unit("save")])
        for number in range(1 << 30):
            async with loader.load([unit(f"load{number}")]) as load:
                await load.admitted()
                if number == 3:
                    print("loading", flush=True)
                await load.report()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
