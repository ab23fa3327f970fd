"""Objects in memory that the store lends are copied from there, and nothing is used that was not proven."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import anyio
import numpy as np
import pytest
import structlog

from softload import PageLoader, PageStatus, PageStore, context, events, lending, unit_copies, unit_layers
from softload.copies import Copy, execute
from softload.geometry import DraftMode
from softload.landing import LandingMemory
from softload.lent_copies import LentCopy, Refuted, copy_lent
from softload.native_calls import CallSpan
from softload.protocols import Descriptor
from softload.store_calls import StoreCalls
from softload.stores import LendingWrapperStore, MemoryStore
from softload.testing import HangingStore, RecordingStore

from .harness import (
    Pools,
    any_of,
    arrived,
    assert_outcome,
    config,
    end_time_of,
    eventually,
    is_of,
    keys,
    lending_store,
    load,
    make_pools,
    opened,
    put,
    settle,
)

pytestmark = pytest.mark.asyncio

PAGES = 6
OBJECTS = 4 * PAGES
"""Of the target: a page has a group of layers 0, 1, 2-3 and 4."""


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of these tests are smaller than what is worth a copy of its own."""
    monkeypatch.setattr(lending, "_WORTH_BYTES", 1)


class Gate:
    """The engine's fence: what happens between admission and copy happens while it is shut."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.opens = threading.Event()

    def __call__(self) -> None:
        self.arrived.set()
        assert self.opens.wait(20)

    async def wait(self) -> None:
        """Until a unit is admitted and would copy."""
        assert await anyio.to_thread.run_sync(self.arrived.wait, 20)


def object_keys(loader: PageLoader, pools: Pools, page_key: str) -> list[str]:
    """The keys of one page's objects, first layers first."""
    context = loader._context
    assert context is not None
    return [
        context.keys.object_key(page_key, name, spec.part)
        for name, specs in pools.group.specs(context.config.layout).items()
        for spec in specs
    ]


