"""Mooncake Store as a `PageStore`. The only module that imports mooncake."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import structlog

from softload.errors import LoaderClosedError, StoreSetupError
from softload.events import STORE_RAISED
from softload.outcomes import PageStatus
from softload.protocols import Answer, Descriptor, PutAnswer, PutRefusal
from softload.stores import setup_checks
from softload.stores.checks import check_lengths, check_positive
from softload.stores.cluster import INSTALL_HINT
from softload.stores.gate import CallGate
from softload.stores.listening import PortWatch
from softload.stores.master_contact import MasterContact
from softload.stores.mooncake_puts import MooncakePuts
from softload.stores.native_codes import NATIVE_CODES, descriptor, descriptors, expect, translate
from softload.stores.native_log import native_library, restore_log_level
from softload.stores.own_memory import own_memory
from softload.stores.probe import is_alive, probe_master
from softload.stores.process_exit import has_left, leave_at_exit
from softload.stores.reservations import Reservations

__all__ = ["NATIVE_CODES", "MooncakeStore"]

_CLOSE_DEADLINE: Final = 2.0
_ENVIRONMENT: Final = {
    # The default of 256 makes large calls to a busy peer fail with -800.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    # A line for every missing key otherwise.
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "3",
}

_Ask = Callable[[Any], Any]

_segments_started: Final = PortWatch()

_log = structlog.get_logger("softload.stores.mooncake")


class MooncakeStore:
    """A client of a Mooncake master.

    `open` sets variables of this process's environment where they are not set, for the native library reads them once:
    `MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=65535`, `MC_LOG_LEVEL=ERROR` and `GLOG_minloglevel=3` (quiet).

    Args:
        master: `host:port` of the master.
        protocol: `tcp` or `rdma`.
        device: RDMA devices, comma-separated; empty for Mooncake's own choice.
        metadata: address of the metadata server, or `P2PHANDSHAKE` for none.
        segment: bytes of memory that this process gives to the store: 0, or at least 16 MiB.
        local_buffer: bytes of the client's own buffer.
        tenant: tenant of a master with tenants; empty for the default one.
        lease: seconds that the master's leases last; Mooncake does not tell, so a value that is too long is a mistake.
        hostname: the address that peers reach this process by; None for the one that leads to the master.

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        *,
        master: str,
        protocol: str = "tcp",
        device: str = "",
        metadata: str = "P2PHANDSHAKE",
        segment: int = 0,
        local_buffer: int = 16 << 20,
        tenant: str = "",
        lease: float = 5.0,
        hostname: str | None = None,
    ) -> None:
        self._master = master
        self._protocol = setup_checks.check_protocol(protocol)
        self._device = device
        self._metadata = setup_checks.check_metadata(metadata)
        self._segment = setup_checks.check_segment(segment) if segment else 0
        self._ports: frozenset[int] = frozenset()
        self._local_buffer = check_positive("local_buffer", local_buffer)
        self._tenant = tenant
        self._lease_ttl = check_positive("lease", lease)
        self._hostname = hostname
        self._says_goodbye = segment > 0
        self._gate = CallGate()
        self._contact = MasterContact(master)
        self._native: Any = None
        self._native_there = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._closed = threading.Event()
        self._reservations = Reservations()
        self._puts = MooncakePuts(self._gate, self._reservations, self._call, self._per_key)

    def __repr__(self) -> str:
        state = "closed" if self._closing.is_set() else "new" if self._native is None else "open"
        return f"<{type(self).__name__} {state} | master {self._master} | {self._gate.calls_out} calls out>"

    @property
    def lease_ttl(self) -> float:
        """Seconds that a lease lasts."""
        return self._lease_ttl

    @property
    def calls_out(self) -> int:
        """Native calls that have not returned; also after `close`."""
        return self._gate.calls_out

    def open(self) -> None:
        """Connect to the master; again is no change. Takes about 0.1 s, of which the native part holds the GIL.

        Raises:
            StoreSetupError: the library or an RDMA device is missing, or master or metadata server do not answer.
            LoaderClosedError: after `close`.
        """
        with self._lock:
            if self._closing.is_set():
                raise LoaderClosedError("this store was closed; open a new one")
            if self._native is not None:
                return
            client_type = self._prepare()
            if self._protocol == "rdma":
                setup_checks.probe_rdma(self._device)
            setup_checks.probe_metadata(self._metadata)
            local_address, native = probe_master(self._master), client_type()
            self._start(native, self._hostname or local_address)
            restore_log_level(native_library())
            self._native = native
            leave_at_exit(self)
            self._native_there = True
            # Now, because none can be started once the interpreter is ending.
            threading.Thread(target=self._close_when_idle, name="softload-mooncake-close", daemon=True).start()
            self._gate.admit()

    def close(self) -> None:
        """Disconnect: new calls answer `STORE_UNREACHABLE` from now on. Waits at most about 2 s.

        The native close follows when the last call has returned, for it crashes the process under a call; where one
        hangs that may be never, and memory given to it must live on. It holds the GIL, for one to two seconds, and for
        7 s or more where the master is gone: then the native client is left behind until the process ends.
        """
        self._start_closing()
        self._await_closed(_CLOSE_DEADLINE)

    def register(self, pointer: int, nbytes: int) -> bool:
        """Register memory with the transport."""
        return bool(self._call(lambda native: native.register_buffer(pointer, nbytes), asks_master=False) == 0)

    def unregister(self, pointer: int) -> None:
        """Take a registration back."""
        self._call(lambda native: native.unregister_buffer(pointer), asks_master=False)

    def exists(self, keys: Sequence[str]) -> Sequence[bool | PageStatus]:
        """Ask the master; leases what is there."""
        answers = self._per_key(keys, lambda native: native.batch_is_exist(list(keys)))
        if answers == [1] * len(keys):  # as a rule; what equals 1 is 1
            return [True] * len(keys)
        return [
            answer if isinstance(answer, PageStatus) else bool(answer) if answer in (0, 1) else PageStatus.MALFORMED
            for answer in answers
        ]

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        """Ask the master for replicas; leases what is there. An object that is being written answers `NOT_FOUND`.

        A master that is out of reach answers as if nothing were there. So an answer without any key is looked into: by
        a connection, which is refused at once where nobody is, then by a question.
        """
        if not keys:
            return []
        absent = PageStatus.NOT_FOUND
        with self._contact.turn():
            replicas = self._call(lambda native: native.batch_get_replica_desc(list(keys)))
            if not replicas:
                answer = PageStatus.STORE_UNREACHABLE if self._contact.failed() else self.exists(keys[:1])[0]
                absent = answer if isinstance(answer, PageStatus) else absent
        if isinstance(replicas, PageStatus):
            return [replicas] * len(keys)
        if not isinstance(replicas, dict):
            return [PageStatus.MALFORMED] * len(keys)
        found = list(map(replicas.get, keys))
        if None not in found:
            return descriptors(found)
        return [descriptor(replicas[key]) if key in replicas else absent for key in keys]

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """Read whole objects; asks the master and takes its own lease."""
        check_lengths(keys=keys, pointers=pointers, sizes=sizes)
        if len(set(keys)) < len(keys):
            return self._read_in_turns(keys, pointers, sizes)
        answers = self._per_key(
            keys,
            lambda native: native.batch_get_into(list(keys), list(pointers), list(sizes)),
            invalid=PageStatus.WRONG_SIZE,
        )
        if answers == list(sizes):
            return list(sizes)
        # A buffer that is too large is filled in part: the count is the object's size then.
        return [
            PageStatus.WRONG_SIZE if isinstance(answer, int) and 0 < answer < size else expect(answer, size)
            for answer, size in zip(answers, sizes, strict=True)
        ]

    def session_start(self, keys: Sequence[str]) -> Sequence[Answer]:
        """Ask the master; a start that fails forgets the key's live session."""
        answers = self._per_key(keys, lambda native: native.batch_get_session_start(list(keys)))
        return [expect(answer, 0) for answer in answers]

    def session_end(self, keys: Sequence[str]) -> None:
        """Forget sessions; the master is not asked."""
        if keys:
            self._call(lambda native: native.batch_get_session_end(list(keys)), asks_master=False)

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        """Read from the remembered replicas; the master is not asked.

        `LEASE_EXPIRED` for a session past its lease, which ends it, for no session, and for a range past the object's
        end (that one keeps the session): Mooncake does not tell the last two apart.
        """
        check_lengths(keys=keys, pointers=pointers, sizes=sizes, offsets=offsets)
        wanted = [list(each) for each in sizes]
        answers = self._per_key(
            keys,
            lambda native: native.batch_get_into_multi_buffer_ranges(
                list(keys), [list(each) for each in pointers], wanted, [list(each) for each in offsets]
            ),
            invalid=PageStatus.LEASE_EXPIRED,
            asks_master=False,
        )
        return [expect(answer, sum(each)) for answer, each in zip(answers, wanted, strict=True)]

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[PutAnswer]:
        """Reserve objects, one replica each; a size below one byte answers `MALFORMED`."""
        return self._puts.start(keys, sizes)

    def put_write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """Write reserved objects; `NOT_FOUND` without a reservation, `WRONG_SIZE` for another size than reserved."""
        return self._puts.write(keys, pointers, sizes)

    def put_end(self, keys: Sequence[str]) -> Sequence[Answer]:
        """Make objects visible; `NOT_FOUND` without a reservation, `NOT_READY` for one that was not written whole."""
        return self._puts.end(keys)

    def put_revoke(self, keys: Sequence[str]) -> None:
        """Give reservations back; one that the master could not take back is tried again before later puts."""
        self._puts.revoke(keys)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> Sequence[Answer]:
        """Remove objects at the master; `NOT_READY` where leased (unless forced) or being written."""
        answers = self._per_key(keys, lambda native: native.batch_remove(list(keys), force))
        return [expect(answer, 0) for answer in answers]

    def lend(self, key: str, descriptor: Descriptor) -> range | None:
        """The memory that this process gives to the store, if the object lies there; see `LendingStore.lend`."""
        if not self._segment:
            return None
        name = self._call(lambda native: native.get_hostname(), asks_master=False)
        if not isinstance(name, str):
            return None
        return own_memory(self, key, descriptor, name=name, ports=self._ports, nbytes=self._segment)

    def hold(self) -> AbstractContextManager[bool]:
        """A call that is out for as long as it is held: closing waits for it. See `LendingStore.hold`."""
        return self._gate.call()

    def _prepare(self) -> Any:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from mooncake.store import MooncakeDistributedStore
        except ModuleNotFoundError as error:
            raise StoreSetupError(f"expected the package 'mooncake', found none ({error}); {INSTALL_HINT}") from error
        except ImportError as error:
            raise StoreSetupError(
                f"Mooncake is installed but a shared library it needs is not: {error}. On Debian and Ubuntu: "
                "apt-get install libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4; libcuda and libcudart are needed "
                "by the CUDA wheels only, without an accelerator use mooncake-transfer-engine-non-cuda"
            ) from error
        return MooncakeDistributedStore

    def _start(self, native: Any, hostname: str) -> None:
        """Set up. The ports that this opens are this client's: another one of this process may be closed any time."""
        if not self._segment:
            self._set_up(native, hostname)
            return
        opened = _segments_started.begin()
        try:
            self._set_up(native, hostname)
        finally:
            self._ports = opened.end()

    def _set_up(self, native: Any, hostname: str) -> None:
        memory, transport = (self._segment, self._local_buffer), (self._protocol, self._device)
        tenant = {"tenant_id": self._tenant} if self._tenant else {}
        try:
            code = native.setup(hostname, self._metadata, *memory, *transport, self._master, **tenant)
        except MemoryError:
            code = setup_checks.OUT_OF_MEMORY
        if code != 0:
            raise setup_checks.setup_refused(code, self._master, self._metadata, memory, transport)

    def _call(self, ask: _Ask, *, asks_master: bool = True) -> Any:
        """One native call: what it answered, or the status of a store that is closed, out of reach, or that raised."""
        with self._gate.call() as allowed:
            if not allowed or (asks_master and not self._contact.may_ask()):
                return PageStatus.STORE_UNREACHABLE
            try:
                return ask(self._native)
            except Exception as error:
                _log.warning(STORE_RAISED, error=repr(error))
                return PageStatus.MALFORMED

    def _per_key(
        self, keys: Sequence[str], ask: _Ask, *, invalid: PageStatus = PageStatus.MALFORMED, asks_master: bool = True
    ) -> list[int | PageStatus | PutRefusal]:
        """One native call that answers per key; `invalid` is what it means by -600."""
        if not keys:
            return []
        raw = self._call(ask, asks_master=asks_master)
        if isinstance(raw, PageStatus):
            return [raw] * len(keys)
        if not isinstance(raw, list) or len(raw) != len(keys):
            return [PageStatus.MALFORMED] * len(keys)
        if set(map(type, raw)) == {int} and min(raw) >= 0:
            return raw
        answers = [translate(code, invalid) for code in raw]
        if PageStatus.STORE_UNREACHABLE in answers:
            self._contact.failed()
        return answers

    def _read_in_turns(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """Read with no key twice in a call: the native one fills the last of its buffers and counts for all of them."""
        answers: list[Answer] = [PageStatus.MALFORMED] * len(keys)
        left = list(range(len(keys)))
        while left:
            turn = list({keys[index]: index for index in reversed(left)}.values())
            read = self.read(
                [keys[index] for index in turn], [pointers[index] for index in turn], [sizes[index] for index in turn]
            )
            for index, answer in zip(turn, read, strict=True):
                answers[index] = answer
            taken = set(turn)
            left = [index for index in left if index not in taken]
        return answers

    def _start_closing(self) -> None:
        with self._lock:
            self._gate.shut()
            self._closing.set()
            if self._native is None:
                self._closed.set()

    def _await_closed(self, timeout: float) -> bool:
        return self._closed.wait(timeout)

    def _close_when_idle(self) -> None:
        self._closing.wait()
        self._gate.wait_idle()
        if is_alive(self._master):
            self._native.close()
            has_left(self)
            self._native_there = False
        else:
            # Its destructor would do the same as the close.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._native))
        self._closed.set()

    def leave(self, timeout: float) -> bool:
        """At the end of the process: whether the native client is gone.

        Calls had better return before the interpreter ends. The master forgets a silent client by itself; only one
        whose memory others read says goodbye.
        """
        self._gate.shut()
        if self._gate.wait_idle(timeout) and self._says_goodbye:
            self._start_closing()
            self._await_closed(_CLOSE_DEADLINE)
        return not self._native_there
