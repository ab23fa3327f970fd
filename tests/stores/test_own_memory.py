"""Memory is taken for this process's own only where its content proves it."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from softload.protocols import Answer, Descriptor
from softload.stores import EmbeddedMooncakeStore, MemoryStore, MooncakeStore, WrapperStore
from softload.stores.listening import listening_ports
from softload.stores.native_memory import copy_bytes
from softload.stores.own_memory import own_memory

SEGMENT = 1 << 20


class Reading(WrapperStore):
    """Reads `data`, whatever is asked for."""

    def __init__(self, data: np.ndarray, answer: int | None = None) -> None:
        super().__init__(MemoryStore())
        self.data = data
        self.answer = data.size if answer is None else answer
        self.registers = True
        self.registered: set[int] = set()

    def register(self, pointer: int, nbytes: int) -> bool:
        self.registered.add(pointer)
        return self.registers

    def unregister(self, pointer: int) -> None:
        self.registered.remove(pointer)

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        assert pointers[0] in self.registered
        copy_bytes(pointers[0], self.data.ctypes.data, min(self.data.size, sizes[0]))
        return [self.answer]


@pytest.fixture
def port() -> Iterator[int]:
    """One that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def segment() -> np.ndarray:
    # A mapping of its own, as a store's segment is: the heap's may be split anywhere by what was done to parts of it.
    memory = mmap.mmap(-1, SEGMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = np.frombuffer(memory, np.uint8)
    data[:] = np.random.default_rng(1).integers(0, 256, SEGMENT, dtype=np.uint8)
    return data


def lent(store: Reading, segment: np.ndarray, port: int, *, offset: int = 4096, size: int = 1000) -> range | None:
    where = Descriptor(size, f"127.0.0.1:{port}", segment.ctypes.data + offset)
    return own_memory(store, "key", where, name="127.0.0.1:1", ports=listening_ports(), nbytes=SEGMENT)


def test_memory_with_the_objects_bytes_is_ours(segment: np.ndarray, port: int) -> None:
    store = Reading(segment[4096:5096])
    found = lent(store, segment, port)
    assert found is not None
    assert segment.ctypes.data in found and segment.ctypes.data + SEGMENT - 1 in found
    assert len(found) <= 2 * SEGMENT
    assert not store.registered


def test_other_bytes_there_are_not(segment: np.ndarray, port: int) -> None:
    data = segment[4096:5096].copy()
    data[999] ^= 1
    assert lent(Reading(data), segment, port) is None


@pytest.mark.parametrize("endpoint", ["192.0.2.1:{port}", "127.0.0.1:1", "127.0.0.1:", "127.0.0.1", "", "127.0.0.1:²"])
def test_other_endpoints_are_not(segment: np.ndarray, port: int, endpoint: str) -> None:
    where = Descriptor(1000, endpoint.format(port=port), segment.ctypes.data + 4096)
    store = Reading(segment[4096:5096])
    assert own_memory(store, "key", where, name="127.0.0.1:1", ports=listening_ports(), nbytes=SEGMENT) is None


@pytest.mark.parametrize("size", [1, 63])
def test_a_few_bytes_prove_nothing(segment: np.ndarray, port: int, size: int) -> None:
    assert lent(Reading(segment[4096 : 4096 + size]), segment, port, size=size) is None


def test_equal_bytes_prove_nothing(segment: np.ndarray, port: int) -> None:
    segment[:] = 7
    assert lent(Reading(segment[4096:5096]), segment, port) is None


def test_an_object_that_cannot_be_read_proves_nothing(segment: np.ndarray, port: int) -> None:
    assert lent(Reading(segment[4096:5096], answer=999), segment, port) is None
    store = Reading(segment[4096:5096])
    store.registers = False
    assert lent(store, segment, port) is None


@pytest.mark.parametrize("address", [0, 4096, 1 << 46, 1 << 63, 1 << 80])
def test_addresses_where_nothing_is(segment: np.ndarray, port: int, address: int) -> None:
    where = Descriptor(1000, f"127.0.0.1:{port}", address)
    assert (
        own_memory(Reading(segment[:1000]), "key", where, name="127.0.0.1:1", ports=listening_ports(), nbytes=SEGMENT)
        is None
    )


def test_memory_that_nobody_writes_to_is_no_segment(port: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 4096, dtype=np.uint8)
    with mmap.mmap(-1, 4096) as writable:
        writable.write(data.tobytes())
        assert lent(Reading(data), np.frombuffer(writable, np.uint8), port, offset=0, size=4096) is not None
    code = _code_address()
    where = Descriptor(1000, f"127.0.0.1:{port}", code)
    assert (
        own_memory(Reading(data[:1000]), "key", where, name="127.0.0.1:1", ports=listening_ports(), nbytes=SEGMENT)
        is None
    )


def _code_address() -> int:
    """Of the interpreter's own instructions."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        return next(int(line.split("-")[0], 16) for line in lines if " r-xp " in line)


def test_an_object_past_the_end_of_what_is_mapped(segment: np.ndarray, port: int) -> None:
    assert lent(Reading(segment), segment, port, size=1 << 50) is None


@pytest.mark.mooncake
def test_memory_of_owners_is_not_lent(owned_mooncake_store: EmbeddedMooncakeStore) -> None:
    store = owned_mooncake_store
    data = np.random.default_rng(1).integers(0, 256, 1000, dtype=np.uint8)
    assert store.put_start(["lent-owned"], [1000]) == [0]
    assert store.put_write(["lent-owned"], [data.ctypes.data], [1000]) == [1000]
    assert store.put_end(["lent-owned"]) == [0]
    (found,) = store.descriptors(["lent-owned"])
    assert isinstance(found, Descriptor)
    assert store.lend("lent-owned", found) is None
    # Nor would it be with a segment of ours: it is another process that listens on that port.
    assert own_memory(store, "lent-owned", found, name="127.0.0.1:1", ports=listening_ports(), nbytes=SEGMENT) is None


@pytest.mark.mooncake
def test_another_client_of_this_process_is_somebody_else(mooncake_store: EmbeddedMooncakeStore) -> None:
    """Its memory goes when it is closed, which nobody who holds this one's keeps from happening."""
    second = MooncakeStore(master=mooncake_store.cluster.address, hostname="127.0.0.1", segment=64 << 20, lease=1.0)
    second.open()
    try:
        data = np.random.default_rng(2).integers(0, 256, 5000, dtype=np.uint8)
        assert second.register(data.ctypes.data, data.size)
        lent: dict[str, list[bool]] = {}
        for nth in range(200):
            key = f"two-clients-{nth}"
            assert list(second.put_start([key], [data.size])) == [0]
            assert list(second.put_write([key], [data.ctypes.data], [data.size])) == [data.size]
            assert list(second.put_end([key])) == [0]
            (found,) = second.descriptors([key])
            assert isinstance(found, Descriptor)
            if found.endpoint not in lent:
                lent[found.endpoint] = [each.lend(key, found) is not None for each in (mooncake_store, second)]
            second.remove([key], force=True)
            if len(lent) == 2:
                break
        second.unregister(data.ctypes.data)
    finally:
        second.close()
    assert sorted(lent.values()) == [[False, True], [True, False]]
