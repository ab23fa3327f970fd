"""A `PageLoader` for engines without an event loop: one daemon thread, one loop, one way to it."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import anyio.abc
import structlog

from softload.errors import LoaderClosedError, StoreSetupError
from softload.loader import PageLoader
from softload.telemetry import Statistics

__all__ = ["LoaderBridge"]

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class LoaderBridge:
    """Owns a loader on a loop of its own; callable from any thread, and no call waits without a bound.

    A store that cannot be set up costs the cache, not the engine: the bridge stays without a loader, tries again every
    `retry_seconds`, and `loader` is ``None`` until then.

    Args:
        make_loader: makes a loader with a store that was not opened yet; called for every attempt.
        retry_seconds: between two attempts to set the store up.
    """

    def __init__(self, make_loader: Callable[[], PageLoader], *, retry_seconds: float = 10.0) -> None:
        self._make_loader = make_loader
        self._retry_seconds = retry_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handed: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        """What other threads want to run, on its way to the loop."""
        self._futures: set[Future[Any]] = set()
        self._arrived: anyio.Event | None = None
        self._stop: anyio.Event | None = None
        self._attempted = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._loader: PageLoader | None = None
        self._failure: Exception | None = None

    def __repr__(self) -> str:
        state = "closed" if self._thread is None or self._ended.is_set() else "open" if self._loader else "no store"
        return f"<LoaderBridge: {state}>"

    @property
    def loader(self) -> PageLoader | None:
        """The open loader; use it on the loop only, that is in functions given to `spawn` and `call`."""
        return self._loader

    @property
    def setup_error(self) -> StoreSetupError | None:
        """Why there is no loader."""
        return self._failure if isinstance(self._failure, StoreSetupError) else None

    def start(self, timeout: float) -> bool:
        """Start the loop and wait until the store is set up or has refused; False where it is not there in time.

        Raises:
            Exception: what making the loader raised, other than a `StoreSetupError`: a mistake in its settings.
        """
        if self._thread is not None:
            raise RuntimeError("this LoaderBridge was started already")
        self._thread = threading.Thread(target=self._run, name="softload-loop", daemon=True)
        self._thread.start()
        # The thread is a daemon, so that it never keeps a process; without this the store's own processes might stay.
        atexit.register(_close_at_exit, weakref.ref(self))
        self._attempted.wait(timeout)
        if self._failure is not None and not isinstance(self._failure, StoreSetupError):
            raise self._failure
        return self._loader is not None

    def spawn(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """Have the loop run a coroutine function; cancelling the future cancels it.

        Returns at once, whatever the loop does meanwhile: an engine's thread waits for nothing here.

        Raises:
            LoaderClosedError: the bridge was not started, or is closed.
        """
        loop = self._loop
        if loop is None or self._ended.is_set():
            raise LoaderClosedError("the loader's event loop does not run")
        future: Future[T] = Future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        self._handed.append(lambda: _carry(function, future))
        try:
            loop.call_soon_threadsafe(self._wake)
        except RuntimeError as error:  # the loop is closed
            future.cancel()
            raise LoaderClosedError("the loader's event loop has ended") from error
        return future

    def spawn_all(self, functions: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> Future[None]:
        """Run coroutine functions on the loop, started in order; the future is done when all have ended.

        For an engine's step with many orders: a `spawn` wakes the loop, which may then keep the interpreter for some
        milliseconds. An exception of one would cancel the others, so they must raise none.

        Raises:
            LoaderClosedError: the bridge was not started, or is closed.
        """

        async def run() -> None:
            async with anyio.create_task_group() as tasks:
                for function in functions:
                    tasks.start_soon(function)

        return self.spawn(run)

    def call(self, function: Callable[[], Awaitable[T]], timeout: float) -> T:
        """Run a coroutine function on the loop and wait for it.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; it was cancelled.
            LoaderClosedError: the bridge is closed, or was closed meanwhile.
        """
        future = self.spawn(function)
        try:
            return future.result(timeout)
        except CancelledError:
            raise LoaderClosedError("the loader was closed") from None
        except TimeoutError:
            future.cancel()
            raise

    def statistics(self, timeout: float = 1.0) -> Statistics | None:
        """The loader's statistics, read on its loop; ``None`` without a loader."""

        async def read() -> Statistics | None:
            return None if self._loader is None else self._loader.statistics()

        return self.call(read, timeout)

    def forget(self, request_ids: Iterable[str]) -> None:
        """On the loop: what failed under these names, which will not be used again, is of no more interest."""
        loader = self._loader
        if loader is not None:
            with suppress(LoaderClosedError):
                for request_id in request_ids:
                    loader.forget(request_id)

    def close(self, timeout: float = 10.0) -> bool:
        """Close the loader and end the loop; True where that was done in time. May be called twice."""
        if self._thread is None:
            return True
        until = time.monotonic() + timeout
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and not self._ended.is_set():
            with suppress(RuntimeError):  # it is ending by itself
                loop.call_soon_threadsafe(stop.set)
        return self._ended.wait(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        try:
            anyio.run(self._main)
        except Exception as error:  # handed to start(), or told to whoever looks
            self._failure = error
            if self._attempted.is_set():
                _log.exception("loader.loop_failed")
        finally:
            self._loader = None
            self._ended.set()
            self._attempted.set()
            for future in list(self._futures):  # what came too late to be started
                future.cancel()

    def _wake(self) -> None:
        if self._arrived is not None:
            self._arrived.set()

    async def _main(self) -> None:
        self._stop = anyio.Event()
        self._arrived = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._take_in, tasks)
            self._loop = asyncio.get_running_loop()
            try:
                await self._serve(self._stop)
            finally:
                self._loader = None
                tasks.cancel_scope.cancel()

    async def _take_in(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start what other threads want to run, in their order."""
        while True:
            assert self._arrived is not None
            await self._arrived.wait()
            self._arrived = anyio.Event()
            while self._handed:
                tasks.start_soon(self._handed.popleft())

    async def _serve(self, stop: anyio.Event) -> None:
        told = ""
        while not stop.is_set():
            try:
                async with self._make_loader() as loader:
                    self._failure = None
                    self._loader = loader
                    self._attempted.set()
                    await stop.wait()
                    self._loader = None
            except StoreSetupError as error:
                self._failure = error
                if str(error) != told:
                    told = str(error)
                    _log.error("store.unavailable", error=told, retry_s=self._retry_seconds)
                self._attempted.set()
                with anyio.move_on_after(self._retry_seconds):
                    await stop.wait()


async def _carry(function: Callable[[], Awaitable[T]], future: Future[T]) -> None:
    """Run it, and tell its future what came of it."""
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:

        def on_done(done: Future[T]) -> None:
            if done.cancelled():
                with suppress(RuntimeError):  # the loop has ended, and this with it
                    loop.call_soon_threadsafe(scope.cancel)

        future.add_done_callback(on_done)
        try:
            result = await function()
        except Exception as error:
            with suppress(InvalidStateError):  # cancelled meanwhile
                future.set_exception(error)
        except BaseException:
            future.cancel()
            raise
        else:
            with suppress(InvalidStateError):
                future.set_result(result)


def _close_at_exit(reference: weakref.ref[LoaderBridge]) -> None:
    bridge = reference()
    if bridge is not None:
        bridge.close(5.0)
