"""Layout `page` has no digests: what is copied from where it lies is used once the store was asked again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from softload import PageStatus, ReadMode, lending, unit_copies, unit_layers, unit_loans
from softload.geometry import DraftMode
from softload.lent_copies import copy_lent
from softload.protocols import Descriptor
from softload.stores import MemoryStore
from softload.testing import HangingStore, RecordingStore

from .doubles import LyingStore
from .harness import (
    LAYERS,
    PAGE_SIZE,
    Pools,
    arrived,
    assert_outcome,
    end_time_of,
    is_of,
    keys,
    lending_store,
    load,
    make_pools,
    opened,
    put,
    settle,
)
from .test_direct_reads import Elsewhere, Gate, _Lent, bytes_of, object_keys, put_object
from .test_pages_without_slots import unit as windowed_unit
from .test_pages_without_slots import windowed

pytestmark = pytest.mark.asyncio

PAGES = 6
PAGE: dict[str, Any] = {"layout": "page"}


@pytest.fixture(autouse=True)
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of these tests are smaller than what is worth a question."""
    monkeypatch.setattr(lending, "_WORTH_BYTES", 1)
    monkeypatch.setattr(unit_loans, "_WORTH_ASKING", 1)


@pytest.fixture
def single_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of layers are copied one after another, however small: 0, 1, 2-3, 4."""
    monkeypatch.setattr(unit_layers, "_COPIED_ALONG", 0)


def questions(recording: RecordingStore) -> list[int]:
    """How many objects each question was about."""
    return [len(call.keys) for call in recording.calls if call.method == "descriptors"]


def place_foreign(memory: MemoryStore, key: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Another object takes this one's place; what it held."""
    (before,) = memory.descriptors([key])
    data = bytes_of(memory, key).copy()
    assert memory.remove([key], force=True) == [0]
    put_object(memory, "another", ~data)
    assert memory.descriptors(["another"]) == [before]
    return data


@contextmanager
def held_copy(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Direct copies, of which this one, from 1, waits when it has copied, or before where it is negative."""
    gate = Gate()
    begun: list[None] = []

    def copy(*args: Any, **options: Any) -> Any:
        begun.append(None)
        if len(begun) == -number:
            gate()
        refuted = copy_lent(*args, **options)
        if len(begun) == number:
            gate()
        return refuted

    monkeypatch.setattr(unit_copies, "copy_lent", copy)
    try:
        yield gate
    finally:
        gate.opens.set()


@pytest.mark.parametrize("draft", [None, DraftMode.SIDECAR, DraftMode.PACKED])
@pytest.mark.parametrize("family", ["mla", "mha"])
async def test_what_the_store_lends_is_not_read(family: str, draft: DraftMode | None) -> None:
    pools = make_pools(family=family, draft=draft)
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **PAGE) as loader:
        await put(loader, pools, keys(PAGES))
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES))]) as handle:
            assert (await handle.admitted())["a"] == PAGES
            report = await handle.report()
        assert_outcome(report.outcomes["a"], PAGES)
        assert report.outcomes["a"].draft_pages == (PAGES if draft else 0)
        pools.assert_restored(keys(PAGES), range(PAGES))
        pools.assert_rows_kept(range(PAGES))
        assert recording.count("read") == recording.count("read_ranges") == recording.count("session_start") == 0
        now = loader.statistics()
        found = recording.descriptors([each for key in keys(PAGES) for each in object_keys(loader, pools, key)])
        size = sum(descriptor.size for descriptor in found if isinstance(descriptor, Descriptor))
        assert report.bytes_loaded == now.bytes_loaded == now.bytes_direct == size
        assert now.kept_bytes == 0
        await settle(loader)


@pytest.mark.parametrize("read_mode", [ReadMode.WHOLE, ReadMode.RANGES])
async def test_who_wants_a_way_of_reading_gets_it(read_mode: ReadMode) -> None:
    pools = make_pools()
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **PAGE, read_mode=read_mode) as loader:
        await put(loader, pools, keys(PAGES))
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        assert recording.count("read") + recording.count("read_ranges") > 0
        assert loader.statistics().bytes_direct == 0
        await settle(loader)


@pytest.mark.parametrize(
    ("width", "draft", "layer_us", "is_direct"),
    [
        pytest.param(64, None, 0, False, id="small"),
        pytest.param(16 << 10, None, 0, True, id="large"),
        pytest.param(16 << 10, DraftMode.SIDECAR, 0, True, id="a small draft beside large"),
        pytest.param(3 << 10, None, 0, False, id="smaller than that"),
        pytest.param(3 << 10, None, 20, False, id="a fast forward"),
        pytest.param(3 << 10, None, 40, True, id="a slow forward"),
    ],
)
async def test_small_objects_land(
    width: int, draft: DraftMode | None, layer_us: int, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not worth so many questions, unless the forward hides them."""
    monkeypatch.undo()
    pools = make_pools(width=width, layers=16, pages=2 * PAGES, draft=draft)
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **PAGE, landing_bytes=16 << 20) as loader:
        await put(loader, pools, keys(PAGES))
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES))], layer_seconds=layer_us * 1e-6) as handle:
            assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        assert (recording.count("read") + recording.count("read_ranges") == 0) == is_direct
        assert (loader.statistics().bytes_direct > 0) == is_direct
        await settle(loader)


