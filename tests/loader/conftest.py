"""What every test of the loader runs under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from softload import loader


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    """A blocking call of the library on the event loop fails the test."""
    with blockbuster_ctx("softload") as blockbuster:
        yield blockbuster


@pytest.fixture
def quick_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits less for calls that a test holds."""
    monkeypatch.setattr(loader, "_CLOSE_SECONDS", 0.1)
