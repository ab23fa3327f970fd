"""The machine over every way in which pages are stored and read."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.stateful import run_state_machine_as_test

from softload import DraftPolicy, Integrity, Layout, ReadMode
from softload.geometry import DraftMode

from .machine import LoaderMachine
from .stepped import SteppedMachine

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
ONE_CHUNK = 1 << 20
"""More than any draft: after a deadline all of its slots are zeroed that it left."""

TINY = 192 << 10
"""Landing memory for three units at a time: others wait, or are shed."""

CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "grouped-full": {"integrity": Integrity.FULL},
    "grouped-sidecar": {"draft": DraftMode.SIDECAR},
    "grouped-sidecar-required": {"draft": DraftMode.SIDECAR, "draft_policy": DraftPolicy.REQUIRE},
    "grouped-packed": {"draft": DraftMode.PACKED, "integrity": Integrity.FULL},
    "grouped-sidecar-one-chunk": {"draft": DraftMode.SIDECAR, "copy_chunk_bytes": ONE_CHUNK},
    "grouped-packed-one-chunk": {"draft": DraftMode.PACKED, "copy_chunk_bytes": ONE_CHUNK},
    "grouped-tiny": {"landing_bytes": TINY, "draft": DraftMode.SIDECAR},
    "grouped-lent": {"lends": True},
    "grouped-lent-full": {"lends": True, "integrity": Integrity.FULL, "draft": DraftMode.PACKED},
    "grouped-lent-tiny": {"lends": True, "landing_bytes": TINY, "draft": DraftMode.SIDECAR},
    "grouped-lent-evicting": {"lends": True, "store_bytes": 256 << 10, "copy_chunk_bytes": ONE_CHUNK},
    "grouped-evicting": {"store_bytes": 256 << 10},
    "page": {"layout": Layout.PAGE},
    "page-packed": {"layout": Layout.PAGE, "draft": DraftMode.PACKED, "copy_chunk_bytes": ONE_CHUNK},
    "page-lent": {"layout": Layout.PAGE, "lends": True, "freezes": False, "single_groups": True},
    "page-lent-packed": {"layout": Layout.PAGE, "lends": True, "freezes": False, "draft": DraftMode.PACKED},
    "page-lent-frozen": {"layout": Layout.PAGE, "lends": True, "single_groups": True, "draft": DraftMode.SIDECAR},
    "page-lent-tiny": {"layout": Layout.PAGE, "lends": True, "freezes": False, "landing_bytes": TINY},
    "page-lent-evicting": {"layout": Layout.PAGE, "lends": True, "freezes": False, "store_bytes": 256 << 10},
    "ranges": {"layout": Layout.PAGE, "read_mode": ReadMode.RANGES, "read_lanes": 1},
    "ranges-packed": {"layout": Layout.PAGE, "read_mode": ReadMode.RANGES, "read_lanes": 1, "draft": DraftMode.PACKED},
    "ranges-sidecar-tiny": {
        "layout": Layout.PAGE,
        "read_mode": ReadMode.RANGES,
        "read_lanes": 1,
        "draft": DraftMode.SIDECAR,
        "landing_bytes": TINY,
    },
}

STEPPED = {
    name: CASES[name]
    for name in CASES
    if name.startswith("grouped") and (DEEP or not name.endswith(("-evicting", "-one-chunk", "-required")))
}
"""Where loads may be admitted in steps: the cases that differ most, and all of them in a deep run."""

EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "300" if DEEP else "12"))


@pytest.mark.timeout(0 if DEEP else 60)
@pytest.mark.parametrize("case", CASES)
def test_whatever_happens_nothing_leaks_and_no_wrong_byte_is_accepted(case: str) -> None:
    run(LoaderMachine, case, EXAMPLES, 60 if DEEP else 40)


@pytest.mark.timeout(0 if DEEP else 60)
@pytest.mark.parametrize("case", STEPPED)
def test_nor_where_loads_are_admitted_in_steps(case: str) -> None:
    run(SteppedMachine, case, EXAMPLES if DEEP else EXAMPLES // 2, 60 if DEEP else 30)


def run(machine_class: type[LoaderMachine], case: str, examples: int, steps: int) -> None:
    machine = type(f"Machine_{case.replace('-', '_')}", (machine_class,), CASES[case])
    # Which of two threads comes first decides what a full store evicts, and so which rules apply: Hypothesis may find
    # that out, and goes no further then. That is no failure; one that it cannot repeat is another error of Hypothesis.
    with suppress(FlakyStrategyDefinition):
        run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=steps))
