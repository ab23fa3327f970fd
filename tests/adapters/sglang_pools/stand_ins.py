"""What SGLang imports that a machine without a GPU does not have: stood in for, before the first import of it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from types import ModuleType
from unittest import mock

import torch

_SCHEMAS = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]

_STUBS = "sglang_platform_stubs"
"""In `sys.modules` once this was done, by whichever copy of this module."""


class _Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of kernels, none of which is called."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "sgl_kernel":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__, module.__version__ = [], spec, spec.name, "0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> bool:
    """Make ``import sglang`` possible; whether it is there at all."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.submodule_search_locations is None:
        return False
    if "sglang" in sys.modules or _STUBS in sys.modules:
        return True
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    for name in ("nms", "qnms"):
        _SCHEMAS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    sys.meta_path.insert(0, _Mocks())
    # SGLang has a stand-in for Triton, which it installs on Apple's machines alone.
    path = os.path.join(found.submodule_search_locations[0], "_platform_stubs.py")
    spec = importlib.util.spec_from_file_location(_STUBS, path)
    assert spec is not None and spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    with (
        mock.patch.object(sys, "platform", "darwin"),
        mock.patch.object(platform, "machine", lambda: "arm64"),
        mock.patch.object(torch.backends.mps, "is_available", lambda: True),
    ):
        stubs.install_platform_stubs()
    return True
