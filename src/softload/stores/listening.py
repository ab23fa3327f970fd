"""On which ports a process listens, as the kernel says it."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

__all__ = ["PortWatch", "exposed_ports", "listening_ports"]

_LISTENING: Final = "0A"
_LOOPBACK: Final = ("7F", "00000000000000000000000001000000")
"""How addresses of loopback end (IPv4, whose bytes are reversed) and what they are (IPv6)."""


class PortWatch:
    """Tells which ports of this process one of several that start something has opened, and not another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = self._running = 0

    def begin(self) -> PortsOpened:
        """Before something is started; `PortsOpened.end` must follow."""
        with self._lock:
            self._begun += 1
            self._running += 1
            return PortsOpened(self, self._begun if self._running == 1 else None)

    def _end(self, nth: int | None) -> bool:
        """Whether it ran while nothing else did."""
        with self._lock:
            self._running -= 1
            return nth == self._begun


class PortsOpened:
    """What is being started, from `PortWatch.begin` on."""

    def __init__(self, watch: PortWatch, nth: int | None) -> None:
        self._watch = watch
        self._nth = nth
        self._before = listening_ports()

    def end(self) -> frozenset[int]:
        """It has started, or failed to: the ports since; none where something else has been starting at any time."""
        ports = frozenset(listening_ports()) - frozenset(self._before)
        return ports if self._watch._end(self._nth) else frozenset()


def listening_ports(pid: int | None = None) -> dict[int, bool]:
    """TCP ports of a process that accept connections, and whether other machines reach them.

    Args:
        pid: of the process; ``None`` for this one.

    Returns:
        empty where the kernel does not tell (another system than Linux, another user's process).
    """
    process = Path("/proc") / ("self" if pid is None else str(pid))
    try:
        inodes = _sockets(process)
        lines = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in (process / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        ]
    except OSError:
        return {}
    ports: dict[int, bool] = {}
    for fields in lines:
        address, _, port = fields[1].rpartition(":")
        if fields[3] == _LISTENING and fields[9] in inodes:
            number = int(port, 16)
            ports[number] = ports.get(number, False) or not _is_loopback(address)
    return ports


def exposed_ports(pid: int | None = None) -> list[int]:
    """Those of `listening_ports` that other machines reach, sorted."""
    return sorted(port for port, exposed in listening_ports(pid).items() if exposed)


def _sockets(process: Path) -> set[str]:
    inodes = set()
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    return inodes


def _is_loopback(address: str) -> bool:
    v4, v6 = _LOOPBACK
    return address.endswith(v4) if len(address) == 8 else address == v6
