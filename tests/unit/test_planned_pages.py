"""Which pages others are about to plan: what decides whether bytes that were copied are kept for them."""

from __future__ import annotations

from softload.context import PlannedPages


def test_pages_are_wanted_by_others_until_those_have_planned_them() -> None:
    planned = PlannedPages()
    planned.add("a", ["k0", "k1"])
    assert not planned.other_wants("a", ["k0", "k1"]), "its own"
    assert planned.other_wants("b", ["k5", "k1"])
    planned.add("b", ["k1", "k2"])
    planned.add("b", ["k1", "k2"])  # once more is no change
    assert planned.other_wants("a", ["k1"]) and not planned.other_wants("a", ["k0"])
    planned.discard("a")
    assert planned.other_wants("a", ["k1"]) and not planned.other_wants("b", ["k1", "k2"])
    planned.discard("b")
    planned.discard("b")
    assert not planned.other_wants("a", ["k0", "k1", "k2"])
