"""A unit goes on once all of it is known to be there; where its later layers are, and what, is found out after that."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
import torch

from softload import DevicePool, DevicePoolGroup, PageLoader, PageStatus, PageStore, PoolName, handles, lending
from softload.outcomes import UnitOutcome
from softload.protocols import Descriptor
from softload.stores.wrapper import LendingWrapperStore
from softload.testing import HangingStore, RecordingStore

from .doubles import LyingStore
from .harness import (
    PAGE_SIZE,
    Pools,
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
    missed,
    opened,
    put,
    settle,
    store,
)
from .test_admission import resized

pytestmark = pytest.mark.asyncio

PAGES = 40
"""In four groups of layers: enough objects for an admission in steps."""

ROWS = range(PAGES)


class Withholding(LendingWrapperStore):
    """Says no sooner where objects of later layers are than it may."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self.asked = threading.Event()
        self.may_answer = threading.Event()

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        if for_the_rest(keys):
            self.asked.set()
            assert self.may_answer.wait(10)
        return super().descriptors(keys)


def for_the_rest(object_keys: Sequence[str]) -> bool:
    """For `HangingStore.hold`: a question for all objects but those of the first layers."""
    return len(object_keys) >= PAGES and not object_keys[0].endswith(".g0")


async def outcome_of(loader: PageLoader, pools: Pools, admitted: int) -> UnitOutcome:
    """Of a load of all pages, of which so many are admitted."""
    async with loader.load([pools.unit("a", keys(PAGES), ROWS)]) as handle:
        assert (await handle.admitted())["a"] == admitted
        await handle.layer(0)
        outcome = (await handle.report()).outcomes["a"]
    loader.forget("a")
    return outcome


@pytest.mark.parametrize("is_lent", [False, True])
async def test_first_layers_come_while_it_is_asked_where_the_others_are(
    monkeypatch: pytest.MonkeyPatch, is_lent: bool
) -> None:
    monkeypatch.setattr(lending, "_WORTH_BYTES", 1)  # so few bytes would be read, wherever they lie
    pools = make_pools(pages=2 * PAGES)
    recording = RecordingStore(lending_store(lends=is_lent))
    withholding = Withholding(recording)
    async with opened(withholding, pools) as loader:
        await put(loader, pools, keys(PAGES))
        recording.clear()
        async with loader.load([pools.unit("a", keys(PAGES), ROWS)]) as handle:
            assert (await handle.admitted())["a"] == PAGES
            assert (await handle.layer(0)).live == {"a"}
            assert await anyio.to_thread.run_sync(withholding.asked.wait, 10)
            assert len(recording.keys_of("read")) == (0 if is_lent else PAGES)
            withholding.may_answer.set()
            report = await handle.report()
        assert_outcome(report.outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), ROWS)
        assert report.admission_s < report.first_layer_s < report.load_s
        assert len(set(recording.keys_of("descriptors"))) == len(recording.keys_of("descriptors")) == 4 * PAGES
        assert len(recording.keys_of("read")) == (0 if is_lent else 4 * PAGES)
        await settle(loader)


@pytest.mark.parametrize(
    "options", [{}, {"layout": "page", "read_mode": "whole"}, {"layout": "page", "read_mode": "ranges"}]
)
async def test_all_is_read_while_the_engine_still_has_the_slots(options: dict[str, Any]) -> None:
    pools = make_pools(pages=2 * PAGES)
    opens = threading.Event()
    async with opened(store(), pools, **options) as loader:
        await put(loader, pools, keys(PAGES))
        await load(loader, pools.unit("open", keys(PAGES), ROWS))
        nbytes = loader.statistics().bytes_loaded
        pools.scramble()
        try:
            async with loader.load([pools.unit("a", keys(PAGES), ROWS, ready=opens.wait)]) as handle:
                await eventually(lambda: loader.statistics().bytes_loaded == 2 * nbytes)
                pools.assert_rows_kept()
                opens.set()
                assert_outcome((await handle.report()).outcomes["a"], PAGES)
        finally:
            opens.set()
        pools.assert_restored(keys(PAGES), ROWS)
        await settle(loader)


