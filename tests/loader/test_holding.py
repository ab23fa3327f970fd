"""What is here is counted on only once it is held."""

from __future__ import annotations

import anyio
import pytest

from softload import PageLoader, UnitOutcome
from softload.geometry import DraftMode
from softload.testing import HangingStore

from .doubles import Held
from .harness import (
    any_of,
    arrived,
    assert_outcome,
    config,
    eventually,
    is_of,
    keys,
    load,
    make_pools,
    opened,
    put,
    settle,
    store,
)

pytestmark = pytest.mark.asyncio


async def test_a_grant_does_not_free_what_its_unit_counts_on() -> None:
    """Landed bytes that nobody holds make room for others, but not for the unit whose prefix they are."""
    pools = make_pools(pages=64)
    settings = {"layout": "page", "read_mode": "whole"}
    async with opened(store(), pools, **settings, landing_bytes=8192, prefetch_ttl=5.0) as loader:
        for key in (*keys(14), *keys(6, "z")):
            await put(loader, pools, (key,))
        for unit in (pools.unit("a", keys(4)), pools.unit("z", keys(6, "z"))):
            async with loader.prefetch([unit]) as prefetch:
                await prefetch.landed()
        assert_outcome((await load(loader, pools.unit("b", keys(10), range(10))))["b"], 10)
        pools.assert_restored(keys(10), range(10))


async def test_object_replaced_by_one_without_the_draft_lends_no_foreign_draft_bytes() -> None:
    pools, plain = make_pools(draft=DraftMode.PACKED), make_pools()
    settings = {"layout": "page", "read_mode": "whole"}
    inner = store()
    hanging = HangingStore(Held(inner))
    fillers = keys(7, "n")
    outcomes: dict[str, UnitOutcome] = {}
    async with opened(hanging, pools, **settings, landing_bytes=8192, prefetch_ttl=5.0) as loader:
        for key in (*fillers, *keys(4)):
            await put(loader, pools, (key,))
        hanging.hold("read", any_of(*fillers))
        async with loader.load([pools.unit("blocker", fillers, range(10, 17))]) as blocker:
            await arrived(hanging, "read")

            async def wait_for_room() -> None:
                outcomes.update(await load(loader, pools.unit("b", keys(4), range(4))))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait_for_room)
                await eventually(lambda: loader.statistics().waiting_grants == 1)
                inner.remove([key for key in inner._objects if is_of("k0")(key)], force=True)
                async with PageLoader(Held(inner), plain.group, config=config(**settings)) as other:
                    await put(other, plain, ("k0",))
                async with loader.prefetch([pools.unit("a", ("k0",))]) as prefetch:
                    await prefetch.landed()
                    hanging.release()
                    await eventually(lambda: "b" in outcomes)
            await blocker.report()
        for page in range(outcomes["b"].draft_pages):
            assert pools.holds(f"k{page}", page, draft=True)
        assert outcomes["b"].draft_pages == 0
        await settle(loader)
