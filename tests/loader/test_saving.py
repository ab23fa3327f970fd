"""Saves: what is stored, what is refused, and what a store that is full or away costs."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import anyio
import pytest

from softload import PageStatus, PutRefusal, SaveStatus, saving
from softload.geometry import DraftMode
from softload.testing import Fault, FaultKind, FaultyStore, HangingStore, RecordingStore

from .doubles import LyingStore
from .harness import (
    MODE_IDS,
    MODES,
    any_of,
    arrived,
    assert_outcome,
    eventually,
    hold_copies,
    is_of,
    keys,
    load,
    make_pools,
    opened,
    put,
    settle,
    store,
)

pytestmark = pytest.mark.asyncio

modes = pytest.mark.parametrize("mode", MODES[:2], ids=MODE_IDS[:2])


@modes
@pytest.mark.parametrize("draft", [None, DraftMode.PACKED, DraftMode.SIDECAR])
async def test_save_and_save_again(mode: dict[str, str], draft: DraftMode | None) -> None:
    pools = make_pools(draft=draft)
    recording = RecordingStore(store())
    async with opened(recording, pools, **mode) as loader:
        pools.fill(keys(6), range(6))
        pools.remember()
        first = await loader.save([pools.unit("a", keys(6), range(6))])
        outcome = first.outcomes["a"]
        assert outcome.saved_pages == 6
        assert {page.status for page in outcome.pages} == {SaveStatus.SAVED}
        assert first.bytes_saved == loader.statistics().bytes_saved > 0
        again = await loader.save([pools.unit("b", keys(6), range(6))])
        assert {page.status for page in again.outcomes["b"].pages} == {SaveStatus.PRESENT}
        assert (again.outcomes["b"].saved_pages, again.bytes_saved) == (0, 0)
        pools.assert_rows_kept()
        # No look at a key, before or after: every look leases, and a full store then has nothing to evict.
        assert recording.count("exists") == recording.count("descriptors") == 0
        await settle(loader)


@modes
@pytest.mark.parametrize("restored", [0, 3])
async def test_failed_pages_are_refused_until_they_are_computed(mode: dict[str, str], restored: int) -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools, **mode) as loader:
        await put(loader, pools, keys(6))
        lying.lie("read", is_of(f"k{restored}"), PageStatus.NOT_FOUND)
        unit = pools.unit("a", keys(6), range(6))
        assert_outcome((await load(loader, unit))["a"], restored)
        lying.be_honest()
        statuses = [page.status for page in (await loader.save([unit])).outcomes["a"].pages]
        assert statuses == [SaveStatus.PRESENT] * restored + [SaveStatus.REFUSED] * (6 - restored)
        pools.fill(keys(6)[restored:], range(restored, 6))
        loader.computed(unit, restored + 1)
        statuses = [page.status for page in (await loader.save([unit])).outcomes["a"].pages]
        assert statuses == [SaveStatus.PRESENT] * (restored + 1) + [SaveStatus.REFUSED] * (5 - restored)
        loader.computed(unit, [5])
        assert (await loader.save([unit])).outcomes["a"].pages[5].status is SaveStatus.PRESENT
        loader.computed(unit)
        assert SaveStatus.REFUSED not in {page.status for page in (await loader.save([unit])).outcomes["a"].pages}


async def test_refused_by_key_and_not_by_slot_number() -> None:
    """The engine gave the slots of a failed load to another request: that one's pages may be stored."""
    pools = make_pools()
    async with opened(store(), pools) as loader:
        assert_outcome((await load(loader, pools.unit("a", keys(3), range(3))))["a"], 0)
        pools.fill(keys(3, "other"), range(3))
        report = await loader.save([pools.unit("b", keys(3, "other"), range(3))])
        assert report.outcomes["b"].saved_pages == 3
        report = await loader.save([pools.unit("a", keys(3), range(3))])
        assert {page.status for page in report.outcomes["a"].pages} == {SaveStatus.REFUSED}


