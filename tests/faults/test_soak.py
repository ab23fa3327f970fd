"""A minute of faults of all kinds; `make soak` takes half an hour."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable

import pytest

from .soak import complaints, soak

pytestmark = [pytest.mark.mooncake, pytest.mark.timeout(240)]
pytest.importorskip("mooncake")


def test_a_minute_of_faults(report: Callable[..., None]) -> None:
    faulthandler.cancel_dump_traceback_later()  # takes longer than the time after which stacks are printed
    figures = soak(60.0, seed=1)
    report(
        "soak",
        **{
            name: float(figures[name])
            for name in ("requests", "restored_pages", "computed_pages", "wall_s", "quarantined_bytes_peak",
                         "rss_second_quarter", "rss_last_quarter", "threads_peak")
        },
    )  # fmt: skip
    assert complaints(figures) == []
    assert figures["restored_pages"] > 0
    assert len(figures["happened"]) > 10
