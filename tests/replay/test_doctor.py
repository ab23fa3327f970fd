"""`softload doctor`: what it finds, in words, on stores that are fit and on those that are not."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest

from softload import doctor
from softload.doctor import Check, diagnose
from softload.errors import StoreSetupError
from softload.outcomes import PageStatus
from softload.protocols import Answer, PageStore, PutAnswer, PutRefusal
from softload.stores import MemoryStore, WrapperStore, setup_checks


def by_name(checks: Sequence[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def diagnose_with(store: PageStore, monkeypatch: pytest.MonkeyPatch, url: str = "memory://") -> dict[str, Check]:
    monkeypatch.setattr(doctor, "open_store", lambda _: store)
    return by_name(diagnose(url))


def test_memory_store_is_fit() -> None:
    checks = by_name(diagnose("memory://?capacity=1MiB"))
    assert not [check for check in checks.values() if check.ok is False]
    assert {"Python", "torch", "store", "object", "whole read", "sessions", "removal"} <= set(checks)


@pytest.mark.mooncake
def test_ports_that_other_machines_reach_are_told() -> None:
    pytest.importorskip("mooncake")
    checks = by_name(diagnose("mooncake://embedded?segment=16MiB"))
    assert checks["listening"].ok is None
    assert "connections from other machines on" in checks["listening"].found
    assert "MC_MIN_RPC_PORT" in checks["listening"].advice
    assert checks["store"].ok and checks["whole read"].ok
    assert "listening" not in by_name(diagnose("memory://"))


def test_bad_url_is_a_bad_call() -> None:
    with pytest.raises(ValueError, match="ftp"):
        diagnose("ftp://nowhere")


class _Unset(WrapperStore):
    def open(self) -> None:
        raise StoreSetupError("no master: start one")


def test_store_that_cannot_be_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = diagnose_with(_Unset(MemoryStore()), monkeypatch)
    assert checks["store"] == Check("store", False, "no master: start one")
    assert "object" not in checks


class _Full(WrapperStore):
    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[PutAnswer]:
        return [PutRefusal.FULL] * len(keys)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("memory://", "capacity=SIZE"),
        ("mooncake://embedded", "segment=SIZE, at least 16MiB for each owner"),
        ("mooncake://10.0.0.7:50051", "some process must give the cluster memory"),
    ],
)
def test_store_without_room(url: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = diagnose_with(_Full(MemoryStore()), monkeypatch, url)["put"]
    assert check.ok is False and "got full" in check.found and advice in check.advice


def test_a_memory_store_without_room_for_anything() -> None:
    check = by_name(diagnose("memory://?capacity=1KiB"))["put"]
    assert check.ok is False and "capacity=SIZE" in check.advice and "segment" not in check.advice


def test_rdma_without_a_device_is_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_checks, "_INFINIBAND", tmp_path)
    url = "mooncake://127.0.0.1:1?protocol=rdma&device=mlx5_3"
    check = by_name(diagnose(url))["RDMA"]
    assert check.ok is False and "RDMA devices mlx5_3 to be active" in check.found and "protocol=tcp" in check.found
    port = tmp_path / "mlx5_3" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE")
    assert by_name(diagnose(url))["RDMA"] == Check("RDMA", True, "mlx5_3")
    assert "RDMA" not in by_name(diagnose("mooncake://127.0.0.1:1"))


class _Wrong(WrapperStore):
    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        answers = super().read(keys, pointers, sizes)
        ctypes.memset(pointers[0], 0, 64)
        return answers

    def session_start(self, keys: Sequence[str]) -> Sequence[Answer]:
        return [PageStatus.NO_MEMORY_REPLICA] * len(keys)


def test_store_with_wrong_bytes_and_without_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = diagnose_with(_Wrong(MemoryStore()), monkeypatch)
    assert checks["whole read"].ok is False and "wrong bytes" in checks["whole read"].advice
    assert checks["sessions"].ok is False and "no_memory_replica" in checks["sessions"].found


def test_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_bounded", _hanging_descriptors)
    check = by_name(diagnose("memory://"))["round trip"]
    assert check.ok is False and "did not return" in check.found


def _hanging_descriptors(call):  # type: ignore[no-untyped-def]
    result = call()
    if isinstance(result, list) and result and not isinstance(result[0], int):
        raise TimeoutError
    return result


@pytest.mark.parametrize(
    ("versions", "found", "advice"),
    [
        ({}, "not installed", "pip install exactly one of mooncake-transfer-engine-non-cuda (no accelerator)"),
        (
            {"mooncake-transfer-engine": "0.3.13", "mooncake-transfer-engine-non-cuda": "0.3.13"},
            "expected one wheel",
            "then install one of them",
        ),
        ({"mooncake-transfer-engine-cuda13": "0.3.9"}, "expected 0.3.13 or newer", "pip install -U"),
    ],
)
def test_mooncake_builds(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], found: str, advice: str) -> None:
    monkeypatch.setattr(doctor, "_version", versions.get)
    needed = diagnose_with(_Unset(MemoryStore()), monkeypatch, "mooncake://127.0.0.1:1")["Mooncake"]
    assert needed.ok is False and found in needed.found and advice in needed.advice
    assert diagnose_with(_Unset(MemoryStore()), monkeypatch)["Mooncake"].ok is None


def test_missing_libraries_name_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", {"mooncake-transfer-engine-non-cuda": "0.3.13"}.get)
    monkeypatch.setattr(doctor, "_loads", lambda library: library != "libibverbs.so.1")
    check = diagnose_with(_Unset(MemoryStore()), monkeypatch, "mooncake://127.0.0.1:1")["its libraries"]
    assert check == Check(
        "its libraries", False, "cannot load libibverbs.so.1", "apt-get install libibverbs1 (Debian, Ubuntu)"
    )
