"""Settings of a loader: plain values, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["DraftPolicy", "Integrity", "Layout", "LoaderConfig", "ReadMode"]

KIB = 1 << 10
MIB = 1 << 20


class Layout(StrEnum):
    """How pages become objects of the store."""

    GROUPED = "grouped"
    """One object per page, pool and group of layers, each with a digest; the default."""

    PAGE = "page"
    """One object per page and pool: SGLang's own keys and bytes, for interchange; no digest."""


class Integrity(StrEnum):
    """How the bytes of `Layout.GROUPED` objects are checked after they landed."""

    SAMPLE = "sample"
    FULL = "full"
    OFF = "off"


class DraftPolicy(StrEnum):
    """What a lost draft page costs, decided at admission."""

    DROP = "drop"
    """The target stays; `draft_pages` says how far the draft is good."""

    TRUNCATE = "truncate"
    """Both end at the draft's first loss if that costs at most `truncate_pages`, else as DROP."""

    REQUIRE = "require"
    """Both end at the draft's first loss."""


class ReadMode(StrEnum):
    """How objects are read."""

    AUTO = "auto"
    """The loader chooses by what reads have cost so far: whichever lets the forward of a streaming unit wait less. What
    lies in this process's own segment need not be read: see `LoaderConfig.direct_reads`."""

    WHOLE = "whole"
    """Each in one read: the fastest way to all of it. Leases by itself."""

    RANGES = "ranges"
    """Layer by layer under a session, where layer 0 is wanted long before the rest. `Layout.PAGE` only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Settings of a `PageLoader`. Sizes are in bytes, times in seconds.

    Args:
        namespace: what object keys start with besides the pools' geometry: model name and revision, for example.
        tp_rank: this process's tensor-parallel rank; not part of the keys where the pools are replicated.
        cp_rank: its context-parallel rank.
        pp_rank: its pipeline-parallel rank.
        layout: see `Layout`.
        integrity: see `Integrity`; digests are computed when saving, whatever is checked.
        read_mode: see `ReadMode`; only `Layout.PAGE` has ranges.
        draft_policy: see `DraftPolicy`.
        truncate_pages: the most pages that `DraftPolicy.TRUNCATE` gives up.
        open_deadline: a store that is not open, with the landing memory registered, by then is given up.
        deadline: default for units that name none.
        lookup_deadline: a lookup that is not answered by then is a miss.
        save_deadline: a save that is not done by then is given up.
        landing_bytes: landing memory in all.
        read_lanes: reads of the store at a time; late ones do not count for other endpoints, within `stuck_threads`.
        endpoint_lanes: reads of one endpoint at a time, late ones not counted, within `read_lanes`; a unit's first one,
            which brings its first layers, runs alone. With 1 or 2 so does each ranged one, and a unit's large reads
            from a slow endpoint go one at a time, in both cases but for ranges, or objects, of less than 40 KiB. More
            are faster where an owner has links or processors to spare.
        write_lanes: writes to the store at a time.
        control_lanes: lookups, admissions and other small calls at a time.
        stuck_threads: threads that may be stuck in native calls, per kind of lane, before work is shed.
        read_batch_bytes: bytes in one read call at most.
        read_batch_objects: objects in one read call at most.
        copy_chunk_bytes: bytes copied between two looks at the deadline.
        direct_reads: copy streamed objects that lie in this process's own segment from there, instead of by landing
            memory, where the pools are in the CPU's memory: of `Layout.GROUPED` those with a digest, of `Layout.PAGE`
            with `ReadMode.AUTO` large ones.
        hold_limit: how long landed pages stay pinned for a prefetch that does not place them, once all of its units
            have landed.
        prefetch_ttl: how long landed bytes of ended prefetches may serve later units.
        negative_entries: keys in the negative cache at most.
        seed: of the breaker's jitter.

    Raises:
        ValueError: a value out of range; the message names it, what was expected and what came.
    """

    namespace: str = "softload"
    tp_rank: int = 0
    cp_rank: int = 0
    pp_rank: int = 0
    layout: Layout = Layout.GROUPED
    integrity: Integrity = Integrity.SAMPLE
    read_mode: ReadMode = ReadMode.AUTO
    draft_policy: DraftPolicy = DraftPolicy.DROP
    truncate_pages: int = 8
    open_deadline: float = 60.0
    deadline: float = 5.0
    lookup_deadline: float = 1.0
    save_deadline: float = 30.0
    landing_bytes: int = 256 * MIB
    read_lanes: int = 4
    endpoint_lanes: int = 2
    write_lanes: int = 2
    control_lanes: int = 4
    stuck_threads: int = 16
    read_batch_bytes: int = 16 * MIB
    read_batch_objects: int = 256
    copy_chunk_bytes: int = 8 * MIB
    direct_reads: bool = True
    hold_limit: float = 30.0
    prefetch_ttl: float = 10.0
    negative_entries: int = 65_536
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in (
            ("layout", Layout),
            ("integrity", Integrity),
            ("read_mode", ReadMode),
            ("draft_policy", DraftPolicy),
        ):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(value))
            except ValueError:
                known = ", ".join(kind)
                raise ValueError(f"{name}: expected one of {known}, got {value!r}") from None
        for name in ("open_deadline", "deadline", "lookup_deadline", "save_deadline", "hold_limit", "prefetch_ttl"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: expected 0 or more seconds, got {value}")
        for name in (
            "landing_bytes",
            "read_lanes",
            "endpoint_lanes",
            "write_lanes",
            "control_lanes",
            "read_batch_bytes",
            "read_batch_objects",
            "copy_chunk_bytes",
            "negative_entries",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        for name in ("truncate_pages", "stuck_threads", "tp_rank", "cp_rank", "pp_rank"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")
        if not self.namespace:
            raise ValueError("namespace: expected a non-empty string, got ''")
        if self.read_mode is ReadMode.RANGES and self.layout is not Layout.PAGE:
            raise ValueError("read_mode: 'ranges' needs layout 'page', got layout 'grouped'")
