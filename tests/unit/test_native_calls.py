"""Blocking calls: lanes, stuck threads and their replacements, refusal, withdrawal, and returns after the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from softload import events, native_calls
from softload.native_calls import CallGroup, NativeCall, RefusedError

asynchronous = pytest.mark.asyncio


class Held:
    """A function that waits on its thread until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._go = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self._go.wait(30)
        return "done"

    def let_go(self) -> None:
        self._go.set()


@contextmanager
def held(count: int) -> Iterator[list[Held]]:
    """Held functions that are let go at the end, also of a test that failed."""
    functions = [Held() for _ in range(count)]
    try:
        yield functions
    finally:
        for function in functions:
            function.let_go()


def submit(group: CallGroup, function: Callable[[], str]) -> tuple[NativeCall[str], asyncio.Event]:
    returned = asyncio.Event()
    call = NativeCall(function, lambda _: returned.set())
    group.submit(call)
    return call, returned


def threads_of(group: CallGroup) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"softload-{group.name}"]


@asynchronous
async def test_no_more_calls_run_than_there_are_lanes() -> None:
    group = CallGroup("lanes", width=2, max_stuck=0)
    with held(4) as functions:
        calls = [submit(group, function) for function in functions]
        assert group.statistics().running == 2 and group.statistics().queued == 2
        for function, (_, returned) in zip(functions, calls, strict=True):
            function.let_go()
            await returned.wait()
        assert [call.value for call, _ in calls] == ["done"] * 4
    assert group.statistics().running == group.statistics().queued == 0
    assert group.statistics().threads <= 2
    group.close()


@asynchronous
@pytest.mark.parametrize("max_stuck", [0, 1, 3])
async def test_stuck_calls_are_replaced_up_to_the_bound_and_then_refused(max_stuck: int) -> None:
    group = CallGroup(f"stuck{max_stuck}", width=1, max_stuck=max_stuck)
    with held(max_stuck + 1) as functions:
        calls = []
        for function in functions:
            call, returned = submit(group, function)
            assert await asyncio.to_thread(function.entered.wait, 10), "its lane was replaced"
            call.abandon()
            call.abandon()  # once is enough, twice is no more
            calls.append((call, returned))
        assert group.saturated and group.statistics().stuck == max_stuck + 1
        with pytest.raises(RefusedError):
            submit(group, lambda: "late")
        assert group.statistics().refused == 1
        functions[0].let_go()
        await calls[0][1].wait()
        assert not group.saturated
        assert await group.run(lambda: "again") == "again"
    for _, returned in calls:
        await returned.wait()
    assert group.statistics().stuck == group.statistics().running == 0
    assert group.statistics().threads <= 1, "stand-ins are sent away"
    group.close()


@asynchronous
async def test_who_was_refused_is_told_once_as_soon_as_calls_are_taken_again() -> None:
    group = CallGroup("free", width=1, max_stuck=0)
    told = []
    with held(2) as functions:
        call, returned = submit(group, functions[0])
        call.abandon()
        group.when_free(lambda: told.append(group.saturated))
        assert group.saturated and not told
        functions[0].let_go()
        await returned.wait()
        await asyncio.sleep(0)
        assert told == [False]
        _, returned = submit(group, functions[1])
        functions[1].let_go()
        await returned.wait()
        await asyncio.sleep(0)
        assert told == [False]
        group.close()


@asynchronous
async def test_a_call_that_did_not_start_can_be_taken_back_and_never_runs() -> None:
    group = CallGroup("withdrawn", width=1, max_stuck=0)
    ran: list[str] = []
    with held(1) as (first,):
        running, returned = submit(group, first)
        queued = NativeCall(lambda: ran.append("queued"), lambda _: ran.append("returned"))
        group.submit(queued)
        assert queued.withdraw() and not running.withdraw()
        first.let_go()
        await returned.wait()
        assert await group.run(lambda: "next") == "next"
    assert ran == []
    group.close()


@asynchronous
async def test_a_call_that_nobody_wants_any_more_is_skipped_right_before_it_would_run() -> None:
    group = CallGroup("prepared", width=1, max_stuck=0)
    ran: list[str] = []
    group.submit(NativeCall(lambda: ran.append("ran"), lambda _: None, prepare=lambda: False))
    assert await group.run(lambda: "next") == "next"
    assert ran == [] and group.statistics().calls == 1
    group.close()


