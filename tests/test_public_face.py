"""Public names: sorted, complete, documented; and the floors of the code hold."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest

import softload

ROOT = Path(__file__).resolve().parents[1]

DESIGNED = {
    "Admission", "ComponentTransfer", "DevicePool", "DevicePoolGroup", "DraftPolicy", "HitPolicy", "Integrity",
    "Landed", "LateFailure", "LayerReady", "Layout", "LoadReport", "LoaderClosedError", "LoaderConfig", "Lookup",
    "PageLoader", "PageOutcome", "PageSave", "PageStatus", "PageStore", "PoolName", "RankConsensus", "SaveOutcome",
    "SaveReport", "SaveStatus", "SoftloadError", "SoloConsensus", "Statistics", "StoreSetupError", "TransferUnit",
    "UnitOutcome", "open_store",
}  # fmt: skip
"""What the documentation promises; removing one of these breaks users."""

ENGINES = {"vllm", "sglang"}
"""Their adapters are imported where the engine is installed; the engines' own tests see to that."""

PROGRAMS = {"softload.stores.owner"}
"""Modules that are run and not imported."""


def modules() -> Iterator[ModuleType]:
    yield softload
    for info in pkgutil.walk_packages(softload.__path__, "softload."):
        if info.name.rpartition(".")[2].startswith("_"):
            continue
        try:
            yield importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            engine = (error.name or "").partition(".")[0]
            if not (info.name.startswith("softload.adapters.") and engine in ENGINES):
                raise


def test_all_is_sorted_and_without_duplicates() -> None:
    assert list(softload.__all__) == sorted(set(softload.__all__))


def test_all_is_complete() -> None:
    public = {
        name
        for name, value in vars(softload).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public == set(softload.__all__) - {"__version__"}


def test_all_names_what_is_documented() -> None:
    assert set(softload.__all__) >= DESIGNED


def test_every_module_s_all_exists() -> None:
    for module in modules():
        if module.__name__ == "softload.adapters.sglang":
            continue  # imports SGLang on demand
        names = getattr(module, "__all__", None)
        if names is None:
            own = [
                name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
            ]
            assert module.__name__ in PROGRAMS or all(name.startswith("_") for name in own), (
                f"{module.__name__} has no __all__, but {own}"
            )
            continue
        assert len(names) == len(set(names)), module.__name__
        missing = [name for name in names if not hasattr(module, name)]
        assert not missing, f"{module.__name__} names {missing}"


@pytest.mark.parametrize("name", softload.__all__)
def test_public_names_are_documented(name: str) -> None:
    value = getattr(softload, name)
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return
    assert inspect.getdoc(value), name
    if not inspect.isclass(value) or issubclass(value, (Enum, Exception)):
        return
    for attribute, member in vars(value).items():
        if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{name}.{attribute}"


def test_import_contracts_hold() -> None:
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    result = subprocess.run(
        [sys.executable, "-c", script, "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
