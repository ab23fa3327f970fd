"""Places for many pages are asked for before their bytes: objects of one kind lie side by side, none is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from softload import PageLoader, PageStatus, PutRefusal, SaveStatus, lending
from softload.geometry import DraftMode
from softload.native_calls import NativeCall
from softload.testing import HangingStore, RecordingStore

from .doubles import LyingStore
from .harness import (
    Pools,
    any_of,
    arrived,
    assert_outcome,
    eventually,
    is_of,
    keys,
    lending_store,
    load,
    make_pools,
    opened,
    settle,
)
from .test_direct_reads import object_keys

pytestmark = pytest.mark.asyncio

PAGES = 12
FEW: dict[str, Any] = {"read_batch_objects": 5}
"""Objects that are saved at a time: a page and a quarter."""


async def save(loader: PageLoader, pools: Pools, page_keys: Sequence[str], name: str = "save") -> list[SaveStatus]:
    """Of the first rows, which are filled."""
    rows = range(len(page_keys))
    pools.fill(page_keys, rows)
    report = await loader.save([pools.unit(name, page_keys, rows)])
    return [page.status for page in report.outcomes[name].pages]


@pytest.mark.parametrize("draft", [None, DraftMode.PACKED, DraftMode.SIDECAR])
async def test_what_was_saved_in_many_calls_is_copied_in_one_run_of_each_kind(
    draft: DraftMode | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    runs = lending.Lender.runs

    def recorded(lender: lending.Lender, places: Sequence[object], size: int, parts: int) -> Any:
        for run in runs(lender, places, size, parts):
            found.append(run[1].count)
            yield run

    monkeypatch.setattr(lending.Lender, "runs", recorded)
    monkeypatch.setattr(lending, "_WORTH_BYTES", 1)
    pools = make_pools(draft=draft)
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **FEW) as loader:
        assert set(await save(loader, pools, keys(PAGES))) == {SaveStatus.SAVED}
        assert recording.count("put_write") > 4
        kinds = len(object_keys(loader, pools, "k0"))
        await load(loader, pools.unit("first", keys(PAGES), range(PAGES)))  # finds out that they are lent
        found.clear()
        pools.scramble()
        assert_outcome((await load(loader, pools.unit("a", keys(PAGES), range(PAGES))))["a"], PAGES)
        assert found == [PAGES] * kinds
        pools.assert_restored(keys(PAGES), range(PAGES))
        await settle(loader)


async def test_many_pages_take_places_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softload.saving._PLACED_OBJECTS", 21)  # five pages, and a quarter
    pools = make_pools()
    recording = RecordingStore(lending_store())
    told = []
    async with opened(recording, pools, **FEW) as loader:
        pools.fill(keys(PAGES), range(PAGES))
        report = await loader.save(
            [pools.unit("a", keys(PAGES), range(PAGES))], staged=lambda _: told.append(recording.count("put_write"))
        )
        assert report.outcomes["a"].saved_pages == PAGES
        assert [len(call.keys) for call in recording.calls if call.method == "put_start"] == [20, 20, 8]
        assert told == [recording.count("put_write") - 1]
        pools.scramble()
        assert_outcome((await load(loader, pools.unit("b", keys(PAGES), range(PAGES))))["b"], PAGES)
        pools.assert_restored(keys(PAGES), range(PAGES))
        await settle(loader)


@pytest.mark.parametrize(
    "options", [{"direct_reads": False}, {"layout": "page", "read_mode": "whole"}, {"integrity": "off"}]
)
async def test_where_nothing_is_lent_each_call_takes_its_own_places(options: dict[str, Any]) -> None:
    pools = make_pools()
    recording = RecordingStore(lending_store())
    async with opened(recording, pools, **FEW, **options) as loader:
        assert set(await save(loader, pools, keys(PAGES))) == {SaveStatus.SAVED}
        assert recording.count("put_start") == recording.count("put_write") > 1


async def test_what_is_there_is_neither_copied_nor_written() -> None:
    pools = make_pools()
    lying = LyingStore(lending_store())
    recording = RecordingStore(lying)
    async with opened(recording, pools, **FEW) as loader:
        lying.lie("put_start", is_of("k2"), PutRefusal.PRESENT)
        lying.lie("put_start", is_of("k5"), PageStatus.STORE_UNREACHABLE)
        statuses = await save(loader, pools, keys(PAGES))
        assert (statuses[2], statuses[5]) == (SaveStatus.PRESENT, SaveStatus.FAILED)
        assert statuses.count(SaveStatus.SAVED) == PAGES - 2
        assert not any(map(is_of("k2", "k5"), recording.keys_of("put_write")))
        lying.lie("put_start", lambda _: True, PutRefusal.PRESENT)
        recording.clear()
        assert set(await save(loader, pools, keys(PAGES, "all"))) == {SaveStatus.PRESENT}
        assert recording.count("put_write") == 0
        await settle(loader)


async def test_a_store_too_full_for_all_keeps_a_prefix() -> None:
    pools = make_pools()
    memory = lending_store()
    lying = LyingStore(memory)
    recording = RecordingStore(lying)
    async with opened(recording, pools, **FEW) as loader:
        lying.lie("put_start", is_of(*keys(PAGES)[7:]), PutRefusal.FULL)
        statuses = await save(loader, pools, keys(PAGES))
        assert statuses == [SaveStatus.SAVED] * 7 + [SaveStatus.STORE_FULL] * (PAGES - 7)
        assert memory.statistics().reservations == 4 * (PAGES - 7), "those that the store denies to have given"
        pools.scramble()
        assert_outcome((await load(loader, pools.unit("b", keys(7), range(7))))["b"], 7)
        pools.assert_restored(keys(7), range(7))
        await settle(loader)


@pytest.mark.parametrize("is_placed", [True, False])
async def test_a_master_that_does_not_end_puts_is_no_master_that_answers(is_placed: bool) -> None:
    pools = make_pools()
    lying = LyingStore(lending_store())
    async with opened(RecordingStore(lying), pools, **FEW, direct_reads=is_placed) as loader:
        lying.lie("put_end", lambda _: True, PageStatus.STORE_UNREACHABLE)
        assert set(await save(loader, pools, keys(PAGES))) == {SaveStatus.FAILED}
        assert loader.statistics().open_breakers == ("master",)


@pytest.mark.parametrize("method", ["put_start", "put_write", "put_end"])
@pytest.mark.parametrize("ending", ["deadline", "cancelled", "closed"])
async def test_places_of_a_save_that_ends_early_are_given_back(method: str, ending: str) -> None:
    """The call that is out, and may come back much later, ends or gives back its own."""
    pools = make_pools()
    memory = lending_store()
    hanging = HangingStore(memory)
    try:
        async with opened(RecordingStore(hanging), pools, **FEW) as loader:
            pools.fill(keys(PAGES), range(PAGES))
            hanging.hold(method, any_of("k3"))
            deadline = 0.2 if ending == "deadline" else 20.0
            unit = pools.unit("a", keys(PAGES), range(PAGES), deadline=deadline)
            if ending == "deadline":
                report = await loader.save([unit])
                assert SaveStatus.TIMED_OUT in {page.status for page in report.outcomes["a"].pages}
                hanging.release()
            else:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(loader.save, [unit])
                    await arrived(hanging, method)
                    if ending == "cancelled":
                        tasks.cancel_scope.cancel()
                    hanging.release()
            if ending != "closed":
                await loader.drain()
                await eventually(lambda: memory.statistics().reservations == 0)
                again = await save(loader, pools, keys(PAGES), "again")
                assert set(again) <= {SaveStatus.SAVED, SaveStatus.PRESENT}
                pools.scramble()
                assert_outcome((await load(loader, pools.unit("b", keys(PAGES), range(PAGES))))["b"], PAGES)
                pools.assert_restored(keys(PAGES), range(PAGES))
                await settle(loader)
    finally:
        hanging.release()
    assert memory.statistics().reservations == 0


async def test_places_that_come_in_the_step_in_which_the_save_is_cancelled_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = make_pools()
    memory = lending_store()
    complete = NativeCall.complete
    saving: list[asyncio.Task[Any]] = []

    def cancelled(call: NativeCall[Any]) -> None:
        complete(call)
        if call.group is not None and call.group.name == "write" and memory.statistics().reservations:
            saving[0].cancel()

    async with opened(RecordingStore(memory), pools, **FEW) as loader:
        pools.fill(keys(PAGES), range(PAGES))
        monkeypatch.setattr(NativeCall, "complete", cancelled)
        saving.append(asyncio.create_task(loader.save([pools.unit("a", keys(PAGES), range(PAGES))])))
        with pytest.raises(asyncio.CancelledError):
            await saving[0]
        await settle(loader)
        assert memory.statistics().reservations == 0


async def test_draining_waits_until_places_that_came_late_are_given_back() -> None:
    pools = make_pools()
    memory = lending_store()
    hanging = HangingStore(memory)
    async with opened(RecordingStore(hanging), pools, **FEW) as loader:
        hanging.hold("put_start")
        pools.fill(keys(PAGES), range(PAGES))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loader.save, [pools.unit("a", keys(PAGES), range(PAGES))])
            await arrived(hanging, "put_start")
            tasks.cancel_scope.cancel()
        hanging.hold("put_revoke")
        draining = asyncio.create_task(loader.drain())
        hanging.release("put_start")
        await arrived(hanging, "put_revoke")
        assert not draining.done()
        hanging.release()
        await draining
        assert memory.statistics().reservations == 0


async def lacking_its_places(loader: PageLoader, pools: Pools, hanging: HangingStore) -> None:
    """A save is left while it writes: the places of its later pages are being given back, which is held."""
    hanging.hold("put_write", any_of("k3"))
    hanging.hold("put_revoke")
    pools.fill(keys(PAGES), range(PAGES))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loader.save, [pools.unit("a", keys(PAGES), range(PAGES))])
        await arrived(hanging, "put_write")
        tasks.cancel_scope.cancel()
    await arrived(hanging, "put_revoke")


async def test_what_is_just_given_back_is_placed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old place is still there when it is saved again: that is no object."""
    monkeypatch.setattr("softload.saving._GRANT_SECONDS", 20.0)
    pools = make_pools()
    hanging = HangingStore(lending_store())
    async with opened(RecordingStore(hanging), pools, **FEW, write_lanes=4) as loader:
        await lacking_its_places(loader, pools, hanging)
        again = asyncio.create_task(save(loader, pools, ["k8", "k9"], "again"))
        assert set(await save(loader, pools, ["other"], "other")) == {SaveStatus.SAVED}  # begun later, and over sooner
        hanging.release()
        assert await again == [SaveStatus.SAVED] * 2
        pools.scramble()
        assert_outcome((await load(loader, pools.unit("b", ["k8", "k9"], range(2))))["b"], 2)
        pools.assert_restored(["k8", "k9"], range(2))
        await settle(loader)


