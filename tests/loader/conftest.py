"""What every test of the loader runs under."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from softload import context, events, loader, request_log
from softload.geometry import layout


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    """A blocking call of the library on the event loop fails the test."""
    with blockbuster_ctx("softload") as blockbuster:
        yield blockbuster


@pytest.fixture(autouse=True)
def no_bugs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An exception in a task of the loader costs a user one unit and a line in the log; here it fails the test.

    The line itself does not do: what renders a traceback reads files, which `no_blocking_calls` forbids.
    """
    raised: list[str] = []
    tell = request_log.tell

    def listen(method: Callable[..., object], event: str, /, **values: object) -> bool:
        if event == events.TASK_RAISED:
            raised.append(f"{values}\n{traceback.format_exc()}")
        return tell(method, event, **values)

    monkeypatch.setattr(request_log, "tell", listen)
    yield
    assert not raised, raised[0]


@pytest.fixture(autouse=True)
def patient_lending() -> Iterator[None]:
    """The first answers wait until it is known whether what they are about is lent, on a busy machine as well.

    Else that load is read, and later ones find its bytes. Of no use to a test to undo, hence not by its `monkeypatch`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "_LEND_SECONDS", 20.0)
        yield


@pytest.fixture
def quick_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits less for calls that a test holds."""
    monkeypatch.setattr(loader, "_CLOSE_SECONDS", 0.1)


@pytest.fixture(autouse=True)
def single_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools of these tests have some bytes a layer: each group is an object of its own, as it is for large ones."""
    monkeypatch.setattr(layout, "_FIRST_BYTES", 1)
    monkeypatch.setattr(layout, "_LATER_BYTES", 1)
