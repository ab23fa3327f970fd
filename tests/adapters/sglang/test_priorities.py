"""An engine in which requests are preempted for more important ones, whose bytes may be on their way."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .beside import hanging
from .engines import Engine, engine, prompts, tiny_llama


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = tiny_llama(tmp_path_factory.mktemp("model"), layers=4)
    with engine(model, enable_priority_scheduling=True, max_running_requests=1) as one:
        yield one


@pytest.mark.parametrize(("admission", "call"), [("hold", "read"), ("stream", "exists")])
def test_nothing_is_preempted_for_a_request_whose_bytes_are_not_here(
    running: Engine, admission: str, call: str
) -> None:
    """Only once it can run; until then what runs goes on, and is not computed again and again."""
    store = hanging(running, admission=admission)
    important, common = prompts(700, 100, seed=61)
    cold = running.generate([important])[0]
    alone = running.generate([common], tokens=600)[0]
    running.flush()
    low = running.start(common, tokens=600, priority=0)
    until = time.monotonic() + 60
    while len(low.tokens) < 20:
        assert time.monotonic() < until
        time.sleep(0.005)
    store.hold(call)
    high = running.start(important, priority=100)
    assert store.wait_held(call)
    seen = len(low.tokens)
    while len(low.tokens) < seen + 20:
        assert time.monotonic() < until
        time.sleep(0.005)
    assert running.forwards[running.rid_of(low)] == 1
    store.release()
    assert high.done.wait(60) and low.done.wait(60)
    assert high.tokens == cold.tokens and high.cached_tokens == 640
    assert low.tokens == alone.tokens and high.ended < low.ended
    assert running.forwards[running.rid_of(low)] == 2
