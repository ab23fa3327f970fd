"""Figures of one loader alone: faults, growth, many loads at once, what digests and questions cost, lag, plans."""

from __future__ import annotations

import asyncio
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

from peers.cases import CASES, Workload
from peers.constants import constants
from peers.lag import LagMeter, idle_control, percentiles
from peers.measure import Bench, open_bench, settle
from peers.ours import load
from peers.stopwatch import summary
from peers.theirs import SGLangLinker, sglang_is_here
from softload import Integrity, Layout, LoaderConfig, PageLoader
from softload.replay.shapes import PoolFamily, Shape
from softload.stores.memory import MemoryStore

__all__ = ["FIGURES"]

_SMALL = Shape("small", PoolFamily.MLA, 32, 64, 4_096, 0, 0, "")
_MLA = CASES["mla 32x64x73728"].shape

_LAG_SECONDS = 5.0
"""For the event loop's lag: of its samples, one a millisecond, the thousandth part decides."""


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
        settle()
        for _ in range(max(rounds, 5) + 1):
            for name, batch in (("whole", whole), ("2 of 32 gone", holed)):
                seconds, restored = await _seconds(bench, loader, batch)
                rates[name].append(restored / seconds)
                pages[name].add(restored)
        theirs = linker.load(workload, 0.0, holed).pages if linker is not None else None
        if linker is not None:
            linker.close()
    return {
        "pages_per_second": {name: summary(values[1:]) for name, values in rates.items()},
        "rate_of_whole": summary(
            [holes / intact for holes, intact in zip(rates["2 of 32 gone"][1:], rates["whole"][1:], strict=True)]
        ),
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
        settle()
        for turn in range(max(rounds, 5) + 1):
            for count in counts:
                taken, _ = await _seconds(bench, loader, [(0, count)])
                if turn:
                    seconds[count].append(taken)
    return {
        "seconds": {str(count): summary(values) for count, values in seconds.items()},
        "twice_the_pages": [
            statistics.median(after / before for before, after in zip(seconds[count], seconds[2 * count], strict=True))
            for count in counts[:-1]
        ],
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
        settle()
        for turn in range(max(rounds, 5) + 1):
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
        "many_of_one": summary([all_of_them / alone for all_of_them, alone in zip(many, one, strict=True)]),
        "first_layer_p99_of_median": summary(spread),
    }


async def checks(*, owners: int, rounds: int) -> dict[str, Any]:
    """What digests and the question for descriptors cost of a load of 151 MB."""
    workload = Workload(_MLA, 64)
    seconds: dict[str, list[float]] = {kind.value: [] for kind in Integrity}
    asking: list[float] = []
    async with open_bench(workload, owners=owners) as bench:
        loaders = {kind: await bench.loader(Layout.GROUPED, integrity=kind) for kind in Integrity}
        settle()
        for turn in range(max(rounds, 9) + 1):
            kinds = list(loaders.items())
            for kind, loader in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                taken, _ = await _seconds(bench, loader, [(0, 64)])
                if turn:
                    seconds[kind.value].append(taken)
                    asking.append(bench.store.asking.total / taken)
    off = seconds[Integrity.OFF]
    return {
        "seconds": {kind: summary(values) for kind, values in seconds.items()},
        "of_off": {
            kind: summary([each / without for each, without in zip(values, off, strict=True)])
            for kind, values in seconds.items()
        },
        "descriptors": summary(asking),
    }


async def loop_lag(*, owners: int, rounds: int) -> dict[str, Any]:
    """How late the event loop is while 8 loads of 151 MB run, again and again; and an idle process's, meanwhile."""
    workload = Workload(_MLA, 64)
    async with open_bench(workload, owners=owners) as bench:
        loaders = [await bench.loader(Layout.GROUPED)]
        while len(loaders) < 8:  # a slot belongs to one unit at a time: pools of their own
            loaders.append(await bench.beside(Workload(_MLA, 64)).loader(Layout.GROUPED))

        async def once(each: PageLoader, index: int) -> int:
            async with each.load([workload.unit(f"l{index}")]) as handle:
                report = await handle.report()
            return sum(outcome.restored_pages for outcome in report.outcomes.values())

        async def loads() -> None:
            restored = await asyncio.gather(*(once(each, index) for index, each in enumerate(loaders)))
            if restored != [workload.pages] * len(loaders):
                raise RuntimeError(f"expected {workload.pages} pages in each of the loads, got {restored}")

        await loads()
        settle()
        async with LagMeter() as alone:
            await asyncio.sleep(1.0)
        started, turns = time.perf_counter(), 0
        async with idle_control() as control, LagMeter() as meter:
            while turns < rounds or time.perf_counter() - started < _LAG_SECONDS:
                await loads()
                turns += 1
    return {
        "8 loads": percentiles(meter.lags),
        "idle process meanwhile": percentiles(control),
        "no load": percentiles(alone.lags),
        "rounds": turns,
    }


async def plan(*, owners: int, rounds: int) -> dict[str, Any]:
    """The plan of a prefix of 128K of dsv4-flash, made without a store: seconds, and bytes at the peak."""
    workload = Workload(CASES["dsv4-flash 128K"].shape, 512)
    config = LoaderConfig(namespace="bench", landing_bytes=64 << 20)
    figures: dict[str, Any] = {}
    async with PageLoader(MemoryStore(), workload.pools, config=config) as loader:
        for layout in Layout:
            unit = workload.unit("plan")
            taken = []
            settle()
            for _ in range(max(rounds, 9) + 1):
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
    "constants": constants,
}
