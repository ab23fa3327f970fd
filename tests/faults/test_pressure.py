"""Eviction, short leases and removals by force, on a real store that is in use."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from softload import Layout, PageStatus, sessions
from softload.integrity import write_tail
from softload.stores import EmbeddedMooncakeStore
from softload.testing import Fault, FaultKind, FaultyStore, Moment

from ..loader.doubles import Held
from ..loader.harness import Pools, eventually, keys, load, make_pools, missed, opened, put, settle
from .rig import MODE_IDS, MODES, Rig, cluster

pytestmark = [pytest.mark.asyncio, pytest.mark.mooncake]
pytest.importorskip("mooncake")


async def test_eviction_under_overlapping_loads_costs_what_was_evicted(report: Callable[..., None]) -> None:
    """200 loads in groups of eight while saves push the store over its watermark."""
    width, pages = 2048, 8
    pools = make_pools(pages=8 * pages + 2 * pages, layers=5, width=width)
    store = {"high_watermark": 0.9, "eviction_ratio": 0.1}
    dice = random.Random(7)
    seen: Counter[str] = Counter()
    async with cluster(owners=1, segment=16 << 20, lease=0.2, store=store, pools=pools, deadline=10.0) as rig:
        loader = rig.loader
        families = [keys(pages, f"f{index}_") for index in range(60)]  # 20 MiB: more than there is room for
        for family in families[:40]:
            await put(loader, pools, family)

        async def save_on() -> None:
            for family in families[40:] * 3:
                rows = range(8 * pages, 9 * pages)
                pools.fill(family, rows)
                loader.computed(pools.unit("saver", family, rows))
                await loader.save([pools.unit("saver", family, rows)])

        async def restore(name: str, family: Sequence[str], rows: range) -> None:
            outcome = (await load(loader, pools.unit(name, family, rows)))[name]
            pools.assert_restored(family[: outcome.restored_pages], rows[: outcome.restored_pages])
            seen["restored"] += outcome.restored_pages
            for status in missed(outcome)[:1]:
                seen[status] += 1
                lost = rig.object_keys(family[outcome.restored_pages])
                there = await rig.in_thread(rig.embedded.exists, lost)
                assert not all(there), f"{status} for a page that is there"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(save_on)
            for turn in range(25):
                async with anyio.create_task_group() as loads:
                    for index in range(8):
                        rows = range(index * pages, (index + 1) * pages)
                        loads.start_soon(restore, f"r{turn}_{index}", dice.choice(families[:40]), rows)
        await settle(loader)
    report("eviction passes during 200 loads", **{str(name): count for name, count in seen.items()})
    assert seen["restored"] > 0
    assert seen[PageStatus.NOT_FOUND] > 0
    assert set(seen) <= {"restored", PageStatus.NOT_FOUND, PageStatus.NO_MEMORY_REPLICA}


@pytest.mark.timeout(120)
async def test_loads_that_outlive_the_lease_three_times_lose_nothing(
    report: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole reads take leases of their own, sessions are started again.

    Leases of three seconds: what is left of one when a call goes out, a third, is more than a busy machine holds it up.
    """
    monkeypatch.setattr(sessions, "_LATE_START", 20.0)  # a busy machine may take a quarter of a second to start one
    lease = 3.0
    store = EmbeddedMooncakeStore(segment=64 << 20, lease=lease, owners=2)
    restarted: Counter[str] = Counter()

    async def slow_load(name: str, mode: dict[str, Any]) -> None:
        pools = make_pools(pages=64, layers=5)
        slow = FaultyStore(Held(store), [Fault(FaultKind.SLOW, probability=1.0, seconds=lease / 10)])
        batch = 1 if name == "page-whole" else 4
        options = {"read_lanes": 1, "read_batch_objects": batch, "deadline": 90.0, "lookup_deadline": 30.0}
        async with opened(slow, pools, **options, **mode) as loader:
            await put(loader, pools, keys(32, f"lease-{name}-"))
            began = anyio.current_time()
            outcome = (await load(loader, pools.unit(name, keys(32, f"lease-{name}-"), range(32))))[name]
            seconds = anyio.current_time() - began
            assert seconds > 2.5 * lease
            assert missed(outcome) == []
            pools.assert_restored(keys(32, f"lease-{name}-"), range(32))
            restarted[name] = loader.statistics().sessions_restarted
            report(f"lease {lease:g} s, {name}", load_s=seconds, sessions_restarted=restarted[name])
            await settle(loader)

    await anyio.to_thread.run_sync(store.open)
    try:
        async with anyio.create_task_group() as tasks:
            for name, mode in zip(MODE_IDS, MODES, strict=True):
                tasks.start_soon(slow_load, name, mode)
    finally:
        store.close()
    assert restarted["page-ranges"] > 0


PROVEN = [{"layout": "grouped", "integrity": "sample"}, {"layout": "grouped", "integrity": "full"}]
UNPROVEN = [{"layout": "grouped", "integrity": "off"}, MODES[1], MODES[2]]


