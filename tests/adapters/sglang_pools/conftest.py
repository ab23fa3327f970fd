"""These tests compare with SGLang's own pools and assembler: `make test-sglang`. Without SGLang they are skipped."""

from __future__ import annotations

import pytest

from . import stand_ins
from .tally import COMPARED

collect_ignore_glob = [] if stand_ins.install() else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of what was compared."""
    if not COMPARED:
        return
    kinds = sorted({kind for _, kind in COMPARED})
    terminalreporter.section("values that equal SGLang's")
    terminalreporter.line(f"{'case':32}" + "".join(f"{kind:>12}" for kind in kinds))
    for name in sorted({name for name, _ in COMPARED}):
        terminalreporter.line(f"{name:32}" + "".join(f"{COMPARED[name, kind]:12,}" for kind in kinds))
