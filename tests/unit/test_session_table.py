"""Sessions whose start was refused or taken back are what they were: open here as in the store, or gone in both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest

from softload import PageStatus
from softload.health import Health
from softload.sessions import Session, SessionTable
from softload.store_calls import StoreCalls
from softload.stores import MemoryStore
from softload.testing import HangingStore

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def table(max_stuck: int) -> AsyncIterator[tuple[SessionTable, HangingStore, MemoryStore]]:
    """A table over a store that has the keys `a` to `f`; what hangs is let go at the end."""
    memory = MemoryStore(capacity=1 << 16)
    memory.open()
    data = np.ones(64, np.uint8)
    for key in "abcdef":
        memory.put_start([key], [64])
        memory.put_write([key], [data.ctypes.data], [64])
        memory.put_end([key])
    store = HangingStore(memory)
    sessions = SessionTable(StoreCalls(store), Health(), ttl=5.0, max_stuck=max_stuck, clock=lambda: 0.0)
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
        assert await sessions.renew([session], force=True) == [PageStatus.LOADED]
        assert memory.statistics().sessions == 1
        store.release()
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
                tasks.start_soon(lambda: sessions.renew([session], force=True))
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