@pytest.mark.parametrize("draft", [None, DraftMode.SIDECAR])
async def test_computed_too_late_says_nothing_about_who_has_the_slots_now(draft: DraftMode | None) -> None:
    """The engine gave the slots of a failed load to another request, whose load failed too."""
    pools = make_pools(draft=draft)
    async with opened(store(), pools) as loader:
        first, second = pools.unit("a", keys(3), range(3)), pools.unit("b", keys(3, "other"), range(3))
        assert_outcome((await load(loader, first))["a"], 0)
        assert_outcome((await load(loader, second))["b"], 0)
        loader.computed(first)
        report = await loader.save([second])
        assert {page.status for page in report.outcomes["b"].pages} == {SaveStatus.REFUSED}
        pools.fill(keys(3, "other"), range(3))
        loader.computed(second)
        assert (await loader.save([second])).outcomes["b"].saved_pages == 3


async def test_computed_too_late_leaves_the_zeros_of_a_packed_draft_unsaved() -> None:
    pools = make_pools(draft=DraftMode.PACKED)
    recording = RecordingStore(store())
    async with opened(recording, pools) as loader:
        await put(loader, pools, keys(3))
        drafts = [key for key in recording.keys_of("put_end") if ".d" in key]
        assert drafts
        recording.remove(drafts, force=True)
        first, second = pools.unit("a", keys(3, "gone"), range(3)), pools.unit("b", keys(3), range(3))
        assert_outcome((await load(loader, first))["a"], 0)
        outcome = (await load(loader, second))["b"]
        assert (outcome.restored_pages, outcome.draft_pages) == (3, 0)
        loader.computed(first)
        assert (await loader.save([second])).outcomes["b"].draft_saved_pages == 0
        loader.computed(second)
        assert (await loader.save([second])).outcomes["b"].draft_saved_pages == 3


async def test_slots_that_are_being_filled_are_refused() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(3))
        hanging.hold("read")
        async with loader.load([pools.unit("a", keys(3), range(3))]) as handle:
            await arrived(hanging, "read")
            report = await loader.save([pools.unit("a", keys(3), range(3))])
            assert {page.status for page in report.outcomes["a"].pages} == {SaveStatus.REFUSED}
            hanging.release()
            await handle.report()


async def test_restored_pages_may_be_saved() -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(3))
        await load(loader, pools.unit("a", keys(3), range(3)))
        report = await loader.save([pools.unit("a", keys(3), range(3))])
        assert {page.status for page in report.outcomes["a"].pages} == {SaveStatus.PRESENT}


@modes
async def test_full_store_costs_the_save_and_nothing_else(mode: dict[str, str]) -> None:
    pools = make_pools()
    page_bytes = sum(view.shape[1] for view in pools.group.pools[0].page_views)
    async with opened(store(capacity=page_bytes * 8), pools, **mode) as loader:
        pools.fill(keys(4, "seen"), range(4))
        await loader.save([pools.unit("a", keys(4, "seen"), range(4))])
        assert_outcome((await load(loader, pools.unit("a2", keys(4, "seen"), range(8, 12))))["a2"], 4)  # leased now
        report = await loader.save([pools.unit("b", keys(20), range(12, 32))])
        statuses = [page.status for page in report.outcomes["b"].pages]
        assert SaveStatus.STORE_FULL in statuses
        assert set(statuses) <= {SaveStatus.SAVED, SaveStatus.STORE_FULL}
        first = statuses.index(SaveStatus.STORE_FULL)
        assert report.outcomes["b"].saved_pages == statuses.count(SaveStatus.SAVED)
        assert SaveStatus.SAVED not in statuses[first + 1 :], "what is stored is a prefix"
        assert loader.statistics().open_breakers == ()
        await settle(loader)


@modes
@pytest.mark.parametrize("method", ["put_start", "put_write", "put_end"])
@pytest.mark.parametrize(
    "answer", [PageStatus.TRANSFER_FAILED, PageStatus.STORE_UNREACHABLE, PageStatus.MALFORMED, -1, 7, True, None]
)
@pytest.mark.parametrize("page", [0, 2])
async def test_failed_put_is_revoked_and_not_counted(
    mode: dict[str, str], method: str, answer: object, page: int
) -> None:
    pools = make_pools()
    inner = store()
    lying = LyingStore(inner)
    async with opened(lying, pools, **mode) as loader:
        pools.fill(keys(4), range(4))
        lying.lie(method, is_of(f"k{page}"), answer)
        report = await loader.save([pools.unit("a", keys(4), range(4))])
        statuses = [each.status for each in report.outcomes["a"].pages]
        assert statuses[page] is SaveStatus.FAILED
        assert statuses.count(SaveStatus.SAVED) == report.outcomes["a"].saved_pages == 3
        if method != "put_start":
            assert inner.statistics().reservations == 0
        await settle(loader)


