"""The machine over every way in which pages are stored and read."""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition, HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

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


class Unrepeatable(RuleBasedStateMachine):
    """Fails once; then the rule that failed does not apply any more."""

    has_failed: ClassVar[bool] = False

    @precondition(lambda self: not self.has_failed)
    @rule()
    def fail(self) -> None:
        type(self).has_failed = True
        raise AssertionError("what was found")

    @rule(number=st.integers())
    def nothing(self, number: int) -> None:
        pass


def test_what_was_found_is_told_although_hypothesis_cannot_go_on_from_there() -> None:
    with pytest.raises(AssertionError, match="what was found"):
        run(Unrepeatable, "grouped", 100, 10)


def run(machine_class: type[RuleBasedStateMachine], case: str, examples: int, steps: int) -> None:
    failures: list[Exception] = []

    def teardown(machine: RuleBasedStateMachine) -> None:
        failure = sys.exc_info()[1]  # of the step before, which Hypothesis is about to take note of
        try:
            machine_class.teardown(machine)
        except Exception as error:
            failure = error
            raise
        finally:
            if isinstance(failure, Exception) and not isinstance(failure, HypothesisException):
                failures.append(failure)

    attributes = CASES[case] | {"teardown": teardown}
    machine = type(f"Machine_{case.replace('-', '_')}", (machine_class,), attributes)
    # Which of two threads comes first decides what a full store evicts, and so which rules apply: Hypothesis may find
    # that out, and goes no further then. That is no failure, but it forgets those that it had found by then.
    try:
        run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=steps))
    except FlakyStrategyDefinition:
        if failures:
            raise failures[0] from None
