"""Figures of one loader alone: faults, growth, many loads at once, what digests and questions cost, lag, plans."""

from __future__ import annotations

import asyncio
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

from peers.cases import CASES, Workload
from peers.measure import Bench, landing_for, open_bench
from peers.ours import load
from peers.stopwatch import summary
from peers.theirs import SGLangLinker, sglang_is_here
from softload import Integrity, Layout, LoaderConfig, PageLoader
from softload.replay.shapes import PoolFamily, Shape
from softload.stores.memory import MemoryStore

__all__ = ["FIGURES"]

_SMALL = Shape("small", PoolFamily.MLA, 32, 64, 4_096, 0, 0, "")
_MLA = CASES["mla 32x64x73728"].shape


async def _seconds(bench: Bench, loader: PageLoader, batch: Sequence[tuple[int, int]]) -> tuple[float, int]:
    units = [bench.workload.unit(f"r{first}", first, count) for first, count in batch]
    sample = await load(loader, bench.store, units, 0.0)
    return sample.report, sample.pages


async def missing_keys(*, owners: int, rounds: int) -> dict[str, Any]:
    """A batch of 16 requests of 2 pages, whole; and one with 2 of its 32 page keys gone: pages a second of each."""
    workload = Workload(_MLA, 64)
    whole = [(first, 2) for first in range(0, 32, 2)]
    holed = [(first, 2) for first in range(32, 64, 2)]
    rates: dict[str, list[float]] = {"whole": [], "2 of 32 gone": []}
    pages: dict[str, set[int]] = {name: set() for name in rates}
    async with open_bench(workload, owners=owners) as bench:
        loader = await bench.loader(Layout.GROUPED)
        await bench.loader(Layout.PAGE)
        linker = SGLangLinker(workload, bench.store.native) if sglang_is_here() else None
        if linker is not None:
            linker.load(workload, 0.0, whole)
        for page in (37, 50):  # the second page of one request, the first of another
            gone = [f"{loader_key}" for loader_key in _object_keys(loader, workload, page)]
            gone.append(f"{workload.keys[page]}_cp0_pp0_k")
            answers = bench.store.remove(gone, force=True)
            if any(answer != 0 for answer in answers):
                raise RuntimeError(f"expected every object to be removed, got {answers}")
        for _ in range(rounds + 1):
            for name, batch in (("whole", whole), ("2 of 32 gone", holed)):
                seconds, restored = await _seconds(bench, loader, batch)
                rates[name].append(restored / seconds)
                pages[name].add(restored)
        theirs = linker.load(workload, 0.0, holed).pages if linker is not None else None
        if linker is not None:
            linker.close()
    return {
        "pages_per_second": {name: summary(values[1:]) for name, values in rates.items()},
        "restored_pages": {name: sorted(values) for name, values in pages.items()},
        "sglang_restored_pages": theirs,
    }


def _object_keys(loader: PageLoader, workload: Workload, page: int) -> list[str]:
    """Of one page's grouped objects."""
    from softload.keys import KeySpace

    config, pools = loader.config, workload.pools
    space = KeySpace.create(config, pools.fingerprint(config.layout), rank_replicated=pools.rank_replicated)
    return [
        space.object_key(workload.keys[page], spec.pool, spec.part)
        for pool in workload.kv_pools
        for spec in pools.specs(config.layout)[pool.name]
    ]


async def growth(*, owners: int, rounds: int) -> dict[str, Any]:
    """32 layers of 4,096 bytes, 64 to 2,048 pages: seconds, and what twice the pages cost."""
    counts = [64 << power for power in range(6)]
    workload = Workload(_SMALL, counts[-1])
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    async with open_bench(workload, owners=owners) as bench:
        loader = await bench.loader(Layout.GROUPED)
        for turn in range(rounds + 1):
            for count in counts:
                taken, _ = await _seconds(bench, loader, [(0, count)])
                if turn:
                    seconds[count].append(taken)
    medians = [statistics.median(seconds[count]) for count in counts]
    return {
        "seconds": {str(count): summary(values) for count, values in seconds.items()},
        "twice_the_pages": [after / before for before, after in zip(medians, medians[1:], strict=False)],
    }


