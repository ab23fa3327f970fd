"""What was measured, as tables in Markdown, and held against the goals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Goal", "goals", "tables"]


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal, as far as it concerns one case.

    Args:
        number: by which `benchmarks/README.md` lists it.
        name: what it is about.
        case: the case, or the kind of store.
        wanted: the bound, as text.
        measured: what came out.
        met: whether that is within the bound.
    """

    number: int
    name: str
    case: str
    wanted: str
    measured: float
    met: bool


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Lines."""
    for case in result["cases"]:
        yield from _case(case)
    for name, by_store in result["figures"].items():
        for store, figures in by_store.items():
            yield f"\n**{name}, {store}**\n"
            yield from _flat(figures)
    found = list(goals(result))
    if found:
        yield from _goals(found)
    for name in result.get("failed", ()):
        yield f"\n**Not measured: {name}**"


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


def _goals(found: Sequence[Goal]) -> Iterator[str]:
    yield "\n**Goals**\n"
    yield "| goal | | case | wanted | measured | |"
    yield "| ---: | --- | --- | ---: | ---: | --- |"
    for goal in found:
        yield f"| {goal.number} | {goal.name} | {goal.case} | {goal.wanted} | {goal.measured:.3g} | {_verdict(goal)} |"
    yield "\n| goal | met | missed |"
    yield "| ---: | ---: | --- |"
    for number in sorted({goal.number for goal in found}):
        these = [goal for goal in found if goal.number == number]
        missed = dict.fromkeys(f"{goal.name} ({goal.case})" for goal in these if not goal.met)
        yield f"| {number} | {sum(goal.met for goal in these)} of {len(these)} | {'; '.join(missed)} |"


def _verdict(goal: Goal) -> str:
    return "met" if goal.met else "**missed**"


def _at_most(number: int, name: str, case: str, bound: float, measured: float) -> Goal:
    return Goal(number, name, case, f"<= {bound:g}", measured, measured <= bound)


def _at_least(number: int, name: str, case: str, bound: float, measured: float) -> Goal:
    return Goal(number, name, case, f">= {bound:g}", measured, measured >= bound)


_ALL_LAYERS = {
    "local": {"mla": 1.8, "dsa": 1.8, "mha": 1.3, "fragments": 5.0},
    "owner": {"mla": 1.2, "dsa": 1.2, "mha": 0.95, "fragments": 4.0},
}
_DIRECT = {"mla": 2.5, "dsa": 2.5, "mha": 1.8, "fragments": 5.0}
"""All layers of `grouped` where it copies from this process's own segment."""

_LANDED, _PAGE_LANDED = "grouped, landed", "page, landed"

_FIRST_LAYER = {"local": 0.7, "owner": 1.1}

_LARGE = 100e6
"""Bytes of a load from which on its shares of time count."""

_NO_STALL = 1e-4
"""Seconds; a forward that waits less does not wait, whatever the ratio of two such figures."""


def goals(result: dict[str, Any]) -> Iterator[Goal]:
    """Each goal that what was measured says something about."""
    for case in result["cases"]:
        yield from _case_goals(case)
    figures = result["figures"]
    for store, found in figures.get("missing keys", {}).items():
        yield _at_least(5, "2 of 32 keys gone: rate, of the whole's", store, 0.9, found["rate_of_whole"]["median"])
        # Of 16 requests of 2 pages one loses its second page, and one both.
        yield _at_least(5, "2 of 32 keys gone: pages restored", store, 29, min(found["restored_pages"]["2 of 32 gone"]))
    for store, found in figures.get("loop lag", {}).items():
        lag = found["8 loads"]["p99_9"] - found["idle process meanwhile"]["p99_9"]
        yield _at_most(6, "loop lag p99.9 less an idle process's, ms", store, 5, 1000 * lag)
    for found in figures.get("plan", {}).values():
        plan = found["grouped"]
        yield _at_most(6, "plan of 128K dsv4-flash, ms", "no store", 5, 1000 * plan["seconds"]["median"])
        yield _at_most(6, "plan of 128K dsv4-flash, MiB", "no store", 4, plan["peak_bytes"] / 2**20)
    for store, found in figures.get("growth", {}).items():
        yield _at_most(7, "twice the pages, times as long", store, 2.1, max(found["twice_the_pages"]))
    for store, found in figures.get("many loads", {}).items():
        yield _at_least(8, "64 loads, bytes/s of one's", store, 0.9, found["many_of_one"]["median"])
        spread = found["first_layer_p99_of_median"]["median"]
        yield _at_most(8, "64 loads, first layer p99 of median", store, 4, spread)
    for store, found in figures.get("checks", {}).items():
        yield _at_most(9, "descriptors, share of a load", store, 0.05, found["descriptors"]["median"])
        for kind, most in (("sample", 1.05), ("full", 1.30)):
            yield _at_most(9, f"integrity {kind}, of off's time", store, most, found["of_off"][kind]["median"])


def _case_goals(case: dict[str, Any]) -> Iterator[Goal]:
    sides, store, kind = case["sides"], case["store"], case["kind"]
    name = f"{case['case']}, {store}"
    ours, theirs = sides["grouped"]["0"], sides.get("sglang")
    if case["bytes"] >= _LARGE:
        yield _at_most(6, "outside native calls and copies, share", name, 0.05, ours["outside"]["median"])
    if theirs is not None:
        number = 1 if store == "local" else 2
        bounds = {"grouped": _DIRECT[kind] if _LANDED in sides else _ALL_LAYERS[store][kind]}
        if _LANDED in sides:
            bounds[_LANDED] = _ALL_LAYERS[store][kind]
        for side, least in bounds.items():
            faster = _ratio(theirs["0"], sides[side]["0"], "last_layer")
            yield _at_least(number, f"{side}, all layers, times faster", name, least, faster)
            first = _ratio(sides[side]["0"], theirs["0"], "first_layer")
            yield _at_most(number, f"{side}, first layer, of SGLang's", name, _FIRST_LAYER[store], first)
    for label, page in sides["page"].items():
        own = min(sides[way][label]["stall"]["median"] for way in ("page, whole", "page, ranges"))
        for side in ("page", _PAGE_LANDED):
            if side in sides:
                yield _stall_goal(f"{side} stall, of the better way's", name, label, sides[side][label], own, 1.15)
        if theirs is None:
            continue
        for side in ("grouped", "page"):
            most = theirs[label]["stall"]["median"]
            yield _stall_goal(f"{side} stall, of SGLang's", name, label, sides[side][label], most, 1.0)
        if float(label) >= 2:
            of_theirs = _ratio(page, theirs[label], "report")
            yield _at_most(3, f"page at {label} ms a layer, of SGLang's time", name, 1.05, of_theirs)
        elif store == "local" and kind in ("mla", "dsa"):
            faster = _ratio(theirs[label], page, "report")
            yield _at_least(3, f"page at {label} ms a layer, times faster", name, 1.5, faster)


def _ratio(one: dict[str, Any], other: dict[str, Any], figure: str) -> float:
    return float(one[figure]["median"] / other[figure]["median"])


def _stall_goal(what: str, name: str, label: str, side: dict[str, Any], against: float, bound: float) -> Goal:
    stall = side["stall"]["median"]
    return _at_most(4, f"{label} ms a layer: {what}", name, bound, max(stall, _NO_STALL) / max(against, _NO_STALL))
