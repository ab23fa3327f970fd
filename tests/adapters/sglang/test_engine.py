"""The real engine: restored pages give the tokens of a cold run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .beside import PATIENCE
from .engines import PAGE, Engine, engine, prompts, tiny_llama
from .hooked_linker import HookedLinker


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine(tiny_llama(tmp_path_factory.mktemp("model")), PATIENCE) as one:
        yield one


@pytest.mark.parametrize("admission", ["hold", "stream", "sync"])
def test_cold_device_hit_and_restored_are_the_same(running: Engine, admission: str) -> None:
    running.relink(admission=admission, **PATIENCE)
    asked = prompts(700, 300, 130, seed=3)
    cold = running.generate(asked, tokens=12)
    hits = running.generate(asked, tokens=12)
    running.flush()
    restored = running.generate(asked, tokens=12)
    assert [answer.tokens for answer in hits] == [answer.tokens for answer in cold]
    assert [answer.tokens for answer in restored] == [answer.tokens for answer in cold]
    assert all(answer.is_good for answer in restored)
    assert [answer.cached_tokens for answer in restored] == [(len(prompt) - 1) // PAGE * PAGE for prompt in asked]


@pytest.mark.parametrize("admission", ["hold", "stream", "sync"])
def test_restored_pages_are_not_saved_again(running: Engine, admission: str) -> None:
    """Of a longer prompt the new pages are, and nothing else: all of it comes back from the store."""
    linker = running.relink(admission=admission, prefetch_ttl=0, **PATIENCE)
    head, tail = prompts(690, 300, seed=11)  # their answers complete no page
    running.generate([head])
    running.flush()
    before = offered(linker)
    running.generate([head])
    running.settle()
    assert offered(linker) == before
    running.flush()
    (cold,) = running.generate([head + tail])
    running.flush()
    assert offered(linker) == before + 990 // PAGE - 690 // PAGE
    (restored,) = running.generate([head + tail])
    assert restored.cached_tokens == 989 // PAGE * PAGE
    assert restored.tokens == cold.tokens


def offered(linker: HookedLinker) -> int:
    """Pages that the store was offered so far, whatever it answered."""
    statistics = linker._bridge.statistics()
    assert statistics is not None
    return sum(statistics.saved_pages.values())


def test_requests_wait_for_their_turn_to_be_held(running: Engine) -> None:
    running.relink(max_holds=1, **PATIENCE)
    asked = prompts(300, 400, 200, 500, seed=4)
    cold = running.generate(asked)
    running.flush()
    restored = running.together(asked)
    assert [answer.tokens for answer in restored] == [answer.tokens for answer in cold]
    assert [answer.cached_tokens for answer in restored] == [(len(prompt) - 1) // PAGE * PAGE for prompt in asked]


def test_landing_memory_for_a_part_of_a_prefix_restores_that_part(running: Engine) -> None:
    running.relink(landing_bytes="4MiB", **PATIENCE)
    asked = prompts(6000, seed=6)
    cold = running.generate(asked)
    running.flush()
    restored = running.generate(asked)
    assert restored[0].tokens == cold[0].tokens
    assert 0 < restored[0].cached_tokens < 5952
