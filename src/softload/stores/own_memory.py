"""Which memory of this process a client of Mooncake gives to others, proven by what lies in it.

An object's descriptor names an endpoint and an address. Whether that endpoint is this process Mooncake does not tell:
the name that it has for itself has another port. So it is taken for this client if the host is the same, the kernel
says that this process listens on the port since the client was set up, the address lies in memory of this process, and
the object's bytes, read through the store, are the ones that lie there. Another client of this process is somebody
else: its memory goes when it is closed, whoever holds this one.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

import numpy as np

from softload.protocols import Descriptor, PageStore

__all__ = ["own_memory"]

_TELLING_BYTES: Final = 64
"""Shorter objects, and those whose bytes are all equal, may be alike by chance."""


def own_memory(
    store: PageStore, key: str, descriptor: Descriptor, *, name: str, ports: Collection[int], nbytes: int
) -> range | None:
    """The addresses of a segment of this process that an object lies in; ``None`` where it is not proven that it does.

    Args:
        store: reads the object.
        key: the object's.
        descriptor: where it is said to be.
        name: `host:port`, what the store calls this process.
        ports: those that this process listens on for this client, as the kernel says.
        nbytes: of the segment.

    Returns:
        not more than the segment and as much around it as is mapped together with it.
    """
    host, _, port = descriptor.endpoint.rpartition(":")
    if host != name.rpartition(":")[0] or not (port.isascii() and port.isdigit()) or int(port) not in ports:
        return None
    first, end = descriptor.address, descriptor.address + descriptor.size
    mapped = _mapping(first)
    if mapped is None or end > mapped.stop:
        return None
    here = _peek(first, descriptor.size)
    if here is None or here.size < _TELLING_BYTES or (here == here[0]).all():
        return None
    if not np.array_equal(here, _read(store, key, descriptor.size)):
        return None
    return range(max(mapped.start, end - nbytes), min(mapped.stop, first + nbytes))


def _mapping(address: int) -> range | None:
    """The mapping of this process, to be read and written, that an address is in."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system than Linux
        return None
    for line in lines:
        bounds, rights, *_ = line.split(maxsplit=2)
        start, _, stop = bounds.partition("-")
        if int(start, 16) <= address < int(stop, 16):
            return range(int(start, 16), int(stop, 16)) if rights.startswith("rw") else None
    return None


def _peek(address: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
    """Bytes of this process, asked of the kernel: memory that is not there, or no longer, is no reason to crash."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.pread(memory, nbytes, address)
    except (OSError, OverflowError):
        return None
    finally:
        os.close(memory)
    return np.frombuffer(found, np.uint8) if len(found) == nbytes else None


def _read(store: PageStore, key: str, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The object as the store reads it; nothing where it does not."""
    buffer = np.empty(nbytes, np.uint8)
    if not store.register(buffer.ctypes.data, nbytes):
        return buffer[:0]
    try:
        return buffer if list(store.read([key], [buffer.ctypes.data], [nbytes])) == [nbytes] else buffer[:0]
    finally:
        store.unregister(buffer.ctypes.data)
