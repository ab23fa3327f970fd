"""Fixtures for tests that need a real Mooncake, and what every test leaves as it was."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import structlog

from softload.stores import EmbeddedMooncakeStore

pytest.register_assert_rewrite("softload.testing.store_suite", "softload.testing.lending_suite")


@pytest.fixture(autouse=True)
def log_settings() -> Iterator[None]:
    """The command line sets the log up for its whole process, which here is that of all tests."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def mooncake_store() -> Iterator[EmbeddedMooncakeStore]:
    """A real Mooncake of 64 MiB in this process, leases of one second; shared, so use keys of your own."""
    yield from _embedded(owners=0)


@pytest.fixture(scope="session")
def owned_mooncake_store() -> Iterator[EmbeddedMooncakeStore]:
    """The same with its memory in two processes of its own."""
    yield from _embedded(owners=2)


def _embedded(owners: int) -> Iterator[EmbeddedMooncakeStore]:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("no Mooncake build is installed")
    store = EmbeddedMooncakeStore(segment=64 << 20, lease=1.0, owners=owners)
    store.open()
    try:
        yield store
    finally:
        store.close()
