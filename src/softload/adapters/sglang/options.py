"""Settings of the linker: what `linker_extra_config` may hold, checked when the engine starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from softload.adapters._options import OptionKinds
from softload.config import DraftPolicy, Integrity, Layout, LoaderConfig, ReadMode

__all__ = ["Admission", "LinkerOptions"]


class Admission(StrEnum):
    """When bytes come, and who waits for them."""

    HOLD = "hold"
    """They land while the request waits in the queue, without slots, and others pass it."""

    STREAM = "stream"
    """The request runs once the store says what it has, and its forward waits for each layer."""

    SYNC = "sync"
    """The scheduler waits for them, at most `blocking_limit`; needs no hooks into SGLang."""


_KINDS = OptionKinds(
    where="linker_extra_config",
    choices={
        "admission": Admission,
        "layout": Layout,
        "read_mode": ReadMode,
        "integrity": Integrity,
        "draft_policy": DraftPolicy,
    },
    sizes=("landing_bytes",),
    durations=(
        "deadline",
        "lookup_deadline",
        "save_deadline",
        "blocking_limit",
        "offload_limit",
        "hold_limit",
        "prefetch_ttl",
        "start_timeout",
    ),
    counts=("truncate_pages", "read_lanes", "endpoint_lanes", "write_lanes", "stuck_threads", "max_holds"),
    flags=("save", "require_store"),
    optional=("admission",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkerOptions:
    """Settings of one `SoftloadLinker`. Durations in seconds, sizes in bytes; as text also ``"500ms"``, ``"2GiB"``.

    Args:
        store: URL for `softload.open_store`.
        namespace: what object keys start with; made from the model's name and settings by default. With layout `page`
            the prefix of SGLang's own keys, by default its own default: the model's path with dashes for slashes.
        admission: see `Admission`; ``None`` for `hold` where SGLang can be hooked for it, else `sync`.
        layout: see `softload.Layout`; `page` reads and writes the objects of SGLang's own Mooncake linker.
        read_mode: see `softload.ReadMode`; for `auto`, `stream` tells what forwards so far took for a layer.
        integrity: see `softload.Integrity`.
        draft_policy: see `softload.DraftPolicy`.
        truncate_pages: the most pages that the draft policy `truncate` gives up.
        deadline: from a request's first match until it is answered with what has landed.
        lookup_deadline: the part of it that the question for what is there may take.
        blocking_limit: the longest that the scheduler's thread waits for the store in one step; only `sync` waits.
        save_deadline: a save that is not done by then is given up.
        offload_limit: how long an offload may lock its node of the tree, whatever becomes of the save.
        hold_limit: how long landed bytes wait for the scheduler to find slots for them.
        prefetch_ttl: how long landed bytes that nobody took may serve other requests.
        landing_bytes: landing memory of each rank.
        read_lanes: reads of the store at a time.
        endpoint_lanes: reads of one owner at a time, late ones not counted.
        write_lanes: writes to the store at a time.
        stuck_threads: calls of a kind that may hang before work is shed; a quarter of the cores, 2 to 16, by default:
            Mooncake's reads spin as long as their owner is frozen, and must leave the engine its cores.
        max_holds: requests whose bytes are under way at a time; later ones wait for their turn.
        save: whether computed pages are saved.
        require_store: whether a store that cannot be set up keeps the engine from starting.
        start_timeout: how long the start waits for the store.

    Raises:
        ValueError: an unknown key, or a value out of range.
    """

    store: str
    namespace: str | None = None
    admission: Admission | None = None
    layout: Layout = Layout.GROUPED
    read_mode: ReadMode = ReadMode.AUTO
    integrity: Integrity = Integrity.SAMPLE
    draft_policy: DraftPolicy = DraftPolicy.DROP
    truncate_pages: int = 8
    deadline: float = 2.0
    lookup_deadline: float = 0.5
    blocking_limit: float = 0.02
    save_deadline: float = 30.0
    offload_limit: float = 5.0
    hold_limit: float = 60.0
    prefetch_ttl: float = 10.0
    landing_bytes: int = 1 << 30
    read_lanes: int = 4
    endpoint_lanes: int = 2
    write_lanes: int = 2
    stuck_threads: int = field(default_factory=lambda: max(2, min(16, len(os.sched_getaffinity(0)) // 4)))
    max_holds: int = 64
    save: bool = True
    require_store: bool = False
    start_timeout: float = 30.0

    def __post_init__(self) -> None:
        _KINDS.check(self)
        self.loader_config("check")

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> LinkerOptions:
        """The settings that `linker_extra_config` holds.

        Raises:
            ValueError: no store, an unknown key, or a value that does not parse.
        """
        if not isinstance(extra.get("namespace"), str | None):
            raise ValueError(f"{_KINDS.where}: namespace: expected a string, got {extra['namespace']!r}")
        return _KINDS.parse(cls, extra)

    def loader_config(
        self,
        namespace: str,
        *,
        tp_rank: int = 0,
        cp_rank: int = 0,
        pp_rank: int = 0,
    ) -> LoaderConfig:
        """The loader's settings of one rank."""
        return LoaderConfig(
            read_mode=self.read_mode,
            namespace=namespace,
            tp_rank=tp_rank,
            cp_rank=cp_rank,
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
            stuck_threads=self.stuck_threads,
            hold_limit=self.hold_limit,
            prefetch_ttl=self.prefetch_ttl,
        )
