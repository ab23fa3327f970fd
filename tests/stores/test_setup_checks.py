"""What is refused before Mooncake's set-up would hang on it, and what its answers are turned into."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from softload.errors import StoreSetupError
from softload.stores import EmbeddedMooncakeStore, MemoryStore, QuietStart, open_store, setup_checks
from softload.stores.setup_checks import metadata_addresses, probe_metadata, probe_rdma, rdma_devices, setup_refused


@pytest.fixture
def infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two devices: one up, one down."""
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    monkeypatch.setattr(setup_checks, "_INFINIBAND", tmp_path)
    yield tmp_path


def test_devices_and_whether_they_are_up(infiniband: Path) -> None:
    assert rdma_devices() == {"mlx5_0": True, "mlx5_1": False}
    for device in ("", "mlx5_0"):
        probe_rdma(device)


@pytest.mark.parametrize("device", ["mlx5_1", "mlx5_0,mlx5_1", "mlx5_7"])
def test_devices_that_are_down_or_not_there(infiniband: Path, device: str) -> None:
    with pytest.raises(StoreSetupError, match=rf"{device} to be active .* found mlx5_0 \(active\), mlx5_1 \(down\) in"):
        probe_rdma(device)


def test_a_machine_without_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_checks, "_INFINIBAND", tmp_path / "none")
    with pytest.raises(StoreSetupError, match="expected an active RDMA device .* found none"):
        probe_rdma("")


@pytest.mark.mooncake
@pytest.mark.parametrize("query", ["protocol=rdma&device=no-such-device", "metadata=http://127.0.0.1:1/metadata"])
def test_opening_fails_at_once(query: str) -> None:
    """By itself Mooncake would take 22 s, two seconds or minutes."""
    pytest.importorskip("mooncake")
    began = time.monotonic()
    with pytest.raises(StoreSetupError, match="RDMA devices no-such-device|metadata server http"):
        open_store(f"mooncake://127.0.0.1:1?{query}").open()
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("metadata", "addresses"),
    [
        ("http://a:8080/metadata", ("a:8080",)),
        ("http://a/metadata", ("a:80",)),
        ("etcd://a:1;b:2", ("a:1", "b:2")),
        ("10.0.0.7:2379", ("10.0.0.7:2379",)),
        ("redis://a:6379", ("a:6379",)),
        ("P2PHANDSHAKE", ()),
        ("ftp://a:1", ()),
        ("etcd://a:1;b", ()),
        ("http://a:x/", ()),
        ("", ()),
    ],
)
def test_addresses_of_metadata_servers(metadata: str, addresses: tuple[str, ...]) -> None:
    assert metadata_addresses(metadata) == addresses


def test_no_metadata_server_is_not_probed() -> None:
    probe_metadata("P2PHANDSHAKE")


@pytest.mark.parametrize(
    ("code", "advice"),
    [(-1, "is the device there"), (-600, "a smaller segment"), (-900, "is it up"), (-901, "in time"), (-7, "logged")],
)
def test_every_answer_comes_with_advice(code: int, advice: str) -> None:
    text = str(setup_refused(code, "10.0.0.7:50051", "P2PHANDSHAKE", (1, 2), ("tcp", "")))
    assert f"got {code} with protocol 'tcp'" in text
    assert advice in text


@pytest.mark.mooncake
@pytest.mark.parametrize("setting", ["segment", "local_buffer"])
def test_memory_that_is_not_there(setting: str, mooncake_store: EmbeddedMooncakeStore) -> None:
    store = open_store(f"mooncake://{mooncake_store.cluster.address}?{setting}=16TiB")
    with pytest.raises(StoreSetupError, match="got -600 .* a smaller segment or local_buffer"):
        store.open()
    store.close()


def test_a_memory_store_larger_than_memory() -> None:
    for capacity in (1 << 60, 1 << 70):
        with pytest.raises(StoreSetupError, match=f"got {capacity} bytes, which it refused"):
            MemoryStore(capacity=capacity).open()


class _Noisy(MemoryStore):
    def open(self) -> None:
        os.write(2, b"WARNING: Logging before InitGoogleLogging() is written to STDERR\n")
        os.write(2, b"E1129 20:45:15 transfer_metadata.cpp:1098] Local segment descriptor not found\n")
        os.write(2, b"E1129 20:45:15 real_client.cpp:1020] Failed to allocate segment memory\n")
        raise StoreSetupError("no memory")


def test_a_quiet_start_hides_known_noise_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StoreSetupError, match="no memory"):
        QuietStart(_Noisy()).open()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == ("E1129 20:45:15 real_client.cpp:1020] Failed to allocate segment memory\nafter\n")


def test_a_quiet_start_without_a_place_to_hold_lines_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    before = len(os.listdir("/proc/self/fd"))
    quiet = QuietStart(MemoryStore())
    quiet.open()
    quiet.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_quiet_start_whose_lines_nobody_reads(capfd: pytest.CaptureFixture[str]) -> None:
    """A pipe whose reader has gone, as with `softload doctor 2>&1 | head -1`."""

    class Loud(MemoryStore):
        def open(self) -> None:
            os.write(2, b"something\n")
            super().open()

    reader, writer = os.pipe()
    os.close(reader)
    kept = os.dup(2)
    os.dup2(writer, 2)
    try:
        quiet = QuietStart(Loud())
        quiet.open()
        quiet.close()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)
