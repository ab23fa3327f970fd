"""What forwards take for a layer, as the linker sees it: the time between their questions, without their waits."""

from __future__ import annotations

import pytest

from softload.adapters.sglang.batches import LayerPace

LAYERS = 12


class Clock:
    """Stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def forward(pace: LayerPace, clock: Clock, batch: int, computing: float, waiting: float, *, asks: int = 1) -> None:
    """One forward; pools with several buffers ask for each layer more than once."""
    for layer in range(LAYERS):
        pace.asks(batch, layer)
        clock.now += waiting
        pace.goes_on()
        for _ in range(asks - 1):
            clock.now += computing / asks
            pace.asks(batch, layer)
            pace.goes_on()
        clock.now += computing / asks


@pytest.mark.parametrize("asks", [1, 2])
@pytest.mark.parametrize("waiting", [0.0, 0.5])
def test_waits_are_no_time_of_a_layer(waiting: float, asks: int) -> None:
    clock = Clock()
    pace = LayerPace(clock)
    assert pace.seconds == 0.0
    for batch in range(3):
        forward(pace, clock, batch, 0.005, waiting, asks=asks)
        clock.now += 3.0  # nothing runs between two batches
    assert pace.seconds == pytest.approx(0.005)


def test_a_layer_that_was_held_up_says_little_and_a_slower_model_is_known_after_some_forwards() -> None:
    clock = Clock()
    pace = LayerPace(clock)
    forward(pace, clock, 0, 0.005, 0.0)
    pace.asks(1, 0)
    pace.goes_on()
    clock.now += 10.0
    pace.asks(1, 1)
    assert pace.seconds < 0.0075
    for batch in range(2, 7):
        forward(pace, clock, batch, 0.020, 0.0)
    assert pace.seconds == pytest.approx(0.020, rel=0.1)
