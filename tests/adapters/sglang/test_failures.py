"""The real engine while its store fails: every request answers the tokens of a cold run, and none gets an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from .beside import LONG, PATIENCE, faulty, restored
from .engines import Answer, Engine, Prompt, engine, prompts, tiny_llama
from .hooked_linker import Faults, HookedLinker


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine(tiny_llama(tmp_path_factory.mktemp("model"), layers=4), PATIENCE) as one:
        yield one


def stored(running: Engine, *lengths: int, seed: int = 5) -> tuple[list[Prompt], list[Answer]]:
    """Prompts whose pages are in the store and not on the device, and their answers."""
    asked = prompts(*lengths, seed=seed)
    cold = running.generate(asked)
    running.flush()
    return asked, cold


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("integrity", ["full", "off"])
def test_damaged_bytes_are_computed_again_only_if_they_are_checked(running: Engine, integrity: str) -> None:
    faults = faulty(running, integrity=integrity, prefetch_ttl=0)
    asked, cold = stored(running, 700, 500)
    faults.damaged = lambda key: True
    answers = running.generate(asked)
    assert all(answer.is_good for answer in answers)
    assert (tokens(answers) == tokens(cold)) is (integrity == "full")


LAST = ".g1-2"
"""In the keys of objects without the first layer: what follows it has so few bytes that it is one object."""

FAILURES: dict[str, Callable[[Faults, str], None]] = {
    "the first layers": lambda faults, page: setattr(faults, "gone", lambda key: page in key),
    "the last layers": lambda faults, page: setattr(faults, "gone", lambda key: page in key and LAST in key),
    "removed after the match": lambda faults, page: setattr(faults, "removed", lambda key: page in key),
}


@pytest.mark.parametrize("admission", ["hold", "stream", "sync"])
@pytest.mark.parametrize("what", FAILURES)
def test_one_of_eight_fails(running: Engine, what: str, admission: str) -> None:
    """Seven run once, with their pages restored; one is prefilled again."""
    faults = faulty(running, admission=admission)
    asked, cold = stored(running, 700, 300, 450, 200, 330, 640, 260, 390)
    FAILURES[what](faults, running.pages_of(cold[4])[1])
    answers = running.together(asked)
    assert tokens(answers) == tokens(cold)
    assert all(answer.is_good for answer in answers)
    forwards = [running.forwards[running.rid_of(answer)] for answer in answers]
    others = forwards[:4] + forwards[5:]
    assert others == [1] * 7
    assert forwards[4] == (2 if admission == "stream" else 1)  # otherwise its failure is known before it runs
    restored = [answer.cached_tokens for answer in answers]
    assert restored[:4] + restored[5:] == [(len(prompt) - 1) // 64 * 64 for prompt in asked[:4] + asked[5:]]
    assert tokens(running.generate(asked)) == tokens(cold)  # from the device: nothing bad was inserted
    running.flush()
    assert tokens(running.generate(asked)) == tokens(cold)


def test_a_range_fails_in_mid_stream(running: Engine) -> None:
    """The first layers are there, those of one page end in the middle."""
    faults = faulty(running, admission="stream", layout="page", read_mode="ranges")
    asked, cold = stored(running, 700, 300, 450, 200, seed=25)
    page = running.pages_of(cold[1])[2]
    struck: list[int] = []

    def torn(key: str, offset: int) -> bool:
        if page in key and offset > 0:
            struck.append(offset)
        return page in key and offset > 0

    faults.torn = torn
    answers = running.together(asked)
    assert struck
    assert tokens(answers) == tokens(cold) and all(answer.is_good for answer in answers)
    assert [running.forwards[running.rid_of(answer)] for answer in answers] == [1, 2, 1, 1]


def test_everything_fails_in_every_batch(running: Engine) -> None:
    faults = faulty(running, admission="stream")
    asked, cold = stored(running, 700, 300, 450, 200, seed=9)
    faults.gone = lambda key: LAST in key
    for _ in range(5):
        assert tokens(running.together(asked)) == tokens(cold)
        running.flush()


@pytest.mark.parametrize("admission", ["hold", "stream"])
def test_a_failing_request_whose_prompt_comes_in_chunks(running: Engine, admission: str) -> None:
    faults = faulty(running, admission=admission)
    head = prompts(1200, seed=21)[0]
    running.generate([head])
    running.flush()
    asked = [head + prompts(2700, seed=22)[0]]
    cold = running.generate(asked)
    running.flush()
    faults.gone = lambda key: LAST in key
    answers = running.generate(asked)
    assert tokens(answers) == tokens(cold) and answers[0].is_good


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("admission", ["hold", "stream"])
def test_a_client_leaves_while_its_request_loads(running: Engine, admission: str, fails: bool) -> None:
    faults = faulty(running, admission=admission)
    asked, cold = stored(running, 700, 300, seed=13)
    faults.seconds = 0.3
    faults.gone = lambda key: fails and LAST in key
    left = running.start(asked[0])
    time.sleep(0.15)
    running.abort(left)
    stayed = running.generate(asked[1:])
    assert left.done.wait(60)
    assert tokens(stayed) == tokens(cold[1:])
    faults.seconds = 0.0
    running.flush()
    assert tokens(running.generate(asked)) == tokens(cold)


@pytest.mark.parametrize("fails", [False, True])
def test_a_decoding_request_goes_on_while_another_loads(running: Engine, fails: bool) -> None:
    """In `hold` a load of 2 s costs those that decode no more than a step with the other request does."""
    (asked,) = prompts(LONG, seed=17)
    gaps = {}
    for admission in ("hold", "stream"):
        run, cold = restored(running, asked, fails=fails, seconds=2.0, admission=admission)
        print(f"{admission}: {run.steps} tokens, longest gap {run.gap * 1e3:.0f} ms, first {run.first:.3f} s")
        assert run.loading.tokens == cold.tokens
        assert bool(run.loading.cached_tokens) is not fails
        gaps[admission] = run.gap
        if admission == "hold":
            # When it came, and once its bytes were here: not in every step of the others.
            assert HookedLinker.lookups[running.rid_of(run.loading)] == 2
            if not fails:  # which is over before the last bytes have come
                assert run.steps >= 10
    if not fails:
        assert gaps["hold"] < gaps["stream"]
