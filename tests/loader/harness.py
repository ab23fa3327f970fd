"""Small pools whose bytes follow from page key and buffer, and a store that lies about single keys."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import anyio.to_thread
import numpy as np
import pytest
import torch
import xxhash

from softload import (
    ComponentTransfer,
    DevicePool,
    DevicePoolGroup,
    LoaderConfig,
    PageLoader,
    PageOutcome,
    PageStatus,
    PageStore,
    PoolName,
    SaveReport,
    SaveStatus,
    TransferUnit,
    UnitOutcome,
)
from softload.copies import Copy, execute
from softload.geometry import DraftBuffers, DraftMode, mha_pool_group, mla_pool_group
from softload.stores import MemoryStore
from softload.testing import HangingStore

PAGE_SIZE = 4
LAYERS = 5
"""Groups of layers 0, 1, 2-3, 4."""

MODES: tuple[dict[str, str], ...] = (
    {"layout": "grouped"},
    {"layout": "page", "read_mode": "whole"},
    {"layout": "page", "read_mode": "ranges"},
)
MODE_IDS = ("grouped", "page-whole", "page-ranges")

modes = pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
"""For tests of what holds in every layout and read mode."""


def store(**options: Any) -> MemoryStore:
    """A small memory store."""
    return MemoryStore(**{"capacity": 8 << 20, **options})


def lending_store(**options: Any) -> MemoryStore:
    """One that lends its memory, under leases that run out in no test that does not want that: else it is read."""
    return store(**{"lends": True, "lease": 60.0, **options})


def config(**options: Any) -> LoaderConfig:
    """Settings with little landing memory and a deadline that no test without a fault comes near."""
    return LoaderConfig(**{"landing_bytes": 4 << 20, "deadline": 20.0, "lookup_deadline": 20.0, **options})


def keys(count: int, prefix: str = "k") -> tuple[str, ...]:
    """Page keys of one request, in prefix order."""
    return tuple(f"{prefix}{page}" for page in range(count))


def slots(rows: Iterable[int]) -> torch.Tensor:
    """Token slots of page rows."""
    starts = torch.tensor(list(rows), dtype=torch.int64)[:, None] * PAGE_SIZE
    return (starts + torch.arange(PAGE_SIZE)).reshape(-1)


@dataclass(slots=True)
class Pools:
    """An engine's pools.

    Args:
        group: what the loader gets.
        has_sidecar: whether units need draft components.
    """

    group: DevicePoolGroup
    has_sidecar: bool = False
    _before: dict[PoolName, list[torch.Tensor]] = field(default_factory=dict)

    def unit(
        self,
        request_id: str,
        page_keys: Sequence[str],
        rows: Sequence[int] | None = None,
        *,
        draft_keys: Sequence[str] | None = None,
        **options: Any,
    ) -> TransferUnit:
        """A unit of the KV pool, and of the sidecar draft if there is one, in the same rows."""
        mine = None if rows is None else slots(rows)
        target = (ComponentTransfer(PoolName.KV, tuple(page_keys), mine),)
        draft = None
        if self.has_sidecar:
            chosen = tuple(page_keys if draft_keys is None else draft_keys)
            draft = (
                ComponentTransfer(PoolName.DRAFT, chosen, None if mine is None else mine[: len(chosen) * PAGE_SIZE]),
            )
        return TransferUnit(request_id, target, draft, **options)

    def fill(self, page_keys: Sequence[str], rows: Sequence[int], *, pools: Iterable[PoolName] | None = None) -> None:
        """Put the bytes of these pages into the rows, as a forward pass would."""
        for pool in self.group.pools:
            if pools is not None and pool.name not in pools:
                continue
            for index, view in enumerate(pool.page_views):
                for key, row in zip(page_keys, rows, strict=True):
                    view[row] = torch.from_numpy(content(key, pool.name, index, view.shape[1]))

    def scramble(self, seed: int = 1) -> None:
        """Other random bytes everywhere, and remember them."""
        generator = torch.Generator().manual_seed(seed)
        for pool in self.group.pools:
            for view in pool.page_views:
                view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=generator))
        self.remember()

    def remember(self) -> None:
        """Take the picture that `assert_rows_kept` compares with."""
        self._before = {pool.name: [view.clone() for view in pool.page_views] for pool in self.group.pools}

    def holds(self, key: str, row: int, *, draft: bool | None = None) -> bool:
        """Whether a row holds the page's bytes: the target's, or the draft's, or (``None``) both."""
        return all(
            torch.equal(view[row], torch.from_numpy(content(key, pool.name, index, view.shape[1])))
            for pool, index, view in self._views(draft)
        )

    def holds_buffer(self, key: str, row: int, pool: DevicePool, buffer: int) -> bool:
        """Whether a row of one buffer holds the page's bytes."""
        view = pool.page_views[buffer]
        return torch.equal(view[row], torch.from_numpy(content(key, pool.name, buffer, view.shape[1])))

    def is_zero(self, row: int) -> bool:
        """Whether the draft's part of a row is all zeros."""
        return all(not view[row].any() for _, _, view in self._views(True))

    def is_kept(self, row: int, *, draft: bool | None = None) -> bool:
        """Whether a row is as it was remembered."""
        return all(
            torch.equal(view[row], self._before[pool.name][index][row]) for pool, index, view in self._views(draft)
        )

    def assert_restored(self, page_keys: Sequence[str], rows: Sequence[int], *, draft: bool | None = None) -> None:
        """Every row holds its page."""
        wrong = [key for key, row in zip(page_keys, rows, strict=True) if not self.holds(key, row, draft=draft)]
        assert not wrong, f"wrong bytes in the slots of {wrong}"

    def assert_rows_kept(self, except_rows: Iterable[int] = (), *, draft: bool | None = None) -> None:
        """No byte outside `except_rows` has changed."""
        written = set(except_rows)
        changed = [
            row
            for row in range(self.group.pools[0].num_pages)
            if row not in written and not self.is_kept(row, draft=draft)
        ]
        assert not changed, f"rows {changed} have changed"

    def _views(self, draft: bool | None) -> Iterable[tuple[DevicePool, int, torch.Tensor]]:
        for pool in self.group.pools:
            for index, view in enumerate(pool.page_views):
                if draft is None or pool.is_draft_buffer(index) is draft:
                    yield pool, index, view


