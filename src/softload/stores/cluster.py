"""A Mooncake cluster of this process's own: master and owners of memory, ended with it.

The master listens on loopback. Owners and clients are reached by loopback addresses, but their transfer ports listen on
all interfaces: Mooncake 0.3.13 has no option against that (`MC_TCP_BIND_ADDRESS` changes nothing).
"""

from __future__ import annotations

import importlib.util
import random
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from softload.errors import StoreSetupError
from softload.stores.children import Child
from softload.stores.probe import accepts

__all__ = ["INSTALL_HINT", "MooncakeCluster"]

INSTALL_HINT: Final = (
    "pip install exactly one of mooncake-transfer-engine-non-cuda (no accelerator), mooncake-transfer-engine (CUDA 12) "
    "and mooncake-transfer-engine-cuda13"
)

_PORTS: Final = range(20_000, 32_768)
"""Linux gives out the ones from 32,768 on."""

_START_DEADLINE: Final = 15.0
_POLL: Final = 0.02


class MooncakeCluster:
    """The master that ships with the wheel, and `owners` processes that share a segment between them.

    `master` and `owners` (`owner_count` of them, once it is started) are handles with pids, for tests that freeze or
    kill them.

    Args:
        segment: bytes of memory that the owners have together.
        lease: seconds that the master's leases last.
        owners: processes that own memory.
        high_watermark: the fraction of memory above which the master evicts.
        eviction_ratio: the fraction of objects that one pass evicts.
        client_ttl: seconds after which the master forgets a silent client.
    """

    def __init__(
        self,
        *,
        segment: int,
        lease: float,
        owners: int = 0,
        high_watermark: float | None = None,
        eviction_ratio: float | None = None,
        client_ttl: float | None = None,
    ) -> None:
        self._segment = segment
        self.owner_count = owners
        flags = [f"--default_kv_lease_ttl={round(lease * 1000)}", "--enable_metric_reporting=false"]
        if high_watermark is not None:
            flags.append(f"--eviction_high_watermark_ratio={high_watermark}")
        if eviction_ratio is not None:
            flags.append(f"--eviction_ratio={eviction_ratio}")
        if client_ttl is not None:
            flags.append(f"--client_ttl={max(1, round(client_ttl))}")
        self._flags = flags
        self._ports: tuple[int, int] | None = None
        self.master: Child | None = None
        self.owners: list[Child] = []

    def __repr__(self) -> str:
        return f"<MooncakeCluster master {self.master!r} | owners {self.owners!r}>"

    @property
    def address(self) -> str:
        """`host:port` of the master; of no use before `start`."""
        return f"127.0.0.1:{self._ports[0] if self._ports else 0}"

    def start(self) -> None:
        """Start master and owners, and wait until they answer.

        Raises:
            StoreSetupError: the wheel is missing, or one of them did not come up.
        """
        with ExitStack() as undo:
            undo.callback(self.close)
            # A port that was free a moment ago may be taken by the time the master binds it.
            for attempts_left in (2, 1, 0):
                self._ports = _free_ports()
                try:
                    self.restart_master()
                    break
                except StoreSetupError:
                    if self.master is None or self.master.alive or not attempts_left:
                        raise
            self.owners = [self._start_owner() for _ in range(self.owner_count)]
            for owner in self.owners:
                _await_owner(owner)
            undo.pop_all()

    def restart_master(self) -> None:
        """Start the master on its old port, killing the one that may be there. What it knew is lost, as in production.

        Raises:
            StoreSetupError: it did not come up.
        """
        if self._ports is None:
            raise StoreSetupError("the cluster was not started")
        if self.master is not None:
            self.master.kill()
        rpc, metrics = self._ports
        loopback = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        ports = [f"--rpc_port={rpc}", f"--metrics_port={metrics}"]
        self.master = Child([str(_master_program()), *loopback, *ports, *self._flags])
        _await(self.master, lambda: accepts(self.address), "the master")

    def restart_owner(self, index: int) -> None:
        """Start another owner in the place of one, killing that. What it held is lost, as in production.

        Args:
            index: of `owners`.

        Raises:
            StoreSetupError: it did not come up, for want of a living master for example.
        """
        self.owners[index].kill()
        self.owners[index] = self._start_owner()
        _await_owner(self.owners[index])

    def _start_owner(self) -> Child:
        share = self._segment // max(1, self.owner_count)
        program = [sys.executable, "-P", str(Path(__file__).with_name("owner.py"))]
        return Child([*program, "--master", self.address, "--segment", str(share)])

    def close(self) -> None:
        """End the children, the master first: nothing is left to find out about the owners. Again is no change."""
        if self.master is not None:
            self.master.kill()
        for owner in self.owners:
            owner.kill()


def _master_program() -> Path:
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        program = Path(folder) / "mooncake_master"
        if program.is_file():
            return program
    raise StoreSetupError(f"expected the package 'mooncake' with its mooncake_master, found none; {INSTALL_HINT}")


def _free_ports() -> tuple[int, int]:
    """Ports for a master, below those that the kernel gives out.

    One of those would soon be somebody else's when the master is killed, and it has to start again on its own.
    """
    ports: list[int] = []
    with ExitStack() as held:
        for port in [*random.SystemRandom().sample(_PORTS, 64), 0, 0]:
            listener = held.enter_context(socket.socket())
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(listener.getsockname()[1])
            if len(ports) == 2:
                break
    return ports[0], ports[1]


def _await_owner(owner: Child) -> None:
    _await(owner, lambda: "ready" in owner.output(), "an owner of memory")


def _await(child: Child, ready: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + _START_DEADLINE
    while not ready():
        if not child.alive:
            raise StoreSetupError(f"expected {name} to come up, it ended: {child.output()}")
        if time.monotonic() > deadline:
            raise StoreSetupError(f"expected {name} to answer within {_START_DEADLINE} s, it did not: {child.output()}")
        time.sleep(_POLL)
