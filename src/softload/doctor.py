"""What `softload doctor` looks at: Python, torch, the Mooncake build and its libraries, and what a store answers."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

import torch

from softload.errors import StoreSetupError
from softload.outcomes import PageStatus
from softload.protocols import Descriptor, PageStore, PutRefusal
from softload.stores import QuietStart, open_store
from softload.stores.cluster import INSTALL_HINT
from softload.stores.listening import exposed_ports
from softload.stores.setup_checks import probe_rdma, rdma_devices

__all__ = ["Check", "diagnose"]

T = TypeVar("T")

_WHEELS = {
    "mooncake-transfer-engine": "CUDA 12",
    "mooncake-transfer-engine-cuda13": "CUDA 13",
    "mooncake-transfer-engine-non-cuda": "no CUDA",
}
_MINIMUM = (0, 3, 13)
_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "liburing.so.2": "liburing2",
    "libcurl.so.4": "libcurl4",
}
_SECONDS = 30.0
_PAYLOAD = 64 << 10
_in_use: list[object] = []
"""Memory that a call which did not return may still write: kept until the process ends."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Args:
        name: what.
        ok: whether it is fit; ``None`` for a note that asks for nothing.
        found: what was found.
        advice: what to do about it, where there is something to do.
    """

    name: str
    ok: bool | None
    found: str
    advice: str = ""


def diagnose(url: str) -> list[Check]:
    """Look at the installation and try the store at `url`. Takes seconds, at most a minute or two where it hangs.

    Raises:
        ValueError: not a store's URL.
    """
    store = QuietStart(open_store(url))
    needs_mooncake = url.startswith("mooncake:")
    return [*_base(), *_mooncake(needs_mooncake, url), *_rdma(url), *_store(store, url)]


def _base() -> Iterator[Check]:
    python = sys.version_info >= (3, 11)
    yield Check("Python", python, platform.python_version(), "" if python else "install Python 3.11 or newer")
    accelerator = torch.accelerator.current_accelerator()
    yield Check("torch", True, f"{torch.__version__}, {'CPU only' if accelerator is None else accelerator.type}")


def _mooncake(needed: bool, url: str) -> Iterator[Check]:
    versions = {name: version for name in _WHEELS if (version := _version(name)) is not None}
    missing = False if needed else None
    if not versions:
        yield Check("Mooncake", missing, "not installed", INSTALL_HINT if needed else "")
        return
    listed = ", ".join(f"{name} {version} ({_WHEELS[name]})" for name, version in versions.items())
    if len(versions) > 1:
        advice = f"uninstall {', '.join(versions)}, then install one of them: they overwrite each other's files"
        yield Check("Mooncake", missing, f"expected one wheel, got {listed}", advice)
    elif _numbers(next(iter(versions.values()))) < _MINIMUM:
        wanted = ".".join(map(str, _MINIMUM))
        yield Check(
            "Mooncake", missing, f"expected {wanted} or newer, got {listed}", f"pip install -U {next(iter(versions))}"
        )
    else:
        yield Check("Mooncake", True, listed)
    absent = {library: package for library, package in _LIBRARIES.items() if not _loads(library)}
    if absent:
        advice = f"apt-get install {' '.join(absent.values())} (Debian, Ubuntu)"
        yield Check("its libraries", missing, f"cannot load {', '.join(absent)}", advice if needed else "")
    else:
        yield Check("its libraries", True, ", ".join(_LIBRARIES))
    if "embedded" in url and needed:
        master = _master()
        yield Check(
            "mooncake_master",
            master is not None,
            "not found" if master is None else "comes with the wheel",
            "install the wheel again, or name a running master: --store mooncake://HOST:PORT" if master is None else "",
        )


def _rdma(url: str) -> Iterator[Check]:
    """Where it is asked for: without a device, Mooncake sets up well and can read no peer."""
    query = parse_qs(urlsplit(url).query)
    if "rdma" not in query.get("protocol", []):
        return
    try:
        probe_rdma(",".join(query.get("device", [])))
    except StoreSetupError as error:
        yield Check("RDMA", False, str(error))  # says what to do
    else:
        yield Check("RDMA", True, ", ".join(name for name, active in rdma_devices().items() if active))


def _exposed(before: list[int]) -> Iterator[Check]:
    """Ports that the store opened to other machines: a peer writes into registered memory through them."""
    ports = sorted(set(exposed_ports()) - set(before))
    if ports:
        yield Check(
            "listening",
            None,
            f"this process accepts connections from other machines on {', '.join(map(str, ports))}",
            "let only the cluster reach them; MC_MIN_RPC_PORT and MC_MAX_RPC_PORT name the range",
        )


def _store(store: PageStore, url: str) -> Iterator[Check]:
    before = exposed_ports()
    try:
        _bounded(store.open)
    except StoreSetupError as error:
        yield Check("store", False, str(error))  # says what to do
        return
    except TimeoutError:
        yield Check("store", False, f"{url} did not answer within {_SECONDS:.0f} s", "is its master up and reachable?")
        return
    yield Check("store", True, f"{url} answers")
    yield from _exposed(before)
    try:
        yield from _round_trip(store, url)
    except TimeoutError:
        yield Check(
            "round trip", False, f"a call did not return within {_SECONDS:.0f} s", "is an owner of its memory frozen?"
        )
    finally:
        try:
            _bounded(store.close)
        except TimeoutError:
            yield Check("close", False, f"did not return within {_SECONDS:.0f} s", "is the master up and reachable?")


def _more_memory(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return "give it more memory: capacity=SIZE, at least 1MiB"
    if parts.netloc == "embedded":
        return "give it more memory: segment=SIZE, at least 16MiB for each owner"
    return "some process must give the cluster memory, for example this one: segment=SIZE, at least 16MiB"


def _round_trip(store: PageStore, url: str) -> Iterator[Check]:
    """Put one object, look at it, read it whole and by ranges, remove it."""
    key = f"softload-doctor/{uuid.uuid4()}"
    payload = os.urandom(_PAYLOAD)
    memory = ctypes.create_string_buffer(payload, 3 * _PAYLOAD)
    base = ctypes.addressof(memory)
    _in_use.append(memory)
    whole, ranged = base + _PAYLOAD, base + 2 * _PAYLOAD
    if not _bounded(lambda: store.register(base, 3 * _PAYLOAD)):
        yield Check(
            "memory", False, "the transport refused to register 192 KiB", "raise the limit of locked memory: ulimit -l"
        )
        return
    put = _bounded(lambda: _put(store, key, base))
    if put != _PAYLOAD:
        yield Check(
            "put",
            False,
            f"expected {_PAYLOAD} bytes written, got {put!s}",
            _more_memory(url) if put in (PutRefusal.FULL, PageStatus.MALFORMED) else "are its master and owners well?",
        )
        _bounded(lambda: store.unregister(base))
        return
    (described,) = _bounded(lambda: store.descriptors([key]))
    fit = isinstance(described, Descriptor) and described.size == _PAYLOAD
    yield Check(
        "object",
        fit,
        f"{_PAYLOAD} bytes at {described.endpoint}" if isinstance(described, Descriptor) else str(described),
    )
    (read,) = _bounded(lambda: store.read([key], [whole], [_PAYLOAD]))
    same = memory.raw[_PAYLOAD : 2 * _PAYLOAD] == payload
    yield _bytes_check("whole read", read, same)
    (started,) = _bounded(lambda: store.session_start([key]))
    half = _PAYLOAD // 2
    if isinstance(started, PageStatus):
        yield Check("sessions", False, f"expected a session, got {started}", "use a Mooncake of 0.3.13 or newer")
    else:
        (read,) = _bounded(lambda: store.read_ranges([key], [[ranged + half, ranged]], [[half, half]], [[half, 0]]))
        same = memory.raw[2 * _PAYLOAD :] == payload
        yield _bytes_check("sessions", read, same)
        _bounded(lambda: store.session_end([key]))
    (removed,) = _bounded(lambda: store.remove([key], force=True))
    yield Check(
        "removal", not isinstance(removed, PageStatus), str(removed) if isinstance(removed, PageStatus) else "done"
    )
    _bounded(lambda: store.unregister(base))


def _put(store: PageStore, key: str, pointer: int) -> object:
    (reserved,) = store.put_start([key], [_PAYLOAD])
    if reserved != 0:
        return reserved
    (written,) = store.put_write([key], [pointer], [_PAYLOAD])
    if written != _PAYLOAD:
        store.put_revoke([key])
        return written
    (ended,) = store.put_end([key])
    return ended if isinstance(ended, PageStatus) else written


def _bytes_check(name: str, read: object, same: bool) -> Check:
    if read == _PAYLOAD and same:
        return Check(name, True, f"{_PAYLOAD} bytes, the same")
    if read == _PAYLOAD:
        return Check(name, False, f"{_PAYLOAD} bytes, but others", "do not use this store: it returns wrong bytes")
    return Check(name, False, f"expected {_PAYLOAD} bytes, got {read!s}", "can this machine reach the memory's owner?")


class _Call(threading.Thread, Generic[T]):
    """A call on a daemon thread: one that hangs does not keep the process."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__(daemon=True, name="doctor")
        self._call = call
        self.result: list[T] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result.append(self._call())
        except Exception as error:  # raised again by `_bounded`
            self.error = error


def _bounded(call: Callable[[], T]) -> T:
    thread = _Call(call)
    thread.start()
    thread.join(_SECONDS)
    if thread.is_alive():
        raise TimeoutError
    if thread.error is not None:
        raise thread.error
    return thread.result[0]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _master() -> str | None:
    found = util.find_spec("mooncake")
    for place in (found.submodule_search_locations or []) if found is not None else []:
        if (Path(place) / "mooncake_master").is_file():
            return str(Path(place) / "mooncake_master")
    return shutil.which("mooncake_master")
