"""What reads that come back, or do not, say of the endpoint that they went to."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from softload import PageStatus
from softload.fetches import Fetch, Part, PartState, ReadAnswers, ReadCall
from softload.health import Health
from softload.landing import LandingMemory, Share
from softload.native_calls import NativeCall
from softload.read_health import ReadHealth
from softload.telemetry import Counters


def part_of(suspects: set[str]) -> Part:
    """What a unit wants, which has these suspects."""
    segments = LandingMemory(1 << 16).try_grant_runs([(100, 1)], Share.STREAMING)
    assert segments is not None
    part = Fetch(["k"], segments[0], [None], size=100, tailed=True).parts[0]
    part.suspects = suspects
    return part


def out(parts: Sequence[Part], seconds: float) -> ReadCall:
    """A call for these parts that started so long ago and is overdue."""
    call = ReadCall("owner", list(parts), ranged=False)
    call.live = list(parts)
    call.native = NativeCall[ReadAnswers](lambda: ReadAnswers([]), lambda _: None)
    call.native.started_at = time.monotonic() - seconds
    call.overdue = True
    for part in parts:
        part.state, part.call = PartState.IN_FLIGHT, call
    return call


@pytest.fixture
def health() -> Health:
    """Something good has just come from the endpoint: it is not silent, so outcomes are counted."""
    health = Health()
    health.endpoint("owner").record(True, started_at=time.monotonic())
    return health


@pytest.fixture
def reads(health: Health) -> ReadHealth:
    return ReadHealth(health, Counters())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("status", [PageStatus.LOADED, PageStatus.CORRUPT], ids=str)
def test_an_endpoint_whose_bytes_come_answers_whatever_they_are_worth(status: PageStatus, late: bool) -> None:
    health = Health()
    reads = ReadHealth(health, Counters())
    owner = health.endpoint("owner")
    owner.trip()
    call = out([part_of(set())], seconds=0.6)
    call.timed_out = late
    reads.record(call, [status], running=1)
    assert not owner.refuses, "one that was waited for closes it, and after a late one it may be probed"
    assert owner.is_open is late
    assert owner.silence(60.0) < 30.0


def test_a_call_of_two_loads_is_one_outcome_and_leaves_the_second_its_own(health: Health, reads: ReadHealth) -> None:
    first, second, third = set[str](), set[str](), set[str]()
    shared = [part_of(first), part_of(second)]
    out(shared, seconds=1.0)
    for part in (*shared, *shared):
        reads.time_out(part.fetch)
    others = [part_of(second), part_of(third)]
    for part in others:
        out([part], seconds=1.0)
    reads.time_out(others[0].fetch)
    assert not health.endpoint("owner").is_open, "two calls"
    reads.time_out(others[1].fetch)
    assert health.endpoint("owner").is_open, "three calls, of three loads"


def test_a_call_counts_for_the_load_that_has_not_counted_one_yet(health: Health, reads: ReadHealth) -> None:
    first, second, third = set[str](), set[str](), set[str]()
    for parts in ([part_of(first)], [part_of(first), part_of(second)], [part_of(third)]):
        assert not health.endpoint("owner").is_open
        out(parts, seconds=1.0)
        for part in parts:
            reads.time_out(part.fetch)
    assert health.endpoint("owner").is_open


def test_however_many_calls_of_a_load_time_out_that_is_one_outcome(health: Health, reads: ReadHealth) -> None:
    suspects = set[str]()
    for _ in range(5):
        part = part_of(suspects)
        out([part], seconds=1.0)
        reads.time_out(part.fetch)
    assert not health.endpoint("owner").is_open
