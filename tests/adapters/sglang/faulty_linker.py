"""The linker over a store in which faults happen at random; named by module path in a server's launch line."""

from __future__ import annotations

import os

from softload.adapters.sglang import SoftloadLinker
from softload.protocols import PageStore
from softload.testing import FaultyStore, parse_fault


class FaultyLinker(SoftloadLinker):
    """See the module; the faults are those of SOFTLOAD_TEST_FAULTS."""

    def make_store(self) -> PageStore:
        faults = [parse_fault(text) for text in os.environ["SOFTLOAD_TEST_FAULTS"].split(",")]
        return FaultyStore(super().make_store(), faults, seed=1)
