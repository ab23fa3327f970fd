"""A real Mooncake, whose owners and master are killed and frozen while the engine runs."""

from __future__ import annotations

import pytest
from engines import assert_equal, tiny_llama
from owner_faults import FAULTS, STRUCK, strike

pytestmark = pytest.mark.mooncake
pytest.importorskip("mooncake.store", exc_type=ImportError)

DEADLINE = 3.0
"""Long enough for a busy machine to restore what there is; and so that paying it twice would be seen."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_mid_run(fault: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = strike(tiny_llama(tmp_path_factory.mktemp("llama")), fault, deadline=DEADLINE)
    assert_equal(run.cold.answers, run.struck.answers)
    assert all(answer.cached_tokens for answer in run.struck.answers[:STRUCK])
    added = max(run.added_seconds)
    print(f"{fault}: at most {added * 1000:.0f} ms longer than computing; misses {dict(run.missed)}")
    # While an owner is frozen, Mooncake's reads from it spin; `stuck_threads` bounds how many, so that the engine can
    # compute beside them.
    assert added <= DEADLINE + 2.5  # the rest is for the engine's own work, on such a machine
