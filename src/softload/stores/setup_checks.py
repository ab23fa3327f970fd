"""What Mooncake's set-up would take minutes to refuse, holding the GIL, or would accept and not use: checked before."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from softload.errors import StoreSetupError
from softload.stores.probe import accepts

__all__ = [
    "MINIMAL_SEGMENT",
    "OUT_OF_MEMORY",
    "PROTOCOLS",
    "check_metadata",
    "check_protocol",
    "check_segment",
    "metadata_addresses",
    "probe_metadata",
    "probe_rdma",
    "rdma_devices",
    "setup_refused",
]

PROTOCOLS: Final = ("tcp", "rdma")
MINIMAL_SEGMENT: Final = 16 << 20
"""Bytes: the least that Mooncake mounts."""

_NO_METADATA_SERVER: Final = "P2PHANDSHAKE"
_METADATA_SCHEMES: Final = ("http", "https", "etcd", "redis")
_INFINIBAND: Final = Path("/sys/class/infiniband")
OUT_OF_MEMORY: Final = -600
"""What set-up answers where it cannot have its memory."""

_ADVICE: Final = {
    -1: "its transport did not start: is the device there and up, and does the metadata server answer?",
    OUT_OF_MEMORY: "it could not take the memory: give a smaller segment or local_buffer, or free some (with RDMA, "
    "raise `ulimit -l`)",
    -900: "the master did not answer: is it up and reachable, and of the same Mooncake version?",
    -901: "the master did not answer in time: is it up and reachable, and not overloaded?",
}


def check_protocol(protocol: str) -> str:
    """`protocol`, if it is known.

    Raises:
        ValueError: it is not.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol: expected {' or '.join(PROTOCOLS)}, got {protocol!r}")
    return protocol


def check_segment(segment: int, shares: int = 1) -> int:
    """`segment` bytes, if each of `shares` processes gets as much as Mooncake mounts.

    Raises:
        ValueError: they get less.
    """
    if segment < MINIMAL_SEGMENT * shares:
        of_each = f" for each of {shares} owners" if shares > 1 else ""
        raise ValueError(f"segment: expected at least 16MiB{of_each}, got {segment} bytes")
    return segment


def check_metadata(metadata: str) -> str:
    """`metadata`, if it names a metadata server or says that there is none.

    Raises:
        ValueError: it does neither.
    """
    if metadata != _NO_METADATA_SERVER and not metadata_addresses(metadata):
        raise ValueError(
            f"metadata: expected {_NO_METADATA_SERVER}, or the address of a metadata server like "
            f"http://HOST:PORT/metadata, etcd://HOST:PORT or redis://HOST:PORT, got {metadata!r}"
        )
    return metadata


def metadata_addresses(metadata: str) -> tuple[str, ...]:
    """`host:port` of each server that `metadata` names; none where it is not understood.

    Without a scheme it is etcd's, which may have several, separated by semicolons.
    """
    scheme, found, rest = metadata.partition("://")
    if not found:
        scheme, rest = "etcd", metadata
    if scheme not in _METADATA_SCHEMES:
        return ()
    defaults = {"http": 80, "https": 443}
    addresses = []
    for part in rest.split(";"):
        try:
            parts = urlsplit(f"//{part}")
            port = parts.port or defaults.get(scheme)
        except ValueError:
            return ()
        if not parts.hostname or port is None:
            return ()
        addresses.append(f"{parts.hostname}:{port}")
    return tuple(addresses)


def probe_metadata(metadata: str) -> None:
    """Make sure that a metadata server is there: set-up tries for minutes.

    Raises:
        StoreSetupError: none accepts connections.
    """
    addresses = metadata_addresses(metadata)
    if addresses and not any(accepts(address, 3.0) for address in addresses):
        raise StoreSetupError(
            f"expected the metadata server {metadata} to accept connections, it did not within 3 s: start it, or "
            f"correct the address (metadata={_NO_METADATA_SERVER} needs none)"
        )


def rdma_devices() -> dict[str, bool]:
    """This machine's RDMA devices by name, and whether a port of each is active."""
    if not _INFINIBAND.is_dir():
        return {}
    return {device.name: _is_active(device) for device in sorted(_INFINIBAND.iterdir())}


def probe_rdma(device: str) -> None:
    """Make sure that there is an active RDMA device: without one, set-up succeeds and no peer can be read.

    Args:
        device: names, comma-separated; empty for any.

    Raises:
        StoreSetupError: no active device, or none of that name.
    """
    found = rdma_devices()
    listed = ", ".join(f"{name} ({'active' if active else 'down'})" for name, active in found.items()) or "none"
    wanted = [name.strip() for name in device.split(",") if name.strip()]
    bad = [name for name in wanted if not found.get(name)] if wanted else [] if any(found.values()) else ["any"]
    if bad:
        raise StoreSetupError(
            f"expected {'an active RDMA device' if bad == ['any'] else f'the RDMA devices {device} to be active'} for "
            f"protocol 'rdma', found {listed} in {_INFINIBAND}: load the driver, bring the link up, name another "
            "device=NAME, or use protocol=tcp"
        )


def setup_refused(
    code: int, master: str, metadata: str, memory: tuple[int, int], transport: tuple[str, str]
) -> StoreSetupError:
    """What to raise for an answer of Mooncake's set-up that is not 0: what it was given, and what to do about it.

    Args:
        code: the answer.
        master: `host:port`.
        metadata: the metadata server.
        memory: bytes of the segment and of the local buffer.
        transport: protocol and devices.
    """
    advice = _ADVICE.get(code, "see what it logged")
    return StoreSetupError(
        f"expected Mooncake's setup at master {master} to answer 0, got {code} with protocol {transport[0]!r}, device "
        f"{transport[1]!r}, metadata {metadata!r}, segment {memory[0]} and local_buffer {memory[1]} bytes: {advice}"
    )


def _is_active(device: Path) -> bool:
    for state in device.glob("ports/*/state"):
        try:
            if "ACTIVE" in state.read_text():
                return True
        except OSError:
            continue  # the port went away meanwhile
    return False