@pytest.mark.parametrize("page", ["k0", "k3", "k5"])
async def test_with_one_object_elsewhere_all_of_them_are_read(page: str) -> None:
    pools = make_pools()
    recording = RecordingStore(Elsewhere(lending_store(), is_of(page)))
    async with opened(recording, pools, **PAGE) as loader:
        await put(loader, pools, keys(PAGES))
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        assert loader.statistics().bytes_direct == 0
        await settle(loader)


async def test_pages_with_and_without_a_packed_draft() -> None:
    """An object's size tells; both kinds are lent."""
    memory = lending_store()
    without = make_pools()
    async with opened(_Lent(HangingStore(memory), memory), without, **PAGE) as loader:
        await put(loader, without, keys(PAGES)[3:])
        page_objects = {key: object_keys(loader, without, key)[0] for key in keys(PAGES)}
        stored = {key: bytes_of(memory, page_objects[key]).copy() for key in keys(PAGES)[3:]}
    memory = lending_store()
    pools = make_pools(draft=DraftMode.PACKED)
    recording = RecordingStore(memory)
    async with opened(recording, pools, **PAGE) as loader:
        await put(loader, pools, keys(3))
        for key, data in stored.items():
            put_object(memory, object_keys(loader, pools, key)[0], data)
        outcome = (await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"]
        assert_outcome(outcome, PAGES)
        assert outcome.draft_pages == 3
        pools.assert_restored(keys(PAGES), range(PAGES), draft=False)
        pools.assert_restored(keys(3), range(3), draft=True)
        assert all(pools.is_zero(row) for row in range(3, PAGES))
        assert recording.count("read") == 0
        now = loader.statistics()
        size = sum(bytes_of(memory, object_keys(loader, pools, key)[0]).size for key in keys(PAGES))
        assert now.bytes_loaded == now.bytes_direct == size
        await settle(loader)


async def test_of_a_window_only_its_own_pages_are_copied() -> None:
    pools = windowed()
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **PAGE) as loader:
        pools.fill(keys(10), range(10))
        await loader.save([windowed_unit("put", range(10), with_slots=10)])
        pools.scramble(seed=2)
        async with loader.load([windowed_unit("a", range(20, 30), with_slots=2)]) as handle:
            assert (await handle.report()).outcomes["a"].restored_pages == 10
        assert recording.count("read") == 0
        pools.assert_rows_kept(range(20, 30))
        for page in (8, 9):
            assert pools.holds(f"k{page}", 20 + page)
        await settle(loader)


async def test_prefetches_land_and_their_bytes_serve_later_loads() -> None:
    pools = make_pools()
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **PAGE) as loader:
        await put(loader, pools, keys(3))
        async with loader.prefetch([pools.unit("a", keys(3))]) as prefetch:
            assert (await prefetch.landed())["a"] == 3
        assert len(recording.keys_of("read")) == 3
        recording.clear()
        assert_outcome((await load(loader, pools.unit("b", keys(3), range(3))))["b"], 3)
        pools.assert_restored(keys(3), range(3))
        assert recording.count("read") == loader.statistics().bytes_direct == 0
        await settle(loader)


async def test_memory_for_one_page_is_enough_for_what_needs_none() -> None:
    pools = make_pools(width=256)
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **PAGE, landing_bytes=5 * 4 * 256 * 8) as loader:
        for key in keys(16):
            await put(loader, pools, [key])
        assert_outcome((await load(loader, pools.unit("a", keys(16), range(16))))["a"], 16)
        pools.assert_restored(keys(16), range(16))
        assert recording.count("read") == 0
        await settle(loader)