@modes
async def test_key_that_another_client_writes_is_present_and_not_saved(mode: dict[str, str]) -> None:
    pools = make_pools()
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    async with opened(recording, pools, **mode) as loader:
        lying.lie("put_start", is_of("k1"), PutRefusal.PRESENT)
        report = await loader.save([pools.unit("a", keys(3), range(3))])
        assert [page.status for page in report.outcomes["a"].pages] == [
            SaveStatus.SAVED,
            SaveStatus.PRESENT,
            SaveStatus.SAVED,
        ]
        assert report.outcomes["a"].saved_pages == 2
        assert not any(map(is_of("k1"), recording.keys_of("put_write")))


async def test_pages_missed_by_many_are_saved_once() -> None:
    pools = make_pools(pages=80)
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    async with opened(hanging, pools) as loader:
        hanging.hold("put_start")
        reports = []

        async def save(request: int) -> None:
            rows = range(request * 4, request * 4 + 4)
            pools.fill(keys(4), rows)
            reports.append(await loader.save([pools.unit(f"r{request}", keys(4), rows)]))

        async with anyio.create_task_group() as tasks:
            for request in range(10):
                tasks.start_soon(save, request)
            await arrived(hanging, "put_start")
            await anyio.wait_all_tasks_blocked()
            hanging.release()
        statuses = Counter(
            page.status for report in reports for unit in report.outcomes.values() for page in unit.pages
        )
        assert statuses == {SaveStatus.SAVED: 4, SaveStatus.PRESENT: 36}
        assert set(Counter(recording.keys_of("put_start")).values()) == {1}


async def test_source_is_ours_until_the_call_returns() -> None:
    """The owner of a put is frozen, the slots are reused meanwhile: what is stored is what they held at the save."""
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, save_deadline=1.0) as loader:
        pools.fill(keys(4), range(4))
        hanging.hold("put_write")
        report = await loader.save([pools.unit("a", keys(4), range(4))])
        assert {page.status for page in report.outcomes["a"].pages} == {SaveStatus.TIMED_OUT}
        pools.scramble(seed=4)
        hanging.release()
        await settle(loader)
        assert_outcome((await load(loader, pools.unit("b", keys(4), range(4))))["b"], 4)
        pools.assert_restored(keys(4), range(4))


async def test_save_waits_for_the_engines_fence() -> None:
    pools = make_pools()
    opens, asked = threading.Event(), threading.Event()

    def fence() -> None:
        asked.set()
        opens.wait(10)

    async with opened(store(), pools) as loader, anyio.create_task_group() as tasks:
        tasks.start_soon(loader.save, [pools.unit("a", keys(4), range(4), ready=fence)])
        await eventually(asked.is_set)
        pools.fill(keys(4), range(4))  # the forward pass ends
        opens.set()
        await eventually(lambda: loader.statistics().saved_pages.get(SaveStatus.SAVED) == 4)
        pools.scramble(seed=8)
        assert_outcome((await load(loader, pools.unit("b", keys(4), range(4))))["b"], 4)
        pools.assert_restored(keys(4), range(4))


async def test_no_landing_memory_sheds_within_a_moment() -> None:
    pools = make_pools(width=2048)
    hanging = HangingStore(store())
    page_bytes = sum(view.shape[1] for view in pools.group.pools[0].page_views)
    async with opened(hanging, pools, landing_bytes=page_bytes * 16, write_lanes=8) as loader:
        hanging.hold("put_write", any_of(*(f"r{request}k0" for request in range(4))))
        async with anyio.create_task_group() as tasks:
            for request in range(4):  # an eighth of the memory is for saves: these have all of it
                unit = pools.unit(f"r{request}", keys(2, f"r{request}k"), range(2))
                tasks.start_soon(loader.save, [unit])
            await arrived(hanging, "put_write", 4)
            with anyio.fail_after(15):
                report = await loader.save([pools.unit("late", keys(8, "late"), range(8))])
            assert SaveStatus.SHED in {page.status for page in report.outcomes["late"].pages}
            hanging.release()
        await settle(loader)


