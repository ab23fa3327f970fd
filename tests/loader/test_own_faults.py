"""What breaks beside the store - device, ranks, the engine's callbacks, softload itself - costs its units, no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from structlog.testing import capture_logs

from softload import PageLoader, PageStatus, SaveStatus, events, saving, unit_copies
from softload import loader as loader_module
from softload.connection import Connection
from softload.copies import Copy, execute
from softload.geometry import DraftMode
from softload.stores.wrapper import WrapperStore
from softload.testing import HangingStore
from softload.transfer import TransferUnit

from .harness import (
    Pools,
    assert_outcome,
    config,
    eventually,
    from_call,
    keys,
    load,
    make_pools,
    opened,
    put,
    settle,
    store,
    timed_out,
)

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def no_bugs() -> None:
    """Here there are some."""


def failing_copies(when: Callable[[int], bool]) -> Callable[[Sequence[Copy]], None]:
    """Copies that run out of memory: those whose number, from 0, is in `when`."""
    calls = iter(range(1 << 30))

    def run(copies: Sequence[Copy]) -> None:
        if when(next(calls)):
            raise MemoryError("out of device memory")
        execute(copies)

    return run


@pytest.mark.parametrize("first", [0, 1, 3])
async def test_a_failed_copy_costs_its_unit(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    pools = make_pools()
    async with opened(store(), pools, copy_chunk_bytes=4 * 4 * 24) as loader:  # a copy of each layer
        await put(loader, pools, keys(4))
        monkeypatch.setattr(unit_copies, "execute", failing_copies(lambda number: number == first))
        with capture_logs() as logs:
            outcome = (await load(loader, pools.unit("a", keys(4), range(4))))["a"]
        assert_outcome(outcome, 0, PageStatus.CANCELLED)
        assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == [events.COPY_FAILED]
        assert not (await loader.save([pools.unit("a", keys(4), range(4))])).outcomes["a"].saved_pages
        assert_outcome((await load(loader, pools.unit("b", keys(4), range(8, 12))))["b"], 4)
        pools.assert_restored(keys(4), range(8, 12))
        await settle(loader)


async def test_a_copy_that_fails_after_a_layer_was_given_out_is_a_late_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, read_batch_objects=4, read_lanes=1) as loader:
        await put(loader, pools, keys(4))
        monkeypatch.setattr(unit_copies, "execute", failing_copies(lambda number: number == 1))
        hanging.hold("read", from_call(1))
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            assert (await handle.layer(0)).live == {"a"}
            hanging.release()
            outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 0, PageStatus.CANCELLED)
        assert outcome.late_failure is not None
        await settle(loader)


async def test_a_failed_copy_of_the_draft_costs_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = make_pools(draft=DraftMode.SIDECAR)
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(4))

        def run(copies: Sequence[Copy]) -> None:
            draft = {view.data_ptr() for pool in pools.group.draft_pools for view in pool.page_views}
            if any(copy.landing is not None and copy.pages.data_ptr() in draft for copy in copies):
                raise MemoryError("out of device memory")
            execute(copies)

        monkeypatch.setattr(unit_copies, "execute", run)
        outcome = (await load(loader, pools.unit("a", keys(4), range(4))))["a"]
        assert_outcome(outcome, 4)
        assert outcome.draft_pages == 0
        pools.assert_restored(keys(4), range(4), draft=False)
        assert all(pools.is_zero(row) for row in range(4))
        await settle(loader)


@pytest.mark.parametrize("draft", [DraftMode.PACKED, DraftMode.SIDECAR])
async def test_a_bug_in_the_drafts_copies_costs_the_draft(draft: DraftMode, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_draft(_: unit_copies.UnitCopies) -> list[Copy]:
        raise RuntimeError("a bug")

    pools = make_pools(draft=draft)
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(3))
        monkeypatch.setattr(unit_copies.UnitCopies, "of_draft", of_draft)
        with capture_logs() as logs:
            async with loader.load([pools.unit("a", keys(3), range(3))]) as handle:
                assert await handle.draft() == {"a": 0}
                outcome = (await handle.report()).outcomes["a"]
        assert_outcome(outcome, 3)
        assert outcome.draft_pages == 0
        assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == [events.TASK_RAISED]
        pools.assert_restored(keys(3), range(3), draft=False)
        await settle(loader)


async def test_a_failed_copy_costs_its_save(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = make_pools()
    told: list[str] = []
    async with opened(store(), pools) as loader:
        monkeypatch.setattr(saving, "execute", failing_copies(lambda number: number == 0))
        report = await loader.save(
            [pools.unit("a", keys(4), range(4)), pools.unit("b", keys(4, "other"), range(4, 8))],
            staged=lambda unit: told.append(unit.request_id),
        )
        assert {page.status for page in report.outcomes["a"].pages} == {SaveStatus.FAILED}
        assert {page.status for page in report.outcomes["b"].pages} == {SaveStatus.SAVED}
        assert told == ["a", "b"]
        await settle(loader)


async def test_a_bug_costs_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(4))
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(unit_copies, "copies_in", lambda *_: 1 // 0)
            assert_outcome((await load(loader, pools.unit("a", keys(4), range(4))))["a"], 0, PageStatus.CANCELLED)
        assert events.TASK_RAISED in [entry["event"] for entry in logs]
        assert_outcome((await load(loader, pools.unit("b", keys(4), range(4))))["b"], 4)
        await settle(loader)


class Ranks:
    """Answers with what it is given: a list, or something to raise."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    async def minimum(self, values: Sequence[int]) -> Sequence[int]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    "answer", [RuntimeError("connection closed by peer"), [], [4], [4, 4, 4], None, ["x", 4], [-1, -1]], ids=repr
)
async def test_ranks_that_cannot_agree_cost_the_load(answer: object) -> None:
    pools = make_pools()
    ranks = Ranks(answer)
    async with PageLoader(store(), pools.group, config=config(), consensus=ranks) as loader:
        await put(loader, pools, keys(4))
        units = [pools.unit("a", keys(4), range(4)), pools.unit("b", keys(4), range(4, 8))]
        for outcome in (await load(loader, *units)).values():
            assert_outcome(outcome, 0, PageStatus.PEER_DECLINED)
        ranks.answer = [3, 4]
        assert [each.restored_pages for each in (await load(loader, *units)).values()] == [3, 4]
        await settle(loader)


