"""A replay as a trace in Chrome's format, which Perfetto opens: lanes, loads, and what the forward waited for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from softload.fetches import RETRY, SECOND_READ
from softload.replay.recorder import LoadRecord, Recorder

__all__ = ["chrome_trace"]

_LANES, _LOADS, _ENGINE = 1, 2, 3
_PROCESSES = {_LANES: "lanes", _LOADS: "loads", _ENGINE: "engine"}


def chrome_trace(recorder: Recorder) -> dict[str, Any]:
    """The trace, ready for JSON: complete events, microseconds since the replay began.

    On the lanes lie the blocking calls; a read of what was read before (a retry, or a second read beside one that is
    late) is named so, and has a mark across all lanes where it starts. Loads share tracks where they do not overlap. On
    a load's track lie its admission, and per layer what the forward waited for it and when it was there.
    """
    tracks: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []
    for pid, track, name, start, end, details in (*_calls(recorder), *_loads(recorder), *_stalls(recorder)):
        tid = tracks.setdefault((pid, track), len(tracks) + 1)
        event = {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": name,
            "ts": round((start - recorder.began) * 1e6, 1),
            "dur": round(max(0.0, end - start) * 1e6, 1),
        }
        events.append(event | {"args": details} if details else event)
    for span in recorder.calls:
        if span.label in (RETRY, SECOND_READ):
            tid = tracks[_LANES, f"{span.group} {span.lane}"]
            mark = {"ph": "i", "s": "p", "pid": _LANES, "tid": tid, "name": span.label}
            events.append(mark | {"ts": round((span.started - recorder.began) * 1e6, 1)})
    names = [_named("process_name", pid, 0, name) for pid, name in _PROCESSES.items()]
    names += [_named("thread_name", pid, tid, track) for (pid, track), tid in tracks.items()]
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": {"left_out": recorder.left_out}}


_Slice = tuple[int, str, str, float, float, dict[str, Any]]


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _calls(recorder: Recorder) -> Iterator[_Slice]:
    for span in sorted(recorder.calls, key=lambda span: (span.group, span.lane, span.started)):
        details = {"abandoned": True} if span.abandoned else {}
        track = f"{span.group} {span.lane}"
        yield _LANES, track, span.label or span.group, span.started, span.ended, details


def _loads(recorder: Recorder) -> Iterator[_Slice]:
    for track, load in _tracks(recorder.loads):
        name = ", ".join(load.requests)
        ended = max(load.ended, load.admitted, load.started, *(end for _, end in load.waits[-1:]))
        details = {"promised": load.promised, "restored": load.restored, "missed": dict(load.missed)}
        yield _LOADS, track, name, load.started, ended, details
        if load.admitted:
            yield _LOADS, track, "admission", load.started, load.admitted, {}
        for layer, (start, end) in enumerate(load.waits):
            yield _LOADS, track, f"layer {layer}", start, end, {"waited_ms": round((end - start) * 1e3, 3)}


def _tracks(loads: Iterable[LoadRecord]) -> Iterator[tuple[str, LoadRecord]]:
    """Each load with the first track that is free when it starts."""
    busy_until: list[float] = []
    for load in sorted(loads, key=lambda load: load.started):
        free = next((index for index, until in enumerate(busy_until) if until <= load.started), len(busy_until))
        if free == len(busy_until):
            busy_until.append(0.0)
        busy_until[free] = max(load.ended, load.started)
        yield f"load {free}", load


def _stalls(recorder: Recorder) -> Iterator[_Slice]:
    for stall in recorder.stalls:
        yield _ENGINE, "decodes wait", "stall", stall.ended - stall.seconds, stall.ended, {}
