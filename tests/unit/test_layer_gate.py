"""The gate opens at the slowest unit, never closes, and wakes exactly those whose layer opened."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softload.layer_gate import LayerGate

UNITS = ("a", "b", "c")


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from(UNITS), st.none() | st.integers(0, 8)), max_size=20),
)
def test_it_is_open_as_far_as_the_slowest_unit(num_layers: int, steps: list[tuple[str, int | None]]) -> None:
    asyncio.run(_follow(num_layers, steps))


async def _follow(num_layers: int, steps: list[tuple[str, int | None]]) -> None:
    gate = LayerGate(num_layers, UNITS)
    waits = [asyncio.ensure_future(gate.wait(layer)) for layer in range(num_layers) for _ in range(2)]
    await asyncio.sleep(0)
    done = dict.fromkeys(UNITS, 0)
    for unit, layers in steps:
        if layers is None:
            gate.passed(unit, num_layers)  # it has failed
            done[unit] = num_layers
        else:
            gate.passed(unit, min(layers, num_layers))
            done[unit] = max(done[unit], min(layers, num_layers))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        opened = min(done.values())
        assert [wait.done() for wait in waits] == [layer < opened for layer in range(num_layers) for _ in range(2)]
    for unit in UNITS:
        gate.passed(unit, num_layers)
    await asyncio.gather(*waits)


@pytest.mark.asyncio
async def test_without_units_every_layer_is_open() -> None:
    gate = LayerGate(3, ())
    with anyio.fail_after(15):
        for layer in range(3):
            await gate.wait(layer)


@pytest.mark.asyncio
@pytest.mark.parametrize("layer", [-1, 3, 99])
async def test_a_layer_that_is_not_there_is_an_error_that_names_those_that_are(layer: int) -> None:
    with pytest.raises(IndexError, match=f"0 to 2, got {layer}"):
        await LayerGate(3, ["a"]).wait(layer)


@pytest.mark.asyncio
async def test_a_waiter_that_is_cancelled_leaves_the_others_waiting() -> None:
    gate = LayerGate(2, ["a"])
    passed = anyio.Event()

    async def stay() -> None:
        await gate.wait(0)
        passed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stay)
        with anyio.move_on_after(0):
            await gate.wait(0)
        await anyio.wait_all_tasks_blocked()
        assert not passed.is_set()
        gate.passed("a", 1)
        await passed.wait()