async def test_no_memory_in_place_of_quarantined_memory_is_told_and_survived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_memory(connection: Connection, nbytes: int, *, pinned: bool) -> None:
        raise RuntimeError("cannot page-lock memory")

    monkeypatch.setattr(loader_module, "_HOUSEKEEPING_SECONDS", 0.01)
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(4))
        monkeypatch.setattr(Connection, "allocate", no_memory)
        hanging.hold("read")
        with capture_logs() as logs:
            unit = pools.unit("a", keys(4), range(4))
            assert_outcome(await timed_out(loader, hanging, "read", unit), 0, PageStatus.TIMED_OUT)
            await eventually(lambda: events.MEMORY_FAILED in [entry["event"] for entry in logs])
        hanging.release()
        await settle(loader)
        loader.computed(unit)
        assert (await loader.lookup(pools.unit("b", keys(4)))).pages == 4


async def test_a_callback_that_raises_is_logged_and_the_save_goes_on() -> None:
    def broken(_: TransferUnit) -> None:
        raise RuntimeError("engine's callback")

    pools = make_pools()
    async with opened(store(), pools) as loader:
        with capture_logs() as logs:
            report = await loader.save([pools.unit("a", keys(4), range(4))], staged=broken)
        assert report.outcomes["a"].saved_pages == 4
        assert [entry["event"] for entry in logs] == [events.STAGED_RAISED]
        await settle(loader)


class Wordy(WrapperStore):
    """Answers no list, once told to."""

    wrong = False

    def exists(self, keys: Sequence[str]) -> Sequence[bool | PageStatus]:
        return "yes" if self.wrong else super().exists(keys)  # type: ignore[return-value]


async def test_a_malformed_answer_is_told_once_in_a_while() -> None:
    pools: Pools = make_pools()
    wordy = Wordy(store())
    async with opened(wordy, pools) as loader:
        await put(loader, pools, keys(4))
        wordy.wrong = True
        with capture_logs() as logs:
            for _ in range(3):
                assert (await loader.lookup(pools.unit("a", keys(4)))).status is PageStatus.MALFORMED
        told = [entry for entry in logs if entry["event"] == events.STORE_MALFORMED]
        assert [(each["method"], each["expected"], each["got"]) for each in told] == [("exists", "list of 16", "str")]
