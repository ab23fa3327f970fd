"""What SGLang loads by the entry point group `sglang.srt.plugins`, in every one of its processes."""

from __future__ import annotations

from softload.adapters.sglang import hooks
from softload.adapters.sglang.hooking import install

__all__ = ["register"]


def register() -> None:
    """Register the hooks; each does nothing where another linker, or none, is used."""
    install({name: getattr(hooks, name) for name in hooks.__all__})
