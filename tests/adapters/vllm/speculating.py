"""Engines that speculate, whose drafts can be lost, and what they accept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engines import Answer, Prompt, engine, generate, page_hashes, settle, worker
from hooked_connector import PageFaults, page_of
from vllm import LLM

from softload.protocols import PageStore

METHODS = ("eagle", "draft_model")


@dataclass(frozen=True, slots=True)
class Accepted:
    """One run's answers, how many drafts were made, and how many of their tokens were accepted."""

    answers: list[Answer]
    drafts: int
    tokens: int

    @property
    def length(self) -> float:
        """The mean accept length: tokens per step of the target."""
        return 1 + self.tokens / self.drafts


@dataclass(slots=True)
class Speculation:
    """An engine that speculates."""

    llm: LLM
    faults: PageFaults
    told: dict[str, float] = field(default_factory=dict)

    def run(self, prompts: list[Prompt], *, max_tokens: int = 48) -> Accepted:
        """Answer the prompts; what is computed is saved, and leaves the engine's own cache."""
        answers = generate(self.llm, prompts, max_tokens=max_tokens)
        settle(self.llm)
        drafts = self._added("vllm:spec_decode_num_drafts")
        return Accepted(answers, drafts, self._added("vllm:spec_decode_num_accepted_tokens"))

    def lose_draft(self, prompts: list[Prompt], *, from_page: int = 0) -> None:
        """From now on the store has the draft of these prompts' first pages only."""
        kept = {page for prompt in prompts for page in page_hashes(prompt)[:from_page]}
        self.faults.draft_gone = lambda key: page_of(key) not in kept

    def heal(self) -> None:
        """The store has all drafts again."""
        self.faults.draft_gone = lambda key: False

    @property
    def dropped(self) -> int:
        """Loads that lost their draft and kept their target."""
        dropped: int = worker()._bridge.statistics().draft_dropped
        return dropped

    def _added(self, name: str) -> int:
        total = next(metric.value for metric in self.llm.get_metrics() if metric.name == name)
        added = total - self.told.get(name, 0.0)
        self.told[name] = total
        return int(added)


@contextmanager
def speculating(models: Path, method: str, policy: str) -> Iterator[Speculation]:
    """An engine on models that `speculation.train` has written."""
    wrapped: list[PageFaults] = []

    def wrap(store: PageStore) -> PageStore:
        wrapped.append(PageFaults(store))
        return wrapped[0]

    with engine(
        models / "target",
        wrap=wrap,
        extra={"prefetch_ttl": 0, "draft_policy": policy},
        num_gpu_blocks_override=256,
        max_num_seqs=16,
        disable_log_stats=False,
        speculative_config={"method": method, "model": str(models / method), "num_speculative_tokens": 4},
    ) as llm:
        yield Speculation(llm, wrapped[0])
