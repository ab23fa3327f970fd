"""Figures of these tests are printed at the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from softload.geometry import layout

_figures = pytest.StashKey[list[str]]()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Note figures of this test: `report("what", answered_s=1.02)`."""
    lines = request.config.stash.setdefault(_figures, [])

    def note(what: str, **figures: float) -> None:
        told = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        lines.append(f"{request.node.name}: {what}: {told}")

    yield note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_figures, [])
    if lines:
        terminalreporter.section("faults: what was measured")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def single_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools of these tests have some bytes a layer: each group is an object of its own, as it is for large ones."""
    monkeypatch.setattr(layout, "_FIRST_BYTES", 1)
    monkeypatch.setattr(layout, "_LATER_BYTES", 1)
