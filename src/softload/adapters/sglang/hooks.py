"""The hooks: each goes around one function of SGLang, and does nothing where another linker, or none, is used.

A request whose load failed after its forward was launched is *pending*: SGLang's own branch for such requests drops its
output, and instead of ending with a 503 it goes back into the queue. Until then nothing may see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.common import release_kv_cache

from softload.adapters.sglang.linker import SoftloadLinker
from softload.adapters.sglang.options import Admission

__all__ = [
    "add_one_req",
    "finish_external_linker_loads",
    "finish_loads",
    "get_next_batch_to_run",
    "match",
    "pause_generation",
    "preempt_to_schedule",
    "process_batch_result",
    "release_request",
    "stream_output",
]

_log = structlog.get_logger(__name__)

Original = Callable[..., Any]


class LoadFailed(FINISH_ABORT):  # type: ignore[misc]
    """Why a pending request's output is dropped; nobody outside ever sees it.

    Args:
        reason: what SGLang would have ended the request with.
        skipped_insert: whether its KV was to be kept out of the tree for another reason.
    """

    def __init__(self, reason: FINISH_ABORT, *, skipped_insert: bool) -> None:
        super().__init__(reason.message, reason.status_code, reason.err_type)
        self.skipped_insert = skipped_insert


def match(original: Original, wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    """A request that failed is a miss until the engine has computed it; what an earlier match found is void.

    A held request is matched in every step: its pages are named, and looked up, only if there may be another answer.
    """
    linker = _linker_of_wrapper(wrapper)
    if linker is not None:
        wrapper.hit_markers.pop(req.rid, None)
        if not linker.starts_match(req.rid, (result.device_prefix_len, len(key) // wrapper.cache.page_size)):
            return result
    return original(wrapper, key, req, result)


def finish_loads(original: Original, wrapper: Any) -> Any:
    """One verdict for each request, the same on every rank."""
    linker = _linker_of_wrapper(wrapper)
    if linker is None:
        return original(wrapper)
    rids, wrapper.inflight_load_rids = wrapper.inflight_load_rids, []
    if not rids:
        return []
    index, wrapper.inflight_load_index = wrapper.inflight_load_index, -1
    failed = linker.failed_loads(index, rids)
    for rid in rids:
        wrapper.private_load_indices.pop(rid, None)
    if failed:
        _log.warning("load.failed", request_ids=failed, of=len(rids))
    return failed


def release_request(original: Original, wrapper: Any, rid: str) -> Any:
    """A request has left the queue without having run."""
    linker = _linker_of_wrapper(wrapper)
    if linker is not None:
        linker.ended(rid)
    return original(wrapper, rid)


def finish_external_linker_loads(original: Original, cache: Any, reqs: Any) -> Any:
    """Failed requests become pending; the scheduler is told of none, so that it aborts none."""
    linker = _linker_of(cache)
    if linker is None:
        return original(cache, reqs)
    skipped = {id(req): req.skip_radix_cache_insert for req in reqs}
    failed = original(cache, reqs)
    linker.leaving += failed
    for req in failed:
        req.discard_output_reason = LoadFailed(req.discard_output_reason, skipped_insert=skipped[id(req)])
    return []


def add_one_req(
    original: Original, adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None
) -> Any:
    """A held request stays in the queue, and the next one is looked at."""
    linker = _linker_of(adder.tree_cache)
    if linker is None or not linker.is_held(req.rid):
        return original(adder, req, has_chunked_req, truncation_align_size)
    # As SGLang does for a request that it does not admit.
    req.kv.mamba_cow_src_index = None
    req.kv.mamba_needs_clear = False
    if req.kv.holds_mamba and req.session is None:
        adder.tree_cache.req_to_token_pool.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
        req.kv.mamba_pool_idx = None
    return AddReqResult.CONTINUE


def preempt_to_schedule(original: Original, adder: Any, req: Any) -> bool:
    """Nothing that runs is given up for a request that would be held: it is matched first."""
    linker = _linker_of(adder.tree_cache)
    if linker is not None and linker.admission is not Admission.SYNC:
        req.init_next_round_input(adder.tree_cache, cow_mamba=False)
        if linker.is_held(req.rid):
            return False
    return bool(original(adder, req))


def get_next_batch_to_run(original: Original, scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """Pending requests do not go on to decode; held ones are agreed upon; an idle scheduler waits for them."""
    linker = _linker_of(scheduler.tree_cache)
    if linker is None:
        return original(scheduler, running_batch, last_batch)
    _take_out(scheduler, linker, running_batch, last_batch)
    linker.step()
    plan = original(scheduler, running_batch, last_batch)
    if plan.batch_to_run is None and not last_batch:
        linker.wait_idle()
    return plan


def pause_generation(original: Original, scheduler: Any, recv_req: Any) -> Any:
    """Pausing takes the requests of the last batch back into the queue: not those that go there by themselves."""
    linker = _linker_of(scheduler.tree_cache)
    if linker is not None and recv_req.mode != "in_place":
        _take_out(scheduler, linker, scheduler.running_batch, scheduler.last_batch)
    return original(scheduler, recv_req)


def stream_output(original: Original, streamer: Any, reqs: Any, return_logprob: bool, skip_req: Any = None) -> Any:
    """A pending request looks finished while it is given back; nobody is told so."""
    return original(streamer, [req for req in reqs if not _is_pending(req)], return_logprob, skip_req)


def process_batch_result(original: Original, scheduler: Any, batch: Any, result: Any) -> Any:
    """Pending requests go back into the queue, at its front, in their order."""
    linker = _linker_of(scheduler.tree_cache)
    if linker is None or not batch.forward_mode.is_extend():
        return original(scheduler, batch, result)
    pending = [req for req in batch.reqs if _is_pending(req)]
    aborted = [req for req in pending if req.to_finish is not None]
    answer = original(scheduler, batch, result)
    for req in reversed(pending):
        _requeue(scheduler, req)
    for req in aborted:
        scheduler.abort_request(AbortReq(rid=req.rid))
    again = {id(req) for req in pending}
    linker.computed([req.rid for req in batch.reqs if id(req) not in again])
    return answer


def _take_out(scheduler: Any, linker: SoftloadLinker, running_batch: Any, last_batch: Any) -> None:
    """Failed requests leave the batch that they ran in, whether they are pending still or in the queue again."""
    failed, linker.leaving = linker.leaving, []
    if not failed:
        return
    if scheduler.chunked_req is not None and any(req is scheduler.chunked_req for req in failed):
        if scheduler._pending_chunked_abort_req is scheduler.chunked_req:
            # Its client has aborted it: SGLang ends it, with the client's reason.
            failed = [req for req in failed if req is not scheduler.chunked_req]
            scheduler.chunked_req.discard_output_reason = None
        else:
            scheduler.chunked_req = None
    if last_batch:
        last_batch.filter_batch(reqs_to_exclude=failed)
    running_batch.batch_is_full = False


def _requeue(scheduler: Any, req: Any) -> None:
    reason = req.discard_output_reason
    if req.kv.holds_kv:  # one of several chunks: SGLang keeps it for the next
        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    if scheduler.chunked_req is req:
        scheduler.chunked_req = None
    req.finished_reason = req.to_finish = req.finished_len = req.discard_output_reason = None
    req.skip_radix_cache_insert = reason.skipped_insert
    count, stain = req.retraction_count, req.retracted_stain
    req.reset_for_retract()
    req.retraction_count, req.retracted_stain, req.is_retracted = count, stain, False
    if not stain:
        req.cached_tokens = req.cached_tokens_device = req.cached_tokens_host = req.cached_tokens_storage = 0
        req._cache_breakdown_computed = False
    req.host_hit_length = req.host_loaded_length = req.swa_host_hit_length = req.mamba_host_hit_length = 0
    scheduler.waiting_queue.insert(0, req)


def _is_pending(req: Any) -> bool:
    return isinstance(req.discard_output_reason, LoadFailed)


def _linker_of(tree_cache: Any) -> SoftloadLinker | None:
    wrapper = getattr(tree_cache, "linker", None)
    return None if wrapper is None else _linker_of_wrapper(wrapper)


def _linker_of_wrapper(wrapper: Any) -> SoftloadLinker | None:
    linker = wrapper.cache_linker
    return linker if isinstance(linker, SoftloadLinker) else None