@asynchronous
async def test_lower_priorities_go_first_and_equal_ones_in_turn() -> None:
    group = CallGroup("priorities", width=1, max_stuck=0)
    order: list[str] = []
    done = anyio.Event()
    with held(1) as (first,):
        submit(group, first)
        for name, priority in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0), ("last", 3.0)):
            group.submit(
                NativeCall(
                    lambda name=name: order.append(name),  # type: ignore[misc]
                    lambda _, name=name: done.set() if name == "last" else None,  # type: ignore[misc]
                    priority=priority,
                )
            )
    await done.wait()
    assert order == ["a", "b", "c", "d", "last"]
    group.close()


@asynchronous
async def test_a_cancelled_wait_leaves_a_running_call_behind_and_says_so() -> None:
    group = CallGroup("cancelled", width=1, max_stuck=1)
    with held(1) as (function,):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.run, function)
            assert await asyncio.to_thread(function.entered.wait, 10)
            tasks.cancel_scope.cancel()
        assert group.statistics().stuck == 1
        assert await group.run(lambda: "another") == "another"
    group.close()


@asynchronous
@pytest.mark.parametrize("max_stuck", [0, 1, 3])
async def test_late_calls_lend_their_lanes_to_other_kinds_within_the_bound(max_stuck: int) -> None:
    group = CallGroup(f"lending{max_stuck}", width=2, max_stuck=max_stuck)

    def submit_kind(function: Callable[[], str], kind: str) -> NativeCall[str]:
        call = NativeCall(function, lambda _: None, kind=kind)
        group.submit(call)
        return call

    with held(9) as functions:
        late = [submit_kind(function, "late") for function in functions[:4]]
        others = [submit_kind(function, f"well{index // 2}") for index, function in enumerate(functions[4:])]
        assert [call.started_at is not None for call in late] == [True, True, False, False]
        for call in late[:2]:
            call.lend_lane()
            call.lend_lane()  # once is enough
        late[2].lend_lane()  # it has none
        await anyio.sleep(0.01)
        assert [call.started_at is not None for call in others] == [index < min(2, max_stuck) for index in range(5)]
        assert late[2].started_at is None, "no more of what is late"
        assert group.statistics().stuck == 0 and not group.saturated
        late[0].abandon()  # its lane is replaced, not lent, from now on
        await anyio.sleep(0.01)
        assert group.statistics().running <= 2 + max(max_stuck, 1)
    await _all_returned(group)
    assert all(call.finished for call in [*late, *others])
    assert group.statistics().running == group.statistics().queued == 0
    group.close()


@asynchronous
async def test_one_call_of_a_kind_at_a_time_and_a_late_one_makes_way() -> None:
    group = CallGroup("kinds", width=3, max_stuck=1, at_a_time=1)

    def submit_kind(function: Callable[[], str], kind: str, priority: float) -> NativeCall[str]:
        call = NativeCall(function, lambda _: None, kind=kind, priority=priority)
        group.submit(call)
        return call

    def started(calls: list[NativeCall[str]]) -> list[bool]:
        return [call.started_at is not None for call in calls]

    with held(6) as functions:
        here = [submit_kind(function, "here", 4.0 - index) for index, function in enumerate(functions[:4])]
        assert started(here) == [True, False, False, False], "one at a time"
        there = [submit_kind(function, "there", 9.0) for function in functions[4:]]
        assert started(there) == [True, False], "and others do not wait for it"
        here[0].lend_lane()
        await anyio.sleep(0.01)
        assert started(here) == [True, False, False, True], "what may never come back keeps nobody waiting"
        assert started(there) == [True, False]
        functions[3].let_go()
        await _returned(here[3])
        assert started(here) == [True, False, True, True], "the lowest priority first"
        there[0].abandon()
        await anyio.sleep(0.01)
        assert started(there) == [True, True], "nor does what nobody waits for"
        assert group.statistics().queued == 1
    await _all_returned(group)
    assert all(call.finished for call in [*here, *there])
    group.close()


@asynchronous
async def test_a_call_that_steps_aside_keeps_its_lane_and_lets_the_next_of_its_kind_go() -> None:
    group = CallGroup("aside", width=2, max_stuck=0, at_a_time=1)
    with held(3) as functions:
        calls = [NativeCall(function, lambda _: None, kind="here") for function in functions]
        for call in calls:
            group.submit(call)
        assert await asyncio.to_thread(functions[0].entered.wait, 10)
        assert calls[1].started_at is None
        await asyncio.to_thread(calls[0].step_aside)
        assert await asyncio.to_thread(functions[1].entered.wait, 10)
        await asyncio.to_thread(calls[1].step_aside)
        await asyncio.to_thread(calls[1].step_aside)  # once is enough
        await anyio.sleep(0.01)
        assert calls[2].started_at is None, "both lanes are taken"
        functions[0].let_go()
        assert await asyncio.to_thread(functions[2].entered.wait, 10)
    await _all_returned(group)
    calls[2].step_aside()  # it has returned: nothing to step aside from
    await asyncio.sleep(0)
    assert group.statistics().running == group.statistics().queued == 0
    group.close()


