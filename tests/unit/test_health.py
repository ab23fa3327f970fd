"""Breakers and the negative cache on a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softload.health import MAX_ENDPOINTS, Breaker, Health, NegativeCache, Permit
from softload.native_calls import NativeCall
from softload.outcomes import PageStatus


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(clock: ManualClock, jitter: float = 0.5) -> Breaker:
    breaker = Breaker("owner", clock, lambda: jitter)
    for _ in range(3):
        breaker.record(False)
    assert breaker.is_open
    return breaker


def permit(breaker: Breaker) -> Permit:
    allowed = breaker.allows()
    assert allowed is not None and allowed.is_probe == breaker.is_open
    return allowed


@given(st.lists(st.booleans(), max_size=30))
def test_it_opens_when_three_of_the_last_five_outcomes_are_outages(outcomes: list[bool]) -> None:
    breaker = Breaker("owner", ManualClock(), lambda: 0.5)
    last: deque[bool] = deque(maxlen=5)
    for good in outcomes:
        breaker.record(good, permit(breaker))
        last.append(good)
        expected = last.count(False) >= 3 and not good
        assert breaker.is_open == expected
        if expected:
            break


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_the_cool_down_doubles_from_one_to_thirty_seconds(jitter: float) -> None:
    clock = ManualClock()
    breaker = opened(clock, jitter)
    for expected in (1, 2, 4, 8, 16, 30, 30):
        wait = expected * (0.75 + 0.5 * jitter)
        clock.now += wait - 0.001
        assert breaker.refuses and not breaker.allows()
        clock.now += 0.002
        assert not breaker.refuses
        breaker.record(False, permit(breaker))
    clock.now += 60
    breaker.record(True, permit(breaker))
    assert not breaker.is_open
    for _ in range(3):
        breaker.record(False)
    clock.now += 1.3
    assert not breaker.refuses, "a success starts the cool-down from the beginning"


def test_there_is_one_probe_at_a_time_and_its_permit_comes_back() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.now += 2
    first = permit(breaker)
    assert not breaker.allows() and breaker.refuses
    first.give_back()
    second = permit(breaker)
    breaker.record(True, second)
    assert not permit(breaker).is_probe and not permit(breaker).is_probe


def test_only_the_probes_holder_ends_it() -> None:
    clock = ManualClock()
    breaker = Breaker("owner", clock, lambda: 0.5)
    early = permit(breaker)
    breaker.record(False, permit(breaker))
    for _ in range(2):
        breaker.record(False)
    clock.now += 2
    probe = permit(breaker)
    early.give_back()
    assert breaker.refuses, "a call from before it opened is not the probe"
    breaker.record(False, early)
    clock.now += 3
    assert breaker.refuses, "the probe is still out, whatever others find"
    probe.give_back()
    again = permit(breaker)
    probe.give_back()
    assert breaker.refuses, "giving back twice does no harm"
    again.give_back()
    assert not breaker.refuses


def test_a_good_call_closes_it_also_while_a_probe_is_out() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.now += 2
    probe = permit(breaker)
    breaker.record(True)
    assert not breaker.is_open
    for _ in range(3):
        breaker.record(False)
    clock.now += 2
    other = permit(breaker)
    probe.give_back()
    assert breaker.refuses
    other.give_back()


def test_a_look_takes_no_permit() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.now += 2
    for _ in range(3):
        assert not breaker.refuses
    assert breaker.allows()


def test_outages_of_calls_from_before_it_opened_do_not_keep_it_open() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    for _ in range(10):
        breaker.record(False)
    clock.now += 1.001
    assert not breaker.refuses


@given(st.lists(st.sampled_from(["good", "bad", "ask", "back", "end", "wait"]), max_size=60), st.floats(0, 1))
def test_whatever_happens_the_next_probe_is_never_more_than_its_cool_down_away(steps: list[str], jitter: float) -> None:
    clock = ManualClock()
    breaker = Breaker("owner", clock, lambda: jitter)
    permits: list[Permit] = []
    for step in steps:
        if step == "ask":
            permits += [allowed for allowed in [breaker.allows()] if allowed is not None]
        elif step == "wait":
            clock.now += 5
        elif step == "back" and permits:
            permits.pop(0).give_back()
        elif step == "end" and permits:
            breaker.record(False, permits.pop())
        elif step in ("good", "bad"):
            breaker.record(step == "good")
            assert not (step == "good" and breaker.is_open)
    for allowed in permits:
        allowed.give_back()
    clock.now += 30 * 1.25 + 0.001
    assert breaker.allows()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("abcdef"), st.sampled_from(PageStatus)),
            st.tuples(st.just("discard"), st.sampled_from("abcdef"), st.none()),
            st.tuples(st.just("wait"), st.integers(0, 70), st.none()),
        ),
        max_size=40,
    )
)
def test_the_negative_cache_forgets_in_time_and_is_bounded(steps: list[tuple[str, object, PageStatus | None]]) -> None:
    clock = ManualClock()
    cache = NegativeCache(4, clock)
    until: dict[str, float] = {}
    for kind, what, status in steps:
        if kind == "wait":
            clock.now += float(str(what))
        elif kind == "discard":
            cache.discard(str(what))
            until.pop(str(what), None)
        else:
            assert status is not None
            cache.add(str(what), status)
            seconds = {PageStatus.NO_MEMORY_REPLICA: 2, PageStatus.CORRUPT: 60}.get(status, 10)
            until.pop(str(what), None)
            until[str(what)] = clock.now + seconds
            for oldest in list(until)[:-4]:
                del until[oldest]
        assert len(cache) <= 4
        for key in "abcdef":
            if key in cache:
                assert clock.now < until[key], "forgotten keys stay forgotten"
            else:
                # Those that are over may have made room for others, never the other way round.
                assert not (clock.now < until.get(key, 0))
                until.pop(key, None)


def test_statistics_name_what_is_broken() -> None:
    clock = ManualClock()
    health = Health(clock=clock)
    for _ in range(3):
        health.endpoint("10.0.0.1").record(False)
        health.master.record(False)
    health.negative.add("key", PageStatus.NOT_FOUND)
    health.suppress("request")
    statistics = health.statistics()
    assert statistics.open_breakers == ("10.0.0.1", "master")
    assert (statistics.known_endpoints, statistics.negative_keys, statistics.suppressed_requests) == (1, 1, 1)
    health.unsuppress("request")
    assert health.statistics().suppressed_requests == 0


def test_one_dead_owner_is_not_another() -> None:
    health = Health(clock=ManualClock())
    for _ in range(5):
        health.endpoint("dead").record(False)
    assert health.endpoint("dead").refuses
    assert health.endpoint("well").allows() and health.master.allows()


def test_sessions_are_void_once_the_master_is_back_and_only_then() -> None:
    health = Health(clock=ManualClock())
    back: list[None] = []
    health.on_master_back = lambda: back.append(None)
    health.record_master([PageStatus.NOT_FOUND])
    health.record_master([PageStatus.STORE_UNREACHABLE])
    health.record_master([PageStatus.STORE_UNREACHABLE])
    assert not back
    health.record_master([PageStatus.LOADED])
    health.record_master([PageStatus.LOADED])
    assert len(back) == 1


def test_an_endpoint_may_be_called_as_the_master_is() -> None:
    health = Health()
    for _ in range(3):
        health.endpoint("master").record(False)
    assert health.endpoint("master").is_open and not health.master.is_open
    assert health.statistics().open_breakers == ("master",)


def test_endpoints_that_came_and_went_are_forgotten_and_open_breakers_last() -> None:
    health = Health()
    for _ in range(3):
        health.endpoint("broken").record(False)
    used = health.endpoint("used")
    for owner in range(2 * MAX_ENDPOINTS):
        health.endpoint(f"owner-{owner}").record(False)
        assert health.endpoint("used") is used
    assert health.statistics().open_breakers == ("broken",)
    assert len(health._endpoints) == MAX_ENDPOINTS


def out_for(seconds: float) -> NativeCall[list[PageStatus]]:
    """A call that started so long ago and is not back."""
    call: NativeCall[list[PageStatus]] = NativeCall(list, lambda _: None)
    call.started_at = time.monotonic() - seconds
    return call


def test_what_is_silent_is_down_at_the_first_call_that_is_waited_for_in_vain() -> None:
    clock = ManualClock()
    health = Health(clock=clock)
    health.endpoint_timed_out("owner", out_for(0.6), due=0.2)
    assert health.endpoint("owner").refuses and not health.master.is_open
    health.master_timed_out(out_for(0.6))
    assert health.master.refuses


def test_a_call_that_is_late_beside_good_ones_is_one_outcome() -> None:
    clock = ManualClock()
    health = Health(clock=clock)
    well = health.endpoint("well")
    well.record(True)
    clock.now += 0.4
    asyncio.run(doubted(health, "well", out_for(5.0), during=lambda: well.record(True)))
    assert not health.endpoint("well").is_open
    clock.now += 0.4
    asyncio.run(doubted(health, "well", out_for(5.0), during=lambda: None))
    assert health.endpoint("well").is_open, "nothing came from there for half a second"


def test_a_call_that_comes_back_in_time_is_no_silence() -> None:
    health = Health()
    call = out_for(0.2)

    def back() -> None:
        call.finished = True

    asyncio.run(doubted(health, "owner", call, during=back))
    assert not health.endpoint("owner").is_open


async def doubted(health: Health, name: str, call: NativeCall[list[PageStatus]], during: Callable[[], None]) -> None:
    """Time a call out, let something happen, and wait until it has been half a second."""
    health.endpoint_timed_out(name, call, due=0.1)
    assert not health.endpoint(name).is_open
    during()
    await asyncio.sleep(0.5)  # ends after the loop has looked at it again


def test_reads_that_hang_beside_a_lost_master_say_nothing_of_their_endpoint() -> None:
    health = Health()
    health.record_master([PageStatus.STORE_UNREACHABLE])
    health.endpoint_timed_out("owner", out_for(2.0), due=0.1)
    assert not health.endpoint("owner").is_open
    health = Health()
    lost = partial(health.record_master, [PageStatus.STORE_UNREACHABLE])
    asyncio.run(doubted(health, "owner", out_for(0.2), during=lost))
    assert not health.endpoint("owner").is_open, "the master was lost before the endpoint was silent for long enough"


def test_a_silence_that_ends_lets_a_probe_through_and_later_ones_if_they_were_long() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    breaker.came_late(0.6)
    assert not breaker.refuses
    probe = permit(breaker)
    breaker.came_late(8.0)
    assert breaker.refuses, "one probe at a time"
    breaker.record(False, probe)  # open for two seconds now
    breaker.came_late(1.9)
    assert breaker.refuses, "it may be slow for good"
    breaker.came_late(2.0)
    assert permit(breaker).is_probe


def test_a_call_from_before_it_opened_puts_no_probe_off() -> None:
    """Deadlines differ: calls that hang together are given up one after another, for as long as the longest one."""
    clock = ManualClock()
    breaker = Breaker("owner", clock, lambda: 0.5)
    began = clock.now
    clock.now += 0.6
    breaker.trip()
    clock.now += 1.5
    breaker.record(False, started_at=began)
    assert not breaker.refuses
    probe = permit(breaker)
    breaker.record(False, probe, started_at=clock.now)
    clock.now += 1.5
    assert breaker.refuses, "open for two seconds"
    health = Health(clock=time.monotonic)
    hangs = out_for(0.6)
    health.master.trip()
    health.master._open_until = time.monotonic()
    health.master_timed_out(hangs)
    assert not health.master.refuses


def test_what_lies_where_nothing_answers_is_refused_for_no_longer_than_that() -> None:
    clock = ManualClock()
    health = Health(clock=clock)
    for _ in range(3):
        health.endpoint("owner").record(False)
    health.refuse(["a"], "owner", PageStatus.SUPPRESSED)
    assert "a" in health.negative
    clock.now += 1.3
    assert "a" not in health.negative
    assert health.endpoint("owner").allows()


def test_a_call_that_is_out_while_later_ones_are_back_is_one_outcome() -> None:
    """Also where nothing was asked since, and so nothing came."""
    clock = ManualClock()
    health = Health(clock=clock)
    call = out_for(2.0)
    assert call.started_at is not None
    owner = health.endpoint("owner")
    owner.record(True, started_at=call.started_at + 0.05)
    health.master.record(True, started_at=call.started_at + 0.05)
    clock.now += 1.0
    health.endpoint_timed_out("owner", call, due=0.1)
    assert not owner.is_open
    health.endpoint_timed_out("owner", call, due=0.2)  # the other set out with it
    assert owner.is_open
    health.master_timed_out(call)
    assert not health.master.is_open


def test_an_owner_that_is_gone_for_good_is_not_held_against_what_exists_for_ever() -> None:
    clock = ManualClock()
    health = Health(clock=clock)
    assert health.trusts_existence
    gone = health.endpoint("gone")
    gone.trip()
    for seconds in (0.0, 60.0, 530.0):
        clock.now += seconds
        assert not health.trusts_existence
    clock.now += 20.0
    assert gone.is_open and health.trusts_existence, "nobody has wanted anything from there for ten minutes"
    gone.record(False, gone.allows(), started_at=clock.now)
    assert not health.trusts_existence, "somebody did, in vain"
    gone.record(True)
    assert health.trusts_existence
