"""README and docs: python blocks run, links lead somewhere, tables name what the code has."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from softload import LoaderConfig, PageStatus, events
from softload.errors import StoreSetupError
from softload.replay.shapes import SHAPES
from softload.stores import MemoryStore, MooncakeStore
from softload.stores.embedded import EmbeddedMooncakeStore
from softload.testing import FaultKind

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\S*)[ ]*(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def ident(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Line number, mark and source of every python block."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start()) + 2, match[2], match[3])
        for match in FENCE.finditer(text)
        if match[1] == "python"
    ]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=ident)
def test_python_blocks_run(page: Path) -> None:
    """Blocks of a page share names and may await at top level; those marked `no-run` are only parsed."""
    names: dict[str, object] = {"__name__": "__main__"}
    for line, mark, source in blocks(page):
        assert mark in ("", "no-run"), f"{ident(page)}:{line}: unknown mark {mark!r}"
        # Blank lines before the source let tracebacks show the page's own line numbers.
        code = compile("\n" * (line - 1) + source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if mark == "no-run":
            continue
        result = eval(code, names)
        if asyncio.iscoroutine(result):
            asyncio.run(result)


@pytest.mark.parametrize("page", PAGES, ids=ident)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{ident(page)} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{ident(page)} links to {target}; anchors are {sorted(anchors(linked))}"


def test_failures_names_every_status() -> None:
    text = (ROOT / "docs" / "failures.md").read_text()
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE)) == {
        status.name for status in PageStatus if status is not PageStatus.LOADED
    }


def test_failures_names_only_events_that_exist() -> None:
    text = (ROOT / "docs" / "failures.md").read_text().partition("## For the log")[2]
    named = set(re.findall(r"`([a-z]+\.[a-z]+)`", text))
    assert named
    assert named <= {getattr(events, name) for name in events.__all__}


@pytest.mark.parametrize(
    ("heading", "store"),
    [
        ("## In this process", MemoryStore),
        ("## A Mooncake of its own", EmbeddedMooncakeStore),
        ("## A cluster", MooncakeStore),
    ],
)
def test_stores_page_names_every_parameter(heading: str, store: type) -> None:
    section = (ROOT / "docs" / "stores.md").read_text().partition(heading)[2].partition("\n## ")[0]
    parameters = set(inspect.signature(store).parameters) - {"clock", "lends", "master", "hostname"}
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == parameters


def test_docs_name_only_settings_that_exist() -> None:
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"LoaderConfig\((\w+)=", text))
    assert named <= {field.name for field in fields(LoaderConfig)}


def test_shapes_of_the_examples_exist() -> None:
    assert set(re.findall(r"--shape ([a-z][\w.-]+)", (ROOT / "docs" / "replay.md").read_text())) <= set(SHAPES)


def test_replay_page_names_every_option() -> None:
    typer = pytest.importorskip("typer")
    from softload.cli import app

    command = typer.main.get_command(app).commands["replay"]
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    text = (ROOT / "docs" / "replay.md").read_text()
    named = set(re.findall(r"`(--[a-z-]+)", text))
    assert options - {"--help"} <= named, f"not in docs/replay.md: {sorted(options - named)}"
    assert named - options <= {"--store", "--help"}, f"not an option of replay: {sorted(named - options)}"


def replay_lines() -> list[str]:
    """Every call of `softload replay` that the pages show."""
    text = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ")
    found = re.findall(r"^    (?:unshare .*&& )?(softload replay .*)$", text, re.MULTILINE)
    return [line.rstrip('"') for line in found if "[" not in line]


@pytest.mark.parametrize("line", replay_lines())
def test_replay_lines_are_good_calls(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    testing = pytest.importorskip("typer.testing")
    from softload import cli
    from softload.replay import options
    from softload.replay.synthetic import synthetic_trace
    from softload.replay.trace import write_trace

    called: list[options.ReplayOptions] = []

    async def not_run(given: options.ReplayOptions, *_: object) -> dict[str, object]:
        called.append(given)
        raise StoreSetupError("not run")

    monkeypatch.setattr(cli, "replay", not_run)
    monkeypatch.setattr(options, "why_no_partitions", lambda: None)
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, synthetic_trace(300))
    words = [str(trace) if word == "TRACE" else word for word in shlex.split(line)]
    result = testing.CliRunner().invoke(cli.app, words[1:])
    assert called, result.output
    assert len(called[0].faults) == words.count("--fault")


def test_a_line_for_every_fault() -> None:
    shown = set(re.findall(r"--fault ([a-z-]+)", "".join(replay_lines())))
    assert shown == set(FaultKind)
