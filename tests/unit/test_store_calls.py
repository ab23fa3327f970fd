"""The guard around a store: whatever it answers or raises becomes a status, and it changes nothing of the loader's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from softload import PageStatus, events
from softload.protocols import Answer, Descriptor
from softload.store_calls import StoreCalls
from softload.stores import MemoryStore
from softload.stores.wrapper import WrapperStore
from softload.testing import ScriptedStore


class Panic(BaseException):
    """As native code raises it."""


class Hostile:
    """Raises when it is told about, compared or hashed."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    def __hash__(self) -> int:
        raise RuntimeError("no")


KEYS = ["a", "b"]
CALLS: dict[str, Callable[[StoreCalls], list[Any]]] = {
    "exists": lambda calls: calls.exists(KEYS),
    "descriptors": lambda calls: calls.descriptors(KEYS),
    "read": lambda calls: calls.read(KEYS, [64, 64], [8, 8]),
    "session_start": lambda calls: calls.session_start(KEYS),
    "read_ranges": lambda calls: calls.read_ranges(KEYS, [[64], [64]], [[8], [8]], [[0], [0]]),
    "put_start": lambda calls: calls.put_start(KEYS, [8, 8]),
    "put_write": lambda calls: calls.put_write(KEYS, [64, 64], [8, 8]),
    "put_end": lambda calls: calls.put_end(KEYS),
    "remove": lambda calls: calls.remove(KEYS, force=True),
}
QUIET: dict[str, Callable[[StoreCalls], object]] = {
    "register": lambda calls: calls.register(64, 8),
    "unregister": lambda calls: calls.unregister(64),
    "session_end": lambda calls: calls.session_end(KEYS),
    "put_revoke": lambda calls: calls.put_revoke(KEYS),
}


def raising(error: BaseException) -> Callable[[object], object]:
    def answer(_: object) -> object:
        raise error

    return answer


@pytest.mark.parametrize("error", [RuntimeError("bug"), SystemExit(3), Panic("native"), GeneratorExit()])
@pytest.mark.parametrize("method", [*CALLS, *QUIET])
def test_whatever_is_raised_is_a_status(method: str, error: BaseException) -> None:
    scripted = ScriptedStore(MemoryStore(capacity=1 << 16))
    calls = StoreCalls(scripted)
    scripted.script(method, raising(error), raising(error))
    with capture_logs() as logs:
        for _ in range(2):
            if method in CALLS:
                assert CALLS[method](calls) == [PageStatus.MALFORMED] * 2
            else:
                assert not QUIET[method](calls)
    assert [entry["method"] for entry in logs if entry["event"] == events.STORE_RAISED] == [method]


def test_a_store_whose_close_raises_is_left_alone() -> None:
    class Door(WrapperStore):
        def close(self) -> None:
            raise SystemExit(1)

    StoreCalls(Door(MemoryStore(capacity=1 << 16))).close()


@pytest.mark.parametrize("method", CALLS)
def test_answers_that_cannot_be_looked_at(method: str) -> None:
    scripted = ScriptedStore(MemoryStore(capacity=1 << 16))
    scripted.script(method, lambda _: [Hostile(), Hostile()], lambda _: Hostile())
    calls = StoreCalls(scripted)
    for _ in range(2):
        assert CALLS[method](calls) == [PageStatus.MALFORMED] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        Descriptor(8, None, 0),  # type: ignore[arg-type]
        Descriptor(8, b"host", 0),  # type: ignore[arg-type]
        Descriptor(8, ["host"], 0),  # type: ignore[arg-type]
        Descriptor(8, Hostile(), 0),  # type: ignore[arg-type]
        Descriptor(8, "host", -1),
        Descriptor(8, "host", 1.5),  # type: ignore[arg-type]
        Descriptor(8, "host", "64"),  # type: ignore[arg-type]
        Descriptor(8, "host", None),  # type: ignore[arg-type]
        Descriptor(8, "host", True),
        Descriptor(-8, "host", 0),
        Descriptor(1 << 64, "host", 0),
        Descriptor(8, "host", 1 << 70),
        Descriptor(8.0, "host", 0),  # type: ignore[arg-type]
        Descriptor([], "host", 0),  # type: ignore[arg-type]
    ],
    ids=range(14),
)
def test_descriptors_with_a_field_of_a_wrong_kind(wrong: Descriptor) -> None:
    scripted = ScriptedStore(MemoryStore(capacity=1 << 16))
    good = Descriptor(8, "host", 64)
    scripted.script("descriptors", lambda _: [good, wrong])
    assert StoreCalls(scripted).descriptors(KEYS) == [good, PageStatus.MALFORMED]


class Keeping(WrapperStore):
    """Empties the lists that it is given."""

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        answers = list(sizes)
        _empty(keys, pointers, sizes)
        return answers

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        answers = [sum(each) for each in sizes]
        _empty(keys, *pointers, *sizes, *offsets, pointers, sizes, offsets)
        return answers

    def session_end(self, keys: Sequence[str]) -> None:
        _empty(keys)


def _empty(*lists: object) -> None:
    for each in lists:
        assert isinstance(each, list)
        each.clear()


def test_a_store_that_empties_its_arguments() -> None:
    calls = StoreCalls(Keeping(MemoryStore(capacity=1 << 16)))
    keys, pointers, sizes = ["a", "b"], [64, 128], [8, 16]
    assert calls.read(keys, pointers, sizes) == [PageStatus.LOADED] * 2
    ranges, offsets = [[8], [8, 8]], [[0], [0, 8]]
    assert calls.read_ranges(keys, [[64], [128, 136]], ranges, offsets) == [PageStatus.LOADED] * 2
    calls.session_end(keys)
    assert (keys, pointers, sizes, ranges, offsets) == (["a", "b"], [64, 128], [8, 16], [[8], [8, 8]], [[0], [0, 8]])


def test_a_store_that_changes_its_answer_afterwards() -> None:
    scripted = ScriptedStore(MemoryStore(capacity=1 << 16))
    answer = [True, False]
    scripted.script("exists", lambda _: answer)
    known = StoreCalls(scripted).exists(KEYS)
    answer.clear()
    assert known == [True, False]
