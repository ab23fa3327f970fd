"""Many small loads at once: asked for and read together, each with an outcome of its own."""

from __future__ import annotations

import anyio
import pytest

from softload import PageStatus, UnitOutcome, health, pacing
from softload.testing import HangingStore, RecordingStore

from .doubles import LyingStore
from .harness import (  # fmt: skip
    Pools,
    arrived,
    assert_idle,
    assert_outcome,
    busy_lane,
    eventually,
    is_of,
    keys,
    load,
    make_pools,
    missed,
    opened,
    put,
    settle,
    store,
)

pytestmark = pytest.mark.asyncio

LOADS, PAGES = 8, 2
OBJECTS = 4 * PAGES
"""Of one load."""

grouped = {"layout": "grouped", "read_lanes": 1, "control_lanes": 1}


def rows(number: int) -> range:
    return range(number * PAGES, (number + 1) * PAGES)


def names(number: int) -> tuple[str, ...]:
    return keys(PAGES, f"n{number}.")


ALL = [name for number in range(LOADS) for name in names(number)]


def pools_for_all() -> Pools:
    return make_pools(pages=3 * LOADS * PAGES)


async def test_they_are_asked_for_and_read_together() -> None:
    pools = pools_for_all()
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    outcomes: dict[str, UnitOutcome] = {}
    async with opened(hanging, pools, **grouped) as loader:
        await put(loader, pools, ALL)

        async def one(number: int) -> None:
            outcomes.update(await load(loader, pools.unit(f"r{number}", names(number), rows(number))))

        async with anyio.create_task_group() as tasks, busy_lane(loader, pools, hanging, "read"):
            recording.clear()
            for number in range(LOADS):
                tasks.start_soon(one, number)
            await eventually(lambda: len(recording.keys_of("descriptors")) == LOADS * OBJECTS)
            await eventually(lambda: loader.statistics().queued_calls > 0)
        for number in range(LOADS):
            assert_outcome(outcomes[f"r{number}"], PAGES)
            pools.assert_restored(names(number), rows(number))
        assert recording.count("descriptors") < LOADS
        # A unit's reads come one after the other, so that there are two of each at most.
        assert recording.count("read") <= 1 + 2
        assert len(set(recording.keys_of("read"))) == (LOADS + 1) * OBJECTS - OBJECTS + 4
        await settle(loader)


async def test_what_is_wrong_with_one_costs_the_others_nothing() -> None:
    pools = pools_for_all()
    lying = LyingStore(store())
    hanging = HangingStore(lying)
    outcomes: dict[str, UnitOutcome] = {}
    async with opened(hanging, pools, **grouped) as loader:
        await put(loader, pools, ALL)
        lying.lie("read", is_of(names(2)[0]), PageStatus.TRANSFER_FAILED)
        lying.lie("read", is_of(names(4)[1]), PageStatus.NO_MEMORY_REPLICA)
        lying.lie("descriptors", is_of(names(6)[1]), PageStatus.NOT_FOUND)

        async def one(number: int) -> None:
            outcomes.update(await load(loader, pools.unit(f"r{number}", names(number), rows(number))))

        async with anyio.create_task_group() as tasks, busy_lane(loader, pools, hanging, "read"):
            for number in range(LOADS):
                tasks.start_soon(one, number)
            await eventually(lambda: loader.statistics().queued_calls > 0)
        good = {2: 0, 4: 1, 6: 1}
        for number in range(LOADS):
            assert_outcome(outcomes[f"r{number}"], good.get(number, PAGES))
        assert missed(outcomes["r2"])[0] is PageStatus.TRANSFER_FAILED
        assert missed(outcomes["r4"])[0] is PageStatus.NO_MEMORY_REPLICA
        assert missed(outcomes["r6"])[0] is PageStatus.NOT_FOUND
        await settle(loader)


