"""What faults of a cluster cost: Mooncake's bare client beside softload, in one run, on loopback.

    python benchmarks/faults.py [--patience 90] [--json FILE]

Prints the tables of docs/faults.md. A bare call that has not returned after the patience is counted as "more than" it,
and its peer is thawed. Needs a Mooncake build that can be imported; takes about five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from softload import (
    ComponentTransfer,
    Integrity,
    LoaderConfig,
    PageLoader,
    PoolName,
    TransferUnit,
    UnitOutcome,
)
from softload.geometry import DevicePoolGroup, mla_pool_group
from softload.integrity import check_tail, write_tail
from softload.stores import EmbeddedMooncakeStore, MooncakeCluster
from softload.testing import Moment, MomentStore

PAGE_SIZE = 16
PAGES = 32
LAYERS = 4
WIDTH = 16 << 10
"""Bytes of a token and layer: a page has 1 MiB, a load 32 MiB."""
OBJECT = PAGE_SIZE * LAYERS * WIDTH
LEASE = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """One fault: what the bare client did, and what softload did."""

    fault: str
    bare: str
    ours: str


class _Bare:
    """Mooncake's own client, and buffers for `PAGES` objects."""

    def __init__(self, *, owners: int = 1) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.cluster = MooncakeCluster(segment=128 << 20, lease=LEASE, owners=owners)
        self.cluster.start()
        self.native: Any = MooncakeDistributedStore()
        code = self.native.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", self.cluster.address)
        assert code == 0, code
        self.memory = np.zeros((PAGES, OBJECT), np.uint8)
        self.native.register_buffer(self.memory.ctypes.data, self.memory.nbytes)
        self.keys = [f"page{page}" for page in range(PAGES)]

    @property
    def pointers(self) -> list[int]:
        return [self.memory[page].ctypes.data for page in range(PAGES)]

    @property
    def sizes(self) -> list[int]:
        return [OBJECT] * PAGES

    def put(self, keys: list[str]) -> list[int]:
        self.reserve(keys)
        return self.write(keys)

    def reserve(self, keys: list[str]) -> None:
        for page in range(PAGES):
            self.memory[page] = page + 1
        self.native.batch_put_session_start(keys, self.sizes)

    def write(self, keys: list[str]) -> list[int]:
        written = self.native.batch_put_from_multi_buffer_ranges(
            keys, [[p] for p in self.pointers], [[OBJECT]] * PAGES, [[0]] * PAGES
        )
        self.native.batch_put_session_end(keys)
        return list(written)

    def read(self) -> list[int]:
        return list(self.native.batch_get_into(self.keys, self.pointers, self.sizes))


@contextmanager
def bare(**options: Any) -> Iterator[_Bare]:
    """A bare client on a cluster of its own."""
    client = _Bare(**options)
    try:
        yield client
    finally:
        client.cluster.close()


def timed(
    call: Callable[[], object], strike: Callable[[], object], patience: float
) -> tuple[str, object, threading.Thread]:
    """Strike while a call is out, a moment after it began, and wait for it: how long it took and what it answered."""
    answers: list[object] = []
    seconds: list[float] = []

    def run() -> None:
        began = time.perf_counter()
        answers.append(call())
        seconds.append(time.perf_counter() - began)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.004)  # into the transfer: nothing tells when it is there
    strike()
    thread.join(patience)
    if not seconds:
        return f"more than {patience:.0f} s", None, thread
    return f"{seconds[0]:.2f} s", answers[0], thread