async def test_many_units_that_want_the_same_pages() -> None:
    pools = make_pools()
    async with opened(lending_store(), pools, **PAGE) as loader:
        await put(loader, pools, keys(PAGES))
        rows = [range(PAGES * nth, PAGES * (nth + 1)) for nth in range(6)]
        outcomes = await load(loader, *(pools.unit(f"r{nth}", keys(PAGES), mine) for nth, mine in enumerate(rows)))
        for nth, mine in enumerate(rows):
            assert_outcome(outcomes[f"r{nth}"], PAGES)
            pools.assert_restored(keys(PAGES), mine)
        await settle(loader)


@pytest.mark.usefixtures("single_layers")
async def test_the_store_is_asked_once_for_each_group_of_layers() -> None:
    pages = 40
    pools = make_pools(layers=32, pages=2 * pages)
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **PAGE) as loader:
        await put(loader, pools, keys(pages))
        recording.clear()
        assert_outcome((await load(loader, pools.unit("a", keys(pages), range(pages))))["a"], pages)
        assert questions(recording) == [pages] * (1 + 6)


async def test_few_bytes_are_asked_for_together() -> None:
    pools = make_pools(layers=32)
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **PAGE) as loader:
        await put(loader, pools, keys(PAGES))
        recording.clear()
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        assert questions(recording) == [PAGES] * 2


@pytest.mark.parametrize("again", [False, True], ids=["gone", "stored again elsewhere"])
async def test_an_object_that_is_replaced_before_it_is_copied(again: bool) -> None:
    pools = make_pools()
    recording = RecordingStore(memory := lending_store())
    async with opened(recording, pools, **PAGE) as loader:
        await put(loader, pools, keys(PAGES))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            (key,) = object_keys(loader, pools, "k3")
            data = place_foreign(memory, key)
            if again:
                put_object(memory, key, data)
            gate.opens.set()
            outcome = (await handle.report()).outcomes["a"]
        restored = PAGES if again else 3
        assert_outcome(outcome, restored, None if again else PageStatus.NOT_FOUND)
        pools.assert_restored(keys(restored), range(restored))
        pools.assert_rows_kept(range(PAGES))
        assert set(recording.keys_of("read")) == {key}
        await settle(loader)


