"""The constants of the model in docs/performance.md, each measured by itself on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from peers.cases import CASES, Workload
from peers.measure import open_bench, settle
from peers.stopwatch import summary
from softload import Integrity, Layout
from softload.arena import Arena, aligned
from softload.integrity import check_tails, write_tail
from softload.keys import KeySpace
from softload.planning import unit_parts

__all__ = ["constants"]


def _timed(call: Callable[[], object], per: float, rounds: int) -> dict[str, float]:
    """Seconds of a call, divided by `per`; the first one is not counted."""
    taken = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        call()
        taken.append((time.perf_counter() - started) / per)
    return summary(taken[1:])


async def constants(*, owners: int, rounds: int) -> dict[str, Any]:
    """Microseconds an object of planning, asking and checking; GB/s of reading, of checking bytes and of copying."""
    rounds = max(rounds, 9)
    found: dict[str, Any] = {
        "small objects": await _of_objects(Workload(CASES["small 43x512x4096"].shape, 512), owners, rounds),
        "large objects": await _of_objects(Workload(CASES["mla 32x64x73728"].shape, 64), owners, rounds),
    }
    found["check, us an object"] = _scaled(_timed(*_checks(512, 4096, Integrity.SAMPLE), rounds), 1e6)
    for kind in (Integrity.SAMPLE, Integrity.FULL):
        check, _ = _checks(64, 2 << 20, kind)
        found[f"check {kind}, GB/s"] = (64 * (2 << 20)) / _timed(check, 1.0, rounds)["median"] / 1e9
    rows = np.random.default_rng(0).permutation(128)[:64]
    pages, landed = np.ones((128, 73_728), np.uint8), np.ones((64, 32 * 73_728 + 32), np.uint8)

    def copy() -> None:
        for layer in range(32):
            pages[rows] = landed[:, layer * 73_728 : (layer + 1) * 73_728]

    found["copy into slots, GB/s"] = 64 * 32 * 73_728 / _timed(copy, 1.0, rounds)["median"] / 1e9
    return found


async def _of_objects(workload: Workload, owners: int, rounds: int) -> dict[str, Any]:
    """Planning, asking for and reading all objects of a workload."""
    async with open_bench(workload, owners=owners) as bench:
        loader, store = await bench.loader(Layout.GROUPED), bench.store
        unit, pools = workload.unit("u"), workload.pools
        space = KeySpace.create(loader.config, pools.fingerprint(Layout.GROUPED), rank_replicated=pools.rank_replicated)
        columns = unit_parts(unit, pools, Layout.GROUPED, space).columns
        keys = [key for column in columns for key in column.keys]
        sizes = [column.spec.size for column in columns for _ in column.keys]
        landing = Arena(sum(map(aligned, sizes)), pinned=False)
        landing.memory[:] = 1
        offsets = np.cumsum([0, *map(aligned, sizes[:-1])])
        pointers = [landing.pointer + int(offset) for offset in offsets]
        calls = [slice(first, first + 256) for first in range(0, len(keys), 256)]

        def read() -> None:
            for part in calls:
                if list(store.read(keys[part], pointers[part], sizes[part])) != sizes[part]:
                    raise RuntimeError("expected every object to be read whole")

        store.register(landing.pointer, landing.nbytes)
        settle()
        reading = _timed(read, 1.0, rounds)
        figures = {
            "objects": len(keys),
            "bytes": sum(sizes),
            "plan, us an object": _scaled(_timed(lambda: loader.load([unit]), len(keys), rounds), 1e6),
            "descriptors, us an object": _scaled(_timed(lambda: store.descriptors(keys), len(keys), rounds), 1e6),
            "read, us an object": _scaled(reading, 1e6 / len(keys)),
            "read, GB/s": sum(sizes) / reading["median"] / 1e9,
        }
        store.unregister(landing.pointer)
    return figures


def _checks(count: int, size: int, kind: Integrity) -> tuple[Callable[[], object], int]:
    keys = [f"key {index}" for index in range(count)]
    objects = np.random.default_rng(0).integers(0, 256, (count, size + 32), np.uint8)
    for key, row in zip(keys, objects, strict=True):
        write_tail(key, row)

    def check() -> None:
        if not all(check_tails(keys, objects, kind)):
            raise RuntimeError("expected every object to be whole")

    return check, count


def _scaled(figures: dict[str, float], factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in figures.items()}
