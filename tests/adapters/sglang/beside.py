"""A request whose pages are in a slow store, beside one that decodes: what each of them waits for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from softload.protocols import PageStore
from softload.testing import HangingStore

from .engines import Answer, Engine, Prompt, prompts
from .hooked_linker import Faults, HookedLinker

__all__ = [
    "LOAD_SECONDS",
    "LONG",
    "Beside",
    "beside",
    "computed",
    "faulty",
    "hanging",
    "on_device",
    "queueing",
    "restored",
]

W = TypeVar("W", bound=PageStore)

PATIENCE = {"deadline": "20s", "lookup_deadline": "10s", "blocking_limit": "20s", "offload_limit": "30s"}
"""What no busy machine comes near."""

LONG = 1900
"""Tokens of the request that loads; all but 44 of them are restored."""

LOAD_SECONDS = 0.2
"""What its load takes, in however many reads."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What one run came to. Seconds.

    Args:
        gap: the longest time between two tokens of the decoding request, from the other's arrival until a moment after
            its first token.
        steps: tokens that the decoding request got meanwhile.
        first: until the other's first token.
        loading: the other's answer.
    """

    gap: float
    steps: int
    first: float
    loading: Answer


def faulty(running: Engine, **options: object) -> Faults:
    """A linker whose store can be made to fail."""
    return _relinked(running, Faults, {**PATIENCE, **options})


def hanging(running: Engine, **options: object) -> HangingStore:
    """A linker whose store can be made to hang, and that waits for it."""
    return _relinked(running, HangingStore, {**PATIENCE, "lookup_deadline": "20s", **options})


def _relinked(running: Engine, wrapper: Callable[[PageStore], W], options: dict[str, object]) -> W:
    made: list[W] = []

    def wrap(store: PageStore) -> W:
        made.append(wrapper(store))
        return made[-1]

    HookedLinker.wrap = staticmethod(wrap)
    running.relink(**{"prefetch_ttl": 0, **options})
    return made[-1]


def restored(
    running: Engine, prompt: Prompt, *, fails: bool = False, seconds: float = LOAD_SECONDS, **options: object
) -> tuple[Beside, Answer]:
    """The other request's pages come from a slow store; also its answer when it was computed.

    Args:
        running: the engine.
        prompt: the other request's.
        fails: whether the first layers of all its pages turn out to be gone, once they are read.
        seconds: what its load takes, in however many reads.
        options: of the linker.
    """
    faults = faulty(running, read_lanes=1, **options)
    (cold,) = running.generate([prompt])
    running.flush()

    def slow_down() -> None:
        faults.lasts = seconds
        faults.gone = lambda key: fails and ".g0" in key

    return beside(running, prompt, slow_down), cold


def on_device(running: Engine, prompt: Prompt) -> Beside:
    """The other request's pages are in the engine's own cache: the least that a step with it can take."""
    running.flush()
    running.generate([prompt])
    running.settle()
    return beside(running, prompt)


def computed(running: Engine, prompt: Prompt) -> Beside:
    """The other request is computed, beside a linker that has nothing."""
    running.flush()
    with _without_linker(running):
        return beside(running, prompt)


def beside(running: Engine, prompt: Prompt, before: Callable[[], None] = lambda: None) -> Beside:
    """Send a request beside one that decodes, and wait for its end.

    Args:
        running: the engine.
        prompt: the other request's.
        before: called once the first one decodes.
    """
    decoding = running.start(prompts(100, seed=18)[0], tokens=1000)
    while len(decoding.tokens) < 20:
        time.sleep(0.01)
    before()
    loading = running.start(prompt)
    assert loading.done.wait(60), "the request has not ended"
    running.abort(decoding)
    assert decoding.done.wait(60), "the decoding request has not ended"
    # Also the gap in which the other's first token came, and those right after: it waits for that very step too.
    times = [at for at in decoding.times if at <= loading.times[0] + 0.1]
    gap = max(other - one for one, other in zip(times, times[1:], strict=False) if other > loading.sent)
    return Beside(gap, sum(loading.sent <= at <= loading.times[0] for at in times), loading.first, loading)


def queueing(running: Engine, asked: Sequence[Prompt], seconds: float, **options: object) -> tuple[float, float]:
    """What a step of a decoding request takes, at the median: alone, and while these requests are held.

    Args:
        running: the engine.
        asked: the requests whose pages are in the store.
        seconds: how long they are held at least.
        options: of the linker.
    """
    faults = faulty(running, **options)
    cold = running.generate(asked)
    running.flush()
    decoding = running.start(prompts(100, seed=18)[0], tokens=2000)
    while len(decoding.tokens) < 60:
        time.sleep(0.01)
    faults.seconds = seconds
    arrived = time.monotonic()
    others = [running.start(prompt) for prompt in asked]
    for other in others:
        assert other.done.wait(60), "a request has not ended"
    running.abort(decoding)
    assert decoding.done.wait(60), "the decoding request has not ended"
    assert [other.tokens for other in others] == [answer.tokens for answer in cold]
    spans = list(zip(decoding.times, decoding.times[1:], strict=False))
    alone = [after - before for before, after in spans if after < arrived]
    beside_them = [after - before for before, after in spans if arrived < before and after < arrived + seconds]
    return statistics.median(alone), statistics.median(beside_them)


class _Nothing:
    """A linker that has nothing, keeps nothing, and takes no time."""

    def __init__(self, linker: HookedLinker) -> None:
        self.pools = linker.pools
        self.layer_done_counter = linker.layer_done_counter

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        return []

    def start_layer_wise_loading(self) -> int:
        return -1

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        return False

    def num_completed_offloads(self) -> int:
        return 0

    def cancel_queued_load(self, rid: str) -> bool:
        return False


@contextmanager
def _without_linker(running: Engine) -> Iterator[None]:
    """The hooks do nothing with another linker than ours."""
    wrapper = running.scheduler.tree_cache.linker
    linker, wrapper.cache_linker = wrapper.cache_linker, _Nothing(wrapper.cache_linker)
    try:
        yield
        running.settle()
    finally:
        wrapper.cache_linker = linker
