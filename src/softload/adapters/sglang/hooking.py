"""Whether SGLang can be hooked, and is: all hooks or none, and `missing` says why there are none."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import structlog

__all__ = ["TESTED_VERSIONS", "install", "missing"]

_log = structlog.get_logger(__name__)

Hook: TypeAlias = Callable[..., Any]

TESTED_VERSIONS: Final = ("0.5.23",)
"""Versions of SGLang that the hooks were tested with."""

_WRAPPER: Final = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_TREE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_STREAMER: Final = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_ADDER: Final = "sglang.srt.managers.schedule_policy.PrefillAdder"

_TARGETS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    f"{_WRAPPER}.match": ("match", ("self", "key", "req", "result")),
    f"{_WRAPPER}.finish_loads": ("finish_loads", ("self",)),
    f"{_WRAPPER}.release_request": ("release_request", ("self", "rid")),
    f"{_TREE}.finish_external_linker_loads": ("finish_external_linker_loads", ("self", "reqs")),
    f"{_ADDER}.add_one_req": ("add_one_req", ("self", "req", "has_chunked_req", "truncation_align_size")),
    f"{_ADDER}.preempt_to_schedule": ("preempt_to_schedule", ("self", "req")),
    f"{_SCHEDULER}.get_next_batch_to_run": ("get_next_batch_to_run", ("self", "running_batch", "last_batch")),
    f"{_SCHEDULER}.process_batch_result": ("process_batch_result", ("self", "batch", "result")),
    f"{_SCHEDULER}.pause_generation": ("pause_generation", ("self", "recv_req")),
    f"{_STREAMER}.stream_output": ("stream_output", ("self", "reqs", "return_logprob", "skip_req")),
}
"""By target: the name of the hook that goes around it, and the parameters that it must have."""

_reason: str | None = "its plugin is not loaded (entry point group sglang.srt.plugins, name softload)"
_installed: dict[str, Hook] = {}


def install(hooks: Mapping[str, Hook]) -> None:
    """Register hooks around SGLang's functions, unless one of those is not as it was tested; SGLang applies them.

    Again is no change.

    Args:
        hooks: by name, one for each of the targets.
    """
    global _reason
    if _installed:
        return
    _reason = _changed()
    if _reason is not None:
        _log.warning("plugin.not_hooked", reason=_reason)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (name, _) in _TARGETS.items():
        _installed[target] = hooks[name]
        HookRegistry.register(target, hooks[name], HookType.AROUND)


def missing() -> str | None:
    """Why SGLang is not hooked; ``None`` where it is."""
    if _reason is not None:
        return _reason
    absent = [target for target, hook in _installed.items() if not _is_applied(target, hook)]
    return f"no hook around {', '.join(absent)}" if absent else None


def _changed() -> str | None:
    version = importlib.metadata.version("sglang")
    if version not in TESTED_VERSIONS:
        return f"SGLang {version}, expected {' or '.join(TESTED_VERSIONS)}"
    for target, (_, expected) in _TARGETS.items():
        try:
            got = tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
        except (AttributeError, ImportError) as error:
            return f"{target} is not there ({error})"
        if got != expected:
            return f"{target}: expected parameters {', '.join(expected)}, got {', '.join(got)}"
    return None


def _is_applied(target: str, hook: Hook) -> bool:
    function = pkgutil.resolve_name(target)
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
