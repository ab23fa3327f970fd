"""Stories that the machine found or should have found, told again step by step; every step is checked as there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from softload import PageStatus

from .machine import LoaderMachine
from .test_machine import CASES
from .users import page_keys


@contextmanager
def told(case: str) -> Iterator[LoaderMachine]:
    """A machine whose last step is its teardown, which waits for all, closes, and counts."""
    machine: LoaderMachine = type("Story", (LoaderMachine,), CASES[case])()
    try:
        yield machine
    except BaseException:
        machine.sound = False
        raise
    finally:
        machine.teardown()


def do(machine: LoaderMachine, *steps: Callable[[], None]) -> None:
    """Take steps, with all checks after each."""
    for step in steps:
        step()
        machine.check()


def store(machine: LoaderMachine, length: int = 4) -> None:
    """The first pages of conversation 0 are stored, and not in the engine any more."""
    do(machine, lambda: machine.start([(0, length)]))


@pytest.mark.parametrize(("case", "only"), [("grouped-sidecar", "draft"), ("grouped-packed", ".d0")])
def test_a_load_left_before_its_draft_came_keeps_the_target(case: str, only: str) -> None:
    with told(case) as machine:
        store(machine)
        do(machine, lambda: machine.hold("read", only, 0), lambda: machine.load([(0, 4)], None, False))
        assert len(machine.users) == 1
        do(machine, lambda: machine.cancel(0))
        (request,) = machine.ended
        assert (request.result.restored_pages, request.result.draft_pages) == (4, 0)


@pytest.mark.parametrize(("case", "only"), [("grouped-sidecar", "draft"), ("grouped-packed", ".d0")])
def test_a_draft_that_does_not_come_in_time_counts_against_its_endpoint(case: str, only: str) -> None:
    with told(case) as machine:
        store(machine)
        do(machine, lambda: machine.hold("read", only, 0), lambda: machine.load([(0, 4)], 0.3, False))
        do(machine, lambda: machine.pass_time(0.6))
        (request,) = machine.ended
        assert (request.result.restored_pages, request.result.draft_pages) == (4, 0)
        assert machine.loader.statistics().timed_out_calls > 0


def test_what_a_prefetch_landed_is_held_from_when_all_of_it_may_be_placed() -> None:
    """Some landed at once, the rest came late: what the machine calls clean there is restored whole."""
    with told("grouped") as machine:
        store(machine)
        do(machine, lambda: machine.prefetch([(0, 2)], None), lambda: machine.cancel(0))
        do(machine, lambda: machine.hold("read", "", 0), lambda: machine.prefetch([(0, 2), (0, 4)], None))
        do(machine, lambda: machine.pass_time(6.0), lambda: machine.pass_time(2.5))
        (user,) = machine.users
        assert [request.landed for request in user.requests] == [2, 2]
        do(machine, lambda: machine.place(0, 0, False, False))
        assert [request.clean for request in user.requests] == [2, 2]
        assert [request.result.restored_pages for request in user.requests] == [2, 2]


def test_a_question_that_outlives_the_units_time_counts_against_the_master() -> None:
    """Its caller is cancelled at the moment at which the answer would be too late."""
    with told("page-lent-frozen") as machine:
        store(machine)
        do(
            machine,
            lambda: machine.load([(0, 4)], 0.3, True),
            lambda: machine.hold("descriptors", "", 0),
            machine.engine_lets_go,
        )
        assert machine.store.held("descriptors") == 1
        do(machine, lambda: machine.pass_time(2.5))
        (request,) = machine.ended
        assert request.result.restored_pages == 0
        assert machine.loader.statistics().open_breakers == ("master",)


@pytest.mark.parametrize("case", ["grouped-packed", "page-packed", "ranges-packed", "grouped-sidecar"])
def test_zeros_are_never_stored_as_a_draft(case: str) -> None:
    with told(case) as machine:
        store(machine)
        for page in range(4):
            do(machine, lambda page=page: machine.lose_draft(0, page))  # type: ignore[misc]
        do(
            machine,
            lambda: machine.load([(0, 4)], None, False),
            lambda: machine.finish(0, True),
            lambda: machine.evict(0, 4, True),
            lambda: machine.save(0),
        )


@pytest.mark.parametrize("case", CASES)
def test_placing_nothing_is_no_mistake(case: str) -> None:
    with told(case) as machine:
        do(machine, lambda: machine.start([]), lambda: machine.prefetch([(0, 3)], None))
        do(machine, lambda: machine.place(0, 0, False, False))
        (request,) = machine.ended
        assert request.result.requested_pages == 0


@pytest.mark.parametrize(("case", "method"), [("ranges-sidecar-tiny", "read_ranges"), ("grouped-tiny", "read")])
def test_loads_that_are_shed_while_another_is_left_let_go_once(case: str, method: str) -> None:
    with told(case) as machine:
        do(machine, lambda: machine.start([(2, 2), (1, 6), (0, 6)]))
        do(
            machine,
            lambda: machine.hold(method, "", 0),
            lambda: machine.load([(1, 6), (0, 3), (0, 1)], 0.3, False),
            lambda: machine.cancel(0),
            lambda: machine.load([(1, 6)], 0.3, False),
            lambda: machine.pass_time(0.6),
        )


@pytest.mark.parametrize("case", ["grouped", "page"])
def test_what_is_queued_behind_a_hung_read_is_not_started_when_its_load_times_out(case: str) -> None:
    with told(case) as machine:
        do(machine, lambda: machine.start([(0, 6), (1, 6), (2, 6)]))
        do(
            machine,
            lambda: machine.hold("read", "", 0),
            lambda: machine.load([(0, 6), (1, 6), (2, 6)], 0.3, False),
            lambda: machine.pass_time(0.6),
        )
        assert machine.loader.statistics().stuck_threads == machine.read_lanes


@pytest.mark.parametrize("case", ["grouped", "page", "ranges"])
def test_a_probe_that_reads_nothing_gives_its_permit_back(case: str) -> None:
    with told(case) as machine:
        store(machine)
        method = "read_ranges" if case == "ranges" else "read"
        for _ in range(3):
            do(machine, lambda: machine.hold(method, "", 0), lambda: machine.load([(0, 4)], 0.3, False))
            do(machine, lambda: machine.pass_time(0.3), machine.release_all)
        assert machine.loader.statistics().open_breakers == ("memory",)
        do(machine, lambda: machine.pass_time(31.0))
        # The first page is gone: the others are asked for, probe the endpoint, and are not read.
        first = machine.object_keys(page_keys(0, 1)[0], draft=False)
        do(machine, lambda: (machine.memory.remove(first, force=True), None)[1])
        machine.ended.clear()
        do(machine, lambda: machine.load([(0, 4)], None, False))
        (request,) = machine.ended
        assert request.result.pages[0].status is PageStatus.NOT_FOUND
        do(machine, lambda: machine.compute(0, 4, True))
        machine.ended.clear()
        do(machine, lambda: machine.load([(0, 4)], None, False))
        (request,) = machine.ended
        assert request.result.restored_pages == 4
        assert machine.loader.statistics().open_breakers == ()
