"""The real engine, and what may happen to a request whose bytes are on their way: aborts, flushes, pauses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from softload.telemetry import Statistics
from softload.testing import HangingStore

from .beside import hanging
from .engines import Answer, Engine, Prompt, engine, prompts, tiny_llama, wait_until

ADMISSIONS = {"hold": "read", "stream": "exists"}
"""With the call for which a request is held."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine(tiny_llama(tmp_path_factory.mktemp("model"), layers=4)) as one:
        yield one


def stored(running: Engine, admission: str) -> tuple[HangingStore, list[Prompt], list[Answer]]:
    """A store that can hang, prompts whose pages are in it and not on the device, and their answers."""
    store = hanging(running, admission=admission)
    asked = prompts(700, 300, seed=51)
    cold = running.generate(asked)
    running.flush()
    return store, asked, cold


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def statistics(running: Engine) -> Statistics:
    found = running.linker._bridge.statistics()
    assert found is not None
    return found


@pytest.mark.parametrize("everybody", [False, True])
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_an_aborted_one_is_answered_at_once_and_leaves_nothing(
    running: Engine, admission: str, everybody: bool
) -> None:
    """Not when the store answers: the read is still out when its client has been told."""
    store, asked, cold = stored(running, admission)
    slots = running.free_tokens
    call = ADMISSIONS[admission]
    mine = set(running.pages_of(cold[0]))
    store.hold(call, lambda keys: any(page in key for page in mine for key in keys))
    left = running.start(asked[0])
    assert store.wait_held(call)
    running.abort(left, everybody=everybody)
    assert left.done.wait(15)  # well before its hold, of 20 s, would end
    assert store.held(call)
    assert left.finish is not None and left.finish["type"] == "abort" and not left.tokens
    fresh = prompts(150, seed=52)[0]
    assert running.generate([fresh])[0].is_good  # engine and store are free for others
    assert store.held(call)
    store.release()
    running.settle()
    wait_until(lambda: running.free_tokens == slots)  # the scheduler is in the middle of a step
    assert not len(running.linker._holds) and not running.linker.is_held(running.rid_of(left))
    wait_until(lambda: statistics(running).landing_bytes_in_use == 0)
    assert statistics(running).active_units == 0
    answers = running.generate(asked)
    assert tokens(answers) == tokens(cold) and all(answer.cached_tokens for answer in answers)


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_the_cache_is_not_flushed_under_one(running: Engine, admission: str) -> None:
    """SGLang refuses, as for any request that waits; the request is restored all the same."""
    store, asked, cold = stored(running, admission)
    store.hold(ADMISSIONS[admission])
    held = running.start(asked[0])
    assert store.wait_held(ADMISSIONS[admission])
    assert not running.try_flush()
    store.release()
    assert held.done.wait(60)
    assert held.tokens == cold[0].tokens and held.cached_tokens == 640


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_the_cache_is_flushed_under_one_while_the_engine_pauses(running: Engine, admission: str, mode: str) -> None:
    """SGLang's way to new weights: everything is forgotten, the request is looked up anew when the engine goes on."""
    store, asked, cold = stored(running, admission)
    call = ADMISSIONS[admission]
    store.hold(call)
    held = running.start(asked[0])
    assert store.wait_held(call)
    running.pause(mode)
    assert running.try_flush()
    store.release()
    running.resume()
    assert held.done.wait(60)
    assert held.tokens == cold[0].tokens and held.is_good
    running.settle()
    wait_until(lambda: statistics(running).landing_bytes_in_use == 0)
    assert tokens(running.generate(asked)) == tokens(cold)