async def test_what_cannot_be_given_back_is_not_saved_and_not_present() -> None:
    pools = make_pools()
    hanging = HangingStore(lending_store())
    async with opened(RecordingStore(hanging), pools, **FEW, write_lanes=4) as loader:
        await lacking_its_places(loader, pools, hanging)
        assert await save(loader, pools, ["other", "k8"]) == [SaveStatus.SAVED, SaveStatus.SHED]
        # Nor is what a call that nobody waits for any more has begun, and may never end.
        assert await save(loader, pools, ["k3"], "b") == [SaveStatus.SHED]
        hanging.release()
        await settle(loader)
        assert await save(loader, pools, ["k8"], "c") == [SaveStatus.SAVED]


@pytest.mark.parametrize("is_placed", [True, False])
async def test_what_is_begun_and_may_never_end_is_not_present(is_placed: bool) -> None:
    pools = make_pools()
    hanging = HangingStore(lending_store())
    async with opened(RecordingStore(hanging), pools, **FEW, direct_reads=is_placed) as loader:
        pools.fill(keys(PAGES), range(PAGES))
        for method in ("put_start", "put_write", "put_end"):
            mine = keys(PAGES, method)
            hanging.hold(method, any_of(mine[0]))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(loader.save, [pools.unit("a", mine, range(PAGES))])
                await arrived(hanging, method)
                tasks.cancel_scope.cancel()
            assert await save(loader, pools, mine[:1], "b") == [SaveStatus.SHED]
            hanging.release()
            await settle(loader)
            assert await save(loader, pools, mine[:1], "c") in ([SaveStatus.SAVED], [SaveStatus.PRESENT])
            pools.scramble()
            assert_outcome((await load(loader, pools.unit(method, mine[:1], range(1))))[method], 1)
            await settle(loader)


