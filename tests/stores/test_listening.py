"""Which ports of a process other machines reach."""

from __future__ import annotations

import os
import socket

import pytest

from softload.stores.listening import exposed_ports, listening_ports


@pytest.mark.parametrize(
    ("family", "address", "exposed"),
    [
        (socket.AF_INET, "127.0.0.1", False),
        (socket.AF_INET, "127.0.0.7", False),
        (socket.AF_INET, "0.0.0.0", True),
        (socket.AF_INET6, "::1", False),
        (socket.AF_INET6, "::", True),
    ],
)
def test_ports_of_this_process(family: int, address: str, exposed: bool) -> None:
    with socket.socket(family) as listener, socket.socket(family) as silent:
        try:
            listener.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no {address}")
        listener.listen()
        silent.bind((address, 0))
        port = listener.getsockname()[1]
        assert listening_ports()[port] is exposed
        assert (port in exposed_ports(os.getpid())) is exposed
        assert silent.getsockname()[1] not in listening_ports()
    assert port not in listening_ports()


def test_a_process_that_is_gone_has_none() -> None:
    assert listening_ports(1 << 22) == {}
