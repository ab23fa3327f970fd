"""A hundred thousand native results as no library should give them: never an exception, never an accepted page."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from softload import SaveStatus
from softload.stores import MooncakeStore

from ..loader.harness import eventually, keys, load, make_pools, opened, put, settle
from .rig import MODE_IDS, MODES, Watch

pytestmark = pytest.mark.asyncio

CODES = (-200, -600, -702, -703, -704, -705, -706, -707, -710, -712, -800, -801, -900, -901)
ODD: tuple[Any, ...] = (*CODES, -1, 1, 7, 1 << 31, 1 << 63, -(1 << 63), True, None, 0.5, float("nan"), "0", b"", [], {})
RESULTS = 100_000 // len(MODES)


class FuzzedNative:
    """Mooncake's native client over a dictionary: what it does is right, what it answers is often not."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._objects: dict[str, bytearray] = {}
        self._put: dict[str, bytearray] = {}
        self.fuzz = 0.0
        self.results = 0

    def setup(self, *_: object) -> int:
        return 0

    def close(self) -> int:
        return 0

    def register_buffer(self, pointer: int, nbytes: int) -> int:
        return 0

    def unregister_buffer(self, pointer: int) -> int:
        return 0

    def batch_is_exist(self, names: list[str]) -> Any:
        return self._answer([int(name in self._objects) for name in names])

    def batch_get_replica_desc(self, names: list[str]) -> Any:
        truth = {name: [_Replica(len(self._objects[name]))] for name in names if name in self._objects}
        self.results += len(names)
        if self._dice.random() < self.fuzz:
            odd: list[Any] = [None, [], 0, {}, {name: None for name in truth}, {name: [object()] for name in truth}]
            odd += [{name: [_Replica(self._dice.choice(ODD))] for name in truth}]
            return self._dice.choice(odd)
        return truth

    def batch_get_into(self, names: list[str], pointers: list[int], sizes: list[int]) -> Any:
        found = []
        for name, pointer, size in zip(names, pointers, sizes, strict=True):
            held = self._objects.get(name)
            if held is None or size < len(held):
                found.append(-704 if held is None else -600)
                continue
            ctypes.memmove(pointer, bytes(held), len(held))
            found.append(len(held))
        return self._answer(found)

    def batch_get_session_start(self, names: list[str]) -> Any:
        return self._answer([0 if name in self._objects else -704 for name in names])

    def batch_get_session_end(self, names: list[str]) -> Any:
        return self._answer([0] * len(names))

    def batch_get_into_multi_buffer_ranges(
        self, names: list[str], pointers: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
    ) -> Any:
        found = []
        for name, to, counts, starts in zip(names, pointers, sizes, offsets, strict=True):
            held = self._objects.get(name)
            if held is None:
                found.append(-600)
                continue
            for pointer, size, offset in zip(to, counts, starts, strict=True):
                ctypes.memmove(pointer, bytes(held[offset : offset + size]), size)
            found.append(sum(counts))
        return self._answer(found)

    def batch_put_session_start(self, names: list[str], sizes: list[int]) -> Any:
        for name, size in zip(names, sizes, strict=True):
            self._put[name] = bytearray(size)
        return self._answer([-705 if name in self._objects else 0 for name in names])

    def batch_put_from_multi_buffer_ranges(
        self, names: list[str], pointers: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
    ) -> Any:
        for name, (pointer,), (size,) in zip(names, pointers, sizes, strict=True):
            self._put[name] = bytearray(ctypes.string_at(pointer, size))
        return self._answer([sum(each) for each in sizes])

    def batch_put_session_end(self, names: list[str]) -> Any:
        for name in names:
            self._objects.setdefault(name, self._put.pop(name, bytearray(1)))
        return self._answer([0] * len(names))

    def batch_put_session_revoke(self, names: list[str]) -> Any:
        return self._answer([0] * len(names))

    def batch_remove(self, names: list[str], force: bool) -> Any:
        for name in names:
            self._objects.pop(name, None)
        return self._answer([0] * len(names))

    def _answer(self, truth: list[int]) -> Any:
        """The truth, or one of the ways to miss it: in length, type, sign, code or count."""
        self.results += len(truth)
        dice = self._dice
        if dice.random() >= self.fuzz:
            return truth
        way = dice.randrange(9)
        if way == 0:
            return dice.choice([None, [], 0, "", {}, tuple(truth), {"0": truth}])
        if way == 1:
            return truth[: dice.randrange(len(truth) + 1)]
        if way == 2:
            return [*truth, dice.choice(ODD)]
        if way == 3:
            raise RuntimeError("native")
        if way == 4:
            return [dice.choice(ODD) for _ in truth]
        if way == 5:
            return [-value for value in truth]
        if way == 6:
            return [value - dice.randrange(1, 5) for value in truth]
        if way == 7:
            return [float(value) for value in truth]
        odd = list(truth)
        for index in dice.sample(range(len(odd)), min(len(odd), 1 + len(odd) // 8)):
            odd[index] = dice.choice(ODD)
        return odd


class _Replica:
    def __init__(self, size: Any) -> None:
        self.status = SimpleNamespace(name="COMPLETE", value=3)
        self._buffer = SimpleNamespace(size=size, transport_endpoint="127.0.0.1:1", buffer_address=4096)

    def is_memory_replica(self) -> bool:
        return True

    def get_memory_descriptor(self) -> SimpleNamespace:
        return SimpleNamespace(buffer_descriptor=self._buffer)


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
async def test_fuzzed_native_results(
    mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch, report: Callable[..., None]
) -> None:
    dice = random.Random(f"{mode}")
    native = FuzzedNative(dice)
    monkeypatch.setattr("softload.stores.mooncake.probe_master", lambda address: "127.0.0.1")
    monkeypatch.setattr("softload.stores.master_contact.accepts", lambda address: True)
    monkeypatch.setattr("softload.stores.mooncake.is_alive", lambda address: True)
    monkeypatch.setattr("softload.stores.mooncake.native_library", lambda: None)
    monkeypatch.setattr("softload.health._COOL_DOWN", (0.0, 0.0))
    monkeypatch.setattr("softload.health._NEGATIVE_DEFAULT", 0.0)
    monkeypatch.setattr("softload.health._NEGATIVE_SECONDS", {})
    pages = 32
    pools = make_pools(pages=3 * pages, layers=3, width=8)
    watch = Watch()
    restored = number = 0
    while native.results < RESULTS:
        native.fuzz = 0.0
        store = MooncakeStore(master="127.0.0.1:1")
        monkeypatch.setattr(store, "_prepare", lambda: lambda: native)
        async with opened(store, pools, **mode, deadline=5.0, save_deadline=5.0) as loader:
            names = keys(pages, f"n{number}_")
            await put(loader, pools, names)
            native.fuzz = 0.3
            for _ in range(12):
                number += 1
                unit = pools.unit(f"r{number}", names, range(pages))
                assert (await loader.lookup(unit)).pages in range(pages + 1)
                outcome = (await load(loader, unit))[unit.request_id]
                pools.assert_restored(names[: outcome.restored_pages], range(outcome.restored_pages))
                restored += outcome.restored_pages
                rows = range(pages, 2 * pages)
                new = keys(pages, f"s{number}_")
                pools.fill(new, rows)
                saved = await loader.save([pools.unit(f"s{number}", new, rows)])
                assert {page.status for page in saved.outcomes[f"s{number}"].pages} <= set(SaveStatus)
            native.fuzz = 0.0
            await eventually(lambda: not loader.statistics().stuck_threads)
            await settle(loader)
    report("fuzzed native results", results=native.results, restored=restored, seconds=watch.seconds)
    assert restored > 0