async def test_one_that_leaves_while_they_are_read_together_takes_nobody_along() -> None:
    pools = pools_for_all()
    hanging = HangingStore(store())
    scopes = [anyio.CancelScope() for _ in range(LOADS)]
    outcomes: dict[str, UnitOutcome] = {}
    async with opened(hanging, pools, **grouped) as loader:
        await put(loader, pools, ALL)

        async def one(number: int) -> None:
            with scopes[number]:
                outcomes.update(await load(loader, pools.unit(f"r{number}", names(number), rows(number))))

        async with anyio.create_task_group() as tasks:
            hanging.hold("read")
            for number in range(LOADS):
                tasks.start_soon(one, number)
            await arrived(hanging, "read")
            await eventually(lambda: loader.statistics().queued_calls > 0)
            scopes[0].cancel()
            scopes[5].cancel()
            await eventually(lambda: loader.statistics().active_units == LOADS - 2)
            hanging.release()
        assert sorted(outcomes) == [f"r{number}" for number in range(LOADS) if number not in (0, 5)]
        for number in range(LOADS):
            if f"r{number}" in outcomes:
                assert_outcome(outcomes[f"r{number}"], PAGES)
                pools.assert_restored(names(number), rows(number))
        await settle(loader)
        assert_idle(loader)


async def test_all_that_hang_in_one_call_are_answered_by_their_own_deadlines() -> None:
    pools = pools_for_all()
    hanging = HangingStore(store())
    outcomes: dict[str, UnitOutcome] = {}
    async with opened(hanging, pools, **{**grouped, "read_lanes": 2}) as loader:
        await put(loader, pools, ALL)
        hanging.hold("read")

        async def one(number: int, deadline: float) -> None:
            unit = pools.unit(f"r{number}", names(number), rows(number), deadline=deadline)
            outcomes.update(await load(loader, unit))

        async with anyio.create_task_group() as tasks:
            for number in range(LOADS):
                tasks.start_soon(one, number, 0.3 if number % 2 else 20.0)
            await eventually(lambda: len(outcomes) == LOADS // 2)
            hanging.release()
        for number in range(LOADS):
            assert_outcome(outcomes[f"r{number}"], 0 if number % 2 else PAGES)
            if number % 2:
                assert missed(outcomes[f"r{number}"])[0] is PageStatus.TIMED_OUT
        await settle(loader)


async def test_one_question_of_many_that_fails_is_one_outcome_of_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_TURN_SECONDS", 60.0)  # all of them in one turn of the loop, however slow
    pools = pools_for_all()
    lying = LyingStore(store())
    recording = RecordingStore(lying)
    outcomes: dict[str, UnitOutcome] = {}
    async with opened(recording, pools, **grouped) as loader:
        await put(loader, pools, ALL)
        recording.clear()

        async def one(number: int) -> None:
            outcomes.update(await load(loader, pools.unit(f"r{number}", names(number), rows(number))))

        lying.lie("descriptors", lambda _: True, PageStatus.STORE_UNREACHABLE, times=LOADS * OBJECTS)
        async with anyio.create_task_group() as tasks:
            for number in range(LOADS):
                tasks.start_soon(one, number)
        assert recording.count("descriptors") == 1
        for number in range(LOADS):
            assert_outcome(outcomes[f"r{number}"], 0, PageStatus.STORE_UNREACHABLE)
        assert loader.statistics().open_breakers == ()
        await settle(loader)


async def test_one_question_of_many_that_hangs_is_one_outcome_of_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_SILENT_SECONDS", 60.0)  # outcomes alone
    monkeypatch.setattr(pacing, "_TURN_SECONDS", 60.0)  # all of them in one turn of the loop, however slow
    pools = pools_for_all()
    hanging = HangingStore(store())
    async with opened(hanging, pools, **grouped) as loader:
        hanging.hold("descriptors")
        async with anyio.create_task_group() as tasks:
            for number in range(LOADS):
                tasks.start_soon(load, loader, pools.unit(f"r{number}", names(number), rows(number), deadline=1.0))
        assert hanging.held("descriptors") == 1
        assert loader.statistics().open_breakers == ()
        hanging.release()
        await settle(loader)
