"""Measures: percentiles, overlapping time, and the loop's lag."""

from __future__ import annotations

import asyncio
import time

import pytest

from softload.replay.metrics import ActiveTime, LagProbe, Samples, resident_bytes


def test_percentiles_in_milliseconds() -> None:
    samples = Samples()
    for number in range(1, 1001):
        samples.add(number / 1e3)
    assert samples.milliseconds(50, 99.9) == {"p50": 500.5, "p99_9": pytest.approx(999.0, abs=0.1), "max": 1000.0}
    assert Samples().milliseconds(50) == {"p50": 0.0, "max": 0.0}


def test_a_long_run_keeps_a_bounded_number_of_samples_and_the_largest() -> None:
    samples = Samples(most=64)
    for number in range(10_000):
        samples.add(9.0 if number == 4321 else number / 1e4)
    assert len(samples) == 10_000
    assert 32 <= len(samples._seconds) <= 64
    assert samples.milliseconds(50) == {"p50": pytest.approx(500.0, abs=20.0), "max": 9000.0}
    assert samples.milliseconds() == {"max": 9000.0}


def test_overlapping_time_counts_once() -> None:
    active = ActiveTime()
    with active:
        with active:
            pass
        assert active.seconds == 0.0
    assert active.seconds > 0.0


@pytest.mark.asyncio
async def test_a_blocked_loop_is_seen() -> None:
    with LagProbe() as probe:
        await asyncio.sleep(0.01)
        time.sleep(0.05)  # noqa: ASYNC251  # what the probe must see
        await asyncio.sleep(0.01)
        async with asyncio.timeout(15):
            while len(probe.lag) <= 2:  # noqa: ASYNC110  # nothing signals it
                await asyncio.sleep(0.01)
    assert probe.lag.milliseconds()["max"] > 40.0


def test_resident_memory_is_plausible() -> None:
    assert 10 << 20 < resident_bytes() < 1 << 40
