"""SGLang: `SoftloadLinker`, an external cache linker, and a plugin that it needs. Needs SGLang; see docs/sglang.md."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softload.adapters.sglang.linker import SoftloadLinker
    from softload.adapters.sglang.options import Admission, LinkerOptions

__all__ = ["Admission", "LinkerOptions", "SoftloadLinker"]


def __getattr__(name: str) -> Any:
    """Import on demand: SGLang loads the plugin in processes that have no use for the linker."""
    if name == "SoftloadLinker":
        from softload.adapters.sglang.linker import SoftloadLinker

        return SoftloadLinker
    if name in ("Admission", "LinkerOptions"):
        from softload.adapters.sglang import options

        return getattr(options, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