def bytes_of(memory: MemoryStore, key: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An object where it lies, writable."""
    assert memory._arena is not None
    found = memory._objects[key]
    return memory._arena[found.offset : found.offset + found.size]


def put_object(memory: MemoryStore, key: str, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    data = np.ascontiguousarray(data)
    assert memory.put_start([key], [data.size]) == [0]
    assert memory.put_write([key], [data.ctypes.data], [data.size]) == [data.size]
    assert memory.put_end([key]) == [0]


async def test_a_store_that_hangs_over_what_it_lends_keeps_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads an object to find out, and may do so from an owner that is frozen."""
    monkeypatch.setattr(context, "_LEND_SECONDS", 0.05)
    may_answer = threading.Event()

    class Hanging(LendingWrapperStore):
        def lend(self, key: str, descriptor: Descriptor) -> range | None:
            assert may_answer.wait(20)
            return super().lend(key, descriptor)

    pools = make_pools()
    async with opened(Hanging(lending_store()), pools, control_lanes=1) as loader:
        try:
            await put(loader, pools, keys(PAGES))
            assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
            assert loader.statistics().bytes_direct == 0
            assert (await loader.lookup(pools.unit("b", keys(PAGES)))).pages == PAGES
            assert loader.statistics().open_breakers == ()
            may_answer.set()
            await eventually(lambda: loader._context is not None and loader._context.lender.lends_any)
            assert_outcome((await load(loader, pools.unit("c", keys(PAGES), range(PAGES))))["c"], PAGES)
            assert loader.statistics().bytes_direct > 0
            await settle(loader)
        finally:
            may_answer.set()


async def test_a_deadline_that_ends_while_the_store_hangs_over_what_it_lends_is_not_the_masters_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that was asked of the master is here by then: it is the owner that does not answer."""
    monkeypatch.setattr(context, "_LEND_SECONDS", 20.0)
    asked, may_answer = threading.Event(), threading.Event()

    class Hanging(LendingWrapperStore):
        def lend(self, key: str, descriptor: Descriptor) -> range | None:
            asked.set()
            assert may_answer.wait(20)
            return super().lend(key, descriptor)

    pools = make_pools()
    async with opened(Hanging(lending_store()), pools) as loader:
        try:
            await put(loader, pools, keys(PAGES))
            unit = pools.unit("a", keys(PAGES), range(PAGES), deadline=1.0)
            assert_outcome((await load(loader, unit))["a"], 0, PageStatus.TIMED_OUT)
            assert asked.is_set()
            assert loader.statistics().open_breakers == ()
            assert_outcome((await load(loader, pools.unit("b", keys(PAGES), range(PAGES))))["b"], PAGES)
        finally:
            may_answer.set()
        await settle(loader)


async def test_a_store_that_was_closed_while_it_hung_over_what_it_lends_is_asked_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context, "_LEND_SECONDS", 0.05)
    may_answer, closed = threading.Event(), threading.Event()
    asked: list[str] = []
    late: list[str] = []

    class Hanging(Elsewhere):
        def lend(self, key: str, descriptor: Descriptor) -> range | None:
            (late if closed.is_set() else asked).append(descriptor.endpoint)
            assert may_answer.wait(20)
            return None

        def close(self) -> None:
            closed.set()
            super().close()

    pools = make_pools()
    try:
        async with opened(Hanging(lending_store(), is_of("k1")), pools) as loader:
            await put(loader, pools, keys(PAGES))
            assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
            assert loader._context is not None
            lending_group = next(group for group in loader._context.groups() if group.name == "lending")
    finally:
        may_answer.set()
    await eventually(lambda: lending_group.statistics().threads == 0)
    assert (len(asked), late) == (1, [])


async def test_what_the_store_lends_is_not_read() -> None:
    pools = make_pools()
    recording = RecordingStore(lending_store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(PAGES))
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES))]) as handle:
            assert (await handle.admitted())["a"] == PAGES
            report = await handle.report()
        assert_outcome(report.outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        pools.assert_rows_kept(range(PAGES))
        assert recording.count("read") == 0
        now = loader.statistics()
        found = recording.descriptors(object_keys(loader, pools, "k0"))
        size = sum(descriptor.size for descriptor in found if isinstance(descriptor, Descriptor))
        assert report.bytes_loaded == now.bytes_loaded == now.bytes_direct == size * PAGES
        assert now.kept_bytes == 0
        await settle(loader)


@pytest.mark.parametrize(
    "options", [{"direct_reads": False}, {"layout": "page"}, {"integrity": "off"}], ids=["off", "page", "unchecked"]
)
async def test_other_loads_are_read(options: dict[str, Any]) -> None:
    pools = make_pools()
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **options) as loader:
        await put(loader, pools, keys(PAGES))
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        assert recording.count("read") + recording.count("read_ranges") > 0
        assert loader.statistics().bytes_direct == 0
        await settle(loader)


async def test_the_first_layers_are_not_asked_for_apart_where_they_need_not_be_read_and_must_wait_for_all() -> None:
    pages = 40
    pools = make_pools(pages=2 * pages)
    elsewhere: list[str] = []
    recording = RecordingStore(Elsewhere(lending_store(), lambda key: key.endswith(tuple(elsewhere))))
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(pages))
        assert loader._context is not None
        loader._context.health.doubt_existence()  # else that all is there would be enough
        asked = []
        for groups in ([], [], ["g3"], [], []):  # a load is expected to be like the one before it
            elsewhere[:] = groups
            recording.clear()
            assert_outcome((await load(loader, pools.unit("a", keys(pages), range(pages))))["a"], pages)
            asked.append([len(call.keys) for call in recording.calls if call.method == "descriptors"])
        pools.assert_restored(keys(pages), range(pages))
        await settle(loader)
    apart, at_once = [pages, 3 * pages], [4 * pages]
    assert asked == [apart, at_once, at_once, apart, at_once]


async def test_prefetches_land_and_their_bytes_serve_later_loads() -> None:
    pools = make_pools()
    recording = RecordingStore(lending_store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(3))
        async with loader.prefetch([pools.unit("a", keys(3))]) as prefetch:
            assert (await prefetch.landed())["a"] == 3
        assert sorted(recording.keys_of("read")) == sorted(
            key for page in keys(3) for key in object_keys(loader, pools, page)
        )
        recording.clear()
        outcomes = await load(loader, pools.unit("b", keys(3), range(3)))
        assert_outcome(outcomes["b"], 3)
        pools.assert_restored(keys(3), range(3))
        assert recording.count("read") == loader.statistics().bytes_direct == 0
        await settle(loader)


async def test_memory_for_one_page_is_enough_for_what_needs_none() -> None:
    pools = make_pools(width=256)
    page = 5 * 4 * 256 + 4 * 32
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, landing_bytes=page * 4) as loader:
        for key in keys(16):
            await put(loader, pools, [key])
        assert_outcome((await load(loader, pools.unit("a", keys(16), range(16))))["a"], 16)
        pools.assert_restored(keys(16), range(16))
        assert recording.count("read") == 0


async def test_many_units_that_want_the_same_pages() -> None:
    pools = make_pools()
    async with opened(lending_store(), pools) as loader:
        await put(loader, pools, keys(PAGES))
        rows = [range(PAGES * nth, PAGES * (nth + 1)) for nth in range(6)]
        outcomes = await load(loader, *(pools.unit(f"r{nth}", keys(PAGES), mine) for nth, mine in enumerate(rows)))
        for nth, mine in enumerate(rows):
            assert_outcome(outcomes[f"r{nth}"], PAGES)
            pools.assert_restored(keys(PAGES), mine)
        await settle(loader)


class Elsewhere(LendingWrapperStore):
    """Says of some objects that another endpoint has them: those are read."""

    def __init__(self, inner: PageStore, when: Callable[[str], bool]) -> None:
        super().__init__(inner)
        self._when = when

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        return [
            answer._replace(endpoint="elsewhere") if isinstance(answer, Descriptor) and self._when(key) else answer
            for key, answer in zip(keys, super().descriptors(keys), strict=True)
        ]


@pytest.mark.parametrize(
    "when",
    [is_of("k0"), is_of("k3"), is_of("k1", "k2", "k4"), lambda key: key.endswith("g0"), lambda key: key.endswith("g3")],
    ids=["first page", "middle page", "some", "first layer", "last layer"],
)
async def test_what_others_have_is_read(when: Callable[[str], bool]) -> None:
    pools = make_pools()
    recording = RecordingStore(Elsewhere(lending_store(), when))
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(PAGES))
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        pools.assert_rows_kept(range(PAGES))
        every = [key for page in keys(PAGES) for key in object_keys(loader, pools, page)]
        assert sorted(recording.keys_of("read")) == sorted(filter(when, every))
        await settle(loader)


@pytest.mark.parametrize("draft", [DraftMode.SIDECAR, DraftMode.PACKED])
async def test_drafts_are_lent_too(draft: DraftMode) -> None:
    pools = make_pools(draft=draft)
    recording = RecordingStore(lending_store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(PAGES))
        outcome = (await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"]
        assert_outcome(outcome, PAGES)
        assert outcome.draft_pages == PAGES
        pools.assert_restored(keys(PAGES), range(PAGES))
        assert recording.count("read") == 0
        await settle(loader)


async def test_a_draft_that_is_replaced_costs_the_draft_alone() -> None:
    pools = make_pools(draft=DraftMode.SIDECAR)
    memory = lending_store()
    async with opened(memory, pools) as loader:
        await put(loader, pools, keys(3))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(3), range(3), ready=gate)]) as handle:
            await gate.wait()
            gone = next(key for key in object_keys(loader, pools, "k1") if "draft" in key)
            data = bytes_of(memory, gone).copy()
            assert memory.remove([gone], force=True) == [0]
            put_object(memory, "another", ~data)
            gate.opens.set()
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 3)
        assert outcome.draft_pages == 1
        pools.assert_restored(keys(3), range(3), draft=False)
        pools.assert_restored(keys(1), range(1), draft=True)
        assert all(pools.is_zero(row) for row in (1, 2))
        await settle(loader)


@pytest.mark.parametrize("again", [False, True], ids=["gone", "stored again elsewhere"])
@pytest.mark.parametrize("group", [0, 2, 3])
async def test_an_object_that_is_replaced_before_it_is_copied(group: int, again: bool) -> None:
    """Another one, with a valid tail, lies at its address when it is copied."""
    pools = make_pools()
    recording = RecordingStore(memory := lending_store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(PAGES))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            key = object_keys(loader, pools, "k3")[group]
            (before,) = memory.descriptors([key])
            data, foreign = (
                bytes_of(memory, key).copy(),
                bytes_of(memory, object_keys(loader, pools, "k0")[group]).copy(),
            )
            assert memory.remove([key], force=True) == [0]
            put_object(memory, "another", foreign)
            assert memory.descriptors(["another"]) == [before]
            if again:
                put_object(memory, key, data)
            gate.opens.set()
            outcome = (await handle.report()).outcomes["a"]
        restored = PAGES if again else 3
        assert_outcome(outcome, restored, None if again else PageStatus.NOT_FOUND)
        pools.assert_restored(keys(restored), range(restored))
        pools.assert_rows_kept(range(PAGES))
        assert recording.keys_of("read") == (key,) * recording.count("read")
        now = loader.statistics()
        assert (await handle.report()).bytes_loaded >= now.bytes_loaded > now.bytes_direct or not again
        await settle(loader)


async def test_what_was_not_proven_is_taken_from_whom_it_has_landed_for() -> None:
    pools = make_pools()
    recording = RecordingStore(memory := lending_store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(PAGES))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            async with loader.prefetch([pools.unit("b", keys(PAGES))]) as prefetch:
                assert (await prefetch.landed())["b"] == PAGES
                key = object_keys(loader, pools, "k3")[2]
                foreign = bytes_of(memory, object_keys(loader, pools, "k0")[2]).copy()
                assert memory.remove([key], force=True) == [0]
                put_object(memory, "another", foreign)
                recording.clear()
                gate.opens.set()
                assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        pools.assert_rows_kept(range(PAGES))
        assert recording.count("read") == 0
        await settle(loader)


async def test_a_foreign_page_after_a_layer_was_given_out_is_a_late_failure() -> None:
    pools = make_pools(width=90_000, pages=8)  # a layer of these pages is copied by itself
    memory = lending_store(capacity=32 << 20)
    async with opened(memory, pools, landing_bytes=32 << 20) as loader:
        await put(loader, pools, keys(3))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(3), range(3), ready=gate)]) as handle:
            await gate.wait()
            key = object_keys(loader, pools, "k2")[3]
            data = bytes_of(memory, key).copy()
            assert memory.remove([key], force=True) == [0]
            put_object(memory, "another", data)  # the page's own bytes, under another key: at the same place
            bytes_of(memory, "another")[8] ^= 1
            gate.opens.set()
            assert "a" in (await handle.layer(0)).live
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 2, PageStatus.NOT_FOUND)
        assert outcome.late_failure is not None and outcome.late_failure.page == 2
        pools.assert_restored(keys(2), range(2))
        await settle(loader)


@pytest.mark.parametrize("integrity", ["sample", "full"])
async def test_corrupt_bytes_are_read_again_and_removed(integrity: str) -> None:
    pools = make_pools(width=2048)
    recording = RecordingStore(memory := lending_store())
    async with opened(recording, pools, integrity=integrity) as loader:
        await put(loader, pools, keys(4))
        key = object_keys(loader, pools, "k2")[2]
        bytes_of(memory, key)[100 if integrity == "full" else 10] ^= 0xFF
        assert_outcome((await load(loader, pools.unit("a", keys(4), range(4))))["a"], 2, PageStatus.CORRUPT)
        pools.assert_restored(keys(2), range(2))
        await settle(loader)
        assert recording.keys_of("read") == (key, key)
        await eventually(lambda: recording.keys_of("remove") == (key,))
        assert memory.exists([key]) == [False]
        assert loader.statistics().removed_corrupt == 1


async def test_an_object_without_a_digest_is_not_proven_by_its_place() -> None:
    pools = make_pools()
    recording = RecordingStore(memory := lending_store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(2))
        key = object_keys(loader, pools, "k1")[0]
        bytes_of(memory, key)[-16:] = 0
        assert_outcome((await load(loader, pools.unit("a", keys(2), range(2))))["a"], 2)
        pools.assert_restored(keys(2), range(2))
        assert recording.keys_of("read") == (key,)


async def test_past_its_lease_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = make_pools()
    recording = RecordingStore(lending_store(lease=5.0))
    async with opened(recording, pools) as loader:
        assert loader._context is not None
        lender = loader._context.lender
        now = 1000.0
        monkeypatch.setattr(lender, "clock", lambda: now)
        await put(loader, pools, keys(PAGES))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            now += 5.0
            gate.opens.set()
            assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        assert len(recording.keys_of("read")) == OBJECTS
        assert loader.statistics().bytes_direct == 0
        await settle(loader)


async def test_without_memory_for_what_was_not_proven_it_is_a_miss() -> None:
    pools = make_pools(width=256)
    memory = lending_store()
    async with opened(memory, pools, landing_bytes=(5 * 4 * 256 + 4 * 32) * 4) as loader:
        for key in keys(8):
            await put(loader, pools, [key])
        for key in keys(8)[2:]:
            for each in object_keys(loader, pools, key):
                bytes_of(memory, each)[40] ^= 1
        outcome = (await load(loader, pools.unit("a", keys(8), range(8))))["a"]
        assert_outcome(outcome, 2, PageStatus.CORRUPT)
        assert PageStatus.SHED in {page.status for page in outcome.pages}
        pools.assert_restored(keys(2), range(2))
        await settle(loader)


@pytest.mark.parametrize("draft", [None, DraftMode.SIDECAR])
async def test_where_nothing_more_may_be_read_what_is_lent_before_it_stays(
    draft: DraftMode | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = make_pools(draft=draft)
    recording = RecordingStore(Elsewhere(lending_store(), is_of("k4")))
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(PAGES))
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        pools.scramble()
        recording.clear()
        with monkeypatch.context() as patch:
            patch.setattr(LandingMemory, "sheds", True)
            outcome = (await load(loader, pools.unit("b", keys(PAGES), range(PAGES))))["b"]
        assert_outcome(outcome, 4, PageStatus.SHED)
        assert outcome.late_failure is None
        assert outcome.draft_pages == (4 if draft else 0)
        pools.assert_restored(keys(4), range(4))
        pools.assert_rows_kept(range(4))
        assert recording.count("read") == 0
        await settle(loader)


async def test_what_was_lent_before_a_wait_for_memory_is_lent_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile another has read one of its pages: what is left of the run would not have been worth it."""
    pools = make_pools(pages=64, width=256)
    page, pages = 5376, 26  # as they lie in landing memory
    monkeypatch.setattr(lending, "_WORTH_BYTES", 2 * (4 * 256 + 32))
    async with opened(
        Elsewhere(lending_store(), lambda key: key.endswith("g3")), pools, landing_bytes=16 * page, prefetch_ttl=0.0
    ) as loader:
        for key in (*keys(pages), *keys(9, "z")):
            await put(loader, pools, [key])
        assert (context := loader._context) is not None
        async with loader.prefetch([pools.unit("z", keys(9, "z"))]) as hog:
            assert (await hog.landed())["z"] == 9
            async with loader.load([pools.unit("a", keys(pages), range(pages))]) as handle:
                await eventually(lambda: context.landing.statistics().waiting == 1)
                async with loader.prefetch([pools.unit("b", ("k1",))]) as other:
                    assert (await other.landed())["b"] == 1
                    assert context.landing.statistics().waiting == 1
                    for run in list(context.active):
                        if run.request_id == "z":
                            run.end()
                    report = await handle.report()
        assert_outcome(report.outcomes["a"], pages)
        pools.assert_restored(keys(pages), range(pages))
        assert report.bytes_loaded == pages * (5 * 4 * 256 + 4 * 32) - (4 * 256 + 32)  # one object was here by then
        await settle(loader)


async def test_the_store_closes_before_the_copy() -> None:
    pools = make_pools()
    memory = lending_store()
    async with opened(memory, pools) as loader:
        await put(loader, pools, keys(3))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(3), range(3), ready=gate)]) as handle:
            await gate.wait()
            memory.close()
            gate.opens.set()
            assert_outcome((await handle.report()).outcomes["a"], 0, PageStatus.STORE_UNREACHABLE)
        pools.assert_rows_kept()
        await settle(loader)


