"""An async continuous-batching scheduler over a `PageLoader`: the engine of a replay.

Requests arrive as the trace says and wait. One step after the other, the engine admits what it has slots for, runs one
forward pass over the new prompts and all running decodes, "computes" the pages that the store did not give back, saves
them, and lets every running request decode one token. Admission `stream` starts the loads when slots are taken, and the
forward waits for each layer; `prefetch` brings the pages to landing memory while a request waits and others pass it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import anyio
import structlog
from anyio.abc import TaskGroup

from softload.handles import Load, Prefetch
from softload.loader import PageLoader
from softload.outcomes import LoadReport
from softload.replay.engine_memory import EngineMemory, Verification
from softload.replay.jobs import Job
from softload.replay.ledger import Ledger
from softload.replay.options import AdmissionMode, SchedulerOptions
from softload.replay.recorder import LoadRecord, Recorder
from softload.replay.trace import TraceRequest

__all__ = ["Scheduler"]

log = structlog.get_logger("softload.replay")


@dataclass(slots=True, eq=False)
class _Prompt:
    """Jobs whose prompts run in one forward pass, and what brings their promised pages (``None``: nothing to bring)."""

    jobs: Sequence[Job]
    load: Load | None = None
    prefetch: Prefetch | None = None
    record: LoadRecord | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Scheduler:
    """Runs the requests of a trace through a loader; `run` returns when the last one has ended.

    Args:
        loader: open.
        memory: the engine's pools.
        ledger: where everything is counted.
        executor: threads for writing and checking bytes, so that the event loop is the loader's.
        options: see `SchedulerOptions`.
        recorder: remembers single loads.
    """

    def __init__(
        self,
        loader: PageLoader,
        memory: EngineMemory,
        ledger: Ledger,
        executor: Executor,
        options: SchedulerOptions,
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder or Recorder(0, 0)
        self._loader = loader
        self._memory = memory
        self._ledger = ledger
        self._metrics = ledger.metrics
        self._executor = executor
        self._options = options
        self._num_layers = memory.pools.num_layers
        self._waiting: deque[Job] = deque()  # stream: arrived, without slots
        self._landed: deque[_Prompt] = deque()  # prefetch: landed, without slots
        self._ready: deque[_Prompt] = deque()  # with slots, for the next forward pass
        self._decoding: list[Job] = []
        self._running = 0
        self._permits = anyio.Semaphore(options.max_waiting)
        self._wake = asyncio.Event()
        self._admit = asyncio.Event()
        self._arrived_all = False

    async def run(self, jobs: Iterable[tuple[TraceRequest, Job]]) -> None:
        """Serve jobs, which arrive with the timestamps of their requests."""
        self._recorder.began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            self._tasks: TaskGroup = tasks
            if self._options.admission is AdmissionMode.STREAM:
                tasks.start_soon(self._admit_streams, name="admission")
            tasks.start_soon(self._arrivals, jobs, name="arrivals")
            await self._steps()
            tasks.cancel_scope.cancel()  # ends the admission loop; every job has ended

    @property
    def _finished(self) -> bool:
        return self._arrived_all and self._metrics.done == self._metrics.requests

    async def _arrivals(self, jobs: Iterable[tuple[TraceRequest, Job]]) -> None:
        start = time.perf_counter()
        for request, job in jobs:
            if self._options.speed is not None:
                await asyncio.sleep(start + request.timestamp / 1e3 / self._options.speed - time.perf_counter())
            await self._permits.acquire()
            self._metrics.requests += 1
            if self._options.admission is AdmissionMode.STREAM:
                self._waiting.append(job)
                self._admit.set()
            else:
                self._tasks.start_soon(self._serve_prefetch, job, name=f"prefetch {job.request_id}")
        self._arrived_all = True
        self._wake.set()

    # Before the forward pass

    async def _lookup(self, job: Job) -> None:
        if job.keys:
            found = await self._loader.lookup(self._memory.unit(job.request_id, job.keys, None, self._options.deadline))
            job.promised = found.pages
            self._ledger.looked_up(job, found)

    async def _serve_prefetch(self, job: Job) -> None:
        try:
            await self._lookup(job)
            if not job.promised:
                self._queue(self._landed, _Prompt([job]))
                return
            unit = self._memory.unit(job.request_id, job.keys[: job.promised], None, self._options.deadline)
            started = time.perf_counter()
            record = self._recorder.load(job.request_id)
            async with self._loader.prefetch([unit]) as prefetch:
                with self._metrics.loading:
                    await prefetch.landed()
                self._metrics.load.add(time.perf_counter() - started)
                record.admitted = time.monotonic()
                prompt = _Prompt([job], prefetch=prefetch, record=record)
                self._queue(self._landed, prompt)
                await prompt.settled.wait()
        except Exception as error:
            self._lose([job], error)

    async def _admit_streams(self) -> None:
        while True:
            await self._admit.wait()
            self._admit.clear()
            while group := self._take_slots_for_waiting():
                self._tasks.start_soon(self._serve_stream, group, name=f"load of {len(group)}")

    def _take_slots_for_waiting(self) -> list[Job]:
        group: list[Job] = []
        while self._waiting and len(group) < self._options.max_prefill and self._take_slots(self._waiting[0]):
            group.append(self._waiting.popleft())
        return group

    def _take_slots(self, job: Job) -> bool:
        if self._running >= self._options.max_running:
            return False
        job.pages = self._memory.allocator.allocate(len(job.keys))
        if job.pages is None:
            return False
        self._running += 1
        self._permits.release()
        return True

    async def _serve_stream(self, jobs: Sequence[Job]) -> None:
        try:
            for job in jobs:
                await self._lookup(job)
            units = [
                self._memory.unit(
                    job.request_id, job.keys[: job.promised], job.slots()[: job.promised], self._options.deadline
                )
                for job in jobs
                if job.promised
            ]
            if not units:
                self._queue(self._ready, _Prompt(jobs))
                return
            record = self._recorder.load(*(unit.request_id for unit in units))
            with self._metrics.loading:
                async with self._loader.load(units, layer_seconds=self._options.layer_time) as load:
                    await load.admitted()
                    record.admitted = time.monotonic()
                    prompt = _Prompt(jobs, load=load, record=record)
                    self._queue(self._ready, prompt)
                    await prompt.settled.wait()
        except Exception as error:
            self._lose(jobs, error)

    def _queue(self, queue: deque[_Prompt], prompt: _Prompt) -> None:
        queue.append(prompt)
        self._wake.set()

    # The engine's steps

    async def _steps(self) -> None:
        while not self._finished:
            prompts = await self._next_prompts()
            if not prompts and not self._decoding:
                await self._wake.wait()
                self._wake.clear()
                continue
            self._metrics.steps += 1
            await self._forward(prompts)
            prefilled = [job for prompt in prompts for job in prompt.jobs if not job.ended]
            await self._prefill(prefilled)
            for prompt in prompts:
                prompt.settled.set()
            self._decode()
            self._decoding.extend(prefilled)
            await asyncio.sleep(0)

    async def _next_prompts(self) -> list[_Prompt]:
        """Take the prompts of the next pass; what has landed gets slots and is placed, while the decodes wait."""
        prompts: list[_Prompt] = []
        limit = self._options.max_prefill
        while self._ready and sum(len(prompt.jobs) for prompt in prompts) < limit:
            prompts.append(self._ready.popleft())
        while self._landed and len(prompts) < limit:
            if not self._take_slots(self._landed[0].jobs[0]):
                break
            prompts.append(self._landed.popleft())
        placing = [prompt for prompt in prompts if prompt.prefetch is not None]
        if placing:
            started = time.perf_counter()
            await asyncio.gather(*(self._place(prompt) for prompt in placing))
            self._stalled(time.perf_counter() - started)
        return prompts

    async def _place(self, prompt: _Prompt) -> None:
        (job,) = prompt.jobs
        assert prompt.prefetch is not None
        started = time.perf_counter()
        try:
            unit = self._memory.unit(job.request_id, job.keys[: job.promised], job.slots()[: job.promised])
            report = await prompt.prefetch.place([unit])
        except Exception as error:
            self._lose(prompt.jobs, error)
            prompt.settled.set()
            return
        self._metrics.first_layer.add(time.perf_counter() - started)
        self._take_report(prompt, report)

    async def _forward(self, prompts: Sequence[_Prompt]) -> None:
        """One pass over all layers; a streaming load's gates are waited for one after the other."""
        loads = {prompt: prompt.load for prompt in prompts if prompt.load is not None}
        waited = 0.0
        for layer in range(self._num_layers):
            for prompt, load in tuple(loads.items()):
                started = time.monotonic()
                try:
                    await load.layer(layer)
                except Exception as error:
                    self._lose(prompt.jobs, error)
                    del loads[prompt]
                ended = time.monotonic()
                waited += ended - started
                if prompt.record is not None:
                    prompt.record.waits.append((started, ended))
            if self._options.layer_time:
                await asyncio.sleep(self._options.layer_time)
        for prompt, load in loads.items():
            started = time.perf_counter()
            try:
                await load.draft()
                report = await load.report()
            except Exception as error:
                self._lose(prompt.jobs, error)
            else:
                self._metrics.first_layer.add(report.first_layer_s)
                self._metrics.load.add(report.load_s)
                self._take_report(prompt, report)
            waited += time.perf_counter() - started
        if loads:
            self._stalled(waited)

    def _stalled(self, seconds: float) -> None:
        if self._decoding:
            self._metrics.stall.add(seconds)
            self._recorder.stalled(seconds)

    def _take_report(self, prompt: _Prompt, report: LoadReport) -> None:
        for job in prompt.jobs:
            if job.promised:
                job.settle(report.outcomes[job.request_id])
                if prompt.record is not None:
                    prompt.record.settled(job.promised, job.restored, job.missed_statuses())

    async def _prefill(self, jobs: Sequence[Job]) -> None:
        """Check what was restored and write what was not; then offer that to the store."""
        checks = await asyncio.gather(*(self._in_thread(_check_and_compute, self._memory, job) for job in jobs))
        for job, checked in zip(jobs, checks, strict=True):
            job.checked, job.prefilled = checked, True
            self._ledger.settled(job, checked)
            self._tasks.start_soon(self._save, job, name=f"save {job.request_id}")

    async def _save(self, job: Job) -> None:
        try:
            if job.computed_keys:
                slots = job.slots()[job.restored :]
                self._loader.computed(self._memory.unit(job.request_id, job.computed_keys, slots))
                self._ledger.saving(job)
                unit = self._memory.unit(job.request_id, job.computed_keys, slots, saved_from=job.restored)
                self._ledger.saved(await self._loader.save([unit]))
        except Exception as error:
            self._note(error)
        finally:
            job.saved.set()

    def _decode(self) -> None:
        """One token for every running request; those that are done leave once their save has returned."""
        still: list[Job] = []
        for job in self._decoding:
            job.decode_steps -= 1
            if job.decode_steps > 0:
                still.append(job)
            else:
                self._tasks.start_soon(self._retire, job, name=f"retire {job.request_id}")
        self._decoding = still

    async def _retire(self, job: Job) -> None:
        await job.saved.wait()
        checked = await self._in_thread(_check_and_poison, self._memory, job)
        self._ledger.retired(job.checked, checked)
        self._release(job)

    # Ends

    def _release(self, job: Job) -> None:
        job.ended = True
        if job.pages is not None:
            self._memory.allocator.release(job.pages)
            job.pages = None
            self._running -= 1
        else:
            self._permits.release()
        self._admit.set()
        self._wake.set()

    def _lose(self, jobs: Sequence[Job], error: Exception) -> None:
        """End jobs that something raised for; those past their prefill go on, the books say what was raised."""
        self._note(error)
        for job in jobs:
            if not job.ended and not job.prefilled:
                self._metrics.lost_requests += 1
                self._release(job)

    def _note(self, error: Exception) -> None:
        self._metrics.exceptions[type(error).__name__] += 1
        log.error("replay.exception", exc_info=error)

    async def _in_thread(
        self, check: Callable[[EngineMemory, Job], Verification], memory: EngineMemory, job: Job
    ) -> Verification:
        return await asyncio.get_running_loop().run_in_executor(self._executor, check, memory, job)


def _check_and_compute(memory: EngineMemory, job: Job) -> Verification:
    pages, restored = job.slots(), job.restored
    checked = memory.verify(pages[:restored], job.restored_keys, job.draft_restored, restored)
    memory.compute(pages[restored:], job.computed_keys)
    return checked


def _check_and_poison(memory: EngineMemory, job: Job) -> Verification:
    checked = memory.verify(job.slots(), job.keys, job.draft_restored, job.restored)
    memory.poison(job.slots())
    return checked
