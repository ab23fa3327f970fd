"""Callbacks of the loop belong to no task; what they start is started from one all the same."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from softload.loader import _Starter


@pytest.mark.asyncio
@pytest.mark.parametrize("from_callback", [False, True])
async def test_tasks_are_started_from_a_task_whoever_asks(from_callback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done = anyio.Event()

    async def work() -> None:
        done.set()

    async with anyio.create_task_group() as tasks:
        started_by: list[asyncio.Task[object] | None] = []
        start_soon = tasks.start_soon

        def recorded(*args: object) -> None:
            started_by.append(asyncio.current_task())
            start_soon(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(tasks, "start_soon", recorded)
        starter = _Starter(tasks)
        tasks.start_soon(starter.run)
        if from_callback:
            asyncio.get_running_loop().call_soon(starter, work)
        else:
            starter(work)
        with anyio.fail_after(10):
            await done.wait()
        assert len(started_by) == 2 and None not in started_by
        tasks.cancel_scope.cancel()