async def many_loads(*, owners: int, rounds: int) -> dict[str, Any]:
    """64 loads of 16 pages at once, against one of 1,024: bytes a second, and the first layers of the 64."""
    workload = Workload(_SMALL, 1024)
    nbytes = workload.pages * workload.page_bytes
    one: list[float] = []
    many: list[float] = []
    spread: list[float] = []
    async with open_bench(workload, owners=owners) as bench:
        loader = await bench.loader(Layout.GROUPED)
        for turn in range(rounds + 1):
            large, _ = await _seconds(bench, loader, [(0, 1024)])
            firsts: list[float] = []
            started = time.perf_counter()

            async def request(first: int, firsts: list[float] = firsts) -> None:
                asked = time.perf_counter()
                async with loader.load([workload.unit(f"m{first}", first, 16)]) as handle:
                    await handle.layer(0)
                    firsts.append(time.perf_counter() - asked)
                    await handle.report()

            await asyncio.gather(*(request(first) for first in range(0, 1024, 16)))
            together = time.perf_counter() - started
            if turn:
                one.append(nbytes / large)
                many.append(nbytes / together)
                firsts.sort()
                spread.append(firsts[-1] / statistics.median(firsts))  # of 64, the 99th percentile is the last
    return {
        "one_bytes_per_second": summary(one),
        "many_bytes_per_second": summary(many),
        "first_layer_p99_of_median": summary(spread),
    }


async def checks(*, owners: int, rounds: int) -> dict[str, Any]:
    """What digests and the question for descriptors cost of a load of 151 MB."""
    workload = Workload(_MLA, 64)
    seconds: dict[str, list[float]] = {kind.value: [] for kind in Integrity}
    asking: list[float] = []
    async with open_bench(workload, owners=owners) as bench:
        loaders = {kind: await bench.loader(Layout.GROUPED, integrity=kind) for kind in Integrity}
        for turn in range(rounds + 1):
            for kind, loader in loaders.items():
                taken, _ = await _seconds(bench, loader, [(0, 64)])
                if turn:
                    seconds[kind.value].append(taken)
                    asking.append(bench.store.asking.total / taken)
    return {"seconds": {kind: summary(values) for kind, values in seconds.items()}, "descriptors": summary(asking)}


async def loop_lag(*, owners: int, rounds: int) -> dict[str, Any]:
    """How late the event loop is while 8 loads of 151 MB run, again and again; and without them."""
    workload = Workload(_MLA, 64)
    lags: dict[str, list[float]] = {"idle": [], "8 loads": []}
    async with open_bench(workload, owners=owners) as bench:
        loader = await bench.loader(Layout.GROUPED, landing=8 * landing_for(workload.pages * workload.page_bytes))
        loaders = [loader]
        while len(loaders) < 8:  # a slot belongs to one unit at a time: pools of their own
            other = Workload(_MLA, 64)
            other.keys = workload.keys
            own = Bench(bench.store, other, bench._stack)
            own._stored = {Layout.GROUPED}
            loaders.append(await own.loader(Layout.GROUPED))

        async def loads() -> None:
            await asyncio.gather(*(_once(each, index) for index, each in enumerate(loaders)))

        async def _once(each: PageLoader, index: int) -> None:
            async with each.load([workload.unit(f"l{index}")]) as handle:
                await handle.report()

        await loads()
        started = time.perf_counter()
        for _ in range(rounds):
            async with _LagMeter(lags["8 loads"]):
                await loads()
        taken = (time.perf_counter() - started) / rounds
        for _ in range(rounds):
            async with _LagMeter(lags["idle"]):
                await asyncio.sleep(taken)
    return {name: _percentiles(values) for name, values in lags.items()}


class _LagMeter:
    """Sleeps for a millisecond at a time, and notes how much longer it took."""

    def __init__(self, lags: list[float]) -> None:
        self._lags = lags

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._measure())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _measure(self) -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(0.001)
            self._lags.append(time.perf_counter() - asked - 0.001)


def _percentiles(values: list[float]) -> dict[str, float]:
    values.sort()
    at = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999, "max": 1.0}
    return {name: values[min(len(values) - 1, int(len(values) * share))] for name, share in at.items()}


async def plan(*, owners: int, rounds: int) -> dict[str, Any]:
    """The plan of a prefix of 128K of dsv4-flash, made without a store: seconds, and bytes at the peak."""
    workload = Workload(CASES["dsv4-flash 128K"].shape, 512)
    config = LoaderConfig(namespace="bench", landing_bytes=64 << 20)
    figures: dict[str, Any] = {}
    async with PageLoader(MemoryStore(), workload.pools, config=config) as loader:
        for layout in Layout:
            unit = workload.unit("plan")
            taken = []
            for _ in range(rounds + 1):
                started = time.perf_counter()
                loader.load([unit])
                taken.append(time.perf_counter() - started)
            tracemalloc.start()
            handle = loader.load([unit])
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            del handle
            figures[layout.value] = {"seconds": summary(taken[1:]), "peak_bytes": peak}
            break
    return figures


FIGURES = {
    "missing keys": missing_keys,
    "growth": growth,
    "many loads": many_loads,
    "checks": checks,
    "loop lag": loop_lag,
    "plan": plan,
}
