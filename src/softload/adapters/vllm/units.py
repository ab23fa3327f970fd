"""Pages and blocks as transfer units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from softload.adapters.vllm.messages import (
    NULL_BLOCK,
    BlockIds,
    LoadOrder,
    PlaceOrder,
    PrefetchOrder,
    SaveOrder,
    Ticket,
)
from softload.config import LoaderConfig
from softload.geometry.group import DevicePoolGroup
from softload.transfer import ComponentTransfer, Fence, HitPolicy, PoolName, TransferUnit

__all__ = ["BlockTable", "UnitMaker"]


@dataclass(frozen=True, slots=True)
class BlockTable:
    """One of the engine's block tables.

    Args:
        pool: the logical pool whose slots it holds.
        draft: the draft's logical pool with the same slots; ``None`` without a draft there.
        window: blocks that a boundary needs before it; ``None`` for all.
    """

    pool: PoolName
    draft: PoolName | None = None
    window: int | None = None


class UnitMaker:
    """Makes units.

    Args:
        tables: by KV cache group of the engine.
        pools: the worker's pools.
        config: the loader's settings.
    """

    def __init__(self, tables: Sequence[BlockTable], pools: DevicePoolGroup, config: LoaderConfig) -> None:
        self._tables = tuple(tables)
        specs = pools.specs(config.layout)
        page_bytes = sum(spec.size for pool in specs.values() for spec in pool)
        self._load_pages = max(1, config.landing_bytes // 4 // page_bytes)
        self._save_pages = max(1, config.landing_bytes // 32 // page_bytes)

    def lookup(self, order: PrefetchOrder) -> TransferUnit:
        """All pages of an order, without slots."""
        return self._unit(order.ticket, order.keys, None, order.deadline, None)

    def prefetch(self, order: PrefetchOrder, pages: int, deadline: float) -> TransferUnit:
        """The first pages of an order, without slots."""
        return self._unit(order.ticket, order.keys[:pages], None, deadline, None)

    def place(self, order: PrefetchOrder, place: PlaceOrder, ready: Fence | None) -> TransferUnit:
        """The first pages of an order, with the slots that it was given."""
        pages = len(place.block_ids[0])
        return self._unit(order.ticket, order.keys[:pages], place.block_ids, None, ready)

    def load(self, order: LoadOrder, part: range, deadline: float, ready: Fence | None) -> TransferUnit:
        """A part of an order, with slots."""
        block_ids = tuple(ids[part.start : part.stop] for ids in order.block_ids)
        unit = self._unit(order.ticket, order.keys[part.start : part.stop], block_ids, deadline, ready)
        return replace(unit, request_id=self.load_name(order, part))

    @staticmethod
    def load_name(order: LoadOrder, part: range) -> str:
        """The name of the unit that `load` makes."""
        return UnitMaker.name(order.ticket) + (f"+{part.start}" if part.start else "")

    @staticmethod
    def name(ticket: Ticket) -> str:
        """The name of the units of an attempt: what failed in one says nothing about the next."""
        request_id, attempt = ticket
        return f"{request_id}#{attempt}"

    def save(self, order: SaveOrder, part: range, ready: Fence | None) -> TransferUnit | None:
        """A part of an order, without the pages that a sliding window has passed; ``None`` if none are left."""
        target, draft = [], []
        for table, ids in zip(self._tables, order.block_ids, strict=True):
            kept = [page for page in part if ids[page] != NULL_BLOCK]
            if not kept:
                continue
            keys = tuple(order.keys[page] for page in kept)
            slots = torch.tensor([ids[page] for page in kept], dtype=torch.int64)
            target.append(ComponentTransfer(table.pool, keys, slots))
            if table.draft is not None:
                draft.append(ComponentTransfer(table.draft, keys, slots))
        if not target:
            return None
        return TransferUnit(f"{order.request_id}#save{order.number}", tuple(target), tuple(draft) or None, ready=ready)

    def load_parts(self, pages: int) -> Iterator[range]:
        """Parts of a load that fit into landing memory one after another; windows do not come in parts."""
        step = self._load_pages if all(table.window is None for table in self._tables) else pages
        return _parts(pages, step)

    def save_parts(self, pages: int) -> Iterator[range]:
        """Parts of a save that are copied out in one go each."""
        return _parts(pages, self._save_pages)

    def _unit(
        self,
        ticket: Ticket,
        keys: tuple[str, ...],
        block_ids: BlockIds | None,
        deadline: float | None,
        ready: Fence | None,
    ) -> TransferUnit:
        target, draft = [], []
        for index, table in enumerate(self._tables):
            slots = None if block_ids is None else torch.tensor(block_ids[index], dtype=torch.int64)
            policy = HitPolicy.ALL_PAGES if table.window is None else HitPolicy.TRAILING_PAGES
            if slots is not None and table.window is not None:
                slots[slots == NULL_BLOCK] = -1
            target.append(ComponentTransfer(table.pool, keys, slots, policy, table.window or 1))
            if table.draft is not None:
                draft.append(ComponentTransfer(table.draft, keys, slots, policy, table.window or 1))
        return TransferUnit(self.name(ticket), tuple(target), tuple(draft) or None, deadline, ready)


def _parts(pages: int, step: int) -> Iterator[range]:
    return (range(start, min(start + step, pages)) for start in range(0, pages, step))
