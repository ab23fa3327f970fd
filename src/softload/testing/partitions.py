"""TCP ports of loopback that are cut off: silence in both directions, as a link that is down leaves it, no reset.

Only in a network namespace of one's own, whose routing others do not share: `unshare --net`. What is sent from or to
such a port is routed into an interface that nobody listens to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from softload.errors import StoreSetupError

__all__ = ["Partitions", "why_no_partitions"]

_VOID: Final = "softload-void"
_TABLE: Final = "77"
_BEFORE_LOCAL: Final = "5"
_LOCAL: Final = "10"


def why_no_partitions() -> str | None:
    """What keeps this process from cutting ports off; ``None`` for nothing that shows before it is tried."""
    if shutil.which("ip") is None:
        return "no iproute2"
    try:
        is_shared = os.readlink("/proc/self/ns/net") == os.readlink("/proc/1/ns/net")
    except OSError:  # another user's process 1: then the kernel lets us change our own namespace only
        return None
    return "the network of the whole machine" if is_shared else None


class Partitions:
    """Cuts ports off and joins them again.

    Raises:
        StoreSetupError: the kernel does not let this process route, or iproute2 lacks something.
    """

    def __init__(self) -> None:
        self._rules: list[tuple[str, ...]] = []
        if _VOID not in _ip("-oneline", "link", "show"):
            _ip("link", "add", _VOID, "type", "veth", "peer", "name", f"{_VOID}1")
        _ip("link", "set", _VOID, "arp", "off")
        _ip("link", "set", _VOID, "up")
        Path(f"/proc/sys/net/ipv4/conf/{_VOID}/route_localnet").write_text("1", encoding="ascii")
        _ip("route", "replace", "127.0.0.0/8", "dev", _VOID, "table", _TABLE)
        if _ip("rule", "show").startswith("0:"):  # it would come before any other
            _ip("rule", "add", "pref", _LOCAL, "lookup", "local")
            _ip("rule", "del", "pref", "0")

    def __repr__(self) -> str:
        return f"<Partitions {len(self._rules)} rules>"

    def part(self, ports: Iterable[int]) -> None:
        """Cut ports off; those that are stay so.

        Raises:
            StoreSetupError: the kernel, or another, has meddled with a rule; then none of these ports is cut off.
        """
        ports = set(ports)
        try:
            for rule in _rules(ports):
                if rule not in self._rules:
                    _ip("rule", "add", *rule)
                    self._rules.append(rule)
        except StoreSetupError:
            with suppress(StoreSetupError):
                self.join(ports)
            raise

    def join(self, ports: Iterable[int]) -> None:
        """Let packets through again; the kernels of both sides repeat what was lost.

        Raises:
            StoreSetupError: a rule was not there any more; all others are gone.
        """
        failures: list[StoreSetupError] = []
        for rule in _rules(ports):
            if rule in self._rules:
                self._rules.remove(rule)
                try:
                    _ip("rule", "del", *rule)
                except StoreSetupError as error:
                    failures.append(error)
        if failures:
            raise failures[0]


def _rules(ports: Iterable[int]) -> Iterable[tuple[str, ...]]:
    for port in sorted(ports):
        for side in ("sport", "dport"):
            yield "pref", _BEFORE_LOCAL, "ipproto", "tcp", side, str(port), "lookup", _TABLE


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise StoreSetupError(f"expected `ip {' '.join(words)}` to succeed, got {done.stderr.strip()!r}")
    return done.stdout
