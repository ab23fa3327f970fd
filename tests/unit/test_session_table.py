"""Sessions whose start was refused or taken back are what they were: open here as in the store, or gone in both."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest

from softload import PageStatus
from softload.health import Health
from softload.native_calls import NativeCall
from softload.session_states import Session, SessionState
from softload.sessions import SessionTable
from softload.store_calls import StoreCalls
from softload.stores import MemoryStore
from softload.testing import HangingStore

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def table(
    max_stuck: int, clock: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[tuple[SessionTable, HangingStore, MemoryStore]]:
    """A table over a store that has the keys `a` to `f`; what hangs is let go at the end."""
    memory = MemoryStore(capacity=1 << 16)
    memory.open()
    data = np.ones(64, np.uint8)
    for key in "abcdef":
        memory.put_start([key], [64])
        memory.put_write([key], [data.ctypes.data], [64])
        memory.put_end([key])
    store = HangingStore(memory)
    sessions = SessionTable(StoreCalls(store), Health(), ttl=5.0, max_stuck=max_stuck, clock=clock)
    try:
        yield sessions, store, memory
    finally:
        store.release()
        sessions.close()


async def opened(sessions: SessionTable, key: str) -> Session:
    session = (await sessions.acquire([key]))[key]
    assert isinstance(session, Session)
    return session


async def given_up(sessions: SessionTable, store: HangingStore, key: str) -> None:
    """A start that hangs, and that nobody waits for."""
    store.hold("session_start")
    held = store.held("session_start") + 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sessions.acquire, [key])
        assert await asyncio.to_thread(store.wait_held, "session_start", held)
        tasks.cancel_scope.cancel()


async def all_ended(sessions: SessionTable, memory: MemoryStore) -> None:
    with anyio.fail_after(10):
        await sessions.wait_none_open()
    statistics = sessions.statistics()
    assert statistics.opened == statistics.ended
    assert memory.statistics().sessions == 0


async def test_a_restart_that_is_refused_leaves_the_session_open() -> None:
    async with table(max_stuck=0) as (sessions, store, memory):
        session = await opened(sessions, "a")
        await given_up(sessions, store, "b")
        assert await sessions.acquire(["c"]) == {"c": PageStatus.SHED}
        assert await sessions.renew([session], force_up_to=sessions.starts) == [PageStatus.LOADED]
        assert memory.statistics().sessions == 1
        store.release()
        sessions.release([session])
        await all_ended(sessions, memory)


async def test_a_session_that_was_started_since_a_read_went_out_is_not_started_again_for_it() -> None:
    async with table(max_stuck=9) as (sessions, _, memory):
        session = await opened(sessions, "a")
        relied_on = sessions.starts
        for _ in range(2):  # two reads failed; what the first has sent again is out by now
            assert await sessions.renew([session], force_up_to=relied_on) == [PageStatus.LOADED]
        assert sessions.statistics().restarted == 1
        sessions.release([session])
        await all_ended(sessions, memory)


async def test_a_restart_that_is_taken_back_ends_a_session_that_nobody_holds_any_more() -> None:
    async with table(max_stuck=9) as (sessions, store, memory):
        session = await opened(sessions, "a")
        store.hold("session_start")
        async with anyio.create_task_group() as others:
            for key in "bc":
                others.start_soon(sessions.acquire, [key])
            assert await asyncio.to_thread(store.wait_held, "session_start", 2)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: sessions.renew([session], force_up_to=sessions.starts))
                await anyio.wait_all_tasks_blocked()
                sessions.release([session])
                tasks.cancel_scope.cancel()
            others.cancel_scope.cancel()
        store.release()
        await all_ended(sessions, memory)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_start_that_answers_after_everybody_left_is_ended(cancelled: bool) -> None:
    async with table(max_stuck=9) as (sessions, store, memory):
        if cancelled:
            await given_up(sessions, store, "a")
        else:
            sessions.release([await opened(sessions, "a")])
        store.release()
        await all_ended(sessions, memory)
        assert sessions.statistics().opened == 1


async def test_everybody_who_waits_for_the_last_session_to_end_is_told() -> None:
    async with table(max_stuck=2) as (sessions, _, memory):
        first, second = await opened(sessions, "a"), await opened(sessions, "b")
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for session in (first, second):
                    for _ in range(2):
                        tasks.start_soon(sessions.wait_none_open)
                    await anyio.wait_all_tasks_blocked()
                    sessions.release([session])
        await all_ended(sessions, memory)


def first_only() -> Callable[[Sequence[str]], bool]:
    """For `HangingStore.hold`: hold the next call alone."""
    calls = itertools.count()
    return lambda _: next(calls) == 0


async def test_a_start_that_hangs_takes_nobody_along() -> None:
    """It is made once more; what it leaves in the store when it returns is ended."""
    async with table(max_stuck=9) as (sessions, store, memory):
        store.hold("session_start", first_only())
        found: list[object] = []

        async def acquire() -> None:
            found.append((await sessions.acquire(["a"]))["a"])

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(acquire)
        (session,) = set(found)
        assert isinstance(session, Session)
        assert (session.holders, store.held("session_start")) == (3, 1)
        sessions.release([session] * 3)
        await all_ended(sessions, memory)
        store.release()
        await until(lambda: sessions.statistics().opened == 2)
        await all_ended(sessions, memory)


async def test_a_late_start_that_returns_while_the_session_is_ended_is_ended_too() -> None:
    async with table(max_stuck=9) as (sessions, store, memory):
        store.hold("session_start", first_only())
        session = await opened(sessions, "a")
        store.hold("session_end")
        sessions.release([session])
        assert await asyncio.to_thread(store.wait_held, "session_end")
        store.release("session_start")
        await until(lambda: session.ends_again)
        store.release()
        await all_ended(sessions, memory)


async def test_a_late_start_that_fails_has_the_session_started_again_before_it_is_read() -> None:
    """A start that fails erases the session that a later one opened."""
    async with table(max_stuck=9) as (sessions, store, memory):
        store.hold("session_start", first_only())
        session = await opened(sessions, "a")
        assert not sessions.put_off([session])
        memory.remove(["a"], force=True)
        store.release()
        await until(lambda: not sessions.master_suspect)
        assert sessions.put_off([session])
        assert await sessions.renew([session]) == [PageStatus.LEASE_EXPIRED]
        assert session.state is SessionState.GONE


async def test_a_restart_that_hangs_leaves_its_holders_the_session_that_they_have() -> None:
    async with table(max_stuck=9) as (sessions, store, memory):
        session = await opened(sessions, "a")
        store.hold("session_start")
        with anyio.fail_after(10):
            assert await sessions.renew([session], force_up_to=sessions.starts) == [PageStatus.LOADED]
            assert store.held("session_start") == 1
            assert (await sessions.acquire(["a"]))["a"] is session
        sessions.release([session] * 2)
        await all_ended(sessions, memory)
        store.release()
        await until(lambda: sessions.statistics().opened == 2)
        await all_ended(sessions, memory)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110  # a thread brings it about
            await anyio.sleep(0.001)


async def test_restarts_of_one_session_by_several_holders_fail_nobody() -> None:
    """Who waits for one restart may wake to the next one: its session is being started, not gone."""
    async with table(max_stuck=4) as (sessions, store, memory):
        session = await opened(sessions, "a")
        answers: dict[str, PageStatus] = {}

        async def restart(who: str, *, after_another: bool = False) -> None:
            if after_another:
                await session.changed.wait()
            answers[who] = (await sessions.renew([session], force_up_to=sessions.starts))[0]

        async with anyio.create_task_group() as tasks:
            store.hold("session_start")
            tasks.start_soon(restart, "first")
            assert await asyncio.to_thread(store.wait_held, "session_start", 1)
            for who, after_another in (("second", True), ("waiting", False)):  # the second wakes before who waits
                tasks.start_soon(lambda who=who, after=after_another: restart(who, after_another=after))  # type: ignore[misc]
                await anyio.wait_all_tasks_blocked()
            store.release()
        assert answers == dict.fromkeys(("first", "second", "waiting"), PageStatus.LOADED)
        sessions.release([session])
        await all_ended(sessions, memory)


async def test_a_start_that_is_cancelled_in_the_step_in_which_it_is_done_is_ended() -> None:
    async with table(max_stuck=9) as (sessions, store, memory):
        store.hold("session_start")
        task = asyncio.ensure_future(sessions.acquire(["a", "b"]))
        assert await asyncio.to_thread(store.wait_held, "session_start", 1)
        (call,) = sessions._out
        told = call._on_return

        def done_and_cancelled(call: NativeCall[list[PageStatus]]) -> None:
            told(call)
            task.cancel()

        call._on_return = done_and_cancelled
        store.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        await all_ended(sessions, memory)
        assert sessions.statistics().opened == 2


async def test_reads_that_are_put_off_for_one_renewal_are_put_off_until_it_is_done() -> None:
    now = [0.0]
    async with table(max_stuck=9, clock=lambda: now[0]) as (sessions, store, memory):
        session = await opened(sessions, "a")
        for renewals in range(2):
            now[0] += 4.0  # of five
            assert all(sessions.put_off([session]) for _ in range(5)), renewals
            store.hold("session_start")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sessions.renew, [session])
                assert await asyncio.to_thread(store.wait_held, "session_start")
                assert all(sessions.put_off([session]) for _ in range(5)), renewals
                store.release()
        now[0] += 4.0
        assert not sessions.put_off([session]), "two in vain are enough: it goes out"
        assert sessions.put_off([session])
        sessions.release([session])
        await all_ended(sessions, memory)


async def test_a_lease_is_counted_from_when_the_store_was_asked() -> None:
    now = [0.0]
    async with table(max_stuck=9, clock=lambda: now[0]) as (sessions, store, memory):
        store.hold("session_start")
        task = asyncio.ensure_future(opened(sessions, "a"))
        assert await asyncio.to_thread(store.wait_held, "session_start")
        now[0] = 4.0  # of five; on a busy machine the answer waits for the loop
        store.release()
        session = await task
        assert sessions.put_off([session])
        sessions.release([session])
        await all_ended(sessions, memory)


async def test_a_start_that_is_over_takes_no_session_away_from_who_starts_it_again() -> None:
    """Who waited for another's start goes on before that one does, and may find that the lease is over already."""
    ticks = itertools.count(step=100.0)
    async with table(max_stuck=0, clock=lambda: next(ticks)) as (sessions, _, _):
        answers: list[PageStatus] = []

        async def renewed() -> None:
            session = await opened(sessions, "a")
            answers.extend(await sessions.renew([session]))
            sessions.release([session])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(renewed)
            tasks.start_soon(renewed)
        assert answers == [PageStatus.LOADED] * 2
        await sessions.wait_none_open()
        now = sessions.statistics()
        assert now.opened == now.ended == 1


async def test_what_is_held_again_and_let_go_of_in_one_step_is_ended_once() -> None:
    async with table(max_stuck=0) as (sessions, _, _):
        session = await opened(sessions, "a")
        sessions.release([session])
        assert await opened(sessions, "a") is session
        sessions.release([session])
        await sessions.wait_none_open()
        now = sessions.statistics()
        assert now.opened == now.ended == 1