def make_pools(
    *,
    layers: int = LAYERS,
    pages: int = 48,
    width: int = 24,
    family: str = "mla",
    draft: DraftMode | None = None,
    draft_layers: int = 2,
) -> Pools:
    """Pools of random bytes.

    Args:
        layers: of the target.
        pages: rows.
        width: bytes per token and layer.
        family: `mla`, or `mha` for K and V apart.
        draft: packed, sidecar or none.
        draft_layers: of the draft.
    """

    def buffers(count: int) -> list[torch.Tensor]:
        return [torch.zeros(pages * PAGE_SIZE, 1, width, dtype=torch.uint8) for _ in range(count)]

    both = (buffers, buffers) if family == "mha" else (buffers,)
    attached = None
    if draft is not None:
        attached = DraftBuffers(
            pools={PoolName.KV: tuple(make(draft_layers) for make in both)}, page_size=PAGE_SIZE, mode=draft
        )
    if family == "mha":
        group = mha_pool_group(buffers(layers), buffers(layers), PAGE_SIZE, draft=attached)
    else:
        group = mla_pool_group(buffers(layers), PAGE_SIZE, draft=attached)
    pools = Pools(group, has_sidecar=draft is DraftMode.SIDECAR)
    pools.scramble()
    return pools


def content(key: str, pool: PoolName, buffer: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """What a page must hold in one buffer."""
    seed = xxhash.xxh3_64_intdigest(f"{key}\x00{pool}\x00{buffer}".encode())
    return np.random.Generator(np.random.SFC64(seed)).integers(0, 256, nbytes, dtype=np.uint8)


async def put(loader: PageLoader, pools: Pools, page_keys: Sequence[str]) -> SaveReport:
    """Store pages by a save from the last rows, and leave the pools in other random bytes."""
    rows = list(range(pools.group.pools[0].num_pages - len(page_keys), pools.group.pools[0].num_pages))
    pools.fill(page_keys, rows)
    report = await loader.save([pools.unit("put", page_keys, rows)])
    assert {page.status for page in report.outcomes["put"].pages} <= {SaveStatus.SAVED, SaveStatus.PRESENT}
    pools.scramble(seed=len(page_keys))
    return report


def is_of(*page_keys: str) -> Callable[[str], bool]:
    """Whether an object key is of one of these pages, in either layout."""
    return lambda key: any(f"/{page}/" in key or key.startswith(f"{page}_") for page in page_keys)


def any_of(*page_keys: str) -> Callable[[Sequence[str]], bool]:
    """Whether a call is about one of these pages: for `HangingStore.hold`."""
    chosen = is_of(*page_keys)
    return lambda object_keys: any(chosen(key) for key in object_keys)


async def arrived(hanging: HangingStore, method: str, calls: int = 1) -> None:
    """Wait until `calls` calls are held at `method`."""
    assert await anyio.to_thread.run_sync(lambda: hanging.wait_held(method, calls, 30.0)), f"{method} was not called"


@asynccontextmanager
async def opened(page_store: PageStore, pools: Pools, **options: Any) -> AsyncIterator[PageLoader]:
    """A loader over a store; calls that a test held are released before it closes, whatever happened."""
    async with PageLoader(page_store, pools.group, config=config(**options)) as loader:
        try:
            yield loader
        finally:
            if isinstance(page_store, HangingStore):
                page_store.release()


@asynccontextmanager
async def busy_lane(loader: PageLoader, pools: Pools, hanging: HangingStore, method: str) -> AsyncIterator[None]:
    """Hold the only read lane: within, reads queue up, and can be joined for as long as they do.

    A read in flight can be joined for 50 ms only, which is no time on a busy machine.
    """
    await put(loader, pools, ["blocker"])
    last = pools.group.pools[0].num_pages - 1
    hanging.hold(method, any_of("blocker"))
    async with loader.load([pools.unit("blocker", ["blocker"], [last])]) as handle:
        await arrived(hanging, method)
        yield
        hanging.release()
        assert_outcome((await handle.report()).outcomes["blocker"], 1)


def hold_copies(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> tuple[threading.Event, threading.Event]:
    """Have the copies of `unit_copies` or `saving` wait: one event says that one has begun, the other lets them run."""
    begun, may_run = threading.Event(), threading.Event()

    def held(copies: Sequence[Copy]) -> None:
        begun.set()
        assert may_run.wait(10)
        execute(copies)

    monkeypatch.setattr(module, "execute", held)
    return begun, may_run


async def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for what a thread or a background task brings about, and nothing signals."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.001)


def end_time_of(loader: PageLoader, request_id: str) -> None:
    """The deadline of a streaming unit is now: for tests in which it has to get somewhere first, on a busy machine."""
    assert loader._context is not None
    (run,) = (run for run in loader._context.active if run.request_id == request_id)
    run._scope.deadline = anyio.current_time()


async def timed_out(
    loader: PageLoader, hanging: HangingStore, method: str, unit: TransferUnit, calls: int = 1
) -> UnitOutcome:
    """Load a unit whose calls are held; its time is up once each of them takes too long, on a busy machine as well."""
    before = hanging.held(method)
    async with loader.load([unit]) as handle:
        await arrived(hanging, method, before + calls)
        await anyio.sleep(0.1)  # a call is overdue after 50 ms: the loop was told so before it slept
        end_time_of(loader, unit.request_id)
        return (await handle.report()).outcomes[unit.request_id]


async def settle(loader: PageLoader) -> None:
    """Wait until nothing is under way, then check that nothing is held."""
    with anyio.fail_after(30):
        await loader.drain()
    await eventually(lambda: not loader.statistics().open_sessions)
    assert_idle(loader)


def assert_idle(loader: PageLoader) -> None:
    """No slots, sessions, units or landing memory are held but what is kept for later units."""
    now = loader.statistics()
    assert now.active_units == 0
    assert now.held_slots == 0
    assert now.open_sessions == 0
    assert now.sessions_opened == now.sessions_ended
    assert now.quarantined_bytes == 0
    assert now.waiting_grants == 0
    assert now.landing_bytes_in_use == now.kept_bytes


def missed(outcome: UnitOutcome) -> list[PageStatus]:
    """The statuses of the pages that were not restored."""
    return [page.status for page in outcome.pages[outcome.restored_pages :]]


def assert_outcome(outcome: UnitOutcome, restored: int, status: PageStatus | None = None) -> None:
    """The first pages are restored; the next one is a miss with `status`, those after it follow it."""
    assert [page.page for page in outcome.pages] == list(range(outcome.requested_pages))
    assert outcome.restored_pages == outcome.prefill_from_page == restored, outcome
    assert all(page == PageOutcome(page.page, PageStatus.LOADED) for page in outcome.pages[:restored])
    assert PageStatus.LOADED not in missed(outcome)
    if status is not None:
        assert missed(outcome)[0] is status, outcome


async def load(loader: PageLoader, *units: TransferUnit) -> Mapping[str, UnitOutcome]:
    """Load to the end."""
    async with loader.load(units) as handle:
        return (await handle.report()).outcomes


def from_call(number: int) -> Callable[[Sequence[str]], bool]:
    """For `HangingStore.hold`: hold call `number`, from 0, and all that come after it."""
    calls = itertools.count()
    return lambda _: next(calls) >= number


def second_tries() -> Callable[[Sequence[str]], bool]:
    """For `HangingStore.hold`: hold calls that are about an object that an earlier call was about."""
    seen: set[str] = set()

    def again(object_keys: Sequence[str]) -> bool:
        known = not seen.isdisjoint(object_keys)
        seen.update(object_keys)
        return known

    return again


def nth_of(number: int, *page_keys: str) -> Callable[[Sequence[str]], bool]:
    """For `HangingStore.hold`: hold only call `number`, from 0, of those that are about one of these pages."""
    chosen, calls = any_of(*page_keys), itertools.count()
    return lambda object_keys: chosen(object_keys) and next(calls) == number