async def test_a_deadline_before_the_copy_leaves_the_slots_alone() -> None:
    pools = make_pools()
    async with opened(lending_store(), pools) as loader:
        await put(loader, pools, keys(3))
        gate = Gate()
        outcome = (await load(loader, pools.unit("a", keys(3), range(3), deadline=0.15, ready=gate)))["a"]
        gate.opens.set()
        assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
        pools.assert_rows_kept()
        await settle(loader)


async def test_a_deadline_while_the_rest_is_read_keeps_what_is_proven() -> None:
    """What the deadline finds lent is worth a last chunk, if that is proven too."""
    pools = make_pools()
    hanging = HangingStore(memory := lending_store())
    shared = _Lent(hanging, memory)
    async with opened(shared, pools) as loader:
        await put(loader, pools, keys(PAGES))
        key = object_keys(loader, pools, "k4")[1]
        bytes_of(memory, key)[9] ^= 1
        hanging.hold("read")
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES))]) as handle:
            await arrived(hanging, "read")
            bytes_of(memory, object_keys(loader, pools, "k2")[3])[9] ^= 1  # in a layer that comes later
            end_time_of(loader, "a")
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 2, PageStatus.TIMED_OUT)
        pools.assert_restored(keys(2), range(2))
        hanging.release()
        await settle(loader)


