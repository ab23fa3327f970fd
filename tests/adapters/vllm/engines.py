"""Real engines on tiny models of random weights, and what comparing their answers takes."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hooked_connector import HookedConnector
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from vllm import LLM, RequestOutput, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from softload.protocols import PageStore

VOCABULARY = 512
BLOCK = 32

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one prompt got: tokens, how far the best logit was ahead of the second, and how many tokens were cached."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    cached_tokens: int


@dataclass(slots=True)
class Comparison:
    """Equal answers, and those whose first difference is a tie of logits."""

    equal: int = 0
    ties: int = 0
    different: int = 0


compared = Comparison()
"""All comparisons of this process."""


def tiny_llama(folder: Path, *, layers: int = 2, seed: int = 0) -> Path:
    """A Llama of random weights, written to disk."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_gemma(folder: Path, *, layers: int = 4, window: int = 96, seed: int = 0) -> Path:
    """A Gemma 3 of random weights whose layers take turns: a sliding window, full attention."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def prompts(*lengths: int, seed: int = 1) -> list[Prompt]:
    """Random prompts of these lengths."""
    chosen = random.Random(seed)
    return [[chosen.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


@contextmanager
def engine(
    model: Path,
    *,
    wrap: Callable[[PageStore], PageStore] = lambda store: store,
    connector: bool = True,
    extra: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[LLM]:
    """An engine with the connector; one at a time in a process."""
    ensure_kv_transfer_shutdown()  # a module's own engine may still be there: vLLM would take that one's connector
    HookedConnector.wrap = staticmethod(wrap)
    HookedConnector.silent = False
    HookedConnector.forget()
    # A busy machine must not make a test of something else miss a deadline.
    patience = {} if "deadline" in (extra or {}) else {"deadline": 20, "lookup_deadline": 10}
    transfer = KVTransferConfig(
        kv_connector="HookedConnector",
        kv_connector_module_path="hooked_connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": "memory://", "landing_bytes": "64MiB", **patience, **(extra or {})},
    )
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 128,
        "enable_prefix_caching": True,
        "kv_transfer_config": transfer if connector else None,
    }
    llm = None
    try:
        llm = LLM(model=str(model), **{**arguments, **settings})
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def sampling(max_tokens: int) -> SamplingParams:
    """Greedy, with what telling a tie takes."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)


def answer_of(output: RequestOutput) -> Answer:
    """The answer in an engine's output."""
    completion = output.outputs[0]
    margins = []
    for logprobs in completion.logprobs:
        best = sorted((entry.logprob for entry in logprobs.values()), reverse=True)
        margins.append(best[0] - best[1])
    return Answer(tuple(completion.token_ids), tuple(margins), output.num_cached_tokens or 0)


def generate(llm: LLM, prompts: Sequence[Prompt], *, max_tokens: int = 16) -> list[Answer]:
    """Greedy answers, in order."""
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [answer_of(output) for output in llm.generate(asked, sampling(max_tokens), use_tqdm=False)]


def compare(expected: Sequence[Answer], got: Sequence[Answer]) -> Comparison:
    """Answer by answer; printed, and added up in `compared`, so that a run shows how often a tie was let pass."""
    result = Comparison()
    for one, other in zip(expected, got, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        where = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
        if where is None:
            result.equal += 1
        elif one.margins[where] < 1e-3:
            result.ties += 1
        else:
            result.different += 1
    print(result)
    compared.equal += result.equal
    compared.ties += result.ties
    compared.different += result.different
    return result


def assert_equal(expected: Sequence[Answer], got: Sequence[Answer]) -> None:
    """All answers are equal but for ties."""
    assert compare(expected, got).different == 0


def hashed_request(name: str, prompt: Prompt, **sampling: Any) -> Request:
    """A request as it is in the engine's scheduler, with its block hashes."""
    hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
    return Request(name, prompt, SamplingParams(max_tokens=1, **sampling), None, block_hasher=hasher)


def page_hashes(prompt: Prompt) -> list[str]:
    """The prefix hashes of a prompt's whole blocks, as the engine makes them."""
    return [bytes(digest).hex() for digest in hashed_request("probe", prompt).block_hashes]


def core(llm: LLM) -> Any:
    """The engine core of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core


def scheduler_side(llm: LLM) -> Any:
    """The connector's half in the scheduler."""
    return core(llm).scheduler.connector._scheduler


def worker() -> Any:
    """The connector of this process's worker."""
    return get_kv_transfer_group()


def add(llm: LLM, name: str, prompt: Prompt, *, max_tokens: int = 16) -> None:
    """Add a request without waiting for it."""
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling(max_tokens))


def step_until(llm: LLM, condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    """Step the engine until something has happened."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s"
        llm.llm_engine.step()
        time.sleep(0.001)  # as the engine's own loop does when nothing was computed


def step_to_the_end(llm: LLM) -> None:
    """Step the engine until no request is left."""
    step_until(llm, lambda: not llm.llm_engine.has_unfinished_requests())


def kv_bytes() -> list[torch.Tensor]:
    """A copy of all KV bytes of this process's worker."""
    pools = worker()._bridge.loader.pools.pools
    return [view.clone() for pool in pools for view in pool.page_views]


def assert_told_once() -> None:
    """Every load into blocks that was ordered was told as received, once; one that failed was told so once."""
    assert Counter(HookedConnector.received) == Counter(HookedConnector.ordered)
    assert not Counter(HookedConnector.failed) - Counter(HookedConnector.received)


def settle(llm: LLM) -> None:
    """Saves have ended, and the engine's own cache is empty."""
    assert worker()._worker.drain(60.0)
    assert llm.reset_prefix_cache()