@pytest.mark.parametrize("mode", [PROVEN[0], pytest.param(PROVEN[1], marks=pytest.mark.long)], ids=["sample", "full"])
async def test_foreign_bytes_are_never_committed(mode: dict[str, Any], report: Callable[..., None]) -> None:
    tries, foreign, restored = await _replace(mode, loads=50)
    report("removed, reused and put again", tries=tries, restored=restored, foreign=foreign)
    assert tries >= 1000
    assert foreign == 0


@pytest.mark.long
@pytest.mark.parametrize("mode", UNPROVEN, ids=["off", "page-whole", "page-ranges"])
async def test_what_comparing_descriptors_lets_pass(mode: dict[str, Any], report: Callable[..., None]) -> None:
    """Without digests a page that was put again, in place, by somebody else is not told from the page's own."""
    tries, foreign, restored = await _replace(mode, loads=10)
    report("removed, reused and put again", tries=tries, restored=restored, foreign=foreign)
    assert foreign <= tries // 2


async def _replace(mode: dict[str, Any], *, loads: int, pages: int = 20) -> tuple[int, int, int]:
    """Remove all pages by force after their admission; others take their memory, and every second time their keys."""
    pools = make_pools(pages=64, layers=1, width=512)
    tries = foreign = restored = 0
    async with cluster(owners=1, segment=16 << 20, pools=pools, deadline=20.0, read_lanes=1, **mode) as rig:
        loader = rig.loader
        loader._context.health.negative.capacity = 0  # type: ignore[union-attr]  # every try is a first one
        for number in range(loads):
            names = keys(pages, f"t{number}_")
            await put(loader, pools, names)
            rig.moments.at(Moment.READ, _Replacement(rig, names, put_again=bool(number % 2)))
            unit = pools.unit(f"r{number}", names, range(pages))
            outcome = (await load(loader, unit))[unit.request_id]
            tries += pages
            restored += outcome.restored_pages
            for page in range(outcome.restored_pages):
                foreign += not pools.holds(names[page], page)
            pools.assert_rows_kept(range(outcome.restored_pages))
            loader.computed(unit)
            await eventually(lambda: not loader.statistics().stuck_threads)
    return tries, foreign, restored


class _Replacement:
    """What another client does to pages between their admission and their read."""

    def __init__(self, rig: Rig, names: Sequence[str], *, put_again: bool) -> None:
        self._store = rig.embedded
        self._put_again = put_again
        self._keys = [rig.object_keys(name)[0] for name in names]
        specs = next(iter(rig.pools.group.specs(rig.loader.config.layout).values()))
        self._size = specs[0].size
        self._foreign = np.random.default_rng(len(names)).integers(0, 256, self._size, dtype=np.uint8)
        if rig.loader.config.layout is Layout.GROUPED:  # a whole page, and a good one, of somebody else's
            write_tail("another page", self._foreign)

    def __call__(self) -> None:
        self._store.register(self._foreign.ctypes.data, self._size)
        self._store.remove(self._keys, force=True)
        self._put([f"{key}-other" for key in self._keys])
        self._store.remove([f"{key}-other" for key in self._keys], force=True)
        if self._put_again:  # in the place of the page that was there
            self._put(self._keys)
        self._put([f"{key}-third" for key in self._keys])
        self._store.unregister(self._foreign.ctypes.data)

    def _put(self, names: Sequence[str]) -> None:
        sizes = [self._size] * len(names)
        answers = self._store.put_start(names, sizes)
        good = [name for name, answer in zip(names, answers, strict=True) if answer == 0]
        self._store.put_write(good, [self._foreign.ctypes.data] * len(good), sizes[: len(good)])
        self._store.put_end(good)


async def test_saves_into_a_frozen_owner_store_what_the_slots_held(report: Callable[..., None]) -> None:
    """200 saves time out and their slots are reused; when the owner goes on it reads landing memory, not slots."""
    pools: Pools = make_pools(pages=200, layers=5)
    options: dict[str, Any] = {"save_deadline": 3.0, "write_lanes": 48, "stuck_threads": 300, "landing_bytes": 64 << 20}
    async with cluster(owners=1, pools=pools, **options) as rig:
        loader = rig.loader
        pools.fill(keys(200), range(200))
        rig.owners[0].freeze()
        async with anyio.create_task_group() as tasks:
            for page in range(200):
                unit = pools.unit(f"s{page}", keys(200)[page : page + 1], [page])
                tasks.start_soon(loader.save, [unit])
        pools.scramble(seed=9)
        in_flight = rig.embedded.calls_out
        rig.owners[0].thaw()
        with anyio.fail_after(60):
            await loader.drain()
        good = 0
        for page in range(200):
            name = keys(200)[page]
            if (await loader.lookup(pools.unit(f"l{page}", [name]))).pages:
                outcome = (await load(loader, pools.unit(f"l{page}", [name], [page], deadline=10.0)))[f"l{page}"]
                assert outcome.restored_pages == 1, outcome
                pools.assert_restored([name], [page])
                good += 1
        report("saves into a frozen owner", in_flight=in_flight, stored_and_right=good, foreign=0)
        assert in_flight > 16 and good > 16
        await settle(loader)
