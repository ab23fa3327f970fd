"""What the native library answers, key by key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from softload import PageStatus
from softload.protocols import Descriptor
from softload.store_calls import StoreCalls
from softload.stores import MemoryStore
from softload.stores.native_codes import descriptor, descriptors
from softload.testing import ScriptedStore


def replica(*, in_memory: bool = True, status: str = "COMPLETE", **buffer: Any) -> SimpleNamespace:
    named = {"size": 8, "transport_endpoint": "a:1", "buffer_address": 64, **buffer}
    return SimpleNamespace(
        is_memory_replica=lambda: in_memory,
        status=SimpleNamespace(name=status, value=status),
        get_memory_descriptor=lambda: SimpleNamespace(buffer_descriptor=SimpleNamespace(**named)),
    )


def test_the_first_complete_replica_in_memory_counts() -> None:
    found = descriptor([replica(in_memory=False), replica(status="INITIALIZED"), replica(), replica(size=9)])
    assert found == Descriptor(8, "a:1", 64)


@pytest.mark.parametrize("replicas", [[], [replica(in_memory=False)], [replica(status="FAILED")]])
def test_no_such_replica(replicas: list[Any]) -> None:
    assert descriptor(replicas) is PageStatus.NO_MEMORY_REPLICA


def test_of_many_one_that_is_not_in_memory_costs_its_own_key() -> None:
    def on_disk() -> Any:
        raise RuntimeError("no descriptor of memory")

    gone = replica(in_memory=False)
    gone.get_memory_descriptor = on_disk
    found = descriptors([[replica()], [gone], [replica(size=9)]])
    assert found == [Descriptor(8, "a:1", 64), PageStatus.NO_MEMORY_REPLICA, Descriptor(9, "a:1", 64)]


@pytest.mark.parametrize(
    "replicas",
    [None, 7, [object()], [replica(size=None)], [replica(size="many")]],
    ids=["none", "number", "object", "no size", "words"],
)
def test_an_odd_answer_costs_its_own_key(replicas: object) -> None:
    assert descriptor(replicas) is PageStatus.MALFORMED


@pytest.mark.parametrize(
    "odd",
    [{"size": -8}, {"size": True}, {"size": "8"}, {"size": 1 << 70}, {"size": 8.0}, {"transport_endpoint": 7}]
    + [{"buffer_address": "64"}, {"buffer_address": -1}],
    ids=str,
)
@pytest.mark.parametrize("beside", [[replica()], [replica(in_memory=False), replica()]], ids=["alike", "with another"])
def test_an_odd_descriptor_is_malformed_whatever_lies_beside_it(odd: dict[str, Any], beside: list[Any]) -> None:
    scripted = ScriptedStore(MemoryStore(capacity=1 << 16))
    scripted.script("descriptors", lambda _: descriptors([beside, [replica(**odd)]]))
    assert StoreCalls(scripted).descriptors(["a", "b"]) == [Descriptor(8, "a:1", 64), PageStatus.MALFORMED]
