"""Groups of calls that share lanes: no more at a time than those, and each group in its turn."""

from __future__ import annotations

import asyncio
import threading

import pytest

from softload.native_calls import CallGroup, NativeCall
from softload.shared_lanes import SharedLanes

pytestmark = pytest.mark.asyncio


class Groups:
    """Groups of two lanes each that share `width` lanes, and calls that wait until they are let go, one after another.

    A call is known by its group's number and its own.
    """

    def __init__(self, count: int, width: int) -> None:
        self.shared = SharedLanes(width)
        self.groups = [CallGroup(f"g{number}", width=2, max_stuck=0, shared=self.shared) for number in range(count)]
        self.started: list[tuple[int, int]] = []
        self.returned: list[tuple[int, int]] = []
        self._go: dict[tuple[int, int], threading.Event] = {}
        self._changed = asyncio.Event()

    def submit(self, group: int, number: int) -> None:
        name = (group, number)
        go = self._go[name] = threading.Event()

        def run() -> None:
            assert go.wait(30)

        def prepare() -> bool:
            self.started.append(name)
            return True

        def back(_: NativeCall[None]) -> None:
            self.returned.append(name)
            self._changed.set()

        self.groups[group].submit(NativeCall(run, back, prepare=prepare))

    async def let_go(self, *names: tuple[int, int]) -> None:
        """And wait until they have returned, and what they made room for has started."""
        for name in names:
            self._go[name].set()
        async with asyncio.timeout(10):
            while not set(names) <= set(self.returned):
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        for go in self._go.values():
            go.set()
        for group in self.groups:
            group.close()


async def test_no_more_run_than_there_are_lanes_and_groups_take_turns() -> None:
    groups = Groups(3, width=2)
    try:
        for group in range(3):
            for number in range(3):
                groups.submit(group, number)
        assert groups.started == [(0, 0), (0, 1)] and groups.shared.running == 2
        while len(groups.returned) < 9:
            running = [name for name in groups.started if name not in groups.returned]
            assert len(running) <= 2
            await groups.let_go(running[0])
        order = [group for group, _ in groups.started]
        assert set(order[:4]) == set(order[4:7]) == {0, 1, 2}
        assert groups.shared.running == 0
    finally:
        groups.close()


async def test_a_group_has_no_more_lanes_than_its_own() -> None:
    groups = Groups(2, width=5)
    try:
        for group in range(2):
            for number in range(3):
                groups.submit(group, number)
        assert groups.started == [(0, 0), (0, 1), (1, 0), (1, 1)]
        await groups.let_go((0, 0), (0, 1), (1, 0), (1, 1))
        assert len(groups.started) == 6
        await groups.let_go((0, 2), (1, 2))
        assert groups.shared.running == 0
    finally:
        groups.close()


async def test_a_group_that_was_closed_while_it_waited_holds_no_lane() -> None:
    groups = Groups(3, width=1)
    try:
        for group in range(3):
            groups.submit(group, 0)
        groups.groups[1].close()
        await groups.let_go((0, 0))
        assert groups.started == [(0, 0), (2, 0)]
        await groups.let_go((2, 0))
        assert groups.shared.running == 0
    finally:
        groups.close()


async def test_a_loop_has_lanes_of_its_own() -> None:
    mine = SharedLanes.of_loop()
    assert SharedLanes.of_loop() is mine and mine.width >= 2

    async def other() -> SharedLanes:
        return SharedLanes.of_loop()

    assert await asyncio.to_thread(lambda: asyncio.run(other())) is not mine
