"""Whether a master is alive, asked in bounded time."""

from __future__ import annotations

import contextlib
import errno
import socket

from softload.errors import StoreSetupError

__all__ = ["accepts", "is_alive", "probe_master"]


def accepts(address: str, timeout: float = 1.0) -> bool:
    """Whether something accepts connections at `address` (`host:port`); a frozen process does, too."""
    try:
        _connect(address, timeout).close()
    except (OSError, UnicodeError):  # a name that cannot be one
        return False
    return True


def is_alive(address: str) -> bool:
    """Whether the master at `address` is alive, by the same probe as `probe_master`."""
    try:
        probe_master(address, deadline=1.0)
    except StoreSetupError:
        return False
    return True


def probe_master(address: str, deadline: float = 3.0) -> str:
    """The local address that leads to the master at `address` (`host:port`), once the master has shown to be alive.

    Mooncake's own set-up holds the GIL, for 90 s where nobody answers, so this comes first. A frozen process accepts
    connections too; but only a living one closes a connection on which something else than its protocol came.

    Args:
        address: where the master is.
        deadline: seconds to wait for a connection, and for an answer.

    Raises:
        StoreSetupError: nobody answered.
    """
    try:
        with _connect(address, deadline) as connection:
            local_address = str(connection.getsockname()[0])
            with contextlib.suppress(ConnectionError):
                connection.sendall(bytes(64))
                connection.recv(1)
            return local_address
    except (OSError, UnicodeError) as error:
        raise StoreSetupError(
            f"expected a Mooncake master at {address} to answer within {deadline} s, got {error!r}: start "
            "mooncake_master there, or correct the address"
        ) from error


def _connect(address: str, timeout: float) -> socket.socket:
    connection = socket.create_connection(_parts(address), timeout)
    try:
        reached_itself = connection.getsockname() == connection.getpeername()
    except OSError:  # there is no peer any more: somebody was there, and has reset the connection
        reached_itself = False
    if reached_itself:
        # Nobody listens, and the kernel has given this end the very port that it calls.
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
    return connection


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