async def test_cancelled_while_what_was_not_proven_is_read() -> None:
    pools = make_pools()
    hanging = HangingStore(memory := lending_store())
    async with opened(_Lent(hanging, memory), pools) as loader:
        await put(loader, pools, keys(3))
        bytes_of(memory, object_keys(loader, pools, "k1")[0])[9] ^= 1
        hanging.hold("read", any_of("k1"))
        async with loader.load([pools.unit("a", keys(3), range(3))]) as handle:
            await arrived(hanging, "read")
        assert_outcome((await handle.report()).outcomes["a"], 0, PageStatus.CANCELLED)
        hanging.release()
        await settle(loader)


class _Lent(LendingWrapperStore):
    """Calls go to `inner`, which may hold them; `memory` lends."""

    def __init__(self, inner: PageStore, memory: MemoryStore) -> None:
        super().__init__(inner)
        self._memory = memory

    def lend(self, key: str, descriptor: Descriptor) -> range | None:
        return self._memory.lend(key, descriptor)

    def hold(self) -> AbstractContextManager[bool]:
        return self._memory.hold()


async def test_a_suspect_endpoint_is_well_again_without_a_read() -> None:
    """It lets one load through to find out: that load reads nothing."""
    pools = make_pools()
    recording = RecordingStore(lending_store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(3))
        assert loader._context is not None
        breaker = loader._context.health.endpoint("memory")
        breaker.trip()
        assert_outcome((await load(loader, pools.unit("a", keys(3), range(3))))["a"], 0, PageStatus.SUPPRESSED)
        loader._context.health.negative.discard(recording.keys_of("descriptors"))
        breaker._open_until = breaker._clock()
        assert_outcome((await load(loader, pools.unit("b", keys(3), range(3))))["b"], 3)
        assert loader.statistics().open_breakers == ()
        assert recording.count("read") == 0


