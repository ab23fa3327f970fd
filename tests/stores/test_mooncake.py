"""What `MooncakeStore` makes of its native library's answers; the library is played by a double."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from softload.errors import LoaderClosedError, StoreSetupError
from softload.outcomes import PageStatus
from softload.protocols import Descriptor, PutRefusal
from softload.stores import MooncakeStore
from softload.stores.master_contact import MasterContact
from softload.stores.native_codes import NATIVE_CODES
from softload.stores.probe import accepts, probe_master
from softload.stores.process_exit import has_left


class Native:
    """A native client whose answers are attributes: values, exceptions, or functions of the arguments."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"setup": 0, "close": 0, "register_buffer": 0, "unregister_buffer": 0}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append((name, arguments))
            answer = self.answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments) if callable(answer) else answer

        return call

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)


@pytest.fixture
def native() -> Native:
    return Native()


@pytest.fixture
def store(native: Native, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeStore]:
    store = MooncakeStore(master="127.0.0.1:1")
    monkeypatch.setattr(store, "_prepare", lambda: lambda: native)
    monkeypatch.setattr("softload.stores.mooncake.probe_master", lambda address: "127.0.0.1")
    monkeypatch.setattr("softload.stores.master_contact.accepts", lambda address: True)
    monkeypatch.setattr("softload.stores.mooncake.is_alive", lambda address: True)
    monkeypatch.setattr("softload.stores.mooncake.native_library", lambda: None)
    store.open()
    yield store
    store.close()


def whole(store: MooncakeStore, sizes: list[int]) -> list[object]:
    keys = [f"k{index}" for index in range(len(sizes))]
    return list(store.read(keys, [1] * len(keys), sizes))


PER_KEY: list[tuple[str, Callable[[MooncakeStore], Any]]] = [
    ("batch_is_exist", lambda store: store.exists(["a", "b"])),
    ("batch_get_into", lambda store: store.read(["a", "b"], [1, 2], [10, 10])),
    ("batch_get_session_start", lambda store: store.session_start(["a", "b"])),
    (
        "batch_get_into_multi_buffer_ranges",
        lambda store: store.read_ranges(["a", "b"], [[1], [2]], [[10], [10]], [[0], [0]]),
    ),
    ("batch_put_session_start", lambda store: store.put_start(["a", "b"], [10, 10])),
    ("batch_remove", lambda store: store.remove(["a", "b"])),
]
each_call = pytest.mark.parametrize(("name", "call"), PER_KEY, ids=[name for name, _ in PER_KEY])


@each_call
@pytest.mark.parametrize(
    "answer", [[], [0], [0, 0, 0], None, 0, (0, 0), "00", {"a": 0}, RuntimeError("native")], ids=repr
)
def test_an_answer_of_another_shape_fails_every_key(
    store: MooncakeStore, native: Native, name: str, call: Callable[[MooncakeStore], Any], answer: object
) -> None:
    native.answers[name] = answer
    assert list(call(store)) == [PageStatus.MALFORMED] * 2


@each_call
@pytest.mark.parametrize("element", [True, None, 1.0, "0", 12345, -99999], ids=repr)
def test_a_bad_element_fails_its_key_alone(
    store: MooncakeStore, native: Native, name: str, call: Callable[[MooncakeStore], Any], element: object
) -> None:
    good = 10 if "into" in name else 0
    native.answers[name] = [good, element]
    assert list(call(store)) == [good, PageStatus.MALFORMED]


@each_call
@pytest.mark.parametrize(("code", "status"), [pair for pair in NATIVE_CODES.items() if pair[0] != -600])
def test_codes(
    store: MooncakeStore,
    native: Native,
    name: str,
    call: Callable[[MooncakeStore], Any],
    code: int,
    status: PageStatus,
) -> None:
    good = 10 if "into" in name else 0
    native.answers[name] = [code, good]
    assert list(call(store)) == [status, good]


def test_invalid_parameters_mean_something_else_to_each_call(store: MooncakeStore, native: Native) -> None:
    native.answers.update({name: [-600, -600] for name, _ in PER_KEY})
    found = {name: list(call(store))[0] for name, call in PER_KEY}
    assert found == {
        "batch_is_exist": PageStatus.MALFORMED,
        "batch_get_into": PageStatus.WRONG_SIZE,
        "batch_get_session_start": PageStatus.MALFORMED,
        "batch_get_into_multi_buffer_ranges": PageStatus.LEASE_EXPIRED,
        "batch_put_session_start": PageStatus.MALFORMED,
        "batch_remove": PageStatus.MALFORMED,
    }


