"""A whole replay: pools, store, faults, loader, scheduler, and the figures at the end."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from urllib.parse import parse_qs, urlsplit

import anyio
import numpy as np
from numpy.typing import NDArray

from softload.config import Layout, LoaderConfig
from softload.geometry import DevicePoolGroup
from softload.keys import KeySpace
from softload.loader import PageLoader
from softload.protocols import PageStore
from softload.replay.engine_memory import KEPT_SHARE, EngineMemory
from softload.replay.jobs import Job
from softload.replay.ledger import Ledger
from softload.replay.lru_bound import LruBound
from softload.replay.metrics import LagProbe, Metrics, Samples, idle_loop_lag, resident_bytes
from softload.replay.options import ReplayOptions
from softload.replay.progress import Progress
from softload.replay.recorder import Recorder
from softload.replay.scheduler import Scheduler
from softload.replay.shapes import build_pools, find_shape
from softload.replay.trace import TraceRequest
from softload.stores import EmbeddedMooncakeStore, QuietStart, open_store, parse_size
from softload.telemetry import Statistics
from softload.testing import ClusterFaults, FaultyStore, MomentStore
from softload.transfer import PoolName

__all__ = ["ZEROS", "is_clean", "replay"]

MIB = 1 << 20
_POOL_BYTES = 1 << 30
_MAX_DECODE_STEPS = 8
_COMPUTE_THREADS = 2
_QUIET_SECONDS = 2.0
_SETTLE_SECONDS = 90.0
"""A write whose owner was killed comes back after a minute."""
_COLLECT_SECONDS = 5.0
_DEFAULT_STORE_BYTES = {"memory": 1 << 30, "mooncake": 256 * MIB}

ZEROS = (
    "lost_requests",
    "leaked_slots",
    "byte_mismatches",
    "accepted_bad_pages",
    "overwritten_pages",
    "quarantined_bytes",
    "open_sessions",
    "exceptions",
)
"""Figures that a clean replay ends with at 0."""


async def replay(
    options: ReplayOptions,
    requests: Sequence[TraceRequest],
    progress: Progress | None = None,
    recorder: Recorder | None = None,
) -> dict[str, object]:
    """Replay `requests` and return the figures, ready for JSON; see `docs/replay.md` for each of them.

    Args:
        options: what to replay on, and how.
        requests: of the trace.
        progress: told how far it is.
        recorder: remembers single loads and calls, for a timeline or a page.
    """
    shape = find_shape(options.shape)
    num_pages = max(2, min(shape.pool_pages, _POOL_BYTES // shape.page_bytes))
    pools = build_pools(shape, num_pages, options.draft)
    memory = EngineMemory(pools, options.draft, options.seed)
    capacity = _store_pages(options.store, pools, options.layout)
    metrics = Metrics()
    config = options.loader()
    opened = open_store(options.store)
    store: PageStore = QuietStart(opened)
    faults = options.parsed_faults()
    happening: ClusterFaults | None = None
    of_cluster = [fault for fault in faults if fault.kind.is_scheduled]
    if of_cluster:
        assert isinstance(opened, EmbeddedMooncakeStore)  # checked with the options
        store = moments = MomentStore(store)
        happening = ClusterFaults(opened.cluster, of_cluster, moments)
    faulty: FaultyStore | None = None
    if len(faults) > len(of_cluster):
        of_calls = [fault for fault in faults if not fault.kind.is_scheduled]
        store = faulty = FaultyStore(store, of_calls, seed=options.seed, is_draft=_draft_keys(pools, config))
    touched = None if faulty is None else _touched_by(faulty, pools, config)
    if happening is not None:  # whatever was promised may be gone
        touched = _any_job
    ledger = Ledger(metrics, LruBound(capacity), options.draft, touched)
    max_pages = num_pages // 2
    metrics.cut_pages = sum(max(0, len(r.full_blocks) * shape.pages_per_block - max_pages) for r in requests)
    # Made one by one as they arrive: a job and what it was told are gone when it ends.
    jobs = ((request, Job.of(request, shape, max_pages, _MAX_DECODE_STEPS)) for request in requests)

    with ThreadPoolExecutor(_COMPUTE_THREADS, thread_name_prefix="replay-compute") as executor:
        quiet = await _quiet_lag(memory, executor)
        _collect()
        try:
            on_call = recorder.call if recorder is not None else None
            async with PageLoader(store, pools, config=config, on_call=on_call) as loader:
                scheduler = Scheduler(loader, memory, ledger, executor, options.scheduler(), recorder)
                started = time.perf_counter()
                with LagProbe() as probe, idle_loop_lag() as idle, happening or nullcontext():
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(_watch, metrics, len(requests), progress)
                        tasks.start_soon(_keep_heap_small)
                        await scheduler.run(jobs)
                        metrics.rss_mid = metrics.rss_mid or resident_bytes()  # over before anybody looked
                        tasks.cancel_scope.cancel()
                    wall = time.perf_counter() - started
                statistics = await _settled(loader)
                _collect()
                rss_end = resident_bytes()
        finally:
            gc.unfreeze()
    if progress is not None:
        progress.update(metrics.done, len(requests))
    figures = _figures(metrics, ledger.bound, statistics, wall)
    figures |= {
        "loop_lag_ms": probe.lag.milliseconds(50, 99, 99.9),
        "idle_loop_lag_ms": idle.milliseconds(50, 99, 99.9),
        "quiet_loop_lag_ms": quiet.milliseconds(50, 99, 99.9),
        "leaked_slots": memory.allocator.allocated + statistics.held_slots,
        "rss_end": rss_end,
        "lru_capacity_pages": capacity,
        "store": options.store,
        "layout": str(options.layout),
        "read_mode": str(options.read_mode),
        "shape": options.shape,
        "draft": str(options.draft),
        "draft_policy": str(options.draft_policy),
        "admission": str(options.admission),
        "integrity": str(options.integrity),
        "speed": "max" if options.speed is None else options.speed,
        "layer_time_ms": options.layer_time * 1e3,
        "deadline_s": config.deadline,
        "landing_bytes": config.landing_bytes,
        "max_running": options.max_running,
        "faults": list(options.faults),
        "happened": [] if happening is None else happening.happened,
        "seed": options.seed,
        "trace": "synthetic" if options.trace is None else options.trace.name,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    return figures


def _any_job(_: Job) -> bool:
    return True


def is_clean(figures: dict[str, object]) -> bool:
    """Whether nothing was lost, leaked or mismatched."""
    return not any(figures[name] for name in ZEROS)


def _figures(metrics: Metrics, bound: LruBound, statistics: Statistics, wall: float) -> dict[str, object]:
    loading = metrics.loading.seconds
    return {
        "requests": metrics.requests,
        "finished_requests": metrics.finished,
        "lost_requests": metrics.lost_requests,
        "request_pages": metrics.request_pages,
        "cut_pages": metrics.cut_pages,
        "lookup_pages": metrics.lookup_pages,
        "lookups_refused": dict(metrics.lookups_refused),
        "restored_pages": metrics.restored_pages,
        "computed_pages": metrics.computed_pages,
        "missed_requests": metrics.missed_requests,
        "missed_pages": {str(status): count for status, count in metrics.missed_pages.most_common()},
        "lru_bound_pages": bound.hit_pages,
        "draft_pages": metrics.draft_pages,
        "draft_dropped": metrics.draft_dropped,
        "late_failures": metrics.late_failures,
        "byte_mismatches": metrics.byte_mismatches,
        "accepted_bad_pages": metrics.accepted_bad_pages,
        "overwritten_pages": metrics.overwritten_pages,
        "promised_unrestored": metrics.promised_unrestored,
        "promised_unrestored_pages": dict(metrics.promised_unrestored_pages),
        "exceptions": sum(metrics.exceptions.values()),
        "exceptions_by_type": dict(metrics.exceptions),
        "saved_pages": dict(metrics.saves),
        "quarantined_bytes": statistics.quarantined_bytes,
        "quarantined_bytes_peak": statistics.quarantined_bytes_peak,
        "open_sessions": statistics.open_sessions,
        "stuck_threads": statistics.stuck_threads,
        "rss_mid": metrics.rss_mid,
        "bytes_loaded": statistics.bytes_loaded,
        "bytes_saved": statistics.bytes_saved,
        "wall_s": round(wall, 3),
        "requests_per_s": round(metrics.done / wall, 2) if wall else 0.0,
        "loading_s": round(loading, 3),
        "load_gbps": round(statistics.bytes_loaded / loading / 1e9, 3) if loading else 0.0,
        "engine_steps": metrics.steps,
        "first_layer_ms": metrics.first_layer.milliseconds(50, 99),
        "load_ms": metrics.load.milliseconds(50, 99),
        "stall_ms": metrics.stall.milliseconds(50, 99),
    }


def _store_pages(url: str, pools: DevicePoolGroup, layout: Layout) -> int | None:
    """Pages that the store has room for, from its URL; ``None`` where it does not tell."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    size = query.get("capacity", query.get("segment", [""]))[0]
    if size:
        capacity = parse_size(size)
    elif parts.scheme == "memory" or parts.netloc == "embedded":
        capacity = _DEFAULT_STORE_BYTES[parts.scheme]
    else:
        return None
    page = sum(
        spec.size * (KEPT_SHARE if pools.pool(name).index_source is PoolName.SWA else 1)
        for name, specs in pools.specs(layout).items()
        for spec in specs
    )
    return int(capacity / page)