@pytest.mark.parametrize("answer", [PageStatus.NO_MEMORY_REPLICA, resized(-8), PageStatus.NOT_FOUND])
@pytest.mark.parametrize("good", [0, 7])
async def test_what_is_there_and_cannot_be_read_is_a_late_failure_once(
    good: int, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "_HEAD_START", 20.0)  # the first layers are copied before, on a busy machine as well
    pools = make_pools(pages=2 * PAGES)
    recording = RecordingStore(store())
    lying = LyingStore(recording)
    async with opened(lying, pools) as loader:
        await put(loader, pools, keys(PAGES))
        page = is_of(f"k{good}")
        lying.lie("descriptors", lambda key: page(key) and not key.endswith(".g0"), answer)
        outcome = await outcome_of(loader, pools, admitted=PAGES)
        lying_keys = [key for key in recording.keys_of("descriptors") if page(key)]
        status = answer if isinstance(answer, PageStatus) else PageStatus.WRONG_SIZE
        assert_outcome(outcome, good, status)
        assert set(missed(outcome)[1:]) == {PageStatus.AFTER_MISS}
        assert outcome.late_failure is not None
        assert (outcome.late_failure.page, outcome.late_failure.status) == (good, status)
        pools.assert_restored(keys(good), ROWS[:good])
        await settle(loader)
        if answer is PageStatus.NOT_FOUND:  # that may happen to anybody: it is gone
            return
        assert loader._context is not None
        loader._context.health.negative.discard(lying_keys)
        again = await outcome_of(loader, pools, admitted=good)
        assert_outcome(again, good, status)
        assert again.late_failure is None, "that was said a moment ago"
        await settle(loader)


@pytest.mark.parametrize("ends_by", ["leaving", "deadline", "a cancelled unit"])
async def test_a_load_that_ends_before_it_is_known_where_all_is_leaves_nothing_behind(ends_by: str) -> None:
    pools = make_pools(pages=2 * PAGES)
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(PAGES))
        hanging.hold("descriptors", for_the_rest)
        async with loader.load([pools.unit("a", keys(PAGES), ROWS)]) as handle:
            await handle.layer(0)
            await arrived(hanging, "descriptors")
            if ends_by == "deadline":
                end_time_of(loader, "a")
            if ends_by == "a cancelled unit":
                handle._runs[0].cancel()
            if ends_by != "leaving":
                outcome = (await handle.report()).outcomes["a"]
                status = PageStatus.TIMED_OUT if ends_by == "deadline" else PageStatus.CANCELLED
                assert_outcome(outcome, 0, status)
                assert outcome.late_failure is not None and outcome.late_failure.status is status
        now = loader.statistics()
        assert now.landing_bytes_in_use == now.held_slots == now.active_units == 0
        hanging.release()
        await settle(loader)
        loader.forget("a")
        if ends_by != "deadline":
            assert_outcome((await load(loader, pools.unit("again", keys(PAGES), ROWS)))["again"], PAGES)
            pools.assert_restored(keys(PAGES), ROWS)


async def test_nothing_is_admitted_before_all_of_it_is_known_to_be_there() -> None:
    pools = make_pools(pages=2 * PAGES)
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(PAGES))
        hanging.hold("exists")
        async with loader.load([pools.unit("a", keys(PAGES), ROWS)]) as handle:
            await arrived(hanging, "exists")
            with anyio.move_on_after(0.05) as waited:
                await handle.admitted()
            assert waited.cancelled_caught
            pools.assert_rows_kept()
            hanging.release()
            assert (await handle.admitted())["a"] == PAGES
            assert_outcome((await handle.report()).outcomes["a"], PAGES)
        pools.assert_restored(keys(PAGES), ROWS)
        await settle(loader)


