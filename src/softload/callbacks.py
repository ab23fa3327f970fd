"""Callbacks of the event loop, which run outside of any task; and a wait that nothing cuts short."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import importlib.util
from collections.abc import Callable, Coroutine
from typing import Any, TypeVarTuple

import anyio

__all__ = ["callback_context", "tell_loop", "to_its_end", "wait_out"]

Ts = TypeVarTuple("Ts")

current_async_library_cvar: contextvars.ContextVar[str | None] | None = None
if importlib.util.find_spec("sniffio") is not None:
    current_async_library_cvar = importlib.import_module("sniffio").current_async_library_cvar


def callback_context() -> contextvars.Context:
    """For callbacks of the event loop that use anyio, which run outside of any task.

    anyio asks sniffio, where that is installed (engines bring it along), which library runs; and sniffio knows tasks
    only, and this variable.
    """
    context = contextvars.Context()
    if current_async_library_cvar is not None:
        context.run(current_async_library_cvar.set, "asyncio")
    return context


def tell_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[*Ts], object], *args: *Ts) -> bool:
    """Have a callback run on the loop; asked on any thread. False where the loop has ended."""
    try:
        loop.call_soon_threadsafe(callback, *args, context=callback_context())
    except RuntimeError:
        return False
    return True


async def wait_out(*events: asyncio.Event) -> None:
    """Wait for all of them, whoever cancels that meanwhile: it comes after.

    Also for `asyncio.Task.cancel`, as `asyncio.timeout` does, which no scope of anyio holds off.
    """
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        for event in events:
            while not event.is_set():
                try:
                    await event.wait()
                except asyncio.CancelledError as error:
                    cancelled = error
    if cancelled is not None:
        raise cancelled


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Run it in a task of its own, which no cancellation of this one stops; see `wait_out`."""
    task, ended = asyncio.create_task(work), asyncio.Event()
    task.add_done_callback(lambda _: ended.set())
    try:
        await wait_out(ended)
    finally:
        task.result()
