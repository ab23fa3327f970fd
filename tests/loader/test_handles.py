"""The handles of loads and prefetches: entered once, asked only while they are entered, and gone once they are left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import pytest
import torch

from softload import DevicePool, DevicePoolGroup, PageLoader, PoolName
from softload.handles import Load, Prefetch
from softload.testing import HangingStore

from .harness import (
    PAGE_SIZE,
    Pools,
    arrived,
    assert_outcome,
    config,
    eventually,
    keys,
    make_pools,
    opened,
    put,
    settle,
    store,
)

pytestmark = pytest.mark.asyncio


def make(loader: PageLoader, pools: Pools, kind: str) -> Load | Prefetch:
    if kind == "load":
        return loader.load([pools.unit("a", keys(4), range(4))])
    return loader.prefetch([pools.unit("a", keys(4))])


@pytest.mark.parametrize("kind", ["load", "prefetch"])
async def test_entering_twice(kind: str) -> None:
    """Slots of a handle that has ended are the engine's: nothing may reserve or write them again."""
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(4))
        handle = make(loader, pools, kind)
        async with handle:
            with pytest.raises(RuntimeError, match="entered once, got .*: entered"):
                await handle.__aenter__()
            await handle.admitted()
        pools.scramble()
        with pytest.raises(RuntimeError, match="entered once, got .*: ended"):
            async with handle:
                pytest.fail("it was started again")
        pools.assert_rows_kept()
        assert loader.statistics().loads == 1
        await settle(loader)


ASKING: dict[str, Callable[[Load | Prefetch, Pools], Awaitable[object]]] = {
    "admitted": lambda handle, _: handle.admitted(),
    "layer": lambda handle, _: handle.layer(0),  # type: ignore[union-attr]
    "draft": lambda handle, _: handle.draft(),  # type: ignore[union-attr]
    "report": lambda handle, _: handle.report(),  # type: ignore[union-attr]
    "landed": lambda handle, _: handle.landed(),  # type: ignore[union-attr]
    "place": lambda handle, pools: handle.place([pools.unit("a", keys(4), range(4))]),  # type: ignore[union-attr]
    "leaving": lambda handle, _: handle.__aexit__(None, None, None),
}


@pytest.mark.parametrize("name", ASKING)
async def test_asking_what_was_not_entered(name: str) -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        handle = make(loader, pools, "prefetch" if name in ("landed", "place") else "load")
        with anyio.fail_after(15), pytest.raises(RuntimeError, match="inside its `async with`, got .*: not entered"):
            await ASKING[name](handle, pools)


async def test_refused_at_entering_may_enter_later() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(4))
        hanging.hold("read")
        later = loader.load([pools.unit("b", keys(4), range(2, 6))])
        async with loader.load([pools.unit("a", keys(4), range(4))]):
            await arrived(hanging, "read")
            with pytest.raises(ValueError, match="expected slots that no unit holds"):
                await later.__aenter__()
        hanging.release()
        async with later:
            assert_outcome((await later.report()).outcomes["b"], 4)


async def test_report_after_the_end() -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(4))
        async with loader.load([pools.unit("a", keys(4), range(4))]) as handle:
            await handle.layer(4)
        with anyio.fail_after(15):
            assert_outcome((await handle.report()).outcomes["a"], 4)


async def test_placing_after_the_end() -> None:
    pools = make_pools()
    hanging = HangingStore(store())
    placed = pools.unit("a", keys(4), range(4))
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(4))
        async with loader.prefetch([pools.unit("a", keys(4))]) as handle:
            await handle.landed()
        with pytest.raises(RuntimeError, match="`place` inside the handle's `async with`, got .*: ended"):
            await handle.place([placed])
        hanging.hold("descriptors")
        raised = anyio.Event()

        async def place() -> None:
            with pytest.raises(RuntimeError, match="got .*: ended"):
                await handle.place([placed])
            raised.set()

        async with anyio.create_task_group() as tasks:
            async with loader.prefetch([pools.unit("a", keys(4, "new"))]) as handle:
                tasks.start_soon(place)
                await arrived(hanging, "descriptors")
            with anyio.fail_after(15):
                await raised.wait()
        pools.assert_rows_kept()
        assert loader.statistics().held_slots == 0


@pytest.mark.parametrize("call", ["enter", "place"])
async def test_pools_that_were_rebuilt_since_the_handle_was_made(call: str) -> None:
    tensors = [torch.zeros(64, 8, dtype=torch.uint8)]
    group = DevicePoolGroup(
        [DevicePool(PoolName.KV, PoolName.KV, lambda: [tensors], {0: 0}, PAGE_SIZE, False)], 1, PAGE_SIZE
    )
    pools = Pools(group)
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(2))
        load = loader.load([pools.unit("a", keys(2), range(2))])
        async with loader.prefetch([pools.unit("b", keys(2))]) as prefetch:
            await prefetch.landed()
            old = tensors[0]
            tensors[0] = torch.zeros(64, 8, dtype=torch.uint8)
            with pytest.raises(RuntimeError, match="pool kv: .*rebuilt"):
                if call == "enter":
                    await load.__aenter__()
                else:
                    await prefetch.place([pools.unit("b", keys(2), range(2, 4))])
            del old
        assert loader.statistics().held_slots == 0


@pytest.mark.parametrize("kind", ["load", "prefetch"])
async def test_an_admission_ends_with_its_handle(kind: str) -> None:
    """The master hangs, the engine drops the request: the lane and the breaker's permit are for others at once."""
    pools = make_pools()
    hanging = HangingStore(store())
    async with opened(hanging, pools, control_lanes=1) as loader:
        await put(loader, pools, keys(4))
        hanging.hold("descriptors")
        async with make(loader, pools, kind):
            await arrived(hanging, "descriptors")
            async with loader.load([pools.unit("b", keys(4), range(4, 8))]):
                await eventually(lambda: loader.statistics().queued_calls == 1)
        with anyio.fail_after(15):
            assert (await loader.lookup(pools.unit("c", keys(4)))).pages == 4
        hanging.release()
        await settle(loader)


class Ranks:
    """Counts how often this rank took part."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def minimum(self, values: Sequence[int]) -> Sequence[int]:
        self.asked.append(len(values))
        return values


async def test_a_handle_that_is_left_still_answers_the_other_ranks() -> None:
    """All ranks make the same calls in the same order, whatever becomes of a load on one of them."""
    pools = make_pools()
    hanging = HangingStore(store())
    ranks = Ranks()
    async with PageLoader(hanging, pools.group, config=config(), consensus=ranks) as loader:
        hanging.hold("descriptors")
        async with make(loader, pools, "load"):
            await arrived(hanging, "descriptors")
        await eventually(lambda: ranks.asked == [1])
        hanging.release()