async def test_corrupt_on_the_way_into_the_store_is_never_restored() -> None:
    pools = make_pools()
    faulty = FaultyStore(store(), [Fault(FaultKind.CORRUPT, probability=0.3)], seed=5)
    async with opened(faulty, pools, integrity="full") as loader:
        await put(loader, pools, keys(8))
        outcome = (await load(loader, pools.unit("a", keys(8), range(8))))["a"]
        assert outcome.restored_pages < 8
        pools.assert_restored(keys(outcome.restored_pages), range(outcome.restored_pages))


async def test_one_of_many_waiters_cancelled_leaves_the_others_served() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        pools.fill(keys(2), range(2))
        hanging.hold("put_start", any_of("k0"))
        reports = []

        async def save(name: str) -> None:
            reports.append(await loader.save([pools.unit(name, keys(2), range(2))]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(save, "first")
            await arrived(hanging, "put_start")
            with anyio.move_on_after(0.05):
                await save("leaver")
            tasks.start_soon(save, "other")
            await anyio.wait_all_tasks_blocked()
            hanging.release()
        statuses = Counter(
            page.status for report in reports for unit in report.outcomes.values() for page in unit.pages
        )
        assert statuses == {SaveStatus.SAVED: 2, SaveStatus.PRESENT: 2}


async def test_staged_is_told_once_for_each_unit_whatever_happens() -> None:
    """Saved, shed, refused, nothing to save, timed out, and those behind a unit at which the save was cancelled."""
    pools = make_pools()
    hanging = HangingStore(store())
    told: list[str] = []
    entered, opens = threading.Event(), threading.Event()

    def fence() -> None:
        entered.set()
        opens.wait(10)

    async with opened(hanging, pools) as loader:
        await load(loader, pools.unit("missed", keys(2, "missed"), range(2)))
        units = [
            pools.unit("refused", keys(2, "missed"), range(2)),
            pools.unit("good", keys(2), range(2, 4)),
            pools.unit("present", keys(2), range(2, 4)),
            pools.unit("late", keys(2, "late"), range(4, 6), deadline=0.0),
            pools.unit("empty", (), ()),
        ]
        await loader.save(units, staged=lambda unit: told.append(unit.request_id))
        assert told == ["refused", "good", "present", "late", "empty"]

        told.clear()
        waiting = pools.unit("waiting", keys(2, "w"), range(6, 8), ready=fence)
        try:
            async with anyio.create_task_group() as tasks:

                async def save() -> None:
                    behind = [pools.unit(f"behind{n}", keys(2, f"b{n}"), range(8, 10)) for n in range(2)]
                    await loader.save([waiting, *behind], staged=lambda unit: told.append(unit.request_id))

                tasks.start_soon(save)
                await eventually(entered.is_set)
                assert told == []
                tasks.cancel_scope.cancel()
        finally:
            opens.set()
        assert told == ["waiting", "behind0", "behind1"]

        told.clear()
        bad = pools.unit("bad", keys(2), range(3))
        with pytest.raises(ValueError, match="expected 8 token slots"):
            await loader.save([waiting, bad], staged=lambda unit: told.append(unit.request_id))
        assert told == ["waiting", "bad"]
        await settle(loader)


async def test_a_save_whose_task_is_cancelled_ends_its_copy_before_it_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `asyncio.timeout` does, whose cancellations no scope holds off."""
    pools = make_pools()
    told: list[str] = []
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(2))
        copying, may_end = hold_copies(monkeypatch, saving)
        unit = pools.unit("a", keys(2, "a"), range(2))
        task = asyncio.create_task(loader.save([unit], staged=lambda unit: told.append(unit.request_id)))
        try:
            await eventually(copying.is_set)
            for _ in range(2):
                task.cancel()
                await anyio.wait_all_tasks_blocked()
            assert loader.statistics().landing_bytes_in_use > 0, "it is written yet"
            assert told == [], "the slots are read yet"
            assert_outcome((await load(loader, pools.unit("b", keys(2), range(4, 6))))["b"], 2)
        finally:
            may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert told == ["a"]
        await settle(loader)


async def test_request_twice_in_one_save_is_refused() -> None:
    pools = make_pools()
    recording = RecordingStore(store())
    async with opened(recording, pools) as loader:
        recording.clear()
        with pytest.raises(ValueError, match="expected every request once, got 'a' twice"):
            await loader.save([pools.unit("a", keys(2), range(2)), pools.unit("a", keys(2, "x"), range(2, 4))])
        assert recording.calls == ()


async def test_deadlines_of_the_units_of_a_save_run_side_by_side() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, save_deadline=1.5) as loader:
        hanging.hold("put_write")
        started = anyio.current_time()
        report = await loader.save([pools.unit(f"r{n}", keys(2, f"r{n}"), range(2 * n, 2 * n + 2)) for n in range(20)])
        assert anyio.current_time() - started < 15.0, "one after the other they would take half a minute"
        statuses = {page.status for outcome in report.outcomes.values() for page in outcome.pages}
        assert statuses == {SaveStatus.TIMED_OUT}
        assert loader.statistics().stuck_threads == 1, "a unit that is late already starts no call"
        hanging.release()
        await settle(loader)


async def test_drain_waits_for_saves() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    ended: list[str] = []
    async with opened(hanging, pools) as loader, anyio.create_task_group() as tasks:
        hanging.hold("put_write")

        async def save() -> None:
            await loader.save([pools.unit("a", keys(2), range(2))])
            ended.append("save")

        async def drain() -> None:
            await loader.drain()
            ended.append("drain")

        tasks.start_soon(save)
        await arrived(hanging, "put_write")
        tasks.start_soon(drain)
        await anyio.wait_all_tasks_blocked()
        assert ended == []
        hanging.release()
        await eventually(lambda: len(ended) == 2)


async def test_closing_answers_a_save_of_many_units() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    reports = []
    async with anyio.create_task_group() as tasks:
        async with opened(hanging, pools) as loader:
            hanging.hold("put_write")

            async def save() -> None:
                units = [pools.unit(f"r{n}", keys(2, f"r{n}"), range(2 * n, 2 * n + 2)) for n in range(3)]
                reports.append(await loader.save(units))

            tasks.start_soon(save)
            await arrived(hanging, "put_write")
        with anyio.fail_after(15):
            await eventually(lambda: bool(reports))
    assert set(reports[0].outcomes) == {"r0", "r1", "r2"}


@pytest.mark.parametrize("family", ["draft", "alone"])
async def test_computed_takes_what_can_be_iterated_once(family: str) -> None:
    pools = make_pools(draft=DraftMode.SIDECAR if family == "draft" else None)
    async with opened(store(), pools) as loader:
        unit = pools.unit("a", keys(4), range(4))
        assert_outcome((await load(loader, unit))["a"], 0)
        loader.computed(unit, (page for page in (0, 2, 99)))
        statuses = [(page.component, page.status) for page in (await loader.save([unit])).outcomes["a"].pages]
        for component in {name for name, _ in statuses}:
            assert [status for name, status in statuses if name is component] == [
                SaveStatus.SAVED,
                SaveStatus.REFUSED,
                SaveStatus.SAVED,
                SaveStatus.REFUSED,
            ]
        with pytest.raises(ValueError, match="computed pages of 0 or more, got -1"):
            loader.computed(unit, [0, -1])
        with pytest.raises(ValueError, match="computed pages of 0 or more, got -3"):
            loader.computed(unit, -3)


async def test_forgotten_request_may_look_up_again() -> None:
    pools = make_pools()
    lying = LyingStore(store())
    async with opened(lying, pools) as loader:
        await put(loader, pools, keys(4))
        lying.lie("read", is_of("k0"), PageStatus.NOT_FOUND)
        unit = pools.unit("a", keys(4), range(4))
        assert_outcome((await load(loader, unit))["a"], 0)
        assert (await loader.lookup(unit)).status is PageStatus.SUPPRESSED
        loader.forget("a")
        assert (await loader.lookup(unit)).status is not PageStatus.SUPPRESSED
