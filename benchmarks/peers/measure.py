"""One case on one kind of store: every side in turn, again and again, in this process."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from peers.cases import Case, Workload
from peers.ours import ClockedStore, SharedStore, load, save
from peers.stopwatch import Sample, summary
from peers.theirs import Bare, SGLangLinker, rank_of, sglang_is_here
from softload import Integrity, Layout, LoaderConfig, PageLoader
from softload.config import ReadMode

__all__ = ["Bench", "LANDED", "LAYER_TIMES", "landing_for", "measure_case", "open_bench", "settle"]

LAYER_TIMES = (0.0, 0.001, 0.002, 0.005, 0.010)
"""Seconds that a forward takes a layer."""

LANDED = "grouped, landed"
PAGE_LANDED = "page, landed"
"""The side that takes what lies in this process by landing memory too."""

_MIB = 1 << 20

Side = Callable[[float], Awaitable[Sample]]


def landing_for(nbytes: int) -> int:
    """Landing memory that a streaming load of `nbytes` fits into, and the saves that come before."""
    return max(64 * _MIB, nbytes * 5 // 4 + 32 * _MIB)


class Bench:
    """A store with a workload in it, and loaders on it.

    Args:
        store: open.
        workload: saved in each layout that a loader has.
        stack: closes what is opened.
    """

    def __init__(self, store: ClockedStore, workload: Workload, stack: AsyncExitStack) -> None:
        self.store = store
        self.workload = workload
        self._stack = stack
        self._stored: set[Layout] = set()

    async def loader(self, layout: Layout, *, landing: int | None = None, **settings: Any) -> PageLoader:
        """A loader whose pages are stored."""
        nbytes = self.workload.pages * self.workload.page_bytes
        config = LoaderConfig(
            namespace="bench",
            layout=layout,
            landing_bytes=landing or landing_for(nbytes),
            save_deadline=120.0,
            **settings,
        )
        store = SharedStore(self.store)
        loader = await self._stack.enter_async_context(PageLoader(store, self.workload.pools, config=config))
        if layout not in self._stored:
            await save(loader, self.workload)
            self._stored.add(layout)
        return loader

    def beside(self, workload: Workload) -> Bench:
        """The same pages, for loaders with pools of their own: `workload`'s, whose own bytes are not stored."""
        workload.keys = self.workload.keys
        other = Bench(self.store, workload, self._stack)
        other._stored = self._stored
        return other


def settle() -> None:
    """Before anything is timed: the collector forgets what is there, as SGLang has it in its server."""
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def open_bench(workload: Workload, *, owners: int) -> AsyncIterator[Bench]:
    """A bench over an embedded Mooncake whose memory is in this process, or in `owners` others."""
    nbytes = workload.pages * workload.page_bytes
    store = ClockedStore(segment=int(nbytes * 2.6) + 256 * _MIB, lease=120.0, owners=owners)
    store.open()
    try:
        async with AsyncExitStack() as stack:
            yield Bench(store, workload, stack)
    finally:
        store.close()


async def measure_case(case: Case, *, owners: int, rounds: int, layer_times: Sequence[float]) -> dict[str, Any]:
    """All sides of one case.

    Returns:
        by side and layer time (milliseconds, as text) the figures of every round, seconds; bare reads and copies have
        one layer time alone.
    """
    workload = Workload(case.shape, case.pages)
    with_sglang = sglang_is_here()
    async with open_bench(workload, owners=owners) as bench:
        grouped = await bench.loader(Layout.GROUPED, integrity=Integrity.SAMPLE)
        page = await bench.loader(Layout.PAGE)
        whole = await bench.loader(Layout.PAGE, read_mode=ReadMode.WHOLE)
        ranges = await bench.loader(Layout.PAGE, read_mode=ReadMode.RANGES)
        loaders = {"grouped": grouped, "page": page, "page, whole": whole, "page, ranges": ranges}
        if not owners:  # what lies in this process is copied from there, by `grouped` and `page`
            loaders[LANDED] = await bench.loader(Layout.GROUPED, integrity=Integrity.SAMPLE, direct_reads=False)
            loaders[PAGE_LANDED] = await bench.loader(Layout.PAGE, direct_reads=False)
        sides: dict[str, Side] = {name: _ours(loader, bench) for name, loader in loaders.items()}
        linker = SGLangLinker(workload, bench.store.native) if with_sglang else None
        if linker is not None:

            async def theirs(layer_seconds: float) -> Sample:
                return linker.load(workload, layer_seconds)

            sides["sglang"] = theirs
        bare = Bare(workload, bench.store.native, rank_of(workload.pools))
        checked = {name: await _check(side, workload) for name, side in sides.items()}
        workload.poison()
        bare.load(), bare.memmove()
        checked["bare"] = workload.wrong_pages() == 0
        settle()
        samples: dict[str, dict[str, list[Sample]]] = {name: {} for name in [*sides, "bare", "memmove"]}
        for turn in range(rounds):
            for layer_seconds in layer_times:
                label = f"{layer_seconds * 1000:g}"
                order = list(sides)
                for name in order[turn % len(order) :] + order[: turn % len(order)]:
                    samples[name].setdefault(label, []).append(await sides[name](layer_seconds))
            samples["bare"].setdefault("0", []).append(bare.load())
            samples["memmove"].setdefault("0", []).append(bare.memmove())
        if linker is not None:
            linker.close()
    return {
        "case": case.name,
        "kind": case.kind,
        "store": "owner" if owners else "local",
        "bytes": workload.pages * workload.page_bytes,
        "layers": workload.pools.num_layers,
        "pages": workload.pages,
        "bytes_as_they_must_be": checked,
        "sides": {
            name: {label: _figures(all_of) for label, all_of in by_time.items()} for name, by_time in samples.items()
        },
    }


def _ours(loader: PageLoader, bench: Bench) -> Side:
    count = 0

    async def side(layer_seconds: float) -> Sample:
        nonlocal count
        count += 1
        return await load(loader, bench.store, [bench.workload.unit(f"r{count}")], layer_seconds)

    return side


async def _check(side: Side, workload: Workload) -> bool:
    """A first load, that is not timed: what it brings must be what was stored."""
    workload.poison()
    sample = await side(0.0)
    return sample.pages == workload.pages and workload.wrong_pages() == 0


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "first_layer": summary([sample.layers[0] for sample in samples]),
        "last_layer": summary([sample.layers[-1] for sample in samples]),
        "report": summary([sample.report for sample in samples]),
        "stall": summary([sample.stall for sample in samples]),
        "layers": [
            summary([sample.layers[layer] for sample in samples])["median"] for layer in range(len(samples[0].layers))
        ],
    }
    admissions = [sample.admission for sample in samples if sample.admission is not None]
    if admissions:
        figures["admission"] = summary(admissions)
    outside = [sample.outside for sample in samples if sample.outside is not None]
    if outside:
        figures["outside"] = summary(outside)
    return figures
