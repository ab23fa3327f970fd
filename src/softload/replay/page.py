"""A replay as one self-contained page: figures, plots, the slowest loads. No network; reads well on a phone."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from softload.replay.recorder import LoadRecord, Recorder

__all__ = ["report_page"]

_BINS = 60
"""Of a plot over time."""

_SLOWEST = 10

_STYLE = """
:root{color-scheme:light}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;padding:1rem;max-width:60rem;color:#1a1a1a;background:#fff}
h1{font-size:1.4rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2rem 0 .3rem}
p{margin:.3rem 0;color:#444}
table{border-collapse:collapse;width:100%;font-size:.9rem}
td,th{padding:.25rem .5rem;border-bottom:1px solid #ddd;text-align:left;overflow-wrap:anywhere}
td:last-child,th:last-child{text-align:right;font-variant-numeric:tabular-nums}
.bad{color:#b00020;font-weight:600}
.plot{width:100%;height:20rem;touch-action:pan-y}
"""


def report_page(figures: Mapping[str, Any], recorder: Recorder, rows: Sequence[tuple[str, str]]) -> str:
    """The page.

    Args:
        figures: the replay's.
        recorder: what it remembered of single loads.
        rows: the summary, name and value, as the terminal shows it.
    """
    title = f"softload replay: {figures['shape']}, {figures['store']}"
    loads = [load for load in recorder.loads if load.ended]
    sections = [_summary(rows)]
    for heading, note, figure in _plots(loads, recorder):
        sections.append(_section(heading, note, figure, f"plot{len(sections)}"))
    sections.append(_slowest_table(loads))
    if recorder.left_out:
        sections.append(f"<p>{recorder.left_out:,} loads, calls and waits were beyond what is remembered.</p>")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script>"
        f"<h1>{html.escape(title)}</h1>{''.join(sections)}</html>\n"
    )


def _summary(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def _section(heading: str, note: str, figure: go.Figure, name: str) -> str:
    figure.update_layout(
        template="plotly_white",
        margin={"l": 48, "r": 8, "t": 8, "b": 40},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        font={"size": 12},
        hovermode="x unified",
        dragmode=False,  # a finger that scrolls the page must not zoom the plot
    )
    text = figure.to_json().replace("</", "<\\/")
    config = "{responsive:true,displayModeBar:false}"
    return (
        f"<h2>{html.escape(heading)}</h2><p>{html.escape(note)}</p><div class=plot id={name}></div>"
        f"<script>{{const f={text};Plotly.newPlot('{name}',f.data,f.layout,{config})}}</script>"
    )


def _plots(loads: Sequence[LoadRecord], recorder: Recorder) -> Iterator[tuple[str, str, go.Figure]]:
    if not loads:
        return
    began = recorder.began
    width = max(1e-6, (max(load.ended for load in loads) - began) / _BINS)
    yield (
        "Restored share over time",
        "Pages that the store gave back, of those that it had promised.",
        _share(loads, began, width),
    )
    yield (
        "Misses by status",
        "Promised pages that were not restored, when their load had ended.",
        _misses(loads, began, width),
    )
    times = {"whole load": [load.ended - load.started for load in loads]}
    first = [load.waits[0][1] - load.started for load in loads if load.waits]
    times |= {"first layer": first} if first else {}
    yield "How long loads took", "Milliseconds, cumulative: the share of loads that took no longer.", _shares_of(times)
    if recorder.stalls:
        stalls = {"stall": [stall.seconds for stall in recorder.stalls]}
        yield (
            "How long decodes stalled",
            "Milliseconds that running decodes waited for loads, cumulative.",
            _shares_of(stalls),
        )
    slow = _slowest(loads)
    if any(load.waits for load in slow):
        yield (
            "The slowest loads, layer by layer",
            "When the forward got each layer, milliseconds after the request.",
            (_layers(slow)),
        )


def _bin(load: LoadRecord, began: float, width: float) -> int:
    return min(_BINS - 1, int((load.ended - began) / width))


def _middles(width: float) -> list[float]:
    return [round((index + 0.5) * width, 3) for index in range(_BINS)]


def _share(loads: Sequence[LoadRecord], began: float, width: float) -> go.Figure:
    promised, restored = Counter[int](), Counter[int]()
    for load in loads:
        at = _bin(load, began, width)
        promised[at] += load.promised
        restored[at] += load.restored
    share = [100 * restored[at] / promised[at] if promised[at] else None for at in range(_BINS)]
    figure = go.Figure(go.Scatter(x=_middles(width), y=share, mode="lines+markers", connectgaps=True, name="restored"))
    figure.update_yaxes(title="per cent", range=[0, 102])
    return figure.update_xaxes(title="seconds")


def _misses(loads: Sequence[LoadRecord], began: float, width: float) -> go.Figure:
    counts: dict[str, Counter[int]] = {}
    for load in loads:
        for status, pages in load.missed.items():
            counts.setdefault(status, Counter())[_bin(load, began, width)] += pages
    figure = go.Figure(
        [
            go.Bar(x=_middles(width), y=[by_bin[at] for at in range(_BINS)], name=status)
            for status, by_bin in sorted(counts.items())
        ]
    )
    if not counts:
        figure.add_annotation(text="none", showarrow=False, font={"size": 20})
    figure.update_layout(barmode="stack")
    figure.update_yaxes(title="pages", rangemode="tozero")
    return figure.update_xaxes(title="seconds")


def _shares_of(times: Mapping[str, Sequence[float]]) -> go.Figure:
    figure = go.Figure()
    for name, seconds in times.items():
        ordered = sorted(1e3 * each for each in seconds)
        # As many points as a plot can show.
        picked = sorted({round(step * (len(ordered) - 1) / 400) for step in range(401)})
        figure.add_scatter(
            x=[round(ordered[index], 3) for index in picked],
            y=[100 * (index + 1) / len(ordered) for index in picked],
            mode="lines",
            line={"shape": "hv"},
            name=name,
        )
    figure.update_yaxes(title="per cent", range=[0, 102])
    return figure.update_xaxes(title="milliseconds", type="log")


def _slowest(loads: Sequence[LoadRecord]) -> list[LoadRecord]:
    return sorted(loads, key=lambda load: load.started - load.ended)[:_SLOWEST]


def _layers(loads: Sequence[LoadRecord]) -> go.Figure:
    figure = go.Figure()
    for load in loads:
        figure.add_scatter(
            x=list(range(len(load.waits))),
            y=[round(1e3 * (end - load.started), 3) for _, end in load.waits],
            mode="lines",
            name=_name(load),
        )
    figure.update_yaxes(title="milliseconds", rangemode="tozero")
    return figure.update_xaxes(title="layer")


def _name(load: LoadRecord) -> str:
    more = f" +{len(load.requests) - 1}" if len(load.requests) > 1 else ""
    return f"{load.requests[0]}{more}"


def _slowest_table(loads: Sequence[LoadRecord]) -> str:
    head = "<tr><th>load</th><th>pages</th><th>missed</th><th>ms</th></tr>"
    rows = []
    for load in _slowest(loads):
        missed = ", ".join(f"{status} {count:,}" for status, count in load.missed.most_common()) or "none"
        cells = (
            _name(load),
            f"{load.restored:,} of {load.promised:,}",
            missed,
            f"{1e3 * (load.ended - load.started):.1f}",
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<h2>The slowest loads</h2><table>{head}{''.join(rows)}</table>"
