"""For processes that SGLang starts: its stand-ins before the first import of it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class _BeforeSglang(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "sglang":
            sys.meta_path.remove(self)
            where = Path(__file__).resolve().parents[2] / "sglang_pools" / "stand_ins.py"
            spec = importlib.util.spec_from_file_location("sglang_stand_ins", where)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            module.install()
        return None


sys.meta_path.insert(0, _BeforeSglang())