def _key_space(pools: DevicePoolGroup, config: LoaderConfig) -> KeySpace:
    return KeySpace.create(config, pools.fingerprint(config.layout), rank_replicated=pools.rank_replicated)


def _touched_by(faulty: FaultyStore, pools: DevicePoolGroup, config: LoaderConfig) -> Callable[[Job], bool]:
    """Whether a fault was injected into any object of a job's promised pages."""
    keys = _key_space(pools, config)
    parts = [(spec.pool, spec.part) for specs in pools.specs(config.layout).values() for spec in specs]

    def touched(job: Job) -> bool:
        return any(
            keys.object_key(page_key, pool, part) in faulty.touched
            for page_key in job.keys[: job.promised]
            for pool, part in parts
        )

    return touched


def _draft_keys(pools: DevicePoolGroup, config: LoaderConfig) -> Callable[[str], bool]:
    """Whether an object's key is a draft's."""
    keys = _key_space(pools, config)
    page = "<page>"
    suffixes = tuple(
        keys.object_key(page, spec.pool, spec.part).partition(page)[2]
        for specs in pools.specs(config.layout).values()
        for spec in specs
        if spec.draft
    )
    return lambda key: key.endswith(suffixes)


async def _quiet_lag(memory: EngineMemory, executor: Executor) -> Samples:
    """The loop's lag before the run, with the replay's compute threads busy and neither store nor loader."""
    until = time.perf_counter() + _QUIET_SECONDS
    loop = asyncio.get_running_loop()
    halves = np.array_split(np.arange(memory.num_pages, dtype=np.int64), _COMPUTE_THREADS)
    with LagProbe() as probe:
        await asyncio.gather(*(loop.run_in_executor(executor, _compute_until, memory, half, until) for half in halves))
    return probe.lag


