"""What callers get wrong: a clear error that says what was expected and what came, before anything is touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from softload import (
    ComponentTransfer,
    DevicePool,
    DevicePoolGroup,
    HitPolicy,
    LoaderClosedError,
    LoaderConfig,
    PageLoader,
    PoolName,
    SaveStatus,
    TransferUnit,
    open_store,
)
from softload.geometry import DraftMode
from softload.testing import HangingStore, RecordingStore

from .harness import (
    PAGE_SIZE,
    Pools,
    arrived,
    assert_outcome,
    config,
    keys,
    load,
    make_pools,
    opened,
    put,
    slots,
    store,
)

pytestmark = pytest.mark.asyncio


def kv(page_keys: tuple[str, ...], mine: torch.Tensor | None) -> TransferUnit:
    return TransferUnit("a", (ComponentTransfer(PoolName.KV, page_keys, mine),))


BAD_UNITS: dict[str, tuple[Callable[[], TransferUnit], str]] = {
    "too few slots": (lambda: kv(keys(3), slots(range(2))), r"pool kv: expected 12 token slots.* got 8"),
    "too many slots": (lambda: kv(keys(2), slots(range(3))), r"pool kv: expected 8 token slots.* got 12"),
    "unaligned": (lambda: kv(keys(1), torch.arange(1, 5)), r"pool kv: expected page 0 to start at a multiple of 4.*1"),
    "not contiguous": (lambda: kv(keys(1), torch.tensor([0, 1, 3, 2])), r"pool kv: expected contiguous slots.*got 3"),
    "foreign": (lambda: kv(keys(1), slots([1000])), r"pool kv: expected page rows in \[0, 48\), got 1000"),
    "negative": (lambda: kv(keys(1), slots([-1])), r"pool kv: expected slots from 0, got -4"),
    "twice in a unit": (lambda: kv(keys(2), slots([3, 3])), r"expected each page of slots once, got page row 3 twice"),
    "no slots": (lambda: kv(keys(2), None), r"pool kv: expected slots, got none"),
    "unknown pool": (
        lambda: TransferUnit("a", (ComponentTransfer(PoolName.SWA, keys(1), slots([0])),)),
        r"expected a target component of kv, got swa",
    ),
    "draft without one": (
        lambda: TransferUnit(
            "a",
            (ComponentTransfer(PoolName.KV, keys(1), slots([0])),),
            (ComponentTransfer(PoolName.DRAFT, keys(1), slots([0])),),
        ),
        r"expected no draft components .there is no draft., got draft",
    ),
}


@pytest.mark.parametrize("name", BAD_UNITS)
@pytest.mark.parametrize("call", ["load", "save"])
async def test_bad_units(name: str, call: str) -> None:
    make, message = BAD_UNITS[name]
    if call == "save" and name == "twice in a unit":
        pytest.skip("the same row under two keys is not wrong for a save")
    pools = make_pools()
    recording = RecordingStore(store())
    async with opened(recording, pools) as loader:
        recording.clear()
        with pytest.raises(ValueError, match=message):
            if call == "load":
                await load(loader, make())
            else:
                await loader.save([make()])
        pools.assert_rows_kept()
        now = loader.statistics()
        assert (now.held_slots, now.active_units) == (0, 0)
        assert recording.calls == ()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: kv(keys(1), torch.arange(4, dtype=torch.int32)),
            ValueError,
            "one-dimensional int64 slots, got torch.int32",
        ),
        (lambda: kv(keys(1), torch.zeros(2, 2, dtype=torch.int64)), ValueError, r"one-dimensional int64.*\(2, 2\)"),
        (lambda: kv(("k0", ""), None), ValueError, "non-empty page keys, got '' at page 1"),
        (lambda: kv(["k0"], None), TypeError, "keys must be a tuple of str, got list"),  # type: ignore[arg-type]
        (lambda: TransferUnit("a", (), deadline=-1.0), ValueError, "deadline of 0 or more seconds, got -1"),
        (lambda: TransferUnit("a", (), deadline=float("nan")), ValueError, "deadline of 0 or more seconds, got nan"),
        (lambda: TransferUnit("", ()), ValueError, "non-empty request_id, got ''"),
        (
            lambda: ComponentTransfer(PoolName.SWA, keys(1), None, HitPolicy.TRAILING_PAGES, window=0),
            ValueError,
            "window of at least one page, got 0",
        ),
        (
            lambda: TransferUnit("a", (ComponentTransfer(PoolName.KV, keys(1)),) * 2),
            ValueError,
            "expected each pool once, got kv twice",
        ),
        (lambda: LoaderConfig(deadline=-1), ValueError, "deadline: expected 0 or more seconds, got -1"),
        (lambda: LoaderConfig(layout="pages"), ValueError, "layout: expected one of grouped, page, got 'pages'"),  # type: ignore[arg-type]
        (lambda: LoaderConfig(read_mode="ranges"), ValueError, "'ranges' needs layout 'page'"),  # type: ignore[arg-type]
        (lambda: open_store("redis://x"), ValueError, "redis"),
    ],
)
async def test_bad_values(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("where", ["one load", "two loads", "load and place"])
async def test_a_slot_in_two_units(where: str) -> None:
    pools = make_pools()
    recording = RecordingStore(store())
    hanging = HangingStore(recording)
    async with opened(hanging, pools) as loader:
        await put(loader, pools, keys(4))
        first = pools.unit("a", keys(2), [4, 5])
        second = pools.unit("b", keys(3), [6, 7, 5])
        message = r"request 'b', pool kv: expected slots that no unit holds, got page row 5, which is"
        recording.clear()
        if where == "one load":
            with pytest.raises(ValueError, match=message):
                await load(loader, first, second)
            assert recording.calls == ()
            assert loader.statistics().held_slots == 0
            pools.assert_rows_kept()
            return
        hanging.hold("read")
        async with loader.load([first]) as handle:
            await arrived(hanging, "read")
            if where == "two loads":
                with pytest.raises(ValueError, match=message):
                    await load(loader, second)
            else:
                async with loader.prefetch([pools.unit("b", keys(3), None)]) as prefetch:
                    hanging.release()
                    await prefetch.landed()
                    await handle.report()
                    hanging.hold("descriptors")
                    async with loader.load([pools.unit("c", ("z",), [5])]):
                        await arrived(hanging, "descriptors")
                        with pytest.raises(ValueError, match=message):
                            await prefetch.place([second])
            hanging.release()
            assert_outcome((await handle.report()).outcomes["a"], 2)
        # The failed call holds nothing: its slots serve the next one.
        assert_outcome((await load(loader, second))["b"], 3)


async def test_a_request_twice_in_one_call() -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        units = [pools.unit("a", keys(1), [0]), pools.unit("a", keys(1), [1])]
        with pytest.raises(ValueError, match="expected every request once, got 'a' twice"):
            loader.load(units)
        with pytest.raises(ValueError, match="expected every request once, got 'a' twice"):
            loader.prefetch([pools.unit("a", keys(1)), pools.unit("a", keys(1))])


async def test_more_draft_keys_than_target_keys() -> None:
    pools = make_pools(draft=DraftMode.SIDECAR)
    async with opened(store(), pools) as loader:
        unit = TransferUnit(
            "a",
            (ComponentTransfer(PoolName.KV, keys(1), slots([0])),),
            (ComponentTransfer(PoolName.DRAFT, keys(2), slots([0, 1])),),
        )
        with pytest.raises(ValueError, match="pool draft: expected at most 1 draft page keys, got 2"):
            await load(loader, unit)


async def test_pools_that_do_not_fit_together() -> None:
    def pool(name: PoolName, *, page_size: int = PAGE_SIZE, device: str = "cpu") -> DevicePool:
        buffer = torch.zeros(64, 8, dtype=torch.uint8, device=device)
        return DevicePool(name, PoolName.KV, [[buffer]], {0: 0}, page_size, False)

    with pytest.raises(ValueError, match="pool indexer: expected page size 4, got 8"):
        DevicePoolGroup([pool(PoolName.KV), pool(PoolName.INDEXER, page_size=8)], 1, PAGE_SIZE)
    with pytest.raises(ValueError, match="pool indexer: expected device cpu, got meta"):
        DevicePoolGroup([pool(PoolName.KV), pool(PoolName.INDEXER, device="meta")], 1, PAGE_SIZE)
    with pytest.raises(ValueError, match="kv more than once"):
        DevicePoolGroup([pool(PoolName.KV), pool(PoolName.KV)], 1, PAGE_SIZE)


async def test_rebuilt_pool_is_noticed() -> None:
    tensors = [torch.zeros(64, 8, dtype=torch.uint8)]
    group = DevicePoolGroup(
        [DevicePool(PoolName.KV, PoolName.KV, lambda: [tensors], {0: 0}, PAGE_SIZE, False)], 1, PAGE_SIZE
    )
    pools = Pools(group)
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(2))
        old = tensors[0]
        tensors[0] = torch.zeros(64, 8, dtype=torch.uint8)
        for call in (
            lambda: loader.load([pools.unit("a", keys(2), range(2))]),
            lambda: loader.prefetch([pools.unit("a", keys(2))]),
        ):
            with pytest.raises(RuntimeError, match="pool kv: .*rebuilt.*make the pool again"):
                call()
        with pytest.raises(RuntimeError, match="rebuilt"):
            await loader.save([pools.unit("a", keys(2), range(2))])
        del old


async def test_use_before_and_after() -> None:
    pools = make_pools()
    loader = PageLoader(store(), pools.group, config=config())
    unit = pools.unit("a", keys(1), [0])
    for _ in range(2):
        for call in (lambda: loader.load([unit]), lambda: loader.prefetch([unit]), loader.statistics):
            with pytest.raises(LoaderClosedError, match="not open"):
                call()
        for use in (lambda: loader.lookup(unit), lambda: loader.save([unit]), loader.drain):
            with pytest.raises(LoaderClosedError, match="not open"):
                await use()
        if "closed" in repr(loader.store):
            break
        async with loader:
            with pytest.raises(RuntimeError, match="already"):
                async with loader:
                    pass
            with pytest.raises(IndexError, match="expected a layer from 0 to 4, got 5"):
                async with loader.load([unit]) as handle:
                    await handle.layer(5)


@pytest.mark.parametrize("second", [range(1, 3), range(2)])
async def test_overlap_of_two_units_leaves_their_slots_as_they_were(second: range) -> None:
    pools = make_pools()
    async with opened(store(), pools) as loader:
        await put(loader, pools, keys(3))
        assert_outcome((await load(loader, pools.unit("good", keys(3), range(3))))["good"], 3)
        units = [pools.unit("x", keys(2), range(2)), pools.unit("y", keys(2), second)]
        with pytest.raises(ValueError, match="request 'y', pool kv: expected slots that no unit holds"):
            async with loader.load(units):
                pytest.fail("it was started")
        report = await loader.save([pools.unit("again", keys(3), range(3))])
        assert {page.status for page in report.outcomes["again"].pages} == {SaveStatus.PRESENT}
        assert loader.statistics().held_slots == 0
