"""The failures of test_failures.py under another schedule: no overlap, mixed chunks, longest prefix first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import test_failures as scenarios
from .beside import PATIENCE
from .engines import Engine, engine, tiny_llama

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    settings = {"disable_overlap_schedule": True, "enable_mixed_chunk": True, "schedule_policy": "lpm"}
    model = tiny_llama(tmp_path_factory.mktemp("model"), layers=4)
    with engine(model, PATIENCE, **settings) as one:
        yield one


@pytest.mark.parametrize("admission", ["hold", "stream", "sync"])
@pytest.mark.parametrize("what", scenarios.FAILURES)
def test_one_of_eight_fails(running: Engine, what: str, admission: str) -> None:
    scenarios.test_one_of_eight_fails(running, what, admission)


@pytest.mark.parametrize("admission", ["hold", "stream"])
def test_a_failing_request_whose_prompt_comes_in_chunks(running: Engine, admission: str) -> None:
    scenarios.test_a_failing_request_whose_prompt_comes_in_chunks(running, admission)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("admission", ["hold", "stream"])
def test_a_client_leaves_while_its_request_loads(running: Engine, admission: str, fails: bool) -> None:
    scenarios.test_a_client_leaves_while_its_request_loads(running, admission, fails)


def test_everything_fails_in_every_batch(running: Engine) -> None:
    scenarios.test_everything_fails_in_every_batch(running)
