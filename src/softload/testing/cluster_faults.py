"""Faults of a cluster's processes as they come in production: killed, frozen, cut off, started again, in mid-run."""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar

import structlog

from softload.errors import StoreSetupError
from softload.stores.children import Child
from softload.stores.cluster import MooncakeCluster
from softload.stores.listening import listening_ports
from softload.testing.fault_specs import Fault, FaultKind
from softload.testing.moments import MomentStore
from softload.testing.partitions import Partitions, why_no_partitions

__all__ = ["ClusterFaults"]

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class ClusterFaults:
    """Lets faults happen to a cluster while it is entered, and leaves no process frozen or cut off.

    A fault of an owner takes the first owner that is well; where there is none, or no master that is, nothing happens.

    Args:
        cluster: started.
        faults: of scheduled kinds; their seconds count from entering.
        moments: the store whose calls bring the moments of those that have one.

    Raises:
        ValueError: a fault of another kind; a moment without `moments`; a fault of an owner in a cluster without any;
            one that cuts off, in a network that others use. Entering raises `StoreSetupError` where the kernel does not
            let this process do that; leaving does where a fault could not happen, or not be mended: later ones still
            do, and nobody who runs into it is told before.
    """

    def __init__(self, cluster: MooncakeCluster, faults: Sequence[Fault], moments: MomentStore | None = None) -> None:
        for fault in faults:
            if not fault.kind.is_scheduled:
                raise ValueError(f"expected faults of a cluster's processes, got {fault.kind}, which happens to calls")
            if fault.kind.needs_owner and not cluster.owner_count:
                raise ValueError(f"{fault.kind}: expected a cluster with owners, got one without")
            if fault.moment is not None and moments is None:
                raise ValueError(f"{fault.kind}@{fault.moment}: expected a MomentStore, got none")
            if fault.kind.cuts_off and (reason := why_no_partitions()) is not None:
                raise ValueError(f"{fault.kind}: expected iproute2 and a network namespace of one's own, got {reason}")
        self._cluster = cluster
        self._faults = tuple(faults)
        self._moments = moments
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ended = False
        self._acting = threading.RLock()
        self._frozen: set[Child] = set()
        self._partitions: Partitions | None = None
        self._parted: dict[Child, frozenset[int]] = {}
        self._starting: list[threading.Thread] = []
        self._began = 0.0
        self._thread = threading.Thread(target=self._run, name="softload-cluster-faults", daemon=True)
        self.happened: list[tuple[float, str]] = []
        """What was done, and how many seconds after entering."""
        self._failures: list[str] = []

    def __enter__(self) -> ClusterFaults:
        self._began = time.monotonic()
        if any(fault.kind.cuts_off for fault in self._faults):
            self._partitions = Partitions()
        for fault in self._faults:
            if fault.moment is None:
                self._plan(fault.seconds, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
            else:
                assert self._moments is not None
                self._moments.at(fault.moment, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        with self._acting:
            for child in list(self._frozen):
                self._attempt("thaw", partial(self._thaw, child))
            for child in list(self._parted):
                self._attempt("join", partial(self._join, child))
        self._thread.join()
        for thread in self._starting:
            thread.join()
        if self._failures and error is None:
            raise StoreSetupError(f"expected every fault to happen, and to be mended, got {'; '.join(self._failures)}")

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ended and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._ended:
                    return
                _, _, action = heapq.heappop(self._due)
            action()

    def _plan(self, seconds: float, action: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))
            self._changed.notify()

    def _strike(self, fault: Fault) -> None:
        with self._acting:
            if self._ended:
                return
            mend = self._attempt(str(fault.kind), partial(self._do, fault.kind))
            if mend is not None and fault.lasts is not None:
                self._plan(fault.lasts, lambda: self._mend(fault.kind, mend))

    def _attempt(self, what: str, action: Callable[[], T]) -> T | None:
        """What raises here is told at the end: it ends no thread, and no call of the store that came to its moment."""
        try:
            return action()
        except Exception as error:  # of the kernel, or a process that has ended just now
            self._note(f"{what} failed")
            self._failures.append(f"{what}: {error}")
            return None

    def _do(self, kind: FaultKind) -> Callable[[], None] | None:
        """Do it, and say how to undo it; ``None`` where there is nothing to undo."""
        cluster = self._cluster
        mend: Callable[[], None]
        if kind is FaultKind.KILL_LOADER:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind is FaultKind.RESTART_MASTER:
            self._restart_master()
            return None
        if kind.needs_owner:
            well = [index for index, child in enumerate(cluster.owners) if self._is_well(child)]
            if not well:
                return None
            index = well[0]
            child, name, mend = cluster.owners[index], f"owner {index}", partial(self._restart_owner, index)
        else:
            if cluster.master is None or not self._is_well(cluster.master):
                return None
            child, name, mend = cluster.master, "master", self._restart_master
        if kind in (FaultKind.FREEZE_OWNER, FaultKind.FREEZE_MASTER):
            child.freeze()
            self._frozen.add(child)
            self._note(f"{name} frozen")
            return lambda: self._thaw(child)
        if kind.cuts_off:
            assert self._partitions is not None
            ports = frozenset(listening_ports(child.pid))
            if not ports:
                raise StoreSetupError(f"expected ports that process {child.pid} listens on, found none")
            self._partitions.part(ports)
            self._parted[child] = ports
            self._note(f"{name} cut off")
            return lambda: self._join(child)
        child.kill()
        self._note(f"{name} killed")
        return mend

    def _mend(self, kind: FaultKind, mend: Callable[[], None]) -> None:
        with self._acting:
            self._attempt(f"the end of {kind}", mend)

    def _restart_master(self) -> None:
        self._cluster.restart_master()
        self._note("master started")

    def _restart_owner(self, index: int) -> None:
        # It waits for a master, which may be frozen and have to be thawed meanwhile.
        start = partial(self._start_owner, index)
        thread = threading.Thread(target=self._attempt, args=(f"owner {index}", start), daemon=True)
        self._starting = [*(each for each in self._starting if each.is_alive()), thread]
        thread.start()

    def _start_owner(self, index: int) -> None:
        try:
            self._cluster.restart_owner(index)
            self._note(f"owner {index} started")
        except StoreSetupError as error:  # its master is away: that is no fault of the faults
            self._note(f"owner {index} did not start")
            _log.warning("fault.failed", error=str(error))

    def _thaw(self, child: Child) -> None:
        if child in self._frozen:
            self._frozen.remove(child)
            if child.alive:
                child.thaw()
                self._note(f"process {child.pid} thawed")

    def _join(self, child: Child) -> None:
        ports = self._parted.pop(child, None)
        if ports is not None:
            assert self._partitions is not None
            self._partitions.join(ports)
            self._note(f"process {child.pid} joined")

    def _is_well(self, child: Child) -> bool:
        return child.alive and child not in self._frozen and child not in self._parted

    def _note(self, what: str) -> None:
        self.happened.append((round(time.monotonic() - self._began, 3), what))
