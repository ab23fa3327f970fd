"""Direct reads on a real Mooncake: of a segment of this process, never of an owner's."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import anyio.to_thread
import numpy as np
import pytest

from softload import Layout, PageLoader, PageStatus, lending
from softload.protocols import Descriptor
from softload.stores import EmbeddedMooncakeStore, LendingWrapperStore
from softload.testing import RecordingStore

from .harness import assert_outcome, end_time_of, eventually, keys, load, make_pools, missed, opened, put, settle
from .test_direct_reads import Gate, object_keys

pytestmark = [pytest.mark.asyncio, pytest.mark.mooncake]

PAGES = 6
WIDTH = 32 << 10
"""Bytes of a token in a layer: 128 KiB a page and layer, 640 KiB a page."""

layouts = pytest.mark.parametrize("layout", list(Layout))

LANDING = 40 << 20

_names = itertools.count()


def mooncake() -> EmbeddedMooncakeStore:
    """Its leases outlast every test: what is copied past its lease is read, on a busy machine past a short one."""
    return EmbeddedMooncakeStore(segment=64 << 20, lease=60.0)


class Kept(LendingWrapperStore):
    """Stays open, for the next test."""

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between what other tests have left in the segment pages do not always lie side by side."""
    monkeypatch.setattr(lending, "_WORTH_BYTES", 1)


@pytest.fixture(scope="module")
def segment() -> Iterator[EmbeddedMooncakeStore]:
    """A segment of this process; see `mooncake`."""
    pytest.importorskip("mooncake")
    store = mooncake()
    store.open()
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def own(segment: EmbeddedMooncakeStore) -> RecordingStore:
    return RecordingStore(Kept(segment))


@pytest.fixture
def namespace() -> Iterator[dict[str, Any]]:
    """Keys of one's own in a store that others use too."""
    yield {"namespace": f"direct{next(_names)}", "landing_bytes": LANDING}


def described(store: RecordingStore, key: str) -> Descriptor:
    (found,) = store.descriptors([key])
    assert isinstance(found, Descriptor)
    return found