@pytest.mark.usefixtures("single_layers")
@pytest.mark.parametrize("moment", [-1, 1, -2, 2, -3, 3, -4, 4])
@pytest.mark.parametrize("again", [False, True], ids=["gone", "stored again elsewhere"])
async def test_an_object_that_is_replaced_while_it_is_copied(
    moment: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after the copy of some of its layers: those that were given out before stay as they are."""
    pools = make_pools()
    recording = RecordingStore(memory := lending_store())
    async with opened(recording, pools, **PAGE) as loader:
        await put(loader, pools, keys(PAGES))
        with held_copy(moment, monkeypatch) as gate:
            async with loader.load([pools.unit("a", keys(PAGES), range(PAGES))]) as handle:
                await gate.wait()
                (key,) = object_keys(loader, pools, "k3")
                data = place_foreign(memory, key)
                if again:
                    put_object(memory, key, data)
                gate.opens.set()
                for layer in range(pools.group.num_layers):
                    ready = await handle.layer(layer)
                    if "a" in ready.live:
                        self_check(pools, layer)
                outcome = (await handle.report()).outcomes["a"]
        restored = PAGES if again else 3
        assert_outcome(outcome, restored, None if again else PageStatus.NOT_FOUND)
        pools.assert_restored(keys(restored), range(restored))
        pools.assert_rows_kept(range(PAGES))
        assert set(recording.keys_of("read")) == {key}
        await settle(loader)


def self_check(pools: Pools, layer: int) -> None:
    """A layer that was given out has the bytes of every page."""
    (pool,) = pools.group.pools
    for buffer in pool.layer_buffers(layer):
        for page, key in enumerate(keys(PAGES)):
            assert pools.holds_buffer(key, page, pool, buffer), f"layer {layer}, page {page}"


@pytest.mark.usefixtures("single_layers")
async def test_an_object_that_was_away_and_is_back_is_no_proof_of_copies_begun_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers 2 and 3 were copied while another lay there. It is known to have, from the question for layer 1."""
    pools = make_pools()
    hanging = HangingStore(memory := lending_store())
    async with opened(_Lent(hanging, memory), pools, **PAGE) as loader:
        await put(loader, pools, keys(PAGES))
        with held_copy(-2, monkeypatch) as gate:
            async with loader.load([pools.unit("a", keys(PAGES), range(PAGES))]) as handle:
                await gate.wait()
                (key,) = object_keys(loader, pools, "k3")
                (before,) = memory.descriptors([key])
                data = place_foreign(memory, key)
                hanging.hold("read")
                gate.opens.set()
                await arrived(hanging, "read")
                assert memory.remove(["another"], force=True) == [0]
                put_object(memory, key, data)
                assert memory.descriptors([key]) == [before]
                hanging.release()
                outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        await settle(loader)


@pytest.mark.usefixtures("single_layers")
async def test_no_layer_is_given_out_before_the_store_has_answered() -> None:
    pools = make_pools()
    hanging = HangingStore(memory := lending_store())
    async with opened(_Lent(hanging, memory), pools, **PAGE) as loader:
        await put(loader, pools, keys(PAGES))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            hanging.hold("descriptors")
            gate.opens.set()
            await arrived(hanging, "descriptors")
            with anyio.move_on_after(0.05):
                await handle.layer(0)
                pytest.fail("given out without proof")
            hanging.release()
            assert "a" in (await handle.layer(0)).live
            assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        await settle(loader)


@pytest.mark.parametrize("ending", ["deadline", "cancelled"])
async def test_a_master_that_freezes_after_admission_holds_nothing(ending: str) -> None:
    pools = make_pools()
    hanging = HangingStore(memory := lending_store())
    async with opened(_Lent(hanging, memory), pools, **PAGE) as loader:
        await put(loader, pools, keys(PAGES))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            hanging.hold("descriptors")
            gate.opens.set()
            await arrived(hanging, "descriptors")
            if ending == "deadline":
                end_time_of(loader, "a")
                report = await handle.report()
                assert_outcome(report.outcomes["a"], 0, PageStatus.TIMED_OUT)
                assert loader.statistics().held_slots == 0
        if ending == "cancelled":
            assert_outcome((await handle.report()).outcomes["a"], 0, PageStatus.CANCELLED)
        hanging.release()
        await settle(loader)
        assert_outcome((await load(loader, pools.unit("b", keys(PAGES), range(PAGES))))["b"], PAGES)


@pytest.mark.parametrize("answer", [PageStatus.STORE_UNREACHABLE, PageStatus.MALFORMED, None, 7])
async def test_what_the_master_does_not_confirm_is_read(answer: object) -> None:
    """A master that is gone may have given the memory to others before it went."""
    pools = make_pools()
    lying = LyingStore(memory := lending_store())
    recording = RecordingStore(lying)
    async with opened(_Lent(recording, memory), pools, **PAGE) as loader:
        await put(loader, pools, keys(PAGES))
        lying.lie("descriptors", lambda _: True, answer, times=PAGES, skip=PAGES)
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        assert sorted(recording.keys_of("read")) == sorted(object_keys(loader, pools, key)[0] for key in keys(PAGES))
        assert loader.statistics().bytes_direct == 0
        await settle(loader)


async def test_a_dead_master_does_not_vouch_for_foreign_bytes() -> None:
    """It has given the object's place to another, and then died: its silence is no proof."""
    pools = make_pools()
    lying = LyingStore(memory := lending_store())
    async with opened(_Lent(lying, memory), pools, **PAGE) as loader:
        await put(loader, pools, keys(PAGES))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            place_foreign(memory, object_keys(loader, pools, "k3")[0])
            for method in ("descriptors", "read", "exists"):
                lying.lie(method, lambda _: True, PageStatus.STORE_UNREACHABLE)
            gate.opens.set()
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 0, PageStatus.STORE_UNREACHABLE)
        lying.be_honest()
        await settle(loader)


async def test_past_its_lease_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = make_pools()
    recording = RecordingStore(lending_store(lease=5.0))
    async with opened(recording, pools, **PAGE) as loader:
        assert loader._context is not None
        now = 1000.0
        monkeypatch.setattr(loader._context.lender, "clock", lambda: now)
        await put(loader, pools, keys(PAGES))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            now += 5.0
            gate.opens.set()
            assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        assert len(recording.keys_of("read")) == PAGES
        assert loader.statistics().bytes_direct == 0
        await settle(loader)


