"""What the scheduler's and the workers' halves tell each other: plain values, since they may be different processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found, unused-ignore]
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

__all__ = [
    "NULL_BLOCK",
    "BlockIds",
    "LoadOrder",
    "Orders",
    "PlaceOrder",
    "PrefetchOrder",
    "Reports",
    "SaveOrder",
    "Ticket",
    "blocks_of",
]

NULL_BLOCK = 0
"""Stands in block tables where a sliding window has passed; vLLM never gives it to a request."""

BlockIds: TypeAlias = tuple[tuple[int, ...], ...]
"""Block ids by KV cache group, one per page of the order."""


def blocks_of(block_ids: BlockIds) -> frozenset[int]:
    """The blocks, whatever their group: no block is in two of them."""
    return frozenset(block for ids in block_ids for block in ids if block != NULL_BLOCK)


Ticket: TypeAlias = tuple[str, int]
"""A request and a number that no other attempt of this engine's requests has: what is told of one attempt must not be
taken for another's, also where a request's name comes again."""


@dataclass(frozen=True, slots=True)
class PrefetchOrder:
    """Look up these pages and let them land, by `deadline` seconds from now.

    Answered with the number that landed; with `lookup_only`, with the number that the store says it has.
    """

    ticket: Ticket
    keys: tuple[str, ...]
    deadline: float
    lookup_only: bool = False


@dataclass(frozen=True, slots=True)
class PlaceOrder:
    """Copy what landed into blocks. Answered as received, exactly once."""

    ticket: Ticket
    block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load these pages into blocks, by `deadline` seconds from now. Answered as received, exactly once."""

    ticket: Ticket
    keys: tuple[str, ...]
    block_ids: BlockIds
    deadline: float


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save pages that this step computes. Answered once their blocks are not read any more."""

    number: int
    request_id: str
    keys: tuple[str, ...]
    block_ids: BlockIds


@dataclass(slots=True)
class Orders(KVConnectorMetadata):  # type: ignore[misc, unused-ignore]
    """One step's orders.

    Args:
        prefetches: to start.
        cancelled: prefetches that nobody will place.
        places: to start after the forward.
        loads: to start after the forward, or in layer-wise mode before it.
        saves: to start after the forward.
        overwritten: save orders whose blocks this step writes: they must have been read before.
        idle: whether the step computes nothing.
    """

    prefetches: list[PrefetchOrder] = field(default_factory=list)
    cancelled: list[Ticket] = field(default_factory=list)
    places: list[PlaceOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)
    idle: bool = False


@dataclass(slots=True)
class Reports(KVConnectorWorkerMetadata):  # type: ignore[misc, unused-ignore]
    """What one worker, or several, have to tell after a step.

    Args:
        landed: pages per ticket, one number per worker.
        staged: save orders whose blocks are not read any more, with how many workers say so.
    """

    landed: dict[Ticket, list[int]] = field(default_factory=dict)
    staged: Counter[int] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both workers' reports as one."""
        assert isinstance(other, Reports)
        landed = {ticket: list(pages) for ticket, pages in self.landed.items()}
        for ticket, pages in other.landed.items():
            landed.setdefault(ticket, []).extend(pages)
        return Reports(landed, self.staged + other.staged)