def there(found: Descriptor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An object where it lies, writable."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * found.size).from_address(found.address))


@layouts
async def test_a_segment_of_this_process_is_copied_from(
    own: RecordingStore, namespace: dict[str, Any], layout: Layout
) -> None:
    pools = make_pools(width=WIDTH, pages=16)
    async with opened(own, pools, layout=layout, **namespace) as loader:
        await put(loader, pools, keys(PAGES))
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        own.clear()  # one object was read for proof
        pools.scramble()
        assert_outcome((await load(loader, pools.unit("b", keys(PAGES), range(PAGES))))["b"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        pools.assert_rows_kept(range(PAGES))
        assert own.count("read") == 0
        now = loader.statistics()
        assert now.bytes_direct == now.bytes_loaded > 0
        await settle(loader)


@layouts
async def test_an_owners_memory_is_read(
    owned_mooncake_store: EmbeddedMooncakeStore, namespace: dict[str, Any], layout: Layout
) -> None:
    pools = make_pools(width=WIDTH, pages=16)
    recording = RecordingStore(Kept(owned_mooncake_store))
    async with opened(recording, pools, layout=layout, **namespace) as loader:
        await put(loader, pools, keys(PAGES))
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        objects = {key for page in keys(PAGES) for key in object_keys(loader, pools, page)}
        assert {*recording.keys_of("read"), *recording.keys_of("read_ranges")} == objects
        assert loader.statistics().bytes_direct == 0
        await settle(loader)


async def _opened_and_known(loader: PageLoader, own: RecordingStore, pools: Any) -> None:
    await put(loader, pools, keys(PAGES))
    assert_outcome((await load(loader, pools.unit("first", keys(PAGES), range(PAGES))))["first"], PAGES)
    pools.scramble()
    own.clear()


@layouts
async def test_an_object_that_is_replaced_before_it_is_copied(
    own: RecordingStore, namespace: dict[str, Any], layout: Layout
) -> None:
    pools = make_pools(width=WIDTH, pages=16)
    async with opened(own, pools, layout=layout, **namespace) as loader:
        await _opened_and_known(loader, own, pools)
        gate = Gate()
        key = object_keys(loader, pools, "k3")[-2:][0]
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            before = described(own, key)
            foreign = there(before)[::-1].copy()
            assert own.remove([key], force=True) == [0]
            others = [f"{namespace['namespace']}-other{nth}" for nth in range(64)]
            places = []
            for other in others:  # the allocator may have other places of this size
                assert own.put_start([other], [foreign.size]) == [0]
                assert own.put_write([other], [foreign.ctypes.data], [foreign.size]) == [foreign.size]
                assert own.put_end([other]) == [0]
                places.append(described(own, other).address)
                if places[-1] == before.address:
                    break
            assert before.address in places
            gate.opens.set()
            outcome = (await handle.report()).outcomes["a"]
        own.remove(others, force=True)
        assert_outcome(outcome, 3, PageStatus.NOT_FOUND)
        pools.assert_restored(keys(3), range(3))
        await settle(loader)


async def test_bytes_that_were_spoilt_in_the_segment(own: RecordingStore, namespace: dict[str, Any]) -> None:
    pools = make_pools(width=WIDTH, pages=16)
    async with opened(own, pools, **namespace) as loader:
        await _opened_and_known(loader, own, pools)
        key = object_keys(loader, pools, "k2")[3]
        there(described(own, key))[4096] ^= 1
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], 2, PageStatus.CORRUPT)
        pools.assert_restored(keys(2), range(2))
        await settle(loader)
        assert own.keys_of("read") == (key, key)
        await eventually(lambda: own.count("remove") == 1)
        assert own.exists([key]) == [False]


@layouts
async def test_the_store_closes_while_a_load_waits_to_copy(layout: Layout) -> None:
    pools = make_pools(width=WIDTH, pages=16)
    store = mooncake()
    async with opened(store, pools, layout=layout, landing_bytes=LANDING) as loader:
        await put(loader, pools, keys(PAGES))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            await anyio.to_thread.run_sync(store.close)
            gate.opens.set()
            assert_outcome((await handle.report()).outcomes["a"], 0, PageStatus.STORE_UNREACHABLE)
        pools.assert_rows_kept()
        await settle(loader)


async def test_objects_of_one_kind_lie_side_by_side_however_many_calls_have_saved_them() -> None:
    pools = make_pools(pages=2 * PAGES)
    recording = RecordingStore(mooncake())
    async with opened(recording, pools, read_batch_objects=5) as loader:
        await put(loader, pools, keys(PAGES))
        assert recording.count("put_write") > 4
        for kind in range(4):
            places = [described(recording, object_keys(loader, pools, key)[kind]).address for key in keys(PAGES)]
            assert len(set(np.diff(places))) == 1
        await settle(loader)


@pytest.mark.parametrize("fault", ["frozen", "dead"])
async def test_a_master_that_goes_after_admission_proves_nothing_about_pages(fault: str) -> None:
    """Nothing is given out that it has not confirmed, whatever becomes of it; a frozen one costs the deadline."""
    pools = make_pools(width=WIDTH, pages=16)
    store = mooncake()
    async with opened(store, pools, layout="page", landing_bytes=LANDING) as loader:
        await put(loader, pools, keys(PAGES))
        assert_outcome((await load(loader, pools.unit("first", keys(PAGES), range(PAGES))))["first"], PAGES)
        assert loader.statistics().bytes_direct > 0
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            master = store.cluster.master
            assert master is not None
            await anyio.to_thread.run_sync(master.freeze if fault == "frozen" else master.kill)
            try:
                gate.opens.set()
                assert loader._context is not None
                control = loader._context.control
                if fault == "frozen":
                    await eventually(lambda: control.statistics().running > 0)
                    end_time_of(loader, "a")
                outcome = (await handle.report()).outcomes["a"]
            finally:
                if fault == "frozen":
                    master.thaw()
        assert_outcome(outcome, 0)
        assert missed(outcome)[0] in (PageStatus.TIMED_OUT, PageStatus.STORE_UNREACHABLE)
        if fault == "frozen":
            await settle(loader)
