"""A real Mooncake that is killed, frozen and restarted."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from softload.errors import LoaderClosedError, StoreSetupError
from softload.outcomes import PageStatus
from softload.protocols import Descriptor
from softload.stores import EmbeddedMooncakeStore, MooncakeCluster, MooncakeStore, open_store
from softload.stores.children import Child
from softload.testing.store_suite import Buffer

pytestmark = pytest.mark.mooncake
pytest.importorskip("mooncake")

SIZE = 1 << 20
KEYS = [f"k{index}" for index in range(12)]
MANY = [f"k{index}" for index in range(30)]
"""Mooncake places each at random: both owners have some of so many."""


@pytest.fixture
def buffer() -> Buffer:
    """Outlives the store: a hung read may write to it until the owner is gone."""
    return Buffer(SIZE)


@pytest.fixture
def store(buffer: Buffer) -> Iterator[EmbeddedMooncakeStore]:
    store = open_store("mooncake://embedded?segment=64MiB&owners=2&lease=2s")
    assert isinstance(store, EmbeddedMooncakeStore)
    store.open()
    try:
        store.register(buffer.pointer, SIZE)
        yield store
    finally:
        store.close()


def put(store: MooncakeStore, buffer: Buffer, keys: list[str]) -> list[object]:
    answers = list(store.put_start(keys, [SIZE] * len(keys)))
    store.put_write(keys, [buffer.pointer] * len(keys), [SIZE] * len(keys))
    store.put_end(keys)
    return list(answers)


def read(store: MooncakeStore, buffer: Buffer, keys: list[str]) -> list[object]:
    return list(store.read(keys, [buffer.pointer] * len(keys), [SIZE] * len(keys)))


def by_endpoint(store: MooncakeStore, keys: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, descriptor in zip(keys, store.descriptors(keys), strict=True):
        assert isinstance(descriptor, Descriptor)
        found.setdefault(descriptor.endpoint, []).append(key)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(cluster: MooncakeCluster) -> list[int]:
    assert cluster.master is not None
    return [cluster.master.pid, *(owner.pid for owner in cluster.owners)]


def test_an_open_session_reads_whatever_has_the_memory_of_an_object_that_was_removed(
    store: EmbeddedMooncakeStore, buffer: Buffer
) -> None:
    """With full counts and other bytes: this is why what was read in ranges is checked."""
    buffer.array[:] = 1
    assert put(store, buffer, KEYS) == [0] * len(KEYS)
    assert list(store.session_start(KEYS)) == [0] * len(KEYS)
    assert list(store.remove(KEYS, force=True)) == [0] * len(KEYS)
    buffer.array[:] = 2
    for turn in range(6):  # the allocator takes other places first: until there are none
        put(store, buffer, [f"other{turn}_{index}" for index in range(len(KEYS))])
    foreign = 0
    for key in KEYS:
        buffer.array[:] = 0
        assert list(store.read_ranges([key], [[buffer.pointer]], [[SIZE]], [[0]])) == [SIZE]
        foreign += bool((buffer.array == 2).all())
    assert foreign
    store.session_end(KEYS)


def test_the_masters_port_is_none_that_the_kernel_gives_to_others(store: EmbeddedMooncakeStore) -> None:
    """A master that was killed has to start again on it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < 32_768:
        pytest.skip(f"this machine gives out ports from {first} on")
    assert int(store.cluster.address.rpartition(":")[2]) < first


def test_memory_belongs_to_the_owners(store: EmbeddedMooncakeStore, buffer: Buffer) -> None:
    assert put(store, buffer, MANY) == [0] * len(MANY)
    assert len(by_endpoint(store, MANY)) == 2


def test_a_dead_owner_fails_its_own_objects_alone(store: EmbeddedMooncakeStore, buffer: Buffer) -> None:
    put(store, buffer, MANY)
    endpoints = by_endpoint(store, MANY)
    store.cluster.owners[0].kill()
    answers = {endpoint: read(store, buffer, keys[:1]) for endpoint, keys in endpoints.items()}
    assert [SIZE] in answers.values()
    (bad,) = [answer for answer in answers.values() if answer != [SIZE]]
    assert isinstance(bad[0], PageStatus)


def test_close_ends_a_read_that_hangs_on_a_frozen_owner(store: EmbeddedMooncakeStore, buffer: Buffer) -> None:
    put(store, buffer, KEYS)
    children = pids(store.cluster)
    for owner in store.cluster.owners:
        owner.freeze()
    answers: list[object] = []
    reader = threading.Thread(target=lambda: answers.extend(read(store, buffer, KEYS[:1])), daemon=True)
    reader.start()
    while not store.calls_out:
        pass
    began = time.monotonic()
    store.close()
    assert time.monotonic() - began < 15
    reader.join(10)
    assert len(answers) == 1
    assert isinstance(answers[0], PageStatus)
    assert not [pid for pid in children if is_running(pid)]


