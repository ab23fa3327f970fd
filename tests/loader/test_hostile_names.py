"""Page keys and request ids are data: not paths, formats, commands or lines of a log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from softload import PageStatus, SaveStatus
from softload.protocols import PageStore
from softload.stores import EmbeddedMooncakeStore

from .doubles import Held
from .harness import MODE_IDS, MODES, assert_outcome, load, make_pools, opened, put, settle, store

pytestmark = pytest.mark.asyncio

HOSTILE = (
    "../../etc/passwd", "/dev/null", "~root", "a b", "$(touch softload-was-here)", "`touch softload-was-here`", "; ls",
    "%s%n%d", "{0.__class__}", "line\nbreaker.opened breaker=master", "cr\rback", "tab\t=", "\x00nul", "quote'\"",
    "clé/ключ/鍵", "x" * 2000, "k_0/kv.0", "\x1b[2J\x9b", "\u2028\x85next",
)  # fmt: skip


async def round_trip(page_store: PageStore, mode: dict[str, Any]) -> None:
    pools = make_pools()
    async with opened(page_store, pools, **mode) as loader:
        await put(loader, pools, HOSTILE)
        for name in HOSTILE:
            assert (await loader.lookup(pools.unit(name, HOSTILE))).pages == len(HOSTILE)
        name = "request\n2026 [critical] forged"
        rows = range(len(HOSTILE))
        assert_outcome((await load(loader, pools.unit(name, HOSTILE, rows)))[name], len(HOSTILE))
        pools.assert_restored(HOSTILE, rows)
        pools.assert_rows_kept(rows)
        lost = (await load(loader, pools.unit(name + "2", ["not\nthere"], [20])))[name + "2"]
        assert_outcome(lost, 0, PageStatus.NOT_FOUND)
        await settle(loader)


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
async def test_round_trip_in_memory(
    mode: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    await round_trip(store(), mode)
    assert os.listdir(tmp_path) == []
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "page.missed" in line]) == 1
    assert all(line.startswith("20") for line in lines), lines
    assert not [line for line in lines if line.startswith("2026 [critical]")]


@pytest.mark.mooncake
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
async def test_round_trip_in_mooncake(
    mode: dict[str, Any], owned_mooncake_store: EmbeddedMooncakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    owned_mooncake_store.open()
    await round_trip(Held(owned_mooncake_store), mode)
    assert os.listdir(tmp_path) == []


LONE = "\ud800"
"""Half of a surrogate pair: a text that no encoding of a terminal or of a key can hold."""


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("name", ["\x1b[2J\x1b]0;forged\x07", "\u2028forged", LONE, "long" * 10_000], ids=ascii)
async def test_names_in_lines_of_the_log(mode: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pools = make_pools()
    async with opened(store(), pools, **mode) as loader:
        assert_outcome((await load(loader, pools.unit(name, ["missing"], [0])))[name], 0, PageStatus.NOT_FOUND)
        await settle(loader)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "page.missed" in line]
    assert "\x1b]" not in line and "\x1b[2J" not in line
    assert len(line) < 1000


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
async def test_a_page_key_that_no_encoding_holds_is_a_miss(mode: dict[str, Any]) -> None:
    pools = make_pools()
    async with opened(store(), pools, **mode) as loader:
        pools.fill([LONE.encode("utf-8", "replace").decode()], [0])
        saved = await loader.save([pools.unit("s", [LONE], [0])])
        assert {page.status for page in saved.outcomes["s"].pages} <= set(SaveStatus)
        assert (await loader.lookup(pools.unit("l", [LONE]))).pages in (0, 1)
        outcome = (await load(loader, pools.unit("l", [LONE], [1])))["l"]
        assert outcome.restored_pages in (0, 1)
        await settle(loader)
