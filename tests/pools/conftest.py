"""A real Mooncake for many loaders, one after another."""

from __future__ import annotations

import pytest

from softload.stores import EmbeddedMooncakeStore, WrapperStore


class KeptOpen(WrapperStore):
    """A store that outlives the loaders which use it."""

    def open(self) -> None:
        """It is open."""

    def close(self) -> None:
        """It stays open."""


@pytest.fixture
def store(mooncake_store: EmbeddedMooncakeStore) -> KeptOpen:
    """The session's Mooncake."""
    return KeptOpen(mooncake_store)
