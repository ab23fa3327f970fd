"""One engine for the tests of a module, with a store whose pages can be made to fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import Answer, Prompt, engine, generate, prompts, scheduler_side, settle, tiny_llama, worker
from hooked_connector import HookedConnector, PageFaults
from vllm import LLM

from softload.adapters.vllm.messages import Orders
from softload.adapters.vllm.scheduler_side import ScheduledStep
from softload.protocols import PageStore
from softload.telemetry import Statistics
from softload.testing import HangingStore


class Rig:
    """An engine and its store."""

    llm: LLM
    faults: PageFaults
    hanging: HangingStore

    def __init__(self) -> None:
        self._seeds = itertools.count(1000)

    def wrap(self, store: PageStore) -> PageStore:
        """For the connector: the store with faults."""
        self.hanging = HangingStore(store)
        self.faults = PageFaults(self.hanging)
        return self.faults

    def computed(self, *lengths: int, max_tokens: int = 16) -> tuple[list[Prompt], list[Answer]]:
        """New prompts, computed and saved, and out of the engine's own cache; with their answers."""
        fresh = prompts(*lengths, seed=next(self._seeds))
        answers = generate(self.llm, fresh, max_tokens=max_tokens)
        assert not any(answer.cached_tokens for answer in answers)
        settle(self.llm)
        return fresh, answers

    def heal(self) -> None:
        """No faults any more."""
        self.hanging.release()
        self.faults.gone_at_admission.clear()
        self.faults.gone_while_landing.clear()
        self.faults.removed_once_admitted.clear()
        self.faults.draft_gone = lambda key: False
        HookedConnector.silent = False
        HookedConnector.forget()

    def orders(self) -> Orders:
        """What the scheduler's half orders from now on, step by step together."""
        seen, side = Orders(), scheduler_side(self.llm)
        take = side.take_orders

        def taken(step: ScheduledStep) -> Orders:
            orders: Orders = take(step)
            seen.loads += orders.loads
            seen.places += orders.places
            return orders

        side.take_orders = taken
        return seen

    @property
    def counters(self) -> dict[str, int]:
        """The scheduler half's counters."""
        counters: dict[str, int] = dict(scheduler_side(self.llm).counters)
        return counters

    @property
    def statistics(self) -> Statistics:
        """The loader's."""
        statistics: Statistics = worker()._bridge.statistics()
        return statistics


@contextmanager
def rig(
    folder: Path,
    *,
    model: Callable[[Path], Path] = tiny_llama,
    extra: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Rig]:
    """A rig on a tiny model. Landed bytes that nobody took are not kept: they would hide what a store has lost."""
    made = Rig()
    with engine(model(folder), wrap=made.wrap, extra={"prefetch_ttl": 0, **(extra or {})}, **settings) as made.llm:
        yield made
