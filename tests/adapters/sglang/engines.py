"""A real scheduler of SGLang with a real model, in this process: its own event loop on a thread, its own sockets."""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zmq
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReqInput,
    ShutdownReq,
    TokenizedGenerateReqInput,
    sock_recv,
    sock_send,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.network import get_zmq_socket
from transformers import LlamaConfig, LlamaForCausalLM

from softload.adapters.sglang.plugin import register

from .hooked_linker import HookedLinker

VOCABULARY = 512
PAGE = 64

Prompt = list[int]

register()
HookRegistry.apply_hooks()


def wait_until(reached: Callable[[], object], timeout: float = 60.0) -> None:
    """What the engine's thread does next shows when its step is over."""
    until = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.005)


@dataclass(slots=True, eq=False)
class Answer:
    """What one request got so far."""

    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish: dict[str, Any] | None = None
    times: list[float] = field(default_factory=list)
    """When each token came, on the monotonic clock."""
    sent: float = 0.0
    ended: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    def end(self, reason: dict[str, Any]) -> None:
        """Nothing more comes."""
        self.finish = reason
        self.ended = time.monotonic()
        self.done.set()

    @property
    def is_good(self) -> bool:
        """Whether it ended as it should."""
        return self.finish is not None and self.finish["type"] == "length"

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent

    @property
    def longest_gap(self) -> float:
        """Seconds between two tokens."""
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


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
        max_position_embeddings=8192,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Engine:
    """See the module.

    Args:
        model: a folder.
        options: of the linker.
        settings: more of SGLang's.
    """

    def __init__(self, model: Path, options: dict[str, Any], **settings: Any) -> None:
        config = {
            "linker": "HookedLinker",
            "linker_module_path": HookedLinker.__module__,
            "linker_extra_config": {"store": "memory://", **options},
        }
        arguments: dict[str, Any] = {
            "model_path": str(model),
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "skip_tokenizer_init": True,
            "disable_cuda_graph": True,
            "page_size": PAGE,
            "max_total_tokens": 16384,
            "max_running_requests": 16,
            "chunked_prefill_size": 2048,
            "mem_fraction_static": 0.6,  # what others take meanwhile is missing in it; the tokens bound the pools
            "random_seed": 7,
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": config,
        }
        server_args = ServerArgs(**{**arguments, **settings})
        ports = PortArgs.init_new(server_args)
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        context = zmq.Context(1)
        self._requests = get_zmq_socket(context, zmq.PUSH, ports.scheduler_input_ipc_name, True)
        self._outputs = get_zmq_socket(context, zmq.PULL, ports.tokenizer_ipc_name, True)
        self.scheduler: Any = Scheduler(server_args, ports)
        self.answers: dict[str, Answer] = {}
        self.forwards: Counter[str] = Counter()
        """How often each request was prefilled, in one piece or in part."""
        self.batches: list[list[str]] = []
        """The requests that were prefilled together."""
        self._flushed = threading.Event()
        self._flush_succeeded = False
        self._number = 0
        self._lock = threading.Lock()
        self._stopped = False
        self._go = threading.Event()
        """While it is not set the scheduler stands before its next step."""
        self._go.set()
        self._count_forwards()
        self._gate_steps()
        self._threads = [threading.Thread(target=self._run), threading.Thread(target=self._receive)]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    @property
    def linker(self) -> HookedLinker:
        """The linker of this moment."""
        linker: HookedLinker = self.scheduler.tree_cache.linker.cache_linker
        return linker

    def start(self, prompt: Prompt, *, tokens: int = 8, priority: int | None = None) -> Answer:
        """Send a request."""
        with self._lock:
            self._number += 1
            rid = f"r{self._number:05d}"
        answer = self.answers[rid] = Answer(sent=time.monotonic())
        parameters = SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
        parameters.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_text="",
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=parameters,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=True,
            priority=priority,
        )
        self._send(request)
        return answer

    def generate(self, prompts: Sequence[Prompt], *, tokens: int = 8, timeout: float = 60.0) -> list[Answer]:
        """Send requests, and wait for the ends of all."""
        answers = [self.start(prompt, tokens=tokens) for prompt in prompts]
        for answer in answers:
            assert answer.done.wait(timeout), "a request has not ended"
        return answers

    def abort(self, answer: Answer, *, everybody: bool = False) -> None:
        """Its client has gone, or those of all."""
        self._send(AbortReq(rid=self.rid_of(answer), abort_all=everybody))

    def rid_of(self, answer: Answer) -> str:
        """SGLang's name of a request."""
        return next(rid for rid, known in self.answers.items() if known is answer)

    def pages_of(self, answer: Answer) -> tuple[str, ...]:
        """The hashes of a request's pages."""
        return HookedLinker.looked_up[self.rid_of(answer)]

    def start_together(self, prompts: Sequence[Prompt], *, tokens: int = 8) -> list[Answer]:
        """Send requests that the scheduler sees at once."""
        self._go.clear()
        try:
            answers = [self.start(prompt, tokens=tokens) for prompt in prompts]
            time.sleep(0.2)  # in the scheduler's socket, all of them
        finally:
            self._go.set()
        for answer in answers:
            answer.sent = time.monotonic()  # the engine stood till now
        return answers

    def together(self, prompts: Sequence[Prompt], *, tokens: int = 8) -> list[Answer]:
        """Send requests that the scheduler sees at once, and wait for the ends of all."""
        answers = self.start_together(prompts, tokens=tokens)
        for answer in answers:
            assert answer.done.wait(60), "a request has not ended"
        return answers

    def settle(self, timeout: float = 60.0) -> None:
        """Wait until nothing runs and every offload has ended."""
        until = time.monotonic() + timeout
        wrapper = self.scheduler.tree_cache.linker
        while wrapper.pending_offloads or not self.scheduler.is_fully_idle():
            assert self._threads[0].is_alive(), "the scheduler has died"
            assert time.monotonic() < until, "the engine is not idle"
            time.sleep(0.005)

    def flush(self) -> None:
        """Empty the engine's own cache, once nothing runs any more."""
        self.settle()
        assert self.try_flush()

    def try_flush(self) -> bool:
        """Ask for it at once; whether it was done."""
        self._flushed.clear()
        self._send(FlushCacheReqInput())
        assert self._flushed.wait(60)
        return self._flush_succeeded

    def pause(self, mode: str) -> None:
        """Let the event loop run nothing."""
        self._send(PauseGenerationReqInput(mode=mode))
        until = time.monotonic() + 60
        while not self.scheduler._engine_paused:
            assert time.monotonic() < until, "the engine does not pause"
            time.sleep(0.005)

    def resume(self) -> None:
        """Let it go on after a pause."""
        self._send(ContinueGenerationReqInput())

    @property
    def free_tokens(self) -> int:
        """Slots that no request holds, those of the tree included."""
        tree, allocator = self.scheduler.tree_cache, self.scheduler.token_to_kv_pool_allocator
        return int(allocator.available_size()) + int(tree.evictable_size())

    def relink(self, **options: Any) -> HookedLinker:
        """Another linker in place of the present one."""
        linker: HookedLinker = self.relink_to(HookedLinker, {"store": "memory://", **options})
        return linker

    def relink_to(self, kind: type[Any], config: dict[str, Any]) -> Any:
        """A linker of a class in place of the present one, wired as SGLang does it."""
        self.flush()
        cache, scheduler = self.scheduler.tree_cache, self.scheduler
        self.linker.close()
        args, kwargs = HookedLinker.made
        linker = kind(*args, **{**kwargs, "extra_config": config})
        cache.linker.cache_linker = linker
        counter = linker.layer_done_counter
        scheduler.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(counter)
        scheduler.tp_worker.register_hicache_layer_transfer_counter(counter)
        return linker

    def close(self) -> None:
        """End the event loop and the linker."""
        self._send(ShutdownReq())
        self._threads[0].join(20)
        self._stopped = True
        self._threads[1].join(20)
        self.scheduler.release_host_resources()

    def _send(self, request: Any) -> None:
        with self._lock:
            sock_send(self._requests, request)

    def _run(self) -> None:
        self.scheduler.run_event_loop()

    def _receive(self) -> None:
        while not self._stopped:
            if not self._outputs.poll(100):
                continue
            output = sock_recv(self._outputs)
            if isinstance(output, FlushCacheReqOutput):
                self._flush_succeeded = output.success
                self._flushed.set()
            elif isinstance(output, BatchTokenIDOutput):
                now = time.monotonic()
                for index, rid in enumerate(output.rids):
                    self._take(rid, output, index, now)
            elif isinstance(output, AbortReq):
                answer = self.answers[output.rid]
                answer.end(output.finished_reason or {"type": "abort"})

    def _take(self, rid: str, output: Any, index: int, now: float) -> None:
        answer = self.answers.get(rid)
        if answer is None:
            return
        ids = list(output.output_ids[index])
        new = ids[len(answer.tokens) :] if len(ids) == output.completion_tokens[index] else ids
        answer.tokens += new
        answer.times += [now] * len(new)
        answer.cached_tokens = output.cached_tokens[index]
        if output.finished_reasons[index] is not None:
            answer.end(output.finished_reasons[index])

    def _count_forwards(self) -> None:
        run_batch = self.scheduler.run_batch

        def counting(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if batch.forward_mode.is_extend():
                decoding = {id(req) for req in batch.decoding_reqs or ()}  # with mixed chunks
                prefilled = [req.rid for req in batch.reqs if id(req) not in decoding]
                self.forwards.update(prefilled)
                self.batches.append(prefilled)
            return run_batch(batch, *args, **kwargs)

        self.scheduler.run_batch = counting

    def _gate_steps(self) -> None:
        get_next_batch_to_run = self.scheduler.get_next_batch_to_run

        def gated(*args: Any, **kwargs: Any) -> Any:
            self._go.wait()
            return get_next_batch_to_run(*args, **kwargs)

        self.scheduler.get_next_batch_to_run = gated


def prompts(*lengths: int, seed: int = 1) -> list[Prompt]:
    """Random prompts of these lengths."""
    chosen = random.Random(seed)
    return [[chosen.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


@contextmanager
def engine(model: Path, options: dict[str, Any] | None = None, **settings: Any) -> Iterator[Engine]:
    """An engine; one in a process."""
    running = Engine(model, options or {}, **settings)
    try:
        yield running
    finally:
        running.close()