@pytest.mark.parametrize("answer", [False, PageStatus.STORE_UNREACHABLE, PageStatus.MALFORMED])
async def test_what_is_not_known_to_be_there_is_no_late_failure(answer: Any) -> None:
    pools = make_pools(pages=2 * PAGES)
    lying = LyingStore(store())
    async with opened(lying, pools) as loader:
        await put(loader, pools, keys(PAGES))
        page = is_of("k7")
        lying.lie("exists", page, answer)
        lying.lie("descriptors", lambda key: page(key) and not key.endswith(".g0"), PageStatus.NOT_FOUND)
        outcome = await outcome_of(loader, pools, admitted=7)
        assert_outcome(outcome, 7, PageStatus.NOT_FOUND)
        assert outcome.late_failure is None
        await settle(loader)


async def test_first_layers_that_cannot_be_read_are_no_late_failure() -> None:
    pools = make_pools(pages=2 * PAGES)
    lying = LyingStore(store())
    async with opened(lying, pools) as loader:
        await put(loader, pools, keys(PAGES))
        page = is_of("k7")
        lying.lie("descriptors", lambda key: page(key) and key.endswith(".g0"), PageStatus.NO_MEMORY_REPLICA)
        outcome = await outcome_of(loader, pools, admitted=7)
        assert_outcome(outcome, 7, PageStatus.NO_MEMORY_REPLICA)
        assert outcome.late_failure is None
        pools.assert_restored(keys(7), ROWS[:7])
        await settle(loader)


async def test_layers_without_bytes_are_ready_once_all_is_known_to_be_there() -> None:
    pages = 140
    mapping = {layer: layer - 2 for layer in range(2, 6)}
    buffers = [torch.zeros(pages * PAGE_SIZE, 1, 24, dtype=torch.uint8) for _ in mapping]
    pool = DevicePool(PoolName.KV, PoolName.KV, [buffers], mapping, PAGE_SIZE, False)
    pools = Pools(DevicePoolGroup([pool], 6, PAGE_SIZE))
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(pages))
        hanging.hold("descriptors")
        async with loader.load([pools.unit("a", keys(pages), range(pages))]) as handle:
            assert (await handle.admitted())["a"] == pages
            assert (await handle.layer(1)).live == {"a"}
            pools.assert_rows_kept()
            hanging.release()
            assert_outcome((await handle.report()).outcomes["a"], pages)
        pools.assert_restored(keys(pages), range(pages))
        await settle(loader)


async def test_ranks_wait_for_all_answers() -> None:
    class Ranks:
        async def minimum(self, values: Sequence[int]) -> Sequence[int]:
            return values

    pools = make_pools(pages=2 * PAGES)
    hanging = HangingStore(store())
    async with PageLoader(hanging, pools.group, config=config(), consensus=Ranks()) as loader:
        await put(loader, pools, keys(PAGES))
        hanging.hold("descriptors", for_the_rest)
        async with loader.load([pools.unit("a", keys(PAGES), ROWS)]) as handle:
            await arrived(hanging, "descriptors")
            with anyio.move_on_after(0.05) as waited:
                await handle.admitted()
            assert waited.cancelled_caught
            hanging.release()
            assert (await handle.admitted())["a"] == PAGES
            assert_outcome((await handle.report()).outcomes["a"], PAGES)
        await settle(loader)


async def test_a_unit_of_the_same_load_that_has_no_memory_waits_for_none_of_it() -> None:
    """The first one goes on; what it has copied serves the other."""
    pools = make_pools(pages=4 * PAGES)
    recording = RecordingStore(store())
    async with opened(recording, pools, landing_bytes=4 * 4 * 96 * PAGES * 3) as loader:
        await put(loader, pools, keys(2 * PAGES))
        recording.clear()
        units = [pools.unit(name, keys(2 * PAGES)[at:][:PAGES], range(at, at + PAGES)) for name, at in UNITS]
        outcomes = await load(loader, *units)
        for name, at in UNITS:
            assert_outcome(outcomes[name], PAGES)
            pools.assert_restored(keys(2 * PAGES)[at:][:PAGES], range(at, at + PAGES))
        await settle(loader)


UNITS = (("a", 0), ("b", PAGES))
