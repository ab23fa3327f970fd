"""The command line: exit statuses, messages, JSON, tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from softload import cli
from softload.cli import app
from softload.doctor import Check
from softload.replay import runner
from softload.replay.synthetic import synthetic_trace
from softload.replay.trace import write_trace

invoke = CliRunner()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runner, "_QUIET_SECONDS", 0.05)
    monkeypatch.setattr(runner, "_POOL_BYTES", 512 * (32 << 10))
    yield
    structlog.reset_defaults()


def test_replay_of_a_file_writes_json_and_a_table(tmp_path: Path) -> None:
    trace, figures = tmp_path / "small.jsonl", tmp_path / "figures.json"
    write_trace(trace, synthetic_trace(20))
    result = invoke.invoke(
        app, ["replay", str(trace), "--requests", "15", "--json", str(figures), "--landing", "32MiB"]
    )
    assert result.exit_code == 0, result.output
    written = json.loads(figures.read_text())
    assert written["requests"] == 15
    assert written["trace"] == "small.jsonl"
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
        (["replay", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["replay", "--speed", "fast"], "speed: expected a number or max, got 'fast'"),
        (["replay", "--landing", "big"], "expected a size"),
        (["replay", "--shape", "dsv4-flash/0"], "expected dsv4-flash/FACTOR with a factor of 1 or more, got"),
        (["replay", "--fault", "kill-master@2"], "expected a fault of calls"),
        (["replay", "--json", "/no/such/folder/x.json"], "--json: expected a file in a folder that is there"),
        (["replay", "--store", "redis://x"], "redis"),
        (["replay", "--layout", "pages"], "pages"),
        (["doctor", "--store", "redis://x"], "redis"),
    ],
)
def test_bad_calls_exit_with_2(arguments: list[str], message: str) -> None:
    result = invoke.invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output


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