class Odd(LendingWrapperStore):
    """Answers something else than it should when it is asked to lend, or to hold what it lends."""

    def __init__(self, inner: PageStore, lent: object, held: object = None) -> None:
        super().__init__(inner)
        self._lent = lent
        self._held = held

    def lend(self, key: str, descriptor: Descriptor) -> range | None:
        if isinstance(self._lent, BaseException):
            raise self._lent
        return self._lent(super().lend(key, descriptor)) if callable(self._lent) else self._lent  # type: ignore[return-value]  # a lie

    def hold(self) -> AbstractContextManager[bool]:
        return self._hold() if self._held is not None else super().hold()

    @contextmanager
    def _hold(self) -> Iterator[Any]:
        if self._held == "raises":
            raise RuntimeError("odd")
        yield self._held
        raise RuntimeError("odd, at the end")


@pytest.mark.parametrize(
    "odd",
    [
        (RuntimeError("odd"),),
        (SystemExit(1),),
        (0,),
        ((1, 2),),
        (range(0),),
        (lambda lent: range(lent.start, lent.stop, 2),),
        (lambda lent: range(lent.stop, lent.stop + 1),),
        (lambda lent: range(lent.start, 1 << 70),),
        (lambda lent: lent, "raises"),
        (lambda lent: lent, 1),
        (lambda lent: lent, False),
    ],
    ids="raises exits number pair empty steps beside endless hold-raises hold-odd hold-refuses".split(),
)
async def test_a_store_that_lends_nonsense_is_read(odd: tuple[Any, ...]) -> None:
    pools = make_pools()
    recording = RecordingStore(Odd(lending_store(), *odd))
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(3))
        assert_outcome((await load(loader, pools.unit("a", keys(3), range(3))))["a"], 3)
        pools.assert_restored(keys(3), range(3))
        assert len(recording.keys_of("read")) == 4 * 3
        assert loader.statistics().bytes_direct == 0
        await settle(loader)


