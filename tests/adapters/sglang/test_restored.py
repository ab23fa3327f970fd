"""Which pages the store is not offered again, and for how long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from softload import ComponentTransfer, HitPolicy, PoolName, TransferUnit
from softload.adapters.sglang import restored
from softload.adapters.sglang.restored import RestoredPages

KEYS = ("a", "b", "c")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time."""
    now = [100.0]
    monkeypatch.setattr(restored, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def unit(keys: tuple[str, ...] = KEYS) -> TransferUnit:
    window = ComponentTransfer(PoolName.SWA, keys, None, HitPolicy.TRAILING_PAGES, 2)
    return TransferUnit("r", (ComponentTransfer(PoolName.KV, keys), window))


def test_what_was_restored_is_held_for_a_while(clock: list[float]) -> None:
    pages = RestoredPages()
    pages.add(unit())
    assert all(pages.holds(PoolName.KV, key) for key in KEYS)
    assert not pages.holds(PoolName.KV, "d")
    clock[0] += 5.0
    assert not any(pages.holds(PoolName.KV, key) for key in KEYS)


def test_pages_before_a_window_were_not_restored(clock: list[float]) -> None:
    pages = RestoredPages()
    pages.add(unit())
    assert [pages.holds(PoolName.SWA, key) for key in KEYS] == [False, True, True]


def test_it_forgets_what_is_old_and_keeps_what_came_again(clock: list[float]) -> None:
    pages = RestoredPages()
    pages.add(unit())
    clock[0] += 3.0
    pages.add(unit(("a",)))
    clock[0] += 3.0
    pages.add(unit(("x",)))
    assert pages.holds(PoolName.KV, "a")
    assert len(pages) == 4  # a and x, of two pools each
