"""Settings of the state machine: the same runs every time, many more of them with HYPOTHESIS_PROFILE=deep."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from softload.geometry import layout

_UNLIKE_FUNCTIONS = (HealthCheck.too_slow, HealthCheck.filter_too_much)

settings.register_profile(
    "quick", derandomize=True, deadline=None, max_examples=100, suppress_health_check=_UNLIKE_FUNCTIONS
)
settings.register_profile(
    "deep", derandomize=False, deadline=None, max_examples=3000, suppress_health_check=_UNLIKE_FUNCTIONS
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(autouse=True)
def single_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's pages have few bytes a layer: each group is an object of its own, as it is for large ones."""
    monkeypatch.setattr(layout, "_FIRST_BYTES", 1)
    monkeypatch.setattr(layout, "_LATER_BYTES", 1)
