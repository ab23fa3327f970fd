"""An object that several units want is read once; who leaves takes nobody along; who is late joins nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from softload import PageStatus, UnitOutcome, planning
from softload.testing import HangingStore, RecordingStore

from .doubles import LyingStore
from .harness import (
    arrived,
    assert_outcome,
    busy_lane,
    eventually,
    from_call,
    is_of,
    keys,
    load,
    make_pools,
    missed,
    modes,
    opened,
    put,
    settle,
    store,
)

pytestmark = pytest.mark.asyncio


@modes
@pytest.mark.parametrize("leaver", [0, 4, 9])
async def test_one_of_ten_leaves_nine_served(mode: dict[str, str], leaver: int) -> None:
    method = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools(pages=64)
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    async with opened(hanging, pools, **mode, read_lanes=1) as loader:
        await put(loader, pools, keys(4))
        scopes = [anyio.CancelScope() for _ in range(10)]
        outcomes: dict[str, UnitOutcome] = {}

        async def one(request: int) -> None:
            with scopes[request]:
                unit = pools.unit(f"r{request}", keys(4), range(request * 4, request * 4 + 4))
                outcomes.update(await load(loader, unit))

        async with anyio.create_task_group() as tasks:
            async with busy_lane(loader, pools, hanging, method):
                for request in range(10):
                    tasks.start_soon(one, request)
                objects = 4 * len(pools.group.specs(loader.config.layout)[pools.group.pools[0].name])
                await eventually(lambda: loader.statistics().shared_objects == 9 * objects)
                scopes[leaver].cancel()
                await anyio.wait_all_tasks_blocked()
        assert len(outcomes) == 9
        for request in range(10):
            rows = range(request * 4, request * 4 + 4)
            if request != leaver:
                assert_outcome(outcomes[f"r{request}"], 4)
                pools.assert_restored(keys(4), rows)
        pools.assert_rows_kept([63, *(row for row in range(40) if row // 4 != leaver)])
        assert set(Counter(recording.keys_of("read")).values()) <= {1}
        assert set(Counter(recording.keys_of("session_start")).values()) <= {1}
        await settle(loader)


async def test_a_read_past_its_time_is_not_joined() -> None:
    """Every request wants hash 0, and its read hangs: later ones read it anew."""
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, layout="page") as loader:
        await put(loader, pools, keys(2))
        first = iter([True])
        hanging.hold("read", lambda _: next(first, False))
        async with loader.load([pools.unit("stuck", keys(2), range(2))]) as stuck:
            await arrived(hanging, "read")
            await anyio.sleep(0.06)  # four times what such a read takes, and at least 50 ms
            for request in range(3):
                with anyio.fail_after(15):
                    outcomes = await load(loader, pools.unit(f"r{request}", keys(2), range(4, 6)))
                assert_outcome(outcomes[f"r{request}"], 2)
            hanging.release()
            assert_outcome((await stuck.report()).outcomes["stuck"], 2)
        pools.assert_restored([*keys(2), *keys(2)], [0, 1, 4, 5])
        await settle(loader)


async def test_a_read_that_somebody_gave_up_on_is_not_joined() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, layout="page") as loader:
        await put(loader, pools, keys(2))
        hanging.hold("read", from_call(0))
        async with loader.load([pools.unit("patient", keys(2), range(2))]) as patient:
            await arrived(hanging, "read")
            outcome = (await load(loader, pools.unit("hasty", keys(2), range(2, 4), deadline=0.1)))["hasty"]
            assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
            async with loader.load([pools.unit("next", keys(2), range(4, 6))]) as anew:
                await arrived(hanging, "read", 2)  # a second call for the same keys
                hanging.release()
                assert_outcome((await anew.report()).outcomes["next"], 2)
            assert_outcome((await patient.report()).outcomes["patient"], 2)
        pools.assert_restored([*keys(2), *keys(2)], [0, 1, 4, 5])
        pools.assert_rows_kept([0, 1, 4, 5])
        await settle(loader)


async def test_a_read_that_somebody_gave_up_on_serves_later_units_once_it_is_here() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    recording = RecordingStore(hanging)
    async with opened(recording, pools, layout="page") as loader:
        await put(loader, pools, keys(2))
        hanging.hold("read")
        try:
            async with loader.prefetch([pools.unit("patient", keys(2))]) as patient:
                await arrived(hanging, "read")
                outcome = (await load(loader, pools.unit("hasty", keys(2), range(2), deadline=0.1)))["hasty"]
                assert_outcome(outcome, 0, PageStatus.TIMED_OUT)
                hanging.release()
                assert (await patient.landed())["patient"] == 2
        finally:
            hanging.release()
        await settle(loader)
        kept = loader.statistics().kept_bytes
        recording.clear()
        async with loader.prefetch([pools.unit("next", keys(2))]) as prefetch:
            assert (await prefetch.landed())["next"] == 2
        assert recording.count("read") == 0
        await settle(loader)
        assert loader.statistics().kept_bytes == kept


@modes
async def test_a_shared_read_that_fails_cuts_each_at_its_own_page(mode: dict[str, str]) -> None:
    method = "read_ranges" if mode.get("read_mode") == "ranges" else "read"
    pools = make_pools()
    lying = LyingStore(store())
    hanging = HangingStore(lying)
    async with opened(hanging, pools, **mode) as loader:
        await put(loader, pools, [*keys(4, "a"), "shared", *keys(4, "b")])
        hanging.hold(method)
        lying.lie(method, is_of("shared"), PageStatus.TRANSFER_FAILED)
        a = pools.unit("A", [*keys(3, "a"), "shared"], range(4))
        b = pools.unit("B", ["b0", "shared", "b1"], range(8, 11))
        async with loader.load([a]) as first, loader.load([b]) as second:
            await first.admitted()
            await second.admitted()
            await arrived(hanging, method)
            hanging.release()
            outcome_a = (await first.report()).outcomes["A"]
            outcome_b = (await second.report()).outcomes["B"]
        assert_outcome(outcome_a, 3, PageStatus.TRANSFER_FAILED)
        assert_outcome(outcome_b, 1)
        assert missed(outcome_b)[0] in (PageStatus.TRANSFER_FAILED, PageStatus.SUPPRESSED)
        pools.assert_restored([*keys(3, "a"), "b0"], [0, 1, 2, 8])
        await settle(loader)


@modes
async def test_who_joined_a_unit_that_ends_before_its_reads_are_queued_is_served(
    mode: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long unit is planned in many turns of the loop: others may join its first pages, and it may end there."""
    monkeypatch.setattr(planning, "_PAGES_PER_CHUNK", 1)
    pools = make_pools(pages=400)
    recording = RecordingStore(store())
    async with opened(recording, pools, **mode) as loader:
        await put(loader, pools, keys(300))
        outcomes: dict[str, UnitOutcome] = {}

        async def one() -> None:
            outcomes.update(await load(loader, pools.unit("short", keys(1), [350], deadline=2.0)))

        async with anyio.create_task_group() as tasks:
            async with loader.load([pools.unit("long", keys(300), range(300))]):
                await _turns_until(lambda: loader.statistics().landing_bytes_in_use > 0)
                tasks.start_soon(one)
                await _turns_until(lambda: loader.statistics().shared_objects > 0)
                if mode.get("read_mode") == "ranges":  # whole reads are queued in the turn that plans them
                    assert not recording.count("read_ranges")
        assert_outcome(outcomes["short"], 1)
        pools.assert_restored(keys(1), [350])
        await settle(loader)


async def _turns_until(condition: Callable[[], bool]) -> None:
    """Look once in every turn of the loop."""
    with anyio.fail_after(30):
        while not condition():  # noqa: ASYNC110
            await anyio.lowlevel.checkpoint()