@pytest.mark.usefixtures("single_layers")
async def test_a_lease_that_ends_between_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was copied under it is good; the rest is read."""
    pools = make_pools()
    recording = RecordingStore(lending_store(lease=5.0))
    async with opened(recording, pools, **PAGE) as loader:
        assert loader._context is not None
        now = 1000.0
        monkeypatch.setattr(loader._context.lender, "clock", lambda: now)
        await put(loader, pools, keys(PAGES))
        with held_copy(-3, monkeypatch) as gate:
            async with loader.load([pools.unit("a", keys(PAGES), range(PAGES))]) as handle:
                await gate.wait()
                assert "a" in (await handle.layer(0)).live
                now += 5.0
                gate.opens.set()
                assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        assert len(recording.keys_of("read")) == PAGES
        await settle(loader)


async def test_the_store_closes_before_the_copy() -> None:
    pools = make_pools()
    memory = lending_store()
    async with opened(memory, pools, **PAGE) as loader:
        await put(loader, pools, keys(3))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(3), range(3), ready=gate)]) as handle:
            await gate.wait()
            memory.close()
            gate.opens.set()
            assert_outcome((await handle.report()).outcomes["a"], 0, PageStatus.STORE_UNREACHABLE)
        pools.assert_rows_kept()
        await settle(loader)


@pytest.mark.usefixtures("single_layers")
async def test_the_store_closes_between_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = make_pools()
    memory = lending_store()
    async with opened(memory, pools, **PAGE) as loader:
        await put(loader, pools, keys(3))
        with held_copy(3, monkeypatch) as gate:
            async with loader.load([pools.unit("a", keys(3), range(3))]) as handle:
                await gate.wait()
                assert "a" in (await handle.layer(0)).live
                memory.close()
                gate.opens.set()
                outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 0, PageStatus.STORE_UNREACHABLE)
        assert outcome.late_failure is not None
        await settle(loader)


async def test_a_deadline_before_the_copy_leaves_the_slots_alone() -> None:
    pools = make_pools()
    async with opened(lending_store(), pools, **PAGE) as loader:
        await put(loader, pools, keys(3))
        gate = Gate()
        outcome = (await load(loader, pools.unit("a", keys(3), range(3), deadline=0.15, ready=gate)))["a"]
        gate.opens.set()
        assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
        pools.assert_rows_kept()
        await settle(loader)


@pytest.mark.usefixtures("single_layers")
async def test_what_the_deadline_finds_unproven_is_a_miss() -> None:
    """The first page was read, since it had been replaced; the last chunk that a deadline leaves time for is for it."""
    pools = make_pools()
    hanging = HangingStore(memory := lending_store())
    async with opened(_Lent(hanging, memory), pools, **PAGE) as loader:
        await put(loader, pools, keys(PAGES))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(PAGES), range(PAGES), ready=gate)]) as handle:
            await gate.wait()
            (first,) = object_keys(loader, pools, "k0")
            put_object(memory, first, place_foreign(memory, first))
            hanging.hold("descriptors", nth_question_of_many(2))
            gate.opens.set()
            await arrived(hanging, "descriptors")
            assert "a" in (await handle.layer(0)).live
            end_time_of(loader, "a")
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 1, PageStatus.TIMED_OUT)
        pools.assert_restored(keys(1), range(1))
        hanging.release()
        await settle(loader)


def nth_question_of_many(number: int) -> Any:
    """Of those about all pages or all but one, which the proof of one that was read is not."""
    seen: list[None] = []

    def when(asked: Sequence[str]) -> bool:
        is_of_all = len(asked) >= PAGES - 1
        seen.extend([None] * is_of_all)
        return is_of_all and len(seen) == number

    return when


async def test_a_draft_that_is_replaced_costs_the_draft_alone() -> None:
    pools = make_pools(draft=DraftMode.SIDECAR)
    memory = lending_store()
    async with opened(memory, pools, **PAGE) as loader:
        await put(loader, pools, keys(3))
        gate = Gate()
        async with loader.load([pools.unit("a", keys(3), range(3), ready=gate)]) as handle:
            await gate.wait()
            (gone,) = (key for key in object_keys(loader, pools, "k1") if "draft" in key)
            place_foreign(memory, gone)
            gate.opens.set()
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 3)
        assert outcome.draft_pages == 1
        pools.assert_restored(keys(3), range(3), draft=False)
        pools.assert_restored(keys(1), range(1), draft=True)
        assert all(pools.is_zero(row) for row in (1, 2))
        await settle(loader)


@pytest.mark.usefixtures("single_layers")
async def test_a_packed_draft_is_proven_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes last: all layers of the page are there when its object goes."""
    pools = make_pools(draft=DraftMode.PACKED)
    memory = lending_store()
    async with opened(memory, pools, **PAGE) as loader:
        await put(loader, pools, keys(3))
        with held_copy(-5, monkeypatch) as gate:
            async with loader.load([pools.unit("a", keys(3), range(3))]) as handle:
                await gate.wait()
                place_foreign(memory, object_keys(loader, pools, "k1")[0])
                gate.opens.set()
                outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 3)
        assert (outcome.draft_pages, outcome.late_failure) == (1, None)
        pools.assert_restored(keys(3), range(3), draft=False)
        pools.assert_restored(keys(1), range(1), draft=True)
        assert all(pools.is_zero(row) for row in (1, 2))
        assert loader.statistics().held_slots == 0
        await settle(loader)


