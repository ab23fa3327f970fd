"""softload, as the benchmark drives it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from peers.cases import Workload
from peers.stopwatch import Sample, Spans
from softload import PageLoader, TransferUnit
from softload.copies import Copy
from softload.outcomes import PageStatus
from softload.protocols import Answer, Descriptor
from softload.stores.embedded import EmbeddedMooncakeStore
from softload.stores.wrapper import LendingWrapperStore

__all__ = ["COPIES", "ClockedStore", "SharedStore", "load", "save"]

COPIES = Spans()
"""Of copies between landing memory and pools."""

_run = Copy.run


def _clocked_run(self: Copy) -> None:
    started = time.perf_counter()
    _run(self)
    COPIES.add(started, time.perf_counter())


Copy.run = _clocked_run  # type: ignore[method-assign]


class ClockedStore(EmbeddedMooncakeStore):
    """Knows when its native calls ran. `native` is the client itself, for those who call it without us."""

    def __init__(self, *, segment: int, lease: float, owners: int) -> None:
        super().__init__(segment=segment, lease=lease, owners=owners, high_watermark=1.0)
        self.spans = Spans()
        self.asking = Spans()

    @property
    def native(self) -> object:
        """The bare client."""
        return self._native

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """Whole objects."""
        with self.spans.measured():
            return super().read(keys, pointers, sizes)

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        """Ranges."""
        with self.spans.measured():
            return super().read_ranges(keys, pointers, sizes, offsets)

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        """Where objects are."""
        with self.spans.measured(), self.asking.measured():
            return super().descriptors(keys)

    def exists(self, keys: Sequence[str]) -> Sequence[bool | PageStatus]:
        """Whether objects are there."""
        with self.spans.measured():
            return super().exists(keys)

    def session_start(self, keys: Sequence[str]) -> Sequence[Answer]:
        """Leases for ranges."""
        with self.spans.measured():
            return super().session_start(keys)


class SharedStore(LendingWrapperStore):
    """One loader's own store, as a loader wants it; all of them go to the one that is open already."""

    def open(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """The bench does that, after all loaders."""


async def load(loader: PageLoader, store: ClockedStore, units: Sequence[TransferUnit], layer_seconds: float) -> Sample:
    """One streaming load, with a forward that takes `layer_seconds` a layer on another device."""
    sample = Sample()
    store.spans.clear()
    store.asking.clear()
    COPIES.clear()
    started = time.perf_counter()
    async with loader.load(units, layer_seconds=layer_seconds) as handle:
        await handle.admitted()
        sample.admission = time.perf_counter() - started
        for layer in range(loader.pools.num_layers):
            asked = time.perf_counter()
            await handle.layer(layer)
            ready = time.perf_counter()
            sample.stall += ready - asked
            sample.layers.append(ready - started)
            if layer_seconds:
                await asyncio.sleep(layer_seconds)
        report = await handle.report()
    ended = time.perf_counter()
    sample.report = ended - started
    # Until the last layer: a forward that takes its time is not the load's.
    last = started + sample.layers[-1]
    sample.outside = 1 - store.spans.covered(started, last, COPIES) / sample.layers[-1]
    sample.pages = sum(outcome.restored_pages for outcome in report.outcomes.values())
    return sample


async def save(loader: PageLoader, workload: Workload) -> None:
    """Store every page of a workload.

    Raises:
        RuntimeError: not all of them went in.
    """
    report = await loader.save([workload.unit("save", source=True)])
    saved = sum(outcome.saved_pages for outcome in report.outcomes.values())
    if saved != workload.pages:
        statuses = {page.status for outcome in report.outcomes.values() for page in outcome.pages}
        raise RuntimeError(f"expected {workload.pages} pages to be saved, got {saved}: {', '.join(statuses)}")