@pytest.mark.slow
def test_a_dead_master_is_out_of_reach_and_a_restarted_one_is_not(store: EmbeddedMooncakeStore, buffer: Buffer) -> None:
    put(store, buffer, ["stored"])
    assert list(store.put_start(["under-way"], [SIZE])) == [0]
    assert list(store.put_write(["under-way"], [buffer.pointer], [SIZE])) == [SIZE]
    master = store.cluster.master
    assert master is not None
    master.kill()
    assert list(store.descriptors(["stored", "absent"])) == [PageStatus.STORE_UNREACHABLE] * 2
    assert list(store.exists(["stored"])) == [PageStatus.STORE_UNREACHABLE]
    assert list(store.put_end(["under-way"])) == [PageStatus.STORE_UNREACHABLE]
    store.put_revoke(["under-way"])
    store.cluster.restart_master()
    deadline = time.monotonic() + 40.0
    while store.put_start(["probe"], [SIZE])[0] != 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    store.put_revoke(["probe"])
    assert list(store.descriptors(["stored"])) == [PageStatus.NOT_FOUND]
    assert put(store, buffer, ["under-way", "stored"]) == [0, 0]
    assert read(store, buffer, ["under-way", "stored"]) == [SIZE, SIZE]


def test_nobody_is_told_of_missing_keys(store: EmbeddedMooncakeStore, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    store.descriptors(["absent"])
    store.exists(["absent"])
    assert capfd.readouterr().err == ""


def test_open_twice_and_close_twice(store: EmbeddedMooncakeStore) -> None:
    before = pids(store.cluster)
    store.open()
    assert pids(store.cluster) == before
    store.close()
    store.close()
    assert not [pid for pid in before if is_running(pid)]
    with pytest.raises(LoaderClosedError):
        store.open()
    assert not [pid for pid in pids(store.cluster) if is_running(pid)]


def test_a_frozen_master_does_not_hold_open_up() -> None:
    cluster = MooncakeCluster(segment=1 << 20, lease=1.0)
    cluster.start()
    try:
        assert cluster.master is not None
        cluster.master.freeze()
        with pytest.raises(StoreSetupError, match=f"master at {cluster.address}"):
            MooncakeStore(master=cluster.address).open()
    finally:
        cluster.close()


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_close_does_not_wait_for_a_master_that_is_gone(store: EmbeddedMooncakeStore, how: str) -> None:
    """The native close would, holding the GIL."""
    assert store.cluster.master is not None
    getattr(store.cluster.master, how)()
    began = time.monotonic()
    store.close()
    assert time.monotonic() - began < 15


def test_two_clients_of_one_cluster(store: EmbeddedMooncakeStore, buffer: Buffer) -> None:
    other = open_store(f"mooncake://{store.cluster.address}?lease=2s")
    assert isinstance(other, MooncakeStore)
    other.open()
    try:
        put(store, buffer, ["shared"])
        target = Buffer(SIZE)
        other.register(target.pointer, SIZE)
        assert read(other, target, ["shared"]) == [SIZE]
    finally:
        other.close()


def test_owners_that_do_not_come_up_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Child] = []

    class Recorded(Child):
        def __init__(self, argv: list[str]) -> None:
            if "--segment" in argv:
                argv = [*argv, "--no-such-option"]
            super().__init__(argv)
            started.append(self)

    monkeypatch.setattr("softload.stores.cluster.Child", Recorded)
    with pytest.raises(StoreSetupError, match="(?s)an owner of memory to come up, it ended: .*no-such-option"):
        MooncakeCluster(segment=1 << 20, lease=1.0, owners=2).start()
    assert len(started) == 3
    assert not [child for child in started if is_running(child.pid)]


def test_without_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreSetupError, match="pip install exactly one of mooncake-transfer-engine-non-cuda"):
        MooncakeCluster(segment=1 << 20, lease=1.0).start()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), "pip install exactly one of mooncake-transfer-engine-non-"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "apt-get install libibverbs1"),
    ],
)
def test_what_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, error: ImportError, message: str) -> None:
    class Refusing:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.startswith("mooncake"):
                raise error

    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    monkeypatch.setattr("sys.meta_path", [Refusing(), *sys.meta_path])
    with pytest.raises(StoreSetupError, match=message):
        EmbeddedMooncakeStore().open()


def test_a_child_outlives_the_thread_that_asked_for_it() -> None:
    """The kernel would end it with the thread that started it."""
    children: list[Child] = []
    thread = threading.Thread(target=lambda: children.append(Child(["/bin/sleep", "60"])))
    thread.start()
    thread.join()
    (child,) = children
    try:
        assert child.alive
        child.freeze()
        child.thaw()
    finally:
        child.kill()
        child.kill()
    assert not child.alive
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, signal.SIGCONT)