class _Ours:
    """A loader on a cluster of its own, with the same bytes."""

    def __init__(self, store: EmbeddedMooncakeStore, moments: MomentStore, loader: PageLoader, pools: Any) -> None:
        self.store = store
        self.moments = moments
        self.loader = loader
        self.buffers: list[torch.Tensor] = pools

    @property
    def cluster(self) -> MooncakeCluster:
        return self.store.cluster

    def unit(self, name: str, first: int = 0, pages: int = PAGES, **options: Any) -> TransferUnit:
        keys = tuple(f"page{page}" for page in range(first, first + pages))
        slots = torch.arange(first * PAGE_SIZE, (first + pages) * PAGE_SIZE, dtype=torch.int64)
        return TransferUnit(name, (ComponentTransfer(PoolName.KV, keys, slots),), **options)

    def fill(self, add: int = 1) -> None:
        for buffer in self.buffers:
            for page in range(PAGES):
                buffer[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = (page + add) % 256

    async def load(self, name: str, **options: Any) -> tuple[UnitOutcome, float]:
        began = time.perf_counter()
        async with self.loader.load([self.unit(name, **options)]) as load:
            outcome = (await load.report()).outcomes[name]
        return outcome, time.perf_counter() - began

    def foreign(self, pages: int) -> int:
        """Restored pages that hold other bytes than their own."""
        wrong = 0
        for page in range(pages):
            rows = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
            wrong += any(bool((buffer[rows] != page + 1).any()) for buffer in self.buffers)
        return wrong


async def with_ours(scenario: Callable[[_Ours], Any], **config: Any) -> Any:
    """Run a scenario on a loader whose pages are saved; what it froze goes on."""
    buffers = [torch.zeros(PAGES * PAGE_SIZE, 1, WIDTH, dtype=torch.uint8) for _ in range(LAYERS)]
    group: DevicePoolGroup = mla_pool_group(buffers, PAGE_SIZE)
    store = EmbeddedMooncakeStore(segment=128 << 20, lease=LEASE, owners=1)
    moments = MomentStore(store)
    settings = {"deadline": 1.0, "lookup_deadline": 0.5, "landing_bytes": 256 << 20, **config}
    async with PageLoader(moments, group, config=LoaderConfig(**settings)) as loader:
        ours = _Ours(store, moments, loader, buffers)
        ours.fill()
        await loader.save([ours.unit("save", deadline=30.0)])
        try:
            return await scenario(ours)
        finally:
            for child in (store.cluster.master, *store.cluster.owners):
                if child is not None and child.alive:
                    child.thaw()


def owner(how: str, patience: float) -> Row:
    """An owner is killed or frozen in the middle of a read of 32 MiB."""
    with bare() as client:
        client.put(client.keys)
        child = client.cluster.owners[0]
        took, answer, thread = timed(client.read, child.kill if how == "kill" else child.freeze, patience)
        if child.alive:
            child.thaw()
            thread.join(60)
    codes = sorted({code for code in answer if code < 0}) if isinstance(answer, list) else "nothing"

    async def scenario(ours: _Ours) -> str:
        victim = ours.cluster.owners[0]
        strike = victim.kill if how == "kill" else victim.freeze
        ours.moments.at(Moment.READ, lambda: threading.Timer(0.004, strike).start(), nth=2)
        outcome, seconds = await ours.load("struck")
        again, second = await ours.load("again")
        third = statistics.median([(await ours.load(f"later{number}"))[1] for number in range(15)])
        return (
            f"{seconds:.2f} s: {outcome.restored_pages} of {PAGES} pages, the others misses; "
            f"the next loads {second:.2f} s, later ones {third * 1e3:.1f} ms"
        )

    what = "killed" if how == "kill" else "frozen"
    return Row(f"owner {what} in mid-read", f"{took}, answers {codes}", asyncio.run(with_ours(scenario)))


def between_ranges(patience: float) -> Row:
    """An owner is killed after the first layer of a load by ranges of an open session."""
    part = OBJECT // LAYERS
    with bare() as client:
        client.put(client.keys)
        client.native.batch_get_session_start(client.keys)

        def read(layer: int) -> list[int]:
            offsets, pointers = [[layer * part]] * PAGES, [[pointer] for pointer in client.pointers]
            return list(
                client.native.batch_get_into_multi_buffer_ranges(client.keys, pointers, [[part]] * PAGES, offsets)
            )

        read(0)
        client.cluster.owners[0].kill()
        took = [timed(lambda layer=layer: read(layer), lambda: None, patience)[0] for layer in (1, 2)]  # type: ignore[misc]

    async def scenario(ours: _Ours) -> str:
        ours.moments.at(Moment.LANDED, ours.cluster.owners[0].kill)
        outcome, seconds = await ours.load("struck")
        return f"{seconds:.2f} s for all layers: {outcome.restored_pages} of {PAGES} pages"

    ours = asyncio.run(with_ours(scenario, layout="page", read_mode="ranges", read_batch_bytes=4 << 20))
    return Row(
        "owner killed between ranges of two layers", f"{took[0]} for the next layer, {took[1]} for the one after", ours
    )


def put_to_the_dead(patience: float) -> Row:
    """An owner is killed in the middle of a put of 32 MiB."""
    with bare() as client:
        client.reserve(client.keys)
        took, answer, _ = timed(lambda: client.write(client.keys), client.cluster.owners[0].kill, patience)
    codes = sorted({code for code in answer if code < 0}) if isinstance(answer, list) else "nothing"

    async def scenario(ours: _Ours) -> str:
        keys = tuple(f"new{page}" for page in range(PAGES))
        unit = TransferUnit(
            "late", (ComponentTransfer(PoolName.KV, keys, ours.unit("x").target[0].slots),), deadline=1.0
        )
        strike = ours.cluster.owners[0].kill
        ours.moments.at(Moment.SAVE, lambda: threading.Timer(0.001, strike).start())
        staged: list[float] = []
        began = time.perf_counter()
        await ours.loader.save([unit], staged=lambda _: staged.append(time.perf_counter() - began))
        return f"{time.perf_counter() - began:.2f} s; the slots were free after {staged[0]:.2f} s"

    return Row("owner killed in mid-put", f"{took}, answers {codes}", asyncio.run(with_ours(scenario)))


def master(how: str, patience: float) -> Row:
    """The master freezes or dies, then somebody looks a prefix up."""
    with bare() as client:
        client.put(client.keys)
        child = client.cluster.master
        assert child is not None
        (child.kill if how == "kill" else child.freeze)()
        client.native.batch_get_replica_desc(
            client.keys
        ) if how == "kill" else None  # the first to notice fails at once
        took, answer, thread = timed(lambda: list(client.native.batch_is_exist(client.keys)), lambda: None, patience)
        if child.alive:
            child.thaw()
            thread.join(60)
    code = answer[0] if isinstance(answer, list) else "nothing"

    async def scenario(ours: _Ours) -> str:
        child = ours.cluster.master
        assert child is not None
        (child.kill if how == "kill" else child.freeze)()
        seconds = []
        for number in range(12):
            began = time.perf_counter()
            await ours.loader.lookup(ours.unit(f"look{number}"))
            seconds.append(time.perf_counter() - began)
        return f"{max(seconds):.2f} s at most, no pages; breaker open: {sorted(seconds)[3] * 1e3:.2f} ms"

    what = "killed" if how == "kill" else "frozen"
    return Row(f"lookup, master {what}", f"{took}, answers {code}", asyncio.run(with_ours(scenario)))


def sources_reused(patience: float) -> Row:
    """An owner is frozen during puts, their sources are reused, the owner goes on."""
    with bare() as client:
        child = client.cluster.owners[0]
        child.freeze()
        thread = threading.Thread(target=client.put, args=(client.keys,), daemon=True)
        thread.start()
        time.sleep(0.5)
        client.memory[:] = 0xEE
        child.thaw()
        thread.join(60)
        client.memory[:] = 0
        read = client.read()
        good = [page for page in range(PAGES) if read[page] == OBJECT]
        wrong = sum(bool((client.memory[page] != page + 1).any()) for page in good)
        told = f"{wrong} of {len(good)} stored pages hold other bytes"

    async def scenario(ours: _Ours) -> str:
        victim = ours.cluster.owners[0]
        keys = tuple(f"again{page}" for page in range(PAGES))
        whole = ours.unit("save")
        moved = TransferUnit("late", (ComponentTransfer(PoolName.KV, keys, whole.target[0].slots),), deadline=0.7)
        ours.fill()
        victim.freeze()
        await ours.loader.save([moved])
        for buffer in ours.buffers:
            buffer.fill_(0xEE)
        victim.thaw()
        await ours.loader.drain()
        pages = (await ours.loader.lookup(moved)).pages
        unit = TransferUnit(
            "read", (ComponentTransfer(PoolName.KV, keys[:pages], whole.target[0].slots[: pages * PAGE_SIZE]),)
        )
        restored = 0
        if pages:
            async with ours.loader.load([unit]) as load:
                restored = (await load.report()).outcomes["read"].restored_pages
        return f"{ours.foreign(restored)} of {restored} stored pages (the others were not stored)"

    return Row("owner frozen during puts, sources reused", told, asyncio.run(with_ours(scenario)))


def replaced() -> Row:
    """Pages are removed by force and their memory reused, with sessions open."""
    with bare() as client:
        client.put(client.keys)
        client.native.batch_get_session_start(client.keys)
        client.native.batch_remove(client.keys, True)
        source = np.full((PAGES, OBJECT), 0xEE, np.uint8)
        client.native.register_buffer(source.ctypes.data, source.nbytes)
        for turn in range(3):
            names = [f"other{turn}_{page}" for page in range(PAGES)]
            client.native.batch_put_session_start(names, client.sizes)
            pointers = [[source[page].ctypes.data] for page in range(PAGES)]
            client.native.batch_put_from_multi_buffer_ranges(names, pointers, [[OBJECT]] * PAGES, [[0]] * PAGES)
            client.native.batch_put_session_end(names)
        client.memory[:] = 0
        read = client.native.batch_get_into_multi_buffer_ranges(
            client.keys, [[p] for p in client.pointers], [[OBJECT]] * PAGES, [[0]] * PAGES
        )
        full = [page for page in range(PAGES) if read[page] == OBJECT]
        wrong = sum(bool((client.memory[page] != page + 1).any()) for page in full)
        told = f"{len(full)} of {PAGES} full byte counts, {wrong} of them other bytes"

    async def scenario(ours: _Ours) -> str:
        context = ours.loader._context
        assert context is not None
        specs = [spec for found in ours.loader.pools.specs(ours.loader.config.layout).values() for spec in found]
        names = [context.keys.object_key(f"page{p}", spec.pool, spec.part) for p in range(PAGES) for spec in specs]
        size = max(spec.size for spec in specs)
        source = np.full(size, 0xEE, np.uint8)

        def strike() -> None:
            ours.store.register(source.ctypes.data, size)
            ours.store.remove(names, force=True)
            others = [f"other{index}" for index in range(64)]
            good = [key for key, a in zip(others, ours.store.put_start(others, [size] * 64), strict=True) if a == 0]
            ours.store.put_write(good, [source.ctypes.data] * len(good), [size] * len(good))
            ours.store.put_end(good)
            ours.store.unregister(source.ctypes.data)

        ours.moments.at(Moment.READ, strike)
        outcome, _ = await ours.load("struck", deadline=10.0)
        return f"{outcome.restored_pages} pages restored, {ours.foreign(outcome.restored_pages)} of them other bytes"

    ranges = asyncio.run(with_ours(scenario, layout="page", read_mode="ranges", deadline=10.0))
    return Row("removed by force and reused, sessions open", told, ranges)


def digests() -> list[dict[str, Any]]:
    """What `sample` and `full` find, and what they cost, on objects of 1 MiB."""
    dice = np.random.default_rng(0)
    size = 1 << 20
    good = dice.integers(0, 256, size + 32, dtype=np.uint8)
    write_tail("page", good)
    other = dice.integers(0, 256, size + 32, dtype=np.uint8)
    write_tail("other", other)
    boundaries = range(4096, size, 4096)

    def torn(at: int) -> np.ndarray[Any, Any]:
        both = good.copy()
        both[at:] = other[at:]
        both[-32:] = good[-32:]  # the end has landed, something before it has not
        return both

    def sliver(at: int) -> np.ndarray[Any, Any]:
        both = good.copy()
        both[at - 2048 : at - 1024] = other[at - 2048 : at - 1024]
        return both

    def half(at: int) -> np.ndarray[Any, Any]:
        both = other.copy()
        both[at : at + 4096] = good[at : at + 4096]
        both[-32:] = good[-32:]
        return both

    def one_block(at: int) -> np.ndarray[Any, Any]:
        both = good.copy()
        both[at : at + 4096] = other[at : at + 4096]
        return both

    def flipped() -> np.ndarray[Any, Any]:
        both = good.copy()
        both[dice.integers(size)] ^= 1 << dice.integers(8)
        return both

    cases: list[tuple[str, list[np.ndarray[Any, Any]]]] = [
        ("foreign object", [other]),
        ("torn at a 4 KiB boundary", [torn(at) for at in boundaries]),
        ("one 4 KiB block of another object", [one_block(at) for at in boundaries]),
        ("1 KiB of another object, between the samples", [sliver(at) for at in boundaries]),
        ("all but one 4 KiB block of another object", [half(at) for at in boundaries]),
        ("one flipped bit", [flipped() for _ in range(1000)]),
    ]
    rows = []
    for name, damaged in cases:
        found = {
            str(integrity): sum(not check_tail("page", each, integrity) for each in damaged) / len(damaged)
            for integrity in (Integrity.SAMPLE, Integrity.FULL)
        }
        rows.append({"damage": name, "tries": len(damaged), **found})
    landing = np.empty_like(good)
    costs = {}
    for integrity in (Integrity.SAMPLE, Integrity.FULL):
        laps = []
        for _ in range(200):
            began = time.perf_counter()
            check_tail("page", good, integrity)
            laps.append(time.perf_counter() - began)
        costs[str(integrity)] = float(np.median(laps)) * 1e6
    laps = []
    for _ in range(200):
        began = time.perf_counter()
        np.copyto(landing, good)
        laps.append(time.perf_counter() - began)
    rows.append({"damage": "microseconds for 1 MiB (a copy of it takes "
                 f"{float(np.median(laps)) * 1e6:.0f})", "tries": 200, **costs})  # fmt: skip
    return rows


ROWS: dict[str, Callable[[float], Row]] = {
    "owner-killed": lambda patience: owner("kill", patience),
    "owner-frozen": lambda patience: owner("freeze", patience),
    "between-ranges": between_ranges,
    "put-to-the-dead": put_to_the_dead,
    "master-frozen": lambda patience: master("freeze", patience),
    "master-killed": lambda patience: master("kill", patience),
    "sources-reused": sources_reused,
    "replaced": lambda _: replaced(),
}


def in_a_process(name: str, patience: float) -> Row:
    """One row from a process of its own: the native client of an earlier one holds the GIL while it closes."""
    argv = [sys.executable, __file__, "--only", name, "--patience", str(patience)]
    script = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return Row(**json.loads(script.stdout.splitlines()[-1]))


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patience", type=float, default=90.0, help="seconds that a bare call is waited for")
    parser.add_argument("--only", choices=ROWS, help="one row, as JSON")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOG_minloglevel", "3")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    if arguments.only is not None:
        print(json.dumps(asdict(ROWS[arguments.only](arguments.patience))), flush=True)
        os._exit(0)  # bare calls may be out, under which the native library does not end well
    rows = [in_a_process(name, arguments.patience) for name in ROWS]
    print("| fault | bare client | softload |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {row.fault} | {row.bare} | {row.ours} |")
    found = digests()
    print("\n| damage | tries | `sample` finds | `full` finds |\n| --- | ---: | ---: | ---: |")
    for each in found[:-1]:
        print(f"| {each['damage']} | {each['tries']} | {each['sample']:.1%} | {each['full']:.1%} |")
    print(f"| {found[-1]['damage']} | | {found[-1]['sample']:.0f} | {found[-1]['full']:.0f} |")
    if arguments.json is not None:
        cases = [asdict(row) for row in rows]
        arguments.json.write_text(json.dumps({"faults": cases, "digests": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
