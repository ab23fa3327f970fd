"""What a replay remembers, its timeline and its page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from softload import CallSpan
from softload.cli import app
from softload.replay import runner
from softload.replay.recorder import Recorder
from softload.replay.timeline import chrome_trace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_QUIET_SECONDS", 0.05)
    monkeypatch.setattr(runner, "_POOL_BYTES", 512 * (32 << 10))


def replayed(*options: str) -> None:
    done = CliRunner().invoke(app, ["replay", "--requests", "40", *options])
    assert done.exit_code == 0, done.output


def events_of(trace: dict[str, Any], process: str) -> dict[str, list[dict[str, Any]]]:
    """Slices by track of one process, in order."""
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    tracks: dict[str, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and names["process_name", event["pid"], 0] == process:
            tracks.setdefault(names["thread_name", event["pid"], event["tid"]], []).append(event)
    return tracks


@pytest.mark.parametrize("admission", ["stream", "prefetch"])
def test_a_timeline_has_lanes_and_loads_in_their_order(tmp_path: Path, admission: str) -> None:
    file = tmp_path / "timeline.json"
    replayed("--timeline", str(file), "--admission", admission, "--fault", "slow=0.1:0.01")
    trace = json.loads(file.read_text())
    lanes, loads = events_of(trace, "lanes"), events_of(trace, "loads")
    assert any(name.startswith("read ") for name in lanes) and any(name.startswith("compute ") for name in lanes)
    for track in lanes.values():
        for before, after in zip(track, track[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.2, "one call at a time in a lane"
    whole = [event for track in loads.values() for event in track if event["name"].startswith("r")]
    assert whole and all(event["args"]["restored"] <= event["args"]["promised"] for event in whole)
    for track in loads.values():
        for event in track:
            inside = any(
                load["ts"] <= event["ts"] + 0.2 and event["ts"] + event["dur"] <= load["ts"] + load["dur"] + 0.2
                for load in track
                if load["name"].startswith("r")
            )
            assert inside, f"{event['name']} lies in its load"
    names = {event["name"] for track in loads.values() for event in track}
    assert "admission" in names and ("layer 3" in names) == (admission == "stream")


def test_reads_of_what_was_read_before_are_marked(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    # Pages enough that some corrupt one is read, whichever of them are computed twice.
    replayed("--timeline", str(file), "--integrity", "full", "--fault", "corrupt=0.3", "--requests", "160")
    trace = json.loads(file.read_text())
    marks = [event for event in trace["traceEvents"] if event["ph"] == "i" and event["name"] == "retry"]
    assert marks
    reads = {
        (event["tid"], event["ts"])
        for name, track in events_of(trace, "lanes").items()
        if name.startswith("read ")
        for event in track
        if event["name"] == "retry"
    }
    assert {(mark["tid"], mark["ts"]) for mark in marks} == reads


def test_what_is_remembered_is_bounded() -> None:
    recorder = Recorder(most_loads=1, most_calls=2)
    for number in range(3):
        recorder.load(f"r{number}").settled(4, 3, ["not_found"])
        recorder.call(CallSpan("read", 0, "", 1.0, 2.0, abandoned=False))
        recorder.stalled(0.1)
    assert (len(recorder.loads), len(recorder.calls), len(recorder.stalls)) == (1, 2, 2)
    assert recorder.left_out == 4
    assert chrome_trace(recorder)["otherData"] == {"left_out": 4}


def test_a_page_needs_no_network_and_says_what_was_missed(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    file = tmp_path / "report.html"
    replayed("--report", str(file), "--fault", "remove=0.2")
    page = file.read_text()
    assert "name=viewport" in page and "not_found" in page and "restored" in page
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=", own), "nothing is fetched"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1200], ids=["phone", "desk"])
def test_a_page_is_drawn_by_a_real_browser(tmp_path: Path, width: int) -> None:
    pytest.importorskip("plotly")
    file = tmp_path / "report.html"
    replayed("--report", str(file), "--fault", "remove=0.2")
    # A window has a least width, a frame has not.
    tell = "parent.postMessage(document.querySelectorAll('.main-svg').length+' plots, '+document.body.scrollWidth,'*')"
    file.write_text(file.read_text() + f"<script>addEventListener('load',()=>setTimeout(()=>{tell},500))</script>")
    frame = tmp_path / "frame.html"
    frame.write_text(
        "<script>addEventListener('message',event=>document.title=event.data)</script>"
        f'<iframe src="report.html" style="width:{width}px;height:2000px;border:0"></iframe>'
    )
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=1400,2400",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=10000",
            "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    found = re.search(r"<title>(\d+) plots, (\d+)</title>", done.stdout)
    assert found is not None, done.stdout[:500]
    assert int(found[1]) >= 4, "the plots are drawn"
    assert int(found[2]) <= width, "nobody scrolls sideways"
