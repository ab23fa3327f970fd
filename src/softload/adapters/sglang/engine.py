"""What the engine is: its pools, its model's name, and how its requests may be admitted."""

from __future__ import annotations

import hashlib
from typing import Any

import structlog
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_disagg, get_exec, get_model, get_parallel

from softload import events
from softload.adapters.sglang import hooking
from softload.adapters.sglang.options import Admission, LinkerOptions
from softload.config import Layout
from softload.geometry import DraftMode, build_pool_group
from softload.geometry.drafts import without_unfit_draft
from softload.geometry.group import DevicePoolGroup
from softload.transfer import PoolName

__all__ = ["admission_of", "check_engine", "namespace_of_model", "page_prefix", "pool_group_of"]

_log = structlog.get_logger(__name__)

_SOURCES = {ComponentType.FULL: PoolName.KV, ComponentType.SWA: PoolName.SWA, ComponentType.MAMBA: PoolName.MAMBA}
"""The logical pool of each component of the tree."""


def admission_of(options: LinkerOptions) -> Admission:
    """What was asked for, or `hold` where that can be.

    Raises:
        ValueError: `hold` or `stream` was asked for in an engine that cannot be hooked for it.
    """
    if options.admission is Admission.SYNC:
        return Admission.SYNC
    reasons = [reason for reason in (hooking.missing(), *_unsupported()) if reason]
    if not reasons:
        return options.admission or Admission.HOLD
    if options.admission is not None and hooking.missing() is None:
        raise ValueError(
            f"linker_extra_config: admission: {options.admission.value!r} was not tried with {'; '.join(reasons)}: "
            "expected 'sync', or no admission at all"
        )
    _log.warning("linker.sync_only", reasons=reasons)
    return Admission.SYNC


def _unsupported() -> list[str]:
    parallel = get_parallel()
    found = []
    if parallel.attn_dp_size > 1:
        found.append(f"attention data parallelism (attn_dp_size {parallel.attn_dp_size})")
    if get_disagg().disaggregation_mode != "null":
        found.append(f"prefill-decode disaggregation (disaggregation_mode {get_disagg().disaggregation_mode})")
    if get_exec().dllm.dllm_algorithm is not None:
        found.append(f"diffusion language models (dllm_algorithm {get_exec().dllm.dllm_algorithm})")
    return found


def check_engine(params: Any) -> None:
    """Refuse what cannot work.

    Raises:
        ValueError: stages of a pipeline, which do not agree on what was found; a cache that is split over decode ranks,
            whose pages have no names of their own.
    """
    for what, size in (("pp_size", params.pp_size), ("attn_dcp_size", get_parallel().attn_dcp_size)):
        if size > 1:
            raise ValueError(f"{what}: expected 1, got {size}")


def pool_group_of(params: Any, components: Any) -> DevicePoolGroup:
    """The engine's pools; a draft that does not fit costs the draft.

    Raises:
        ValueError: pools of no known family, or components of the tree that do not go with them.
    """
    kinds = {ComponentType(kind) for kind in components}
    unknown = sorted(str(kind) for kind in kinds - set(_SOURCES))
    if unknown:
        raise ValueError(f"expected components full, swa and mamba of the prefix tree, got {', '.join(unknown)}")
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    packed, sidecar = params.mtp_draft_device_pools, params.sidecar_draft_device_pools
    drafts = [*packed, *sidecar]
    if params.mtp_draft_mamba_pools:
        _log.warning(events.DRAFT_DISABLED, reason="draft: expected no recurrent layers, got a pool of its states")
        drafts = []
    group = without_unfit_draft(
        lambda chosen: build_pool_group(
            kvcache,
            params.page_size,
            req_to_token_pool=params.req_to_token_pool if ComponentType.MAMBA in kinds else None,
            draft_pools=chosen or (),
            draft_mode=(DraftMode.PACKED if packed else DraftMode.SIDECAR) if chosen else None,
        ),
        drafts or None,
    )
    expected = {_SOURCES[kind] for kind in kinds}
    got = {pool.index_source for pool in group.target_pools} | {PoolName.KV}
    if expected != got:
        raise ValueError(
            f"expected pools with slots of {', '.join(sorted(expected))}, as the prefix tree has them, "
            f"got {', '.join(sorted(got))} from a {type(kvcache).__name__}"
        )
    return group


def namespace_of_model() -> str:
    """The model, and everything beside the pools' geometry that decides what a page's bytes mean."""
    model = get_model()
    meaning = (
        model.model_path,
        model.revision,
        model.quantization,
        model.kv_cache_dtype,
        model.json_model_override_args,
        get_parallel().tp_size,
        get_parallel().pp_size,
    )
    digest = hashlib.blake2b(repr(meaning).encode(), digest_size=8).hexdigest()
    return f"sglang/{str(model.model_path).rstrip('/').rsplit('/', 1)[-1]}-{digest}"


def page_prefix(options: LinkerOptions) -> str:
    """What SGLang's own Mooncake linker puts before its hashes; `Layout.GROUPED` has a namespace instead."""
    if options.layout is Layout.GROUPED:
        return ""
    name = options.namespace or "-".join(str(get_model().model_path).split("/"))
    return f"{name}_"
