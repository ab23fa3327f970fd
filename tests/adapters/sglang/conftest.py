"""Tests of the SGLang linker: `make test-sglang`. Without SGLang they are skipped."""

from __future__ import annotations

import logging
import os

from tests.adapters.sglang_pools import stand_ins

collect_ignore_glob = [] if stand_ins.install() else ["test_*.py"]

os.environ["HF_HUB_OFFLINE"] = "1"
logging.getLogger("sglang").setLevel(logging.WARNING)