async def test_a_hold_that_raises_at_its_end_costs_nothing() -> None:
    pools = make_pools()
    recording = RecordingStore(Odd(lending_store(), lambda lent: lent, True))
    with structlog.testing.capture_logs() as logs:
        async with opened(recording, pools) as loader:
            await put(loader, pools, keys(3))
            assert_outcome((await load(loader, pools.unit("a", keys(3), range(3))))["a"], 3)
            pools.assert_restored(keys(3), range(3))
    assert recording.count("read") == 0
    assert [entry["method"] for entry in logs if entry["event"] == events.STORE_RAISED] == ["hold"]


async def test_wrappers_that_change_what_reads_bring_do_not_lend() -> None:
    pools = make_pools()
    hanging = HangingStore(lending_store())
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(2))
        hanging.hold("read")
        async with loader.load([pools.unit("a", keys(2), range(2))]) as handle:
            await arrived(hanging, "read")
            hanging.release()
            assert_outcome((await handle.report()).outcomes["a"], 2)


async def test_traces_tell_direct_reads_from_copies() -> None:
    pools = make_pools()
    spans: list[CallSpan] = []
    async with PageLoader(lending_store(), pools.group, config=config(), on_call=spans.append) as loader:
        await put(loader, pools, keys(2))
        spans.clear()
        await load(loader, pools.unit("a", keys(2), range(2)))
    assert {span.label for span in spans if span.group == "compute"} == {"direct read"}
    assert not [span for span in spans if span.group == "read"]