def test_counts_of_whole_reads(store: MooncakeStore, native: Native) -> None:
    native.answers["batch_get_into"] = [10, 9, 11, 0]
    assert whole(store, [10, 10, 10, 10]) == [
        10,
        PageStatus.WRONG_SIZE,
        PageStatus.MALFORMED,
        PageStatus.MALFORMED,
    ]


def test_counts_of_ranged_reads(store: MooncakeStore, native: Native) -> None:
    native.answers["batch_get_into_multi_buffer_ranges"] = [30, 29, 0]
    sizes = [[10, 20], [10, 20], []]
    answers = store.read_ranges(["a", "b", "c"], [[1, 2], [1, 2], []], sizes, [[0, 0], [0, 0], []])
    assert list(answers) == [30, PageStatus.MALFORMED, 0]


def test_a_key_twice_is_read_in_two_calls(store: MooncakeStore, native: Native) -> None:
    native.answers["batch_get_into"] = lambda keys, pointers, sizes: [len(key) for key in keys]
    answers = store.read(["aaa", "b", "aaa", "b", "b"], [1, 2, 3, 4, 5], [3, 1, 3, 1, 7])
    assert list(answers) == [3, 1, 3, 1, PageStatus.WRONG_SIZE]
    read = [arguments for name, arguments in native.calls if name == "batch_get_into"]
    assert all(len(set(keys)) == len(keys) for keys, _, _ in read)
    assert sorted(pointer for _, pointers, _ in read for pointer in pointers) == [1, 2, 3, 4, 5]


def replica(size: int = 100, endpoint: str = "10.0.0.1:1", *, memory: bool = True, status: str = "COMPLETE") -> Any:
    buffer = SimpleNamespace(size=size, transport_endpoint=endpoint, buffer_address=4096)
    return SimpleNamespace(
        is_memory_replica=lambda: memory,
        status=SimpleNamespace(name=status, value=status),
        get_memory_descriptor=lambda: SimpleNamespace(buffer_descriptor=buffer),
    )


def test_descriptors(store: MooncakeStore, native: Native) -> None:
    native.answers["batch_get_replica_desc"] = {
        "good": [replica()],
        "disk": [replica(memory=False)],
        "second": [replica(memory=False), replica(status="PROCESSING"), replica(7, "10.0.0.2:1")],
        "none": [],
        "odd": None,
    }
    assert list(store.descriptors(["absent", "good", "disk", "second", "none", "odd"])) == [
        PageStatus.NOT_FOUND,
        Descriptor(100, "10.0.0.1:1", 4096),
        PageStatus.NO_MEMORY_REPLICA,
        Descriptor(7, "10.0.0.2:1", 4096),
        PageStatus.NO_MEMORY_REPLICA,
        PageStatus.MALFORMED,
    ]
    assert native.count("batch_is_exist") == 0


@pytest.mark.parametrize(
    ("exists", "status"),
    [
        ([0], PageStatus.NOT_FOUND),
        ([1], PageStatus.NOT_FOUND),
        ([-900], PageStatus.STORE_UNREACHABLE),
        ([], PageStatus.MALFORMED),
    ],
)
def test_no_descriptor_at_all_is_looked_into(
    store: MooncakeStore, native: Native, exists: list[int], status: PageStatus
) -> None:
    native.answers.update(batch_get_replica_desc={}, batch_is_exist=exists)
    assert list(store.descriptors(["a", "b"])) == [status] * 2
    assert [arguments for name, arguments in native.calls if name == "batch_is_exist"] == [(["a"],)]