async def test_draining_waits_until_places_that_no_thread_could_give_back_are_given_back() -> None:
    pools = make_pools()
    memory = lending_store()
    hanging = HangingStore(memory)
    try:
        async with opened(RecordingStore(hanging), pools, **FEW, stuck_threads=1) as loader:
            hanging.hold("put_write")
            hanging.hold("put_revoke", any_of("r1k9"))
            pools.fill(keys(PAGES), range(PAGES))
            for nth in range(2):  # one call stuck may be replaced, two are too many: the rest of the latter is left
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(loader.save, [pools.unit("a", keys(PAGES, f"r{nth}k"), range(PAGES))])
                    await arrived(hanging, "put_write", nth + 1)
                    tasks.cancel_scope.cancel()
                if not nth:
                    await eventually(lambda: memory.statistics().reservations == 5)
            draining = asyncio.create_task(loader.drain())
            await asyncio.sleep(0.05)
            hanging.release("put_write")
            await arrived(hanging, "put_revoke")
            await eventually(lambda: not loader.statistics().quarantined_bytes)
            await asyncio.sleep(0.05)
            assert not draining.done()
            hanging.release()
            await draining
            assert memory.statistics().reservations == 0
            await settle(loader)
    finally:
        hanging.release()


@pytest.mark.parametrize("is_small", [False, True])
async def test_places_that_no_thread_could_give_back_go_once_one_is_free(is_small: bool) -> None:
    pools = make_pools()
    memory = lending_store()
    hanging = HangingStore(memory)
    try:
        async with opened(RecordingStore(hanging), pools, **FEW, stuck_threads=1) as loader:
            hanging.hold("put_write")
            pools.fill(keys(PAGES), range(PAGES))
            async with anyio.create_task_group() as tasks:
                for nth in range(2):  # one call stuck may be replaced, two are too many
                    mine = keys(PAGES, f"r{nth}k")
                    tasks.start_soon(loader.save, [pools.unit(f"r{nth}", mine, range(PAGES))])
                await arrived(hanging, "put_write", 2)
                tasks.cancel_scope.cancel()
            assert memory.statistics().reservations > 0
            hanging.release()
            await eventually(lambda: memory.statistics().reservations == 0)
            again = ["r1k5"] if is_small else keys(PAGES, "r1k")
            assert set(await save(loader, pools, again)) <= {SaveStatus.SAVED, SaveStatus.PRESENT}
            assert memory.statistics().reservations == 0
            await settle(loader)
    finally:
        hanging.release()