@pytest.mark.parametrize("ending", ["cancelled", "goes on"])
async def test_the_next_layers_wait_in_line_while_these_are_copied(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They start without the event loop's help, but not once nobody wants them any more."""
    monkeypatch.setattr(unit_layers, "_COPIED_ALONG", 0)
    pools = make_pools()
    arrived, opens = threading.Event(), threading.Event()
    begun: list[int] = []

    def held(*args: Any, **options: Any) -> Any:
        begun.append(len(begun))
        if len(begun) == 2:
            arrived.set()
            assert opens.wait(20)
        return copy_lent(*args, **options)

    async with opened(lending_store(), pools) as loader:
        await put(loader, pools, keys(PAGES))
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        pools.scramble()
        monkeypatch.setattr(unit_copies, "copy_lent", held)
        try:
            async with loader.load([pools.unit("b", keys(PAGES), range(PAGES))]) as handle:
                assert await anyio.to_thread.run_sync(arrived.wait, 20)
                assert loader._context is not None
                assert loader._context.compute.statistics().queued == 1
                if ending == "cancelled":
                    (run,) = loader._context.active
                    run.cancel()
                    await anyio.wait_all_tasks_blocked()
                opens.set()
                report = await handle.report()
        finally:
            opens.set()
        assert_outcome(report.outcomes["b"], *((0, PageStatus.CANCELLED) if ending == "cancelled" else (PAGES,)))
        assert len(begun) == (2 if ending == "cancelled" else 4)
        await settle(loader)


async def test_the_next_layers_do_not_start_while_a_cancelled_copy_of_what_was_read_after_all_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who leaves waits for the copies that run, and for no others."""
    monkeypatch.setattr(unit_layers, "_COPIED_ALONG", 0)
    pools = make_pools()
    refuted, ahead = 2 * PAGES, 2 * PAGES + 1  # the last object of the second layers, and the first one after that
    starts, goes_on, lands, opens = (threading.Event() for _ in range(4))
    begun: list[int] = []

    def held_direct(calls: StoreCalls, copies: Sequence[LentCopy], **options: Any) -> list[Refuted]:
        begun.append(len(begun))
        if len(begun) == ahead:
            starts.set()
            assert goes_on.wait(20)
        found = copy_lent(calls, copies, **options)
        if len(begun) != refuted:
            return found
        first = copies[0]
        return [Refuted(first.column, first.fragments, first.first, first.segment.nbytes)]

    def held_landed(copies: Sequence[Copy]) -> None:
        lands.set()
        assert opens.wait(20)
        execute(copies)

    async with opened(lending_store(), pools, copy_chunk_bytes=1) as loader:
        await put(loader, pools, keys(PAGES))
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        monkeypatch.setattr(unit_copies, "copy_lent", held_direct)
        monkeypatch.setattr(unit_copies, "execute", held_landed)
        try:
            async with loader.load([pools.unit("b", keys(PAGES), range(PAGES))]) as handle:
                for event in (starts, lands):
                    assert await anyio.to_thread.run_sync(event.wait, 20)
                assert loader._context is not None
                (run,) = loader._context.active
                run.cancel()
                await anyio.wait_all_tasks_blocked()
                goes_on.set()
                compute = loader._context.compute
                await eventually(lambda: compute.statistics().running == 1)
                started = len(begun)
                opens.set()
                assert_outcome((await handle.report()).outcomes["b"], 0, PageStatus.CANCELLED)
                assert len(begun) == started == ahead
        finally:
            goes_on.set()
            opens.set()
        await settle(loader)
