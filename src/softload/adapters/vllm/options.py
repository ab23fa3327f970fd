"""Settings of the connector: what `kv_connector_extra_config` may hold, checked when the engine starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from softload.adapters._options import OptionKinds
from softload.config import DraftPolicy, Integrity, Layout, LoaderConfig

__all__ = ["ConnectorOptions", "LoadMode"]


class LoadMode(StrEnum):
    """When bytes come, and who waits for them."""

    PREFETCH = "prefetch"
    """They land while the request waits in the queue, without KV blocks; blocks are taken for what landed."""

    ASYNC = "async"
    """Blocks are taken for what the store says it has; the load fills them while other requests run."""

    LAYERWISE = "layerwise"
    """Blocks are taken at once, and the forward waits for each layer. Needs a scheduler without async scheduling."""


_KINDS = OptionKinds(
    where="kv_connector_extra_config",
    choices={"mode": LoadMode, "layout": Layout, "integrity": Integrity, "draft_policy": DraftPolicy},
    sizes=("landing_bytes",),
    durations=("deadline", "lookup_deadline", "save_deadline", "hold_limit", "prefetch_ttl", "start_timeout"),
    counts=("truncate_pages", "read_lanes", "endpoint_lanes", "write_lanes", "stuck_threads"),
    flags=("save", "require_store", "allow_fail_policy"),
    optional=("stuck_threads",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """Settings of one `SoftloadConnector`. Durations in seconds, sizes in bytes; as text also ``"500ms"``, ``"2GiB"``.

    Args:
        store: URL for `softload.open_store`.
        namespace: what object keys start with; made from the model's name and configuration by default.
        mode: see `LoadMode`.
        layout: see `softload.Layout`.
        integrity: see `softload.Integrity`.
        draft_policy: see `softload.DraftPolicy`.
        truncate_pages: the most blocks that the draft policy `truncate` gives up.
        deadline: from a request's first look at the scheduler until it is answered with what has landed.
        lookup_deadline: the part of it that the question for what is there may take.
        save_deadline: a save that is not done by then is given up.
        hold_limit: how long landed bytes wait for the scheduler to find blocks for them.
        prefetch_ttl: how long landed bytes that nobody took may serve other requests.
        landing_bytes: landing memory of each worker.
        read_lanes: reads of the store at a time.
        endpoint_lanes: reads of one owner at a time, late ones not counted.
        write_lanes: writes to the store at a time.
        stuck_threads: calls of a kind that may hang before work is shed. By default, all workers of a machine together
            get a quarter of its cores, and each 2 to 16: Mooncake's reads spin as long as their owner is frozen, and
            must leave the engine its cores.
        save: whether computed blocks are saved.
        require_store: whether a store that cannot be set up keeps the engine from starting.
        start_timeout: how long the start waits for the store.
        allow_fail_policy: accept a `kv_load_failure_policy` under which a failed load ends its request.

    Raises:
        ValueError: an unknown key, or a value out of range.
    """

    store: str
    namespace: str | None = None
    mode: LoadMode = LoadMode.PREFETCH
    layout: Layout = Layout.GROUPED
    integrity: Integrity = Integrity.SAMPLE
    draft_policy: DraftPolicy = DraftPolicy.DROP
    truncate_pages: int = 8
    deadline: float = 2.0
    lookup_deadline: float = 0.5
    save_deadline: float = 30.0
    hold_limit: float = 60.0
    prefetch_ttl: float = 10.0
    landing_bytes: int = 1 << 30
    read_lanes: int = 4
    endpoint_lanes: int = 2
    write_lanes: int = 2
    stuck_threads: int | None = None
    save: bool = True
    require_store: bool = False
    start_timeout: float = 30.0
    allow_fail_policy: bool = False

    def __post_init__(self) -> None:
        _KINDS.check(self)
        self.loader_config("check")

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ConnectorOptions:
        """The settings that `kv_connector_extra_config` holds.

        Raises:
            ValueError: no store, an unknown key, or a value that does not parse.
        """
        return _KINDS.parse(cls, extra)

    def loader_config(
        self, namespace: str, *, tp_rank: int = 0, pp_rank: int = 0, local_workers: int = 1
    ) -> LoaderConfig:
        """The loader's settings of one worker, of `local_workers` on its machine."""
        stuck_threads = self.stuck_threads
        if stuck_threads is None:
            stuck_threads = max(2, min(16, len(os.sched_getaffinity(0)) // 4 // local_workers))
        return LoaderConfig(
            namespace=namespace,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
            layout=self.layout,
            integrity=self.integrity,
            draft_policy=self.draft_policy,
            truncate_pages=self.truncate_pages,
            deadline=self.deadline,
            lookup_deadline=self.lookup_deadline,
            save_deadline=self.save_deadline,
            landing_bytes=self.landing_bytes,
            read_lanes=self.read_lanes,
            endpoint_lanes=self.endpoint_lanes,
            write_lanes=self.write_lanes,
            stuck_threads=stuck_threads,
            hold_limit=self.hold_limit,
            prefetch_ttl=self.prefetch_ttl,
        )