@asynchronous
async def test_an_urgent_call_runs_alone_of_its_kind() -> None:
    group = CallGroup("alone", width=4, max_stuck=0, at_a_time=2)
    with held(5) as functions:
        urgent = (1, 3)
        calls = [
            NativeCall(function, lambda _: None, kind="here", alone=index in urgent)
            for index, function in enumerate(functions)
        ]
        other = NativeCall(lambda: "there", lambda _: None, kind="there", alone=True)
        for call in [*calls, other]:
            group.submit(call)
        await _returned(other)

        def started() -> list[int]:
            return [index for index, call in enumerate(calls) if call.started_at is not None]

        assert started() == [0], "the urgent one waits for it, and those behind for the urgent one"
        functions[0].let_go()
        await _returned(calls[0])
        assert started() == [0, 1], "alone"
        calls[1].step_aside()
        await asyncio.sleep(0.01)
        assert started() == [0, 1, 2], "until it steps aside"
        functions[2].let_go()
        await _returned(calls[2])
        assert started() == [0, 1, 2, 3]
        functions[3].let_go()
        await _returned(calls[3])
        assert started() == [0, 1, 2, 3, 4]
    await _all_returned(group)
    group.close()


@asynchronous
async def test_calls_of_one_series_run_one_at_a_time_and_others_beside_them() -> None:
    group = CallGroup("series", width=4, max_stuck=1, at_a_time=2)
    one, two = object(), object()
    series = (one, two, one, one, None, one)
    with held(6) as functions:
        calls = [
            NativeCall(function, lambda _: None, kind="here", series=which)
            for function, which in zip(functions, series, strict=True)
        ]
        for call in calls:
            group.submit(call)

        def started() -> list[int]:
            return [index for index, call in enumerate(calls) if call.started_at is not None]

        assert started() == [0, 1], "of two series"
        functions[1].let_go()
        await _returned(calls[1])
        assert started() == [0, 1], "the next one waits for the first of its series, and those behind for it"
        functions[0].let_go()
        await _returned(calls[0])
        assert started() == [0, 1, 2]
        group.step_aside(calls[2])
        assert started() == [0, 1, 2, 3, 4], "what stepped aside keeps none waiting"
        functions[4].let_go()
        await _returned(calls[4])
        assert started() == [0, 1, 2, 3, 4]
        calls[3].abandon()
        await asyncio.sleep(0)
        assert started() == [0, 1, 2, 3, 4, 5], "nor does what nobody waits for"
    await _all_returned(group)
    group.close()


async def _returned(call: NativeCall[str]) -> None:
    with anyio.fail_after(10):
        while not call.finished:  # noqa: ASYNC110
            await anyio.sleep(0.001)


async def _all_returned(group: CallGroup) -> None:
    with anyio.fail_after(10):
        while group.statistics().running:  # noqa: ASYNC110
            await anyio.sleep(0.001)


@asynchronous
async def test_what_a_call_raises_reaches_who_waits() -> None:
    group = CallGroup("raising", width=1, max_stuck=0)

    def fail() -> None:
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        await group.run(fail)
    assert await group.run(lambda: "well") == "well", "the lane is none the worse"
    group.close()


class Panic(BaseException):
    """As Rust extensions raise."""


@asynchronous
@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), Panic("at lib.rs")])
async def test_what_is_no_exception_reaches_who_waits_as_one(raised: BaseException) -> None:
    group = CallGroup("panicking", width=1, max_stuck=0)

    def fail() -> None:
        raise raised

    with anyio.fail_after(10), pytest.raises(RuntimeError, match=type(raised).__name__) as caught:
        await group.run(fail)
    assert caught.value.__cause__ is raised
    assert await group.run(lambda: "well") == "well", "the lane is none the worse"
    assert group.statistics().running == 0
    group.close()


