"""A real Mooncake whose owners and master are killed and frozen while an engine runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engines import Answer, Prompt, engine, generate, prompts, settle, worker
from vllm import LLM

from softload.outcomes import PageStatus
from softload.protocols import PageStore
from softload.stores import EmbeddedMooncakeStore

FAULTS = ("an owner is killed", "an owner is frozen", "the master is frozen", "all are killed")
REQUESTS = 12
STRUCK = 4
"""The request before which the fault happens."""


@dataclass(slots=True)
class Run:
    """Requests one after another: answers, and how long each took."""

    answers: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Struck:
    """The same requests computed, and answered while the fault lasts."""

    cold: Run
    struck: Run
    missed: Mapping[PageStatus, int]

    @property
    def added_seconds(self) -> list[float]:
        """Of every request, what it took longer than computing the longest."""
        return [seconds - max(self.cold.seconds) for seconds in self.struck.seconds]


def strike(model: Path, fault: str, *, deadline: float = 1.0) -> Struck:
    """Compute and save, then ask again, with the fault in mid-run."""
    stores: list[EmbeddedMooncakeStore] = []

    def wrap(store: PageStore) -> PageStore:
        assert isinstance(store, EmbeddedMooncakeStore)
        stores.append(store)
        return store

    url = "mooncake://embedded?segment=64MiB&owners=2&lease=5s"
    extra = {"store": url, "deadline": deadline, "lookup_deadline": deadline / 2, "prefetch_ttl": 0}
    with engine(model, wrap=wrap, extra=extra) as llm:
        generate(llm, prompts(100, seed=99))  # what the first request of all pays is not the store's
        family = prompts(*[300 + 3 * index for index in range(REQUESTS)], seed=11)
        cold = _one_by_one(llm, family)
        settle(llm)
        cluster = stores[0].cluster
        assert cluster.master is not None

        def happen(index: int) -> None:
            assert cluster.master is not None
            if index != STRUCK:
                return
            match fault:
                case "an owner is killed":
                    cluster.owners[0].kill()
                case "an owner is frozen":
                    cluster.owners[0].freeze()
                case "the master is frozen":
                    cluster.master.freeze()
                case _:
                    cluster.close()

        try:
            struck = _one_by_one(llm, family, happen)
            statistics = worker()._bridge.statistics()
        finally:
            for child in (cluster.master, *cluster.owners):
                if child.alive:
                    child.thaw()
    return Struck(cold, struck, statistics.missed_pages)


def _one_by_one(llm: LLM, family: list[Prompt], between: Callable[[int], None] = lambda _: None) -> Run:
    run = Run()
    for index, prompt in enumerate(family):
        between(index)
        started = time.monotonic()
        run.answers += generate(llm, [prompt])
        run.seconds.append(time.monotonic() - started)
    return run
