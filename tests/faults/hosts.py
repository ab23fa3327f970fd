"""A cluster whose master and owners are hosts of their own: network namespaces, on a bridge in another one.

To be imported by a script that runs under `unshare --net`: whatever it makes goes with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from softload.stores import cluster as cluster_module
from softload.stores.children import Child
from softload.stores.probe import accepts

MASTER, FIRST_OWNER = 2, 3
PORT = 50051


def ip(*words: str, inside: int | None = None) -> None:
    """Run iproute2's command, in the namespace of a process if one is named."""
    prefix = [] if inside is None else ["nsenter", "--target", str(inside), "--net"]
    subprocess.run([*prefix, "ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """A master at 10.0.0.2 and owners from 10.0.0.3 on; the loader is at 10.0.0.1."""

    def __init__(self, owners: int, segment: int, lease: float, client_ttl: int) -> None:
        ip("link", "set", "lo", "up")
        ip("link", "add", "bridge0", "type", "bridge")
        ip("address", "add", "10.0.0.1/24", "dev", "bridge0")
        ip("link", "set", "bridge0", "up")
        self._holders: dict[int, Child] = {}
        self.children: list[Child] = []
        self.address = f"10.0.0.{MASTER}:{PORT}"
        master = [str(cluster_module._master_program()), f"--rpc_address=10.0.0.{MASTER}", f"--rpc_port={PORT}"]
        master += [f"--default_kv_lease_ttl={round(lease * 1000)}", f"--client_ttl={client_ttl}"]
        self._run(MASTER, [*master, "--metrics_port=50052", "--enable_metric_reporting=false"])
        _wait(lambda: accepts(self.address))
        program = [sys.executable, "-P", str(Path(cluster_module.__file__).with_name("owner.py"))]
        for host in range(FIRST_OWNER, FIRST_OWNER + owners):
            words = ["--master", self.address, "--segment", str(segment // owners), "--host", f"10.0.0.{host}"]
            owner = self._run(host, [*program, *words])
            _wait(lambda owner=owner: "ready" in owner.output())

    def part(self, host: int) -> None:
        """Take a host's link down: silence, not a reset."""
        ip("link", "set", f"veth{host}", "down")

    def join(self, host: int) -> None:
        """Take it up again."""
        ip("link", "set", f"veth{host}", "up")

    def close(self) -> None:
        for child in (*self.children, *self._holders.values()):
            child.kill()

    def _run(self, host: int, argv: list[str]) -> Child:
        holder = self._holders[host] = Child(["/usr/bin/env", "unshare", "--net", "sleep", "600"])
        mine = os.readlink("/proc/self/ns/net")
        _wait(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != mine)
        ip("link", "add", f"veth{host}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        ip("link", "set", f"veth{host}", "master", "bridge0")
        ip("link", "set", f"veth{host}", "up")
        ip("address", "add", f"10.0.0.{host}/24", "dev", "eth0", inside=holder.pid)
        ip("link", "set", "eth0", "up", inside=holder.pid)
        ip("link", "set", "lo", "up", inside=holder.pid)
        child = Child(["/usr/bin/env", "nsenter", "--target", str(holder.pid), "--net", *argv])
        self.children.append(child)
        return child


def _wait(condition, seconds: float = 15.0) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("a host did not come up")
        time.sleep(0.02)
