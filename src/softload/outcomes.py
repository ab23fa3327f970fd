"""What became of pages, units, loads and saves: frozen values, one status per page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from softload.transfer import PoolName

__all__ = [
    "Action",
    "Admission",
    "Landed",
    "LateFailure",
    "LayerReady",
    "LoadReport",
    "Lookup",
    "PageOutcome",
    "PageSave",
    "PageStatus",
    "SaveOutcome",
    "SaveReport",
    "SaveStatus",
    "UnitOutcome",
]


class Action(StrEnum):
    """What a status asks of the loader."""

    ACCEPT = "accept"
    RETRY = "retry"
    MISS = "miss"
    OUTAGE = "outage"


class PageStatus(StrEnum):
    """Why a page is restored, or why it must be prefilled again."""

    LOADED = "loaded"
    NOT_FOUND = "not_found"
    NO_MEMORY_REPLICA = "no_memory_replica"
    NOT_READY = "not_ready"
    WRONG_SIZE = "wrong_size"
    LEASE_EXPIRED = "lease_expired"
    REPLICA_CHANGED = "replica_changed"
    CORRUPT = "corrupt"
    SUPPRESSED = "suppressed"
    CANCELLED = "cancelled"
    PEER_DECLINED = "peer_declined"
    SHED = "shed"
    AFTER_MISS = "after_miss"
    TRANSFER_FAILED = "transfer_failed"
    STORE_UNREACHABLE = "store_unreachable"
    TIMED_OUT = "timed_out"
    MALFORMED = "malformed"

    @property
    def action(self) -> Action:
        """What the loader does about it: misses are a cache's normal life, outages count against the store's health."""
        return _ACTIONS.get(self, Action.MISS)

    @property
    def is_outage(self) -> bool:
        """Whether it says that something is broken, not that something is gone."""
        return self.action is Action.OUTAGE


_ACTIONS = {
    PageStatus.LOADED: Action.ACCEPT,
    PageStatus.LEASE_EXPIRED: Action.RETRY,
    PageStatus.NO_MEMORY_REPLICA: Action.RETRY,
    PageStatus.REPLICA_CHANGED: Action.RETRY,
    PageStatus.TRANSFER_FAILED: Action.OUTAGE,
    PageStatus.STORE_UNREACHABLE: Action.OUTAGE,
    PageStatus.TIMED_OUT: Action.OUTAGE,
    PageStatus.MALFORMED: Action.OUTAGE,
}


@dataclass(frozen=True, slots=True)
class PageOutcome:
    """One page of a unit: its index, its status, and the pool that decided (``None`` when loaded)."""

    page: int
    status: PageStatus
    component: PoolName | None = None


@dataclass(frozen=True, slots=True)
class LateFailure:
    """A miss found after `layer` had been given out: output computed from this request must not be accepted."""

    page: int
    layer: int
    status: PageStatus


@dataclass(frozen=True, slots=True)
class UnitOutcome:
    """What one request got.

    `restored_pages` pages from the start are in their slots for all layers; the engine prefills from
    `prefill_from_page` (the same number). `draft_pages` says how far the draft's slots hold the draft's own bytes.
    """

    request_id: str
    requested_pages: int
    restored_pages: int
    draft_pages: int
    prefill_from_page: int
    pages: tuple[PageOutcome, ...]
    late_failure: LateFailure | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The end of a load: one outcome per request; `bytes_loaded` came from the store, times are in seconds."""

    outcomes: Mapping[str, UnitOutcome]
    bytes_loaded: int = 0
    admission_s: float = 0.0
    first_layer_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Admission:
    """Pages per request that were revalidated, before any write; `declined` says why a request got fewer than asked."""

    pages: Mapping[str, int]
    declined: Mapping[str, PageStatus] = field(default_factory=dict)

    def __getitem__(self, request_id: str) -> int:
        return self.pages[request_id]


@dataclass(frozen=True, slots=True)
class Landed:
    """Pages per request that lie checked in landing memory; `missed` says why a request got fewer than asked."""

    pages: Mapping[str, int]
    draft_pages: Mapping[str, int] = field(default_factory=dict)
    missed: Mapping[str, PageStatus] = field(default_factory=dict)

    def __getitem__(self, request_id: str) -> int:
        return self.pages[request_id]


@dataclass(frozen=True, slots=True)
class LayerReady:
    """A layer that may be computed: for `live` requests its bytes are in the slots, `failed` ones must be discarded."""

    layer: int
    live: frozenset[str]
    failed: Mapping[str, PageStatus] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lookup:
    """What can be restored now: prefix lengths in pages, ascending, and how many draft pages are there.

    `status` is the reason when the store could not be asked (breaker open, deadline); a plain absence has none.
    """

    boundaries: tuple[int, ...] = ()
    draft_pages: int = 0
    status: PageStatus | None = None

    @property
    def pages(self) -> int:
        """The longest restorable prefix in pages."""
        return self.boundaries[-1] if self.boundaries else 0


class SaveStatus(StrEnum):
    """What became of one page that was offered for saving."""

    SAVED = "saved"
    PRESENT = "present"
    SHED = "shed"
    STORE_FULL = "store_full"
    SUPPRESSED = "suppressed"
    REFUSED = "refused"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class PageSave:
    """One page of one component that was offered for saving."""

    page: int
    status: SaveStatus
    component: PoolName


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """What became of one unit's pages; `saved_pages` counts pages that are now in the store by this call, whole."""

    request_id: str
    pages: tuple[PageSave, ...]
    saved_pages: int = 0
    draft_saved_pages: int = 0


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The end of a save: one outcome per request; `bytes_saved` went to the store."""

    outcomes: Mapping[str, SaveOutcome]
    bytes_saved: int = 0