@pytest.mark.usefixtures("single_layers")
async def test_what_is_joined_in_the_stead_of_what_was_not_proven_may_lack_the_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stored again without it, and brought by another unit: its size tells, as at admission."""
    pools = make_pools(draft=DraftMode.PACKED)
    memory = lending_store()
    async with opened(memory, pools, **PAGE) as loader:
        await put(loader, pools, keys(3))
        (key,) = object_keys(loader, pools, "k1")
        with held_copy(1, monkeypatch) as gate:
            async with loader.load([pools.unit("a", keys(3), range(3))]) as handle:
                await gate.wait()
                put_object(memory, key, place_foreign(memory, key)[: 24 * PAGE_SIZE * LAYERS])
                async with loader.prefetch([pools.unit("b", keys(3))]) as prefetch:
                    assert (await prefetch.landed()).pages == {"b": 3}
                    gate.opens.set()
                    drafted = await handle.draft()
                    outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 3)
        assert (outcome.draft_pages, drafted) == (1, {"a": 1})
        pools.assert_restored(keys(3), range(3), draft=False)
        pools.assert_restored(keys(1), range(1), draft=True)
        assert all(pools.is_zero(row) for row in (1, 2))
        await settle(loader)


async def test_without_memory_for_what_was_not_proven_it_is_a_miss() -> None:
    pools = make_pools(width=256)
    memory = lending_store()
    lying = LyingStore(memory)
    async with opened(_Lent(lying, memory), pools, **PAGE, landing_bytes=5 * 4 * 256 * 8) as loader:
        for key in keys(16):
            await put(loader, pools, [key])
        lying.lie("descriptors", is_of(*keys(16)[2:]), PageStatus.NOT_FOUND, times=14, skip=14)
        outcome = (await load(loader, pools.unit("a", keys(16), range(16))))["a"]
        assert 2 < outcome.restored_pages < 16
        assert_outcome(outcome, outcome.restored_pages, PageStatus.SHED)
        pools.assert_restored(keys(outcome.restored_pages), range(outcome.restored_pages))
        await settle(loader)


async def test_the_master_is_asked_in_bounded_questions() -> None:
    pages = 1100
    pools = make_pools(pages=2 * pages, width=2)
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **PAGE) as loader:
        await put(loader, pools, keys(pages))
        recording.clear()
        assert_outcome((await load(loader, pools.unit("a", keys(pages), range(pages))))["a"], pages)
        assert recording.count("read") == 0
        assert questions(recording) == [512, 512, 76] * 2
        await settle(loader)


async def test_objects_of_one_kind_lie_side_by_side_however_many_calls_have_saved_them() -> None:
    pools = make_pools(family="mha")
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **PAGE, read_batch_objects=5) as loader:
        await put(loader, pools, keys(PAGES))
        assert recording.count("put_write") > 1
        kinds = zip(*(object_keys(loader, pools, key) for key in keys(PAGES)), strict=True)
        for objects in kinds:
            found = recording.descriptors(objects)
            places = [descriptor.address for descriptor in found if isinstance(descriptor, Descriptor)]
            assert len(places) == PAGES
            assert len(set(np.diff(places))) == 1
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        assert recording.count("read") == 0
        pools.assert_restored(keys(PAGES), range(PAGES))
        await settle(loader)
