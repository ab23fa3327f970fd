"""What is installed: metadata, the wheel's contents, and what an import of the library does and does not do."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_version_is_in_the_changelog() -> None:
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_installed_version_is_the_project_s() -> None:
    assert metadata.version("softload") == PROJECT["version"]


def test_dependencies_are_ranges_without_upper_bounds() -> None:
    named = [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]
    for requirement in named:
        assert not any(mark in requirement for mark in ("==", "<", "~=")), requirement
        assert ">=" in requirement or requirement.startswith("softload["), requirement


def test_extras_never_combine_two_builds_of_mooncake() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {name for name in extras if name.startswith("mooncake")} == {"mooncake", "mooncake-cpu", "mooncake-cuda13"}
    for name, lines in extras.items():
        assert sum("mooncake" in line for line in lines) == name.startswith("mooncake"), name


def test_command_is_installed() -> None:
    (command,) = metadata.entry_points(group="console_scripts", name="softload")
    assert command.value == "softload.__main__:main"
    assert command.load() is not None


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"softload-{PROJECT['version']}.dist-info"
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "softload").rglob("*.py")}
    assert names >= sources | {"softload/py.typed", f"{info}/licenses/LICENSE"}
    assert {name.split("/")[0] for name in names} == {"softload", info}


def test_import_loads_neither_extras_nor_engines_nor_mooncake() -> None:
    unwanted = {"mooncake", "psutil", "pytest", "rich", "sglang", "typer", "vllm"}
    loaded = run_python("import sys, softload; print(*{name.partition('.')[0] for name in sys.modules})").split()
    # Dependencies import some of these themselves where they are installed; that is not softload's doing.
    others = "import sys, anyio, numpy, structlog, torch, xxhash"
    by_others = run_python(f"{others}; print(*{{name.partition('.')[0] for name in sys.modules}})").split()
    assert (unwanted & set(loaded)) <= set(by_others)


def test_import_changes_nothing_in_the_process() -> None:
    run_python(
        "import os, signal, threading, torch\n"
        "def state():\n"
        "    handler = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)\n"
        "    return dict(os.environ), handler, threading.active_count(), torch.get_num_threads()\n"
        "before = state()\n"
        "import softload\n"
        "assert state() == before\n"
    )
