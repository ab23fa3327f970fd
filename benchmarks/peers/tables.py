"""What was measured, as tables in Markdown, and held against the goals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["tables"]


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Lines."""
    for case in result["cases"]:
        yield from _case(case)
    for name, by_store in result["figures"].items():
        for store, figures in by_store.items():
            yield f"\n**{name}, {store}**\n"
            yield from _flat(figures)
    yield "\n**Goals**\n"
    yield "| goal | case | wanted | measured | |"
    yield "| --- | --- | ---: | ---: | --- |"
    for goal, case, wanted, measured, met in goals(result):
        yield f"| {goal} | {case} | {wanted} | {measured:.2f} | {'met' if met else '**missed**'} |"


def _case(case: dict[str, Any]) -> Iterator[str]:
    yield f"\n**{case['case']}, {case['store']}: {case['bytes'] / 1e6:.0f} MB, {case['pages']} pages**\n"
    wrong = [name for name, good in case["bytes_as_they_must_be"].items() if not good]
    if wrong:
        yield f"WRONG BYTES: {', '.join(wrong)}\n"
    yield "| side | layer time, ms | admission | first layer | all layers | GB/s | report | stall | outside |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for side, by_time in case["sides"].items():
        for label, figures in by_time.items():
            cells = [_ms(figures.get(name)) for name in ("admission", "first_layer", "last_layer")]
            cells.append(f"{case['bytes'] / figures['last_layer']['median'] / 1e9:.2f}" if label == "0" else "")
            cells += [_ms(figures["report"]), _ms(figures["stall"])]
            cells.append(f"{figures['outside']['median']:.1%}" if "outside" in figures and label == "0" else "")
            yield f"| {side} | {label} | {' | '.join(cells)} |"


def _ms(figure: dict[str, float] | None) -> str:
    if figure is None:
        return ""
    return f"{1000 * figure['median']:.1f} ({1000 * figure['min']:.1f}–{1000 * figure['max']:.1f})"


def _flat(figures: Any, path: str = "") -> Iterator[str]:
    if isinstance(figures, dict) and set(figures) == {"median", "min", "max"}:
        yield f"- {path}: {figures['median']:.4g} ({figures['min']:.4g}–{figures['max']:.4g})"
    elif isinstance(figures, dict):
        for name, value in figures.items():
            yield from _flat(value, f"{path}, {name}" if path else name)
    elif isinstance(figures, list):
        yield f"- {path}: {', '.join(f'{value:.4g}' for value in figures)}"
    else:
        yield f"- {path}: {figures:.4g}" if isinstance(figures, float) else f"- {path}: {figures}"


Goal = tuple[str, str, str, float, bool]

_ALL_LAYERS = {
    "local": {"mla": 1.8, "dsa": 1.8, "mha": 1.3, "fragments": 5.0},
    "owner": {"mla": 1.2, "dsa": 1.2, "mha": 0.95, "fragments": 4.0},
}
_FIRST_LAYER = {"local": 0.7, "owner": 1.1}


def goals(result: dict[str, Any]) -> Iterator[Goal]:
    """Each goal that what was measured says something about: name, case, wanted, measured, met."""
    for case in result["cases"]:
        yield from _case_goals(case)
    for store, figures in result["figures"].get("missing keys", {}).items():
        rates = figures["pages_per_second"]
        share = rates["2 of 32 gone"]["median"] / rates["whole"]["median"]
        yield "rate with 2 of 32 keys gone", store, ">= 0.9", share, share >= 0.9
    for store, figures in result["figures"].get("growth", {}).items():
        most = max(figures["twice_the_pages"])
        yield "twice the pages", store, "<= 2.1", most, most <= 2.1
    for store, figures in result["figures"].get("many loads", {}).items():
        share = figures["many_bytes_per_second"]["median"] / figures["one_bytes_per_second"]["median"]
        yield "64 loads, bytes/s of one's", store, ">= 0.9", share, share >= 0.9
        spread = figures["first_layer_p99_of_median"]["median"]
        yield "64 loads, first layer p99 of median", store, "<= 4", spread, spread <= 4
    for store, figures in result["figures"].get("checks", {}).items():
        off = figures["seconds"]["off"]["median"]
        for kind, most in (("sample", 1.05), ("full", 1.30)):
            cost = figures["seconds"][kind]["median"] / off
            yield f"integrity {kind}", store, f"<= {most}", cost, cost <= most
        share = figures["descriptors"]["median"]
        yield "descriptors, share of a load", store, "<= 0.05", share, share <= 0.05
    for store, figures in result["figures"].get("loop lag", {}).items():
        lag = 1000 * (figures["8 loads"]["p99_9"] - figures["idle"]["p99_9"])
        yield "loop lag p99.9 less idle's, ms", store, "<= 5", lag, lag <= 5
    for figures in result["figures"].get("plan", {}).values():
        seconds, nbytes = figures["grouped"]["seconds"]["median"], figures["grouped"]["peak_bytes"]
        yield "plan of 128K dsv4-flash, ms", "", "<= 5", 1000 * seconds, seconds <= 0.005
        yield "plan of 128K dsv4-flash, MiB", "", "<= 4", nbytes / 2**20, nbytes <= 4 << 20


def _case_goals(case: dict[str, Any]) -> Iterator[Goal]:
    sides, store, kind = case["sides"], case["store"], case["kind"]
    name = f"{case['case']}, {store}"
    ours = sides["grouped"].get("0")
    if ours is not None and case["bytes"] >= 100e6:
        outside = ours["outside"]["median"]
        yield "outside native calls and copies", name, "<= 0.05", outside, outside <= 0.05
    theirs = sides.get("sglang")
    if theirs is None:
        return
    if ours is not None:
        least = _ALL_LAYERS[store][kind]
        faster = theirs["0"]["last_layer"]["median"] / ours["last_layer"]["median"]
        yield "all layers, times faster", name, f">= {least}", faster, faster >= least
        most = _FIRST_LAYER[store]
        first = ours["first_layer"]["median"] / theirs["0"]["first_layer"]["median"]
        yield "first layer, of SGLang's", name, f"<= {most}", first, first <= most
    for label, page in sides["page"].items():
        of_theirs = page["report"]["median"] / theirs[label]["report"]["median"]
        if float(label) >= 2:
            yield f"page at {label} ms a layer, of SGLang's", name, "<= 1.05", of_theirs, of_theirs <= 1.05
        elif store == "local" and kind in ("mla", "dsa"):
            yield f"page at {label} ms a layer, times faster", name, ">= 1.5", 1 / of_theirs, 1 / of_theirs >= 1.5
        for side in ("grouped", "page"):
            stall = sides[side][label]["stall"]["median"]
            if side == "page":
                own = min(sides[other][label]["stall"]["median"] for other in ("page", "page, ranges"))
                yield f"page stall at {label} ms, of the better path", name, "<= 1.15", stall / own, stall <= 1.15 * own
            most = theirs[label]["stall"]["median"]
            yield f"{side} stall at {label} ms, of SGLang's", name, "<= 1", stall / most, stall <= most
