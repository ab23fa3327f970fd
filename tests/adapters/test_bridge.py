"""The loop that a loader has to itself in an engine: started, used and closed from threads without a loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import anyio
import pytest
import torch

from softload import LoaderClosedError, LoaderConfig, PageLoader, PageStore
from softload.adapters._bridge import LoaderBridge
from softload.errors import StoreSetupError
from softload.geometry import mla_pool_group
from softload.stores import MemoryStore, WrapperStore


class RefusingStore(WrapperStore):
    """Cannot be set up the first times."""

    def __init__(self, inner: PageStore, refusals: int) -> None:
        super().__init__(inner)
        self.refusals = refusals

    def open(self) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            raise StoreSetupError("no answer")
        super().open()


def bridge_to(store: PageStore, **options: Any) -> LoaderBridge:
    pools = mla_pool_group([torch.zeros(8 * 4, 1, 16, dtype=torch.uint8)], page_size=4)
    return LoaderBridge(lambda: PageLoader(store, pools, config=LoaderConfig(landing_bytes=1 << 20)), **options)


@pytest.fixture
def bridge() -> Iterator[LoaderBridge]:
    made = bridge_to(MemoryStore(capacity=1 << 20))
    assert made.start(30.0)
    yield made
    assert made.close()


def test_a_steps_orders_start_in_order_and_end_together(bridge: LoaderBridge) -> None:
    async def make_gate() -> anyio.Event:
        return anyio.Event()

    seen: list[int] = []
    last_started = threading.Event()
    gate = bridge.call(make_gate, 30.0)

    async def order(number: int) -> None:
        seen.append(number)
        if number == 5:
            last_started.set()
        await gate.wait()

    async def open_gate() -> None:
        gate.set()

    orders: list[Callable[[], Coroutine[Any, Any, None]]] = [partial(order, number) for number in range(5)]
    future = bridge.spawn_all(orders)
    bridge.spawn_all([partial(order, 5)])
    assert last_started.wait(30.0)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert not future.done()
    bridge.call(open_gate, 30.0)
    future.result(30.0)


def test_spawn_does_not_wait_for_a_loop_that_is_busy(bridge: LoaderBridge) -> None:
    """An engine's thread is not held up by anything that the loop does."""
    entered, leave = threading.Event(), threading.Event()

    async def block_the_loop() -> None:
        entered.set()
        leave.wait(50.0)

    async def answer() -> str:
        return "late"

    bridge.spawn(block_the_loop)
    assert entered.wait(30.0)
    since = time.monotonic()
    waiting = bridge.spawn(answer)
    assert time.monotonic() - since < 10
    assert not waiting.done()
    leave.set()
    assert waiting.result(30.0) == "late"


def test_cancelling_a_future_cancels_what_it_stands_for(bridge: LoaderBridge) -> None:
    entered, ended = threading.Event(), threading.Event()

    async def endless() -> None:
        entered.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    future = bridge.spawn(endless)
    assert entered.wait(30.0)
    assert future.cancel()
    assert ended.wait(30.0)


def test_what_a_coroutine_raises_is_its_caller_s_alone(bridge: LoaderBridge) -> None:
    async def bad() -> None:
        raise KeyError("x")

    async def good() -> int:
        return 7

    with pytest.raises(KeyError):
        bridge.call(bad, 5.0)
    assert bridge.call(good, 5.0) == 7


def test_what_runs_when_the_loop_is_closed_is_cancelled(bridge: LoaderBridge) -> None:
    running, cancelled = threading.Event(), threading.Event()

    async def order() -> None:
        running.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    bridge.spawn_all([order])
    assert running.wait(30.0)
    assert bridge.close()
    assert cancelled.is_set()
    with pytest.raises(LoaderClosedError):
        bridge.spawn_all([order])


def test_a_call_that_takes_too_long_is_cancelled(bridge: LoaderBridge) -> None:
    cancelled = threading.Event()

    async def order() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        bridge.call(order, 0.05)
    assert cancelled.wait(30.0)


def test_a_store_that_cannot_be_set_up_is_tried_again() -> None:
    bridge = bridge_to(RefusingStore(MemoryStore(capacity=1 << 20), refusals=2), retry_seconds=0.01)
    try:
        assert not bridge.start(30.0)
        assert "no answer" in str(bridge.setup_error)

        until = time.monotonic() + 30.0
        while bridge.loader is None:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert bridge.setup_error is None
    finally:
        assert bridge.close()