def test_no_descriptor_at_all_because_nobody_is_at_the_masters_address(
    store: MooncakeStore, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softload.stores.master_contact.accepts", lambda address: False)
    native.answers["batch_get_replica_desc"] = {}
    assert list(store.descriptors(["a", "b"])) == [PageStatus.STORE_UNREACHABLE] * 2
    assert native.count("batch_is_exist") == 0


@pytest.mark.parametrize("answer", [None, [], RuntimeError("native")], ids=repr)
def test_malformed_descriptors(store: MooncakeStore, native: Native, answer: object) -> None:
    native.answers["batch_get_replica_desc"] = answer
    assert list(store.descriptors(["a", "b"])) == [PageStatus.MALFORMED] * 2


def test_puts(store: MooncakeStore, native: Native) -> None:
    native.answers["batch_put_session_start"] = [0, -705, -200, 0]
    assert list(store.put_start(["a", "b", "c", "d"], [10] * 4)) == [0, PutRefusal.PRESENT, PutRefusal.FULL, 0]
    native.answers["batch_put_from_multi_buffer_ranges"] = [10, 7]
    assert list(store.put_write(["a", "b", "d"], [1, 2, 3], [10] * 3)) == [
        10,
        PageStatus.NOT_FOUND,
        PageStatus.MALFORMED,
    ]
    native.answers["batch_put_session_end"] = [0]
    assert list(store.put_end(["a", "b", "d"])) == [0, PageStatus.NOT_FOUND, PageStatus.NOT_READY]
    assert native.calls[-1] == ("batch_put_session_end", (["a"],))
    native.answers["batch_put_session_revoke"] = [0]
    store.put_revoke(["a", "b", "d"])
    assert native.calls[-1] == ("batch_put_session_revoke", (["d"],))


def test_an_end_that_failed_is_revoked_before_the_next_put(store: MooncakeStore, native: Native) -> None:
    native.answers.update(
        batch_put_session_start=[0], batch_put_from_multi_buffer_ranges=[10], batch_put_session_end=[-900]
    )
    store.put_start(["a"], [10])
    store.put_write(["a"], [1], [10])
    assert list(store.put_end(["a"])) == [PageStatus.STORE_UNREACHABLE]
    native.answers["batch_put_session_revoke"] = [-900]
    store.put_revoke(["a"])
    assert list(store.put_start(["a"], [10])) == [PageStatus.STORE_UNREACHABLE]
    native.answers["batch_put_session_revoke"] = [0]
    assert list(store.put_start(["a"], [10])) == [0]
    assert [name for name, _ in native.calls if "put" in name] == [
        "batch_put_session_start",
        "batch_put_from_multi_buffer_ranges",
        "batch_put_session_end",
        "batch_put_session_revoke",
        "batch_put_session_revoke",
        "batch_put_session_revoke",
        "batch_put_session_start",
    ]
    store.put_revoke(["a"])


def test_ends_that_failed_are_revoked_with_later_puts_of_other_keys(store: MooncakeStore, native: Native) -> None:
    """A master that was away for a while leaves nothing behind: most of these keys are never put again."""
    keys = [f"k{index}" for index in range(100)]
    native.answers.update(
        batch_put_session_start=lambda keys, _: [0] * len(keys),
        batch_put_from_multi_buffer_ranges=lambda keys, *_: [10] * len(keys),
        batch_put_session_end=lambda keys: [-900] * len(keys),
        batch_put_session_revoke=lambda keys: [-900] * len(keys),
    )
    store.put_start(keys, [10] * 100)
    store.put_write(keys[:90], list(range(1, 91)), [10] * 90)
    assert set(store.put_end(keys[:90])) == {PageStatus.STORE_UNREACHABLE}
    store.put_revoke(keys)
    assert len(store._reservations) == 100
    store._contact = MasterContact("127.0.0.1:1")  # it is back
    native.answers["batch_put_session_revoke"] = lambda keys: [0] * len(keys)
    native.answers["batch_put_session_end"] = lambda keys: [0] * len(keys)
    for turn in range(2):
        assert list(store.put_start([f"new{turn}"], [10])) == [0]
        store.put_write([f"new{turn}"], [1], [10])
        assert list(store.put_end([f"new{turn}"])) == [0]
    assert len(store._reservations) == 0
    revokes = [arguments[0] for name, arguments in native.calls if name == "batch_put_session_revoke"]
    assert [len(keys) for keys in revokes[-2:]] == [64, 36]


def test_registration(store: MooncakeStore, native: Native) -> None:
    assert store.register(1, 10) is True
    native.answers["register_buffer"] = -600
    assert store.register(1, 10) is False
    native.answers["register_buffer"] = RuntimeError("native")
    assert store.register(1, 10) is False


def test_nothing_native_before_open_and_after_close(store: MooncakeStore, native: Native) -> None:
    store.close()
    before = len(native.calls)
    assert native.count("close") == 1
    unopened = MooncakeStore(master="127.0.0.1:1")
    for closed in (store, unopened):
        assert all(list(call(closed)) == [PageStatus.STORE_UNREACHABLE] * 2 for _, call in PER_KEY)
        assert list(closed.descriptors(["a", "b"])) == [PageStatus.STORE_UNREACHABLE] * 2
        assert list(closed.put_write(["a"], [1], [1])) == [PageStatus.STORE_UNREACHABLE]
        assert list(closed.put_end(["a"])) == [PageStatus.STORE_UNREACHABLE]
        assert closed.register(1, 1) is False
        closed.unregister(1)
        closed.session_end(["a"])
        closed.put_revoke(["a"])
    assert len(native.calls) == before
    store.close()
    unopened.close()
    with pytest.raises(LoaderClosedError):
        store.open()
    with pytest.raises(LoaderClosedError):
        unopened.open()


def test_the_native_close_waits_for_calls_that_are_out(
    store: MooncakeStore, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would crash the process; `close` itself does not wait longer than it says."""
    inside, leave = threading.Event(), threading.Event()

    def hang(*_: object) -> list[int]:
        inside.set()
        leave.wait(30)
        return [10]

    native.answers["batch_get_into"] = hang
    answers: list[object] = []
    reader = threading.Thread(target=lambda: answers.extend(store.read(["a"], [1], [10])))
    reader.start()
    assert inside.wait(10)
    monkeypatch.setattr("softload.stores.mooncake._CLOSE_DEADLINE", 0.05)
    store.close()
    assert store.calls_out == 1
    assert native.count("close") == 0
    assert list(store.exists(["a"])) == [PageStatus.STORE_UNREACHABLE]
    leave.set()
    reader.join(10)
    assert answers == [10]
    assert store._closed.wait(10)
    assert native.count("close") == 1


def test_the_native_close_waits_for_who_looks_into_its_memory(
    store: MooncakeStore, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softload.stores.mooncake._CLOSE_DEADLINE", 0.05)
    with store.hold() as allowed:
        assert allowed is True
        store.close()
        assert store.calls_out == 1
        assert native.count("close") == 0
    assert store._closed.wait(10)
    assert native.count("close") == 1
    with store.hold() as allowed:
        assert allowed is False


def test_a_client_without_a_segment_lends_nothing(store: MooncakeStore, native: Native) -> None:
    assert store.lend("a", Descriptor(100, "127.0.0.1:1", 4096)) is None
    assert native.count("get_hostname") == 0


def test_the_kernel_is_asked_at_set_up_which_ports_are_ours(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks of this host are endpoints like this one: none of them costs a load a look at all sockets."""
    looks: list[int] = []

    def look() -> dict[int, bool]:
        looks.append(len(looks))
        return {7000: False}

    monkeypatch.setattr("softload.stores.listening.listening_ports", look)
    native.answers["get_hostname"] = "127.0.0.1:1"
    with segment_of(native, monkeypatch) as store:
        for rank in range(8):
            assert store.lend("a", Descriptor(100, f"127.0.0.1:{8000 + rank}", 4096)) is None
    assert len(looks) == 2


@contextmanager
def segment_of(native: Native, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeStore]:
    """A client that gives memory to the store."""
    store = MooncakeStore(master="127.0.0.1:1", segment=1 << 24)
    monkeypatch.setattr(store, "_prepare", lambda: lambda: native)
    for name, value in (("probe_master", "127.0.0.1"), ("is_alive", True), ("native_library", None)):
        monkeypatch.setattr(f"softload.stores.mooncake.{name}", lambda *_, value=value: value)
    store.open()
    try:
        yield store
    finally:
        store.close()


@pytest.mark.parametrize("opened", ["before", "meanwhile", "after"])
def test_another_clients_ports_are_not_ours(opened: str, native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory goes when it is closed, whoever holds this one."""
    ports = {22: False}
    monkeypatch.setattr("softload.stores.listening.listening_ports", lambda: dict(ports))

    def set_up(port: int) -> Callable[..., int]:
        def listen(*_: object) -> int:
            ports[port] = False
            return 0

        return listen

    other = Native()
    other.answers["setup"] = set_up(8000)

    def both(*_: object) -> int:
        with segment_of(other, monkeypatch) as second:
            assert not second._ports
        return set_up(7000)()

    native.answers["setup"] = both if opened == "meanwhile" else set_up(7000)
    if opened == "before":
        with segment_of(other, monkeypatch) as second, segment_of(native, monkeypatch) as store:
            assert [*store._ports, *second._ports] == [7000, 8000]
    else:
        with segment_of(native, monkeypatch) as store:
            assert list(store._ports) == ([] if opened == "meanwhile" else [7000])
            with segment_of(other, monkeypatch) as second:
                assert not store._ports & second._ports


def test_a_dead_master_leaves_the_native_client_behind(
    store: MooncakeStore, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its close would hold the GIL for 7 s and more."""
    monkeypatch.setattr("softload.stores.mooncake.is_alive", lambda address: False)
    store.close()
    assert native.count("close") == 0
    assert store.leave(0.0) is False
    has_left(store)


def test_setup_that_fails(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MooncakeStore(master="127.0.0.1:1", protocol="rdma", device="mlx5_0")
    monkeypatch.setattr(store, "_prepare", lambda: lambda: native)
    monkeypatch.setattr("softload.stores.mooncake.probe_master", lambda address: "127.0.0.1")
    monkeypatch.setattr("softload.stores.setup_checks.probe_rdma", lambda device: None)
    native.answers["setup"] = -1
    with pytest.raises(
        StoreSetupError, match="Mooncake's setup .* got -1 with protocol 'rdma', device 'mlx5_0'.* is the device there"
    ):
        store.open()
    store.close()
    assert native.count("close") == 0


def test_nobody_at_the_masters_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(StoreSetupError, match=f"master at 127.0.0.1:{port} to answer"):
        probe_master(f"127.0.0.1:{port}")


def test_a_connection_to_itself_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes about where the kernel picks the port that is called for the caller's own."""
    own: list[socket.socket] = []

    def connected_to_itself(*_: object) -> socket.socket:
        caller = socket.socket()
        caller.bind(("127.0.0.1", 0))
        caller.connect(caller.getsockname())
        own.append(caller)
        return caller

    monkeypatch.setattr("softload.stores.probe.socket.create_connection", connected_to_itself)
    assert not accepts("127.0.0.1:50051")
    with pytest.raises(StoreSetupError, match="nobody listens"):
        probe_master("127.0.0.1:50051")
    assert [caller.fileno() for caller in own] == [-1, -1], "closed"


def test_a_connection_that_was_reset_at_once_reached_somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a living master may do; the caller's socket has no peer any more, and is closed all the same."""
    connect = socket.create_connection
    made: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def connected_and_reset(address: tuple[str, int], timeout: float) -> socket.socket:
            caller = connect(address, timeout)
            peer, _ = listener.accept()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
            made.append(caller)
            with pytest.raises(OSError, match="not connected"):
                caller.getpeername()
            return caller

        monkeypatch.setattr("softload.stores.probe.socket.create_connection", connected_and_reset)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert accepts(address)
        assert probe_master(address) == "127.0.0.1"
    assert [caller.fileno() for caller in made] == [-1, -1], "closed"


def test_a_master_that_accepts_and_is_silent() -> None:
    """As a frozen process does: its kernel goes on accepting."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(StoreSetupError, match="start mooncake_master there"):
            probe_master(f"127.0.0.1:{silent.getsockname()[1]}", deadline=0.1)


def test_a_master_that_is_gone_is_not_asked_until_it_listens_again(
    store: MooncakeStore, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native client would try for four seconds in every call."""
    listens = False
    monkeypatch.setattr("softload.stores.master_contact.accepts", lambda address: listens)
    native.answers.update(batch_is_exist=[-900], batch_get_into=[10], batch_get_into_multi_buffer_ranges=[10])
    assert list(store.exists(["a"])) == [PageStatus.STORE_UNREACHABLE]
    for call in (lambda: store.exists(["a"]), lambda: store.read(["a"], [1], [10]), lambda: store.descriptors(["a"])):
        assert list(call()) == [PageStatus.STORE_UNREACHABLE]
    assert (native.count("batch_is_exist"), native.count("batch_get_into")) == (1, 0)
    assert list(store.read_ranges(["a"], [[1]], [[10]], [[0]])) == [10], "ranges need no master"
    listens = True
    assert list(store.read(["a"], [1], [10])) == [10]


def test_who_waits_behind_a_question_to_a_dead_master_does_not_ask(
    store: MooncakeStore, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is out when the master dies tries for four seconds; those behind it look whether anybody listens."""
    monkeypatch.setattr("softload.stores.master_contact.accepts", lambda address: False)
    asked, goes_on = threading.Event(), threading.Event()

    def ask(keys: list[str]) -> dict[str, object]:
        asked.set()
        goes_on.wait(10)
        return {}

    native.answers["batch_get_replica_desc"] = ask
    answers: list[object] = []
    first = threading.Thread(target=lambda: answers.extend(store.descriptors(["a"])))
    first.start()
    try:
        assert asked.wait(10)
        assert list(store.descriptors(["b"])) == [PageStatus.STORE_UNREACHABLE]
    finally:
        goes_on.set()
        first.join(10)
    assert answers == [PageStatus.STORE_UNREACHABLE]
    assert native.count("batch_get_replica_desc") == 1