@asynchronous
async def test_a_call_that_returns_after_close_is_still_accounted_for_and_its_thread_ends() -> None:
    group = CallGroup("closed", width=1, max_stuck=0)
    with held(1) as (function,):
        call, returned = submit(group, function)
        call.abandon()
        group.close()
        with pytest.raises(RefusedError):
            submit(group, lambda: "no")
        function.let_go()
        await returned.wait()
    assert call.finished and call.value == "done"
    for thread in threads_of(group):
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()
    assert group.statistics().threads == 0


@asynchronous
async def test_closing_answers_who_waits_for_a_call_that_never_started() -> None:
    group = CallGroup("answered", width=1, max_stuck=0)
    with held(1) as (function,):
        submit(group, function)
        refused = anyio.Event()

        async def wait() -> None:
            with anyio.CancelScope(shield=True), pytest.raises(RefusedError):
                await group.run(lambda: "never")
            refused.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            group.close()
            with anyio.fail_after(10):
                await refused.wait()


def test_a_call_may_outlive_its_loop() -> None:
    function = Held()
    group = CallGroup("outlived", width=1, max_stuck=0)

    async def leave() -> None:
        submit(group, function)

    asyncio.run(leave())
    threads = threads_of(group)
    function.let_go()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive() and thread.daemon


@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.sampled_from(["submit", "submit", "abandon", "withdraw", "release"]), max_size=25),
    st.randoms(use_true_random=False),
)
def test_every_call_that_ran_returns_once_and_the_counts_add_up(
    width: int, max_stuck: int, steps: list[str], random: object
) -> None:
    asyncio.run(_exercise(width, max_stuck, steps))


async def _exercise(width: int, max_stuck: int, steps: list[str]) -> None:
    group = CallGroup("model", width=width, max_stuck=max_stuck)
    open_calls: list[tuple[NativeCall[str], Held]] = []
    returns: dict[int, int] = {}
    changed = asyncio.Event()

    def on_return(call: NativeCall[str]) -> None:
        returns[id(call)] = returns.get(id(call), 0) + 1
        changed.set()

    every: list[tuple[NativeCall[str], Held]] = []
    for step in steps:
        running = [pair for pair in open_calls if pair[0].started_at is not None]
        if step == "submit":
            function = Held()
            call = NativeCall(function, on_return)
            saturated = group.statistics().stuck > max_stuck
            try:
                group.submit(call)
            except RefusedError:
                assert saturated
            else:
                assert not saturated
                open_calls.append((call, function))
                every.append((call, function))
        elif step == "abandon" and running:
            running[0][0].abandon()
        elif step == "withdraw":
            for pair in [pair for pair in open_calls if pair[0].started_at is None][:1]:
                assert pair[0].withdraw()
                open_calls.remove(pair)
        elif step == "release" and running:
            call, function = running[-1]
            function.let_go()
            while not call.finished:
                changed.clear()
                await changed.wait()
            open_calls.remove((call, function))
        await asyncio.sleep(0)
        statistics = group.statistics()
        running = [pair for pair in open_calls if pair[0].started_at is not None]
        assert statistics.running == len(running)
        assert statistics.stuck == sum(call.abandoned for call, _ in running)
        assert statistics.running - statistics.stuck <= width
        assert statistics.threads <= statistics.running + width
        waiting = len(open_calls) - len(running)
        assert not waiting or statistics.running - statistics.stuck == width
    for _, function in every:
        function.let_go()
    while any(not call.finished for call, _ in open_calls):
        changed.clear()
        await changed.wait()
    assert all(returns.get(id(call), 0) == (call.started_at is not None) for call, _ in every)
    group.close()
    assert group.statistics().threads == 0


@asynchronous
async def test_calls_that_do_not_come_back_are_told_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_calls, "_STUCK_SECONDS", 0.05)
    group = CallGroup("lost", width=3, max_stuck=3)
    with held(3) as functions, capture_logs() as logs:
        calls = [submit(group, function) for function in functions]
        functions[0].let_go()
        for call, _ in calls:
            call.abandon()
        await calls[0][1].wait()  # most of those that nobody waits for come back a moment later
        with anyio.fail_after(15):
            while not logs:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await anyio.sleep(0.15)
        (told,) = logs
        assert (told["event"], told["log_level"]) == (events.THREAD_STUCK, "warning")
        assert (told["group"], told["stuck"], told["replaced_up_to"]) == ("lost", 2, 3)
        assert told["seconds"] >= 0.05
    for _, returned in calls:
        await returned.wait()
    assert group.statistics().stuck == 0
    group.close()
