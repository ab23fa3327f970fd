"""Settings of the property tests: the same examples every time, many more of them with HYPOTHESIS_PROFILE=deep."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("quick", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("deep", derandomize=False, deadline=None, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
