"""What a replay can be told, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from softload.config import DraftPolicy, Integrity, Layout, LoaderConfig, ReadMode
from softload.replay.shapes import DraftKind, find_shape
from softload.replay.synthetic import synthetic_trace
from softload.replay.trace import TraceRequest, read_trace
from softload.stores import EmbeddedMooncakeStore, open_store
from softload.testing.fault_specs import Fault, FaultKind, parse_fault
from softload.testing.partitions import why_no_partitions

__all__ = ["AdmissionMode", "ReplayOptions", "SchedulerOptions"]

SYNTHETIC_REQUESTS = 600


class AdmissionMode(StrEnum):
    """When a request's slots are taken."""

    PREFETCH = "prefetch"
    """When its pages have landed."""

    STREAM = "stream"
    """Before its load, which the forward pass then follows layer by layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Settings of a `Scheduler`; times in seconds.

    Args:
        admission: see `AdmissionMode`.
        speed: how much faster than the trace requests arrive; ``None`` for as fast as they are taken.
        layer_time: what one layer of one forward pass takes, besides waiting.
        max_running: requests that hold slots at a time.
        max_waiting: requests that have arrived and are looked up or prefetched ahead; further ones arrive later.
        max_prefill: requests whose prompts run in one forward pass.
        deadline: of each transfer unit; ``None`` for the loader's.

    Raises:
        ValueError: a value out of range.
    """

    admission: AdmissionMode = AdmissionMode.STREAM
    speed: float | None = None
    layer_time: float = 0.0
    max_running: int = 32
    max_waiting: int = 64
    max_prefill: int = 8
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.speed is not None and not 0 < self.speed < float("inf"):
            raise ValueError(f"speed: expected a factor above 0, got {self.speed}")
        if not 0 <= self.layer_time < float("inf"):
            raise ValueError(f"layer_time: expected 0 or more seconds, got {self.layer_time}")
        for name, value in (
            ("max_running", self.max_running),
            ("max_waiting", self.max_waiting),
            ("max_prefill", self.max_prefill),
        ):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Settings of a replay, as the command line takes them; sizes in bytes, times in seconds.

    Args:
        trace: a trace file; ``None`` for a synthetic one.
        store: URL of the store.
        requests: how many of the trace; ``None`` for all of a file, 600 of a synthetic one.
        shape: name of the model shape.
        layout: how pages become objects.
        read_mode: how layout `page` is read.
        draft: how the draft is stored.
        draft_policy: what a lost draft page costs.
        admission: when slots are taken.
        speed: how much faster than the trace requests arrive; ``None`` for as fast as they are taken.
        layer_time: what a layer's computation takes.
        integrity: how bytes are checked by the loader (the replay checks every byte anyway).
        deadline: of a transfer unit; ``None`` for the loader's default.
        landing: landing memory; ``None`` for the loader's default.
        max_running: requests that hold slots at a time.
        faults: fault specifications.
        seed: of the synthetic trace, the faults and the loader's jitter.

    Raises:
        ValueError: a value that cannot be used, and what was expected.
    """

    trace: Path | None = None
    store: str = "memory://"
    requests: int | None = None
    shape: str = "mini"
    layout: Layout = Layout.GROUPED
    read_mode: ReadMode = ReadMode.AUTO
    draft: DraftKind = DraftKind.NONE
    draft_policy: DraftPolicy = DraftPolicy.DROP
    admission: AdmissionMode = AdmissionMode.STREAM
    speed: float | None = None
    layer_time: float = 0.0
    integrity: Integrity = Integrity.SAMPLE
    deadline: float | None = None
    landing: int | None = None
    max_running: int = 16
    faults: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        memory = psutil.virtual_memory().total
        if self.landing is not None and self.landing > memory:
            raise ValueError(f"landing: expected less than this machine's {memory} bytes of memory, got {self.landing}")
        if self.requests is not None and self.requests < 1:
            raise ValueError(f"requests: expected at least 1, got {self.requests}")
        find_shape(self.shape)
        self.scheduler()
        self.loader()
        self.parsed_faults()
        open_store(self.store)

    @property
    def finds_flipped_bytes(self) -> bool:
        """Whether the loader looks at every byte: layout `page` has no digests, and `sample` reads one in 64."""
        return self.layout is Layout.GROUPED and self.integrity is Integrity.FULL

    def scheduler(self) -> SchedulerOptions:
        """The scheduler's part."""
        return SchedulerOptions(
            admission=self.admission,
            speed=self.speed,
            layer_time=self.layer_time,
            max_running=self.max_running,
            max_waiting=self.max_running,
            deadline=self.deadline,
        )

    def loader(self) -> LoaderConfig:
        """The loader's part."""
        defaults = LoaderConfig()
        return LoaderConfig(
            namespace=f"replay-{self.shape}",
            layout=self.layout,
            read_mode=self.read_mode,
            integrity=self.integrity,
            draft_policy=self.draft_policy,
            deadline=defaults.deadline if self.deadline is None else self.deadline,
            landing_bytes=defaults.landing_bytes if self.landing is None else self.landing,
            seed=self.seed,
        )

    def parsed_faults(self) -> tuple[Fault, ...]:
        """The faults.

        Raises:
            ValueError: a specification that does not parse, or that this release or these options cannot inject.
        """
        faults = tuple(parse_fault(spec) for spec in self.faults)
        for fault, spec in zip(faults, self.faults, strict=True):
            if fault.kind.is_scheduled:
                self._check_cluster(fault, spec)
            if fault.kind is FaultKind.CORRUPT and not self.finds_flipped_bytes:
                raise ValueError(
                    f"fault {spec!r}: expected layout grouped with integrity full, whose digests find a flipped byte, "
                    f"got layout {self.layout} with integrity {self.integrity}: the replay would end with bad pages "
                    "that nothing could have refused"
                )
            own_objects = self.draft is DraftKind.SIDECAR or self.layout is Layout.GROUPED
            if fault.kind is FaultKind.DRAFT_LOSS and (self.draft is DraftKind.NONE or not own_objects):
                raise ValueError(
                    f"fault {spec!r}: expected a draft with objects of its own (sidecar, or packed in layout grouped), "
                    f"got draft {self.draft} in layout {self.layout}"
                )
        return faults

    def _check_cluster(self, fault: Fault, spec: str) -> None:
        store = open_store(self.store)
        owners = store.cluster.owner_count if isinstance(store, EmbeddedMooncakeStore) else None
        if owners is None or (fault.kind.needs_owner and not owners):
            raise ValueError(
                f"fault {spec!r}: expected a cluster of the replay's own, --store 'mooncake://embedded?owners=N', "
                f"got {self.store!r}"
            )
        if fault.kind.cuts_off and (reason := why_no_partitions()) is not None:
            raise ValueError(
                f"fault {spec!r}: expected iproute2 and a network namespace of the replay's own, unshare --net sh -c "
                f"'ip link set lo up && softload replay ...', got {reason}"
            )

    def read_requests(self) -> list[TraceRequest]:
        """The requests to replay.

        Raises:
            TraceError: the trace file is malformed.
            OSError: it cannot be read.
        """
        if self.trace is None:
            return synthetic_trace(self.requests or SYNTHETIC_REQUESTS, self.seed)
        return read_trace(self.trace, self.requests)
