"""The command line: exit statuses, messages, JSON, tables."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from softload import cli
from softload.cli import app
from softload.doctor import Check
from softload.errors import LandingMemoryError, SoftloadError
from softload.replay import options, runner
from softload.replay.synthetic import synthetic_trace
from softload.replay.trace import write_trace

invoke = CliRunner()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_QUIET_SECONDS", 0.05)
    monkeypatch.setattr(runner, "_POOL_BYTES", 512 * (32 << 10))


def test_replay_of_a_file_writes_json_and_a_table(tmp_path: Path) -> None:
    trace, figures = tmp_path / "[red]small.jsonl", tmp_path / "figures.json"
    write_trace(trace, synthetic_trace(20))
    result = invoke.invoke(
        app, ["replay", str(trace), "--requests", "15", "--json", str(figures), "--landing", "32MiB"]
    )
    assert result.exit_code == 0, result.output
    written = json.loads(figures.read_text())
    assert written["requests"] == 15
    assert written["trace"] == "[red]small.jsonl"
    assert "replay of [red]small.jsonl on memory://" in " ".join(result.output.split())
    assert written["landing_bytes"] == 32 << 20
    assert "restored" in result.output and "15/15 requests" in result.output


def test_json_to_standard_output_is_json_alone() -> None:
    result = invoke.invoke(app, ["replay", "--requests", "10", "--json", "-", "--admission", "stream"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["admission"] == "stream"


def test_a_replay_that_is_not_clean_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "is_clean", lambda figures: False)
    assert invoke.invoke(app, ["replay", "--requests", "5"]).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file.jsonl"], "TRACE: expected a file that can be read, got no-such-file.jsonl: No such file"),
        (["/"], "TRACE: expected a file that can be read, got /: Is a directory"),
        (["--speed", "fast"], "--speed: expected a number or max, got 'fast'"),
        (["--speed", "0"], "--speed: expected a factor above 0, got 0.0"),
        (["--speed", "nan"], "--speed: expected a factor above 0, got nan"),
        (["--requests", "0"], "--requests: expected at least 1, got 0"),
        (["--landing", "big"], "--landing: expected a size like 256MiB"),
        (["--landing", "-1"], "--landing: expected a size like 256MiB or 1GiB (units B, KiB, MiB, GiB, TiB), got '-1'"),
        (["--landing", "0"], "--landing: expected at least 1, got 0"),
        (["--landing", "10000TiB"], "--landing: expected less than this machine's "),
        (["--layer-time", "-1"], "--layer-time: expected 0 or more seconds, got -0.001"),
        (["--deadline", "nan"], "--deadline: expected 0 or more seconds, got nan"),
        (["--max-running", "0"], "--max-running: expected at least 1, got 0"),
        (["--shape", "dsv4-flash/0"], "--shape: expected dsv4-flash/FACTOR with a factor of 1 or more, got"),
        (["--read-mode", "ranges"], "--read-mode: 'ranges' needs layout 'page', got layout 'grouped'"),
        (["--shape", "gpt"], "--shape: expected one of mini, "),
        (["--fault", "kill-master@2"], "--fault 'kill-master@2': expected a cluster of the replay's own"),
        (["--fault", "evict=2"], "--fault 'evict=2': expected a probability of at most 1, got 2"),
        (["--fault", "slow=0.1"], "--fault 'slow=0.1': expected slow=P:SECONDS"),
        (
            ["--fault", "hang=99999999999:1"],
            "--fault 'hang=99999999999:1': expected at most 100000 calls, got 99999999",
        ),
        (["--fault", "corrupt=0.1"], "--fault 'corrupt=0.1': expected layout grouped with integrity full"),
        (
            ["--fault", "corrupt=0.1", "--layout", "page", "--integrity", "full"],
            "--fault 'corrupt=0.1': expected layout grouped with integrity full, whose digests find a flipped byte, "
            "got layout page",
        ),
        (["--fault", "draft-loss=0.1"], "--fault 'draft-loss=0.1': expected a draft with objects of its own"),
        (["--json", "/no/such/folder/x.json"], "--json: expected a file that can be written, got /no/such/folder/x"),
        (["--json", "/"], "--json: expected a file that can be written, got /: Is a directory"),
        (["--store", "redis://x"], "--store 'redis://x': expected a URL like memory://"),
        (["--store", "memory://?capacity=0"], "--store 'memory://?capacity=0': capacity: expected a value above 0"),
        (
            ["--store", "mooncake://h:1?segment=1"],
            "--store 'mooncake://h:1?segment=1': segment: expected at least 16MiB",
        ),
    ],
)
def test_bad_calls_exit_with_2(arguments: list[str], message: str) -> None:
    result = invoke.invoke(app, ["replay", *arguments])
    assert result.exit_code == 2
    assert result.output.startswith(f"softload: {message}")
    assert result.output.count("\n") == 1


def test_ports_are_cut_off_in_a_network_of_ones_own_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "why_no_partitions", lambda: "the network of the whole machine")
    arguments = ["--store", "mooncake://embedded?owners=1", "--fault", "part-owner@1"]
    result = invoke.invoke(app, ["replay", *arguments])
    assert result.exit_code == 2
    assert result.output.startswith("softload: --fault 'part-owner@1': expected iproute2 and a network namespace of")
    assert result.output.endswith(", got the network of the whole machine\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "--layout", "pages"], "'pages'"),
        (["replay", "--requests", "x"], "--requests"),
        (["doctor", "--store", "redis://x"], "--store 'redis://x': expected a URL like memory://"),
    ],
)
def test_other_bad_calls_exit_with_2(arguments: list[str], message: str) -> None:
    result = invoke.invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (LandingMemoryError("expected room, got none; set a smaller `landing_bytes`"), "set a smaller one"),
        (ValueError("landing_bytes: expected at least 2, got 1"), "expected at least 2, got 1"),
        (SoftloadError("landing_bytes: expected less, got more"), "expected less, got more"),
    ],
)
def test_an_error_of_the_library_is_one_line(error: Exception, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object) -> dict[str, object]:
        raise ExceptionGroup("tasks", [error])

    monkeypatch.setattr(cli, "replay", refused)
    result = invoke.invoke(app, ["replay", "--requests", "5"])
    assert result.exit_code == 2
    assert result.output.startswith("softload: --landing: ")
    assert result.output.endswith(f"{line}\n")


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> dict[str, object]:
        raise ValueError("shapes do not match")

    monkeypatch.setattr(cli, "replay", broken)
    assert isinstance(invoke.invoke(app, ["replay", "--requests", "5"]).exception, ExceptionGroup | ValueError)


def test_landing_memory_that_no_page_fits_into_is_a_bad_call() -> None:
    result = invoke.invoke(app, ["replay", "--requests", "5", "--landing", "64KiB"])
    assert result.exit_code == 2
    assert result.output.startswith("softload: --landing: expected at least ")
    assert result.output.endswith(", got 65536\n")


def test_figures_of_an_earlier_run_survive_a_bad_call(tmp_path: Path) -> None:
    figures, fresh = tmp_path / "figures.json", tmp_path / "fresh.json"
    figures.write_text("{}")
    for file in (figures, fresh):
        assert invoke.invoke(app, ["replay", "--json", str(file), "--store", "memory://?capacity=10000TiB"]).exit_code
    assert figures.read_text() == "{}"
    assert not fresh.exists()


@pytest.mark.parametrize("command", [["-m", "softload"], ["-m", "softload", "replay", "--requests", "2"]])
def test_as_a_module(command: list[str]) -> None:
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, check=False)
    assert ("Usage: softload" in result.stdout + result.stderr) == (len(command) == 2)
    assert result.returncode == (0 if len(command) > 2 else 2)


def test_as_the_installed_command() -> None:
    command = [sys.executable, "-c", _console_script(), "shapes"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "glm-5.2" in result.stdout


def test_version() -> None:
    result = invoke.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"softload {metadata.version('softload')}\n"


def _console_script() -> str:
    """What the installed command imports and calls."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["softload"].partition(":")
    return f"from {module} import {function}; {function}()"


