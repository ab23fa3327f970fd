"""The real engine over a real Mooncake whose owners and master are killed and frozen: the tokens of the cold run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from softload.protocols import PageStore
from softload.stores.embedded import EmbeddedMooncakeStore

from .beside import PATIENCE
from .engines import Answer, Engine, Prompt, engine, prompts, tiny_llama, wait_until
from .hooked_linker import HookedLinker

pytestmark = pytest.mark.mooncake

FAULTS = ("none", "an owner is killed", "an owner is frozen", "the master is frozen", "the master is killed")
LENGTHS = [300 + 37 * index for index in range(10)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine(tiny_llama(tmp_path_factory.mktemp("model"), layers=4)) as one:
        yield one


def one_by_one(running: Engine, asked: list[Prompt]) -> list[Answer]:
    """Answers to requests that come one after another."""
    return [answer for prompt in asked for answer in running.generate([prompt])]


def gap_during(decoding: Answer, work: Callable[[], object]) -> float:
    """The longest time between two tokens of a request while others are served."""
    since = time.monotonic()
    work()
    times = [at for at in decoding.times if at >= since]
    return max(after - before for before, after in zip(times, times[1:], strict=False))


def strike(cluster: object, fault: str) -> None:
    """Make it happen."""
    master, owners = cluster.master, cluster.owners  # type: ignore[attr-defined]
    match fault:
        case "an owner is killed":
            owners[0].kill()
        case "an owner is frozen":
            owners[0].freeze()
        case "the master is frozen":
            master.freeze()
        case "the master is killed":
            master.kill()


@pytest.mark.timeout(170)
@pytest.mark.parametrize("admission", ["hold", pytest.param("stream", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_requests_answer_as_if_cold(running: Engine, fault: str, admission: str) -> None:
    stores: list[EmbeddedMooncakeStore] = []

    def wrap(store: PageStore) -> PageStore:
        assert isinstance(store, EmbeddedMooncakeStore)
        stores.append(store)
        return store

    HookedLinker.wrap = staticmethod(wrap)
    url = "mooncake://embedded?segment=64MiB&owners=2&lease=5s"
    # Mooncake's reads spin while their owner is frozen: on the few cores of a test's machine, one at a time.
    few = {"read_lanes": 1, "stuck_threads": 1}
    # Without a fault all of it comes, in whatever time a busy machine takes.
    deadlines = PATIENCE if fault == "none" else {"deadline": "1s", "lookup_deadline": "500ms"}
    running.relink(store=url, admission=admission, prefetch_ttl=0, **few, **deadlines)
    asked = prompts(*LENGTHS, seed=31)
    cold = running.generate(asked)
    running.flush()
    decoding = running.start(prompts(90, seed=32)[0], tokens=6000)
    while len(decoding.tokens) < 30:
        time.sleep(0.01)
    computed: list[Answer] = []
    computing = gap_during(decoding, lambda: computed.extend(one_by_one(running, prompts(*LENGTHS, seed=33))))
    strike(stores[0].cluster, fault)
    since = time.monotonic()
    answers: list[Answer] = []
    gap = gap_during(decoding, lambda: answers.extend(one_by_one(running, asked)))
    took = time.monotonic() - since
    longest = max(answers, key=lambda answer: answer.first)
    meanwhile = sum(longest.sent <= at <= longest.times[0] for at in decoding.times)
    running.abort(decoding)
    assert decoding.done.wait(60)
    restored = sum(answer.cached_tokens for answer in answers)
    print(
        f"{fault}, {admission}: {took:.2f} s, {restored} tokens restored, longest first token "
        f"{longest.first:.2f} s, in which another got {meanwhile} tokens, longest gap of another {gap * 1e3:.0f} ms "
        f"({computing * 1e3:.0f} ms where all of it is computed)"
    )
    # Half a second is the store's, and not that of a busy machine; whose steps are as long as those without a fault.
    if admission == "hold" and longest.first - max(answer.first for answer in computed) > 0.5:
        assert meanwhile >= min(10.0, longest.first / (2 * computing))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in cold]
    assert all(answer.is_good for answer in answers)
    if fault == "none":
        assert restored == sum((length - 1) // 64 * 64 for length in LENGTHS)
    assert len(answers) == len(cold)
    # The engine is as it was: nothing runs, and no slot is lost, once the scheduler's step is over.
    running.settle()
    wait_until(lambda: running.free_tokens == running.scheduler.max_total_num_tokens)
