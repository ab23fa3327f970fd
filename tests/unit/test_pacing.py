"""Planning on the event loop: about a millisecond of it a turn, in the order in which it was asked for."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from softload.pacing import Pacer

pytestmark = pytest.mark.asyncio


class Planning:
    """Pieces of planning that take a time of a clock of their own, and in which turn of the loop each of them ran."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns: list[int] = []
        self.order: list[int] = []
        self.pacer = Pacer(lambda: self.now)

    async def run(self, seconds: list[float]) -> None:
        """All at once, until all have run."""
        loop, turn = asyncio.get_running_loop(), 0

        def count() -> None:
            nonlocal turn
            turn += 1
            handle[0] = loop.call_soon(count)

        async def piece(number: int, takes: float) -> None:
            await self.pacer.turn()
            self.order.append(number)
            self.turns.append(turn)
            self.now += takes

        handle = [loop.call_soon(count)]
        async with anyio.create_task_group() as tasks:
            for number, takes in enumerate(seconds):
                tasks.start_soon(piece, number, takes)
        handle[0].cancel()

    def pieces_a_turn(self) -> list[int]:
        return [self.turns.count(turn) for turn in dict.fromkeys(self.turns)]


async def test_pieces_of_more_than_a_millisecond_run_one_a_turn() -> None:
    planning = Planning()
    await planning.run([0.002] * 10)
    assert planning.pieces_a_turn() == [1] * 10


async def test_small_pieces_share_turns_of_a_millisecond() -> None:
    planning = Planning()
    await planning.run([0.0002] * 40)
    assert planning.order == list(range(40))
    assert len(planning.pieces_a_turn()) <= 40 / 4
    assert max(planning.pieces_a_turn()) * 0.0002 <= 0.0012


async def test_large_pieces_behind_small_ones_have_turns_of_their_own() -> None:
    planning = Planning()
    await planning.run([0.0001] * 15 + [0.005] * 5 + [0.0001] * 15)
    assert planning.order == list(range(35))
    assert len(set(planning.turns[15:20])) == 5


async def test_who_gives_up_its_turn_holds_nobody_up() -> None:
    planning = Planning()
    done: list[str] = []

    async def piece(name: str) -> None:
        await planning.pacer.turn()
        done.append(name)
        planning.now += 0.002

    async with anyio.create_task_group() as tasks:
        first, second, third = (anyio.CancelScope() for _ in range(3))

        async def in_scope(name: str, scope: anyio.CancelScope) -> None:
            with scope:
                await piece(name)

        for name, scope in (("first", first), ("second", second), ("third", third)):
            tasks.start_soon(in_scope, name, scope)
        await asyncio.sleep(0)
        second.cancel()
    assert done == ["first", "third"]
