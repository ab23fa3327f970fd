"""What the command line sets up for its process must not outlive a test that runs it in this one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command line logs errors alone, to the standard error of that moment."""
    yield
    structlog.reset_defaults()
