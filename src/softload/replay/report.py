"""The summary table at the end of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from softload.replay.runner import ZEROS

__all__ = ["summary_rows", "summary_table"]


def summary_table(figures: Mapping[str, Any]) -> Table:
    """The figures that a reader wants first; all of them are in the JSON."""
    how = ", ".join(figures[name] for name in ("shape", "layout", "admission"))
    title = escape(f"replay of {figures['trace']} on {figures['store']}: {how}")
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="left", overflow="fold")
    table.caption_justify = "left"
    bad = [name.replace("_", " ") for name in ZEROS if figures[name]]
    table.caption = f"NOT CLEAN: {', '.join(bad)}" if bad else "clean: nothing was lost, leaked or mismatched"
    for section in (_pages(figures), _times(figures), _zeros(figures)):
        for name, value in section:
            table.add_row(name, value)
        table.add_section()
    return table


def summary_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The same as plain text: name and value."""
    rows = (row for section in (_pages(figures), _times(figures), _zeros(figures)) for row in section)
    return [(name, Text.from_markup(value).plain) for name, value in rows]


def _pages(figures: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    asked, restored, bound = figures["request_pages"], figures["restored_pages"], figures["lru_bound_pages"]
    yield "requests", f"{figures['requests']:,} in {figures['wall_s']:.1f} s ({figures['requests_per_s']:.1f}/s)"
    yield "pages asked for", f"{asked:,}"
    yield (
        "restored",
        f"{restored:,} ({_share(restored, asked)} of all, {_share(restored, bound)} of an ideal LRU's {bound:,})",
    )
    yield "computed", f"{figures['computed_pages']:,}"
    promised = figures["lookup_pages"]
    missed = sum(figures["missed_pages"].values())
    yield (
        "found, not restored",
        f"{missed:,} of {promised:,}"
        + (f", {figures['missed_requests']:,} requests: {_counts(figures['missed_pages'])}" if missed else ""),
    )
    yield "saved", _counts(figures["saved_pages"]) or "none"
    if figures["missed_pages"].get("shed") or figures["saved_pages"].get("shed"):
        yield (
            "hint",
            f"shed: landing memory was taken, or too many calls hung; --landing is {figures['landing_bytes']:,} bytes",
        )
    if figures["draft"] != "none":
        yield "draft pages", f"{figures['draft_pages']:,}, dropped {figures['draft_dropped']:,}"
    if figures["late_failures"]:
        yield "late failures", f"{figures['late_failures']:,}"
    if figures["faults"]:
        yield "faults", ", ".join(figures["faults"])
        yield (
            "cut without a fault",
            f"{figures['promised_unrestored']:,} requests {_counts(figures['promised_unrestored_pages'])}",
        )


def _times(figures: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    yield "loaded", f"{figures['bytes_loaded'] / 1e9:.2f} GB at {figures['load_gbps']:.2f} GB/s while loading"
    for name, label in (
        ("first_layer_ms", "first layer"),
        ("load_ms", "load"),
        ("stall_ms", "decode stall"),
        ("loop_lag_ms", "event-loop lag"),
        ("idle_loop_lag_ms", "lag of an idle loop beside it"),
    ):
        yield label, ", ".join(f"{key.replace('_', '.')} {value:.2f}" for key, value in figures[name].items()) + " ms"
    yield "quarantine peak", f"{figures['quarantined_bytes_peak']:,} bytes"
    yield "memory", f"{figures['rss_mid'] / 1e6:,.0f} MB at half, {figures['rss_end'] / 1e6:,.0f} MB at the end"


def _zeros(figures: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name in ZEROS:
        value = figures[name]
        yield name.replace("_", " "), f"[red]{value:,}[/red]" if value else "0"
    if figures["exceptions"]:
        yield "", _counts(figures["exceptions_by_type"])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