def _compute_until(memory: EngineMemory, pages: NDArray[np.int64], until: float) -> None:
    few = pages[:32]
    keys = [f"{page:016x}" for page in few]
    while time.perf_counter() < until:
        memory.compute(few, keys)
        memory.verify(few, keys, len(few), len(few))
    memory.poison(few)


async def _watch(metrics: Metrics, total: int, progress: Progress | None) -> None:
    """Report progress, and take the memory's size at half of the requests."""
    while True:
        if not metrics.rss_mid and 2 * metrics.done >= total:
            metrics.rss_mid = resident_bytes()
        if progress is not None:
            progress.update(metrics.done, total)
        await asyncio.sleep(0.1)


def _collect() -> None:
    """Collect garbage, and keep what lives on from being walked again."""
    gc.collect()
    gc.freeze()


async def _keep_heap_small() -> None:
    """Spare the loop the collector's full passes.

    The trace, the books and an in-process store's index are millions of objects that an engine does not have in its
    process: walking them would be measured as the loader's lag.
    """
    while True:
        await asyncio.sleep(_COLLECT_SECONDS)
        _collect()


async def _settled(loader: PageLoader) -> Statistics:
    """The loader's figures once calls that outlived their deadline have returned, or when that takes too long."""
    with anyio.move_on_after(_SETTLE_SECONDS):
        await loader.drain()
    return loader.statistics()