_MODULE = "import runpy; runpy.run_module('softload', run_name='__main__')"


@pytest.mark.parametrize("run", [_MODULE, _console_script()], ids=["-m", "softload"])
def test_without_the_packages_of_the_command_line(run: str) -> None:
    code = f"import sys; sys.modules['typer'] = None; {run}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr == (
        "softload: the command line needs typer: pip install 'softload[cli]', or pip install '.[cli]' in a checkout\n"
    )


@pytest.mark.mooncake
def test_a_mooncake_starts_without_noise() -> None:
    """In a process of its own: the native library writes some of it only once."""
    pytest.importorskip("mooncake")
    command = [sys.executable, "-m", "softload", "doctor"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout
    assert result.stderr == ""


def test_shed_pages_hint_at_landing_memory() -> None:
    result = invoke.invoke(app, ["replay", "--requests", "60", "--landing", "160KiB"])
    assert result.exit_code == 0, result.output
    assert "--landing is 163,840 bytes" in " ".join(result.output.replace("│", " ").split())


def test_a_malformed_trace_exits_with_2_and_names_the_line(tmp_path: Path) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n')
    result = invoke.invoke(app, ["replay", str(trace)])
    assert result.exit_code == 2
    assert "bad.jsonl:1: hash_ids: expected 2" in result.output


def test_store_that_cannot_be_set_up_exits_with_1() -> None:
    result = invoke.invoke(app, ["replay", "--requests", "5", "--store", "mooncake://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.output


def test_shapes_lists_all() -> None:
    result = invoke.invoke(app, ["shapes"])
    assert result.exit_code == 0
    for name in ("mini", "llama-3.1-8b", "qwen3-8b", "kimi-k2", "deepseek-v3.2", "glm-5.2", "dsv4-flash"):
        assert name in result.output


def test_doctor_on_memory_is_fit() -> None:
    result = invoke.invoke(app, ["doctor", "--store", "memory://"])
    assert result.exit_code == 0
    assert "whole read: 65536 bytes, the same" in result.output


def test_doctor_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "diagnose", lambda url: [Check("thing", False, "gone [x]", "install it")])
    result = invoke.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "missing thing: gone [x]" in result.output
    assert "-> install it" in result.output
