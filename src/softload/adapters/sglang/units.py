"""SGLang's transfers as transfer units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from softload.geometry.group import DevicePoolGroup
from softload.transfer import ComponentTransfer, Fence, HitPolicy, PoolName, TransferUnit

__all__ = ["Wanted", "draft_of", "unit_of_load", "unit_of_lookup", "unit_of_offload"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a lookup asks for.

    Args:
        keys: one page hash per page, from the first page that the device does not have.
        windows: pages in the trailing window of each logical pool that has one.
    """

    keys: tuple[str, ...]
    windows: Mapping[PoolName, int]

    @classmethod
    def read(cls, transfers: Sequence[Any]) -> Wanted:
        """From the transfers of a lookup or a load.

        SGLang names a window by its keys: those of the last pages, one for a recurrent state.
        """
        keys = tuple(next(transfer.keys for transfer in transfers if transfer.name == PoolName.KV.value))
        windows = {
            PoolName(str(transfer.name)): len(transfer.keys)
            for transfer in transfers
            if transfer.hit_policy == HitPolicy.TRAILING_PAGES.value
        }
        return cls(keys, windows)

    @property
    def is_sparse(self) -> bool:
        """Whether not every prefix of what was found is restorable."""
        return bool(self.windows)


def unit_of_lookup(
    request_id: str, wanted: Wanted, pages: int, pools: DevicePoolGroup, deadline: float
) -> TransferUnit:
    """The first `pages` pages, without slots."""
    keys = wanted.keys[:pages]
    target = [ComponentTransfer(PoolName.KV, keys)]
    target += [
        ComponentTransfer(pool, keys, None, HitPolicy.TRAILING_PAGES, window) for pool, window in wanted.windows.items()
    ]
    return TransferUnit(request_id, tuple(target), draft_of(target, pools), deadline)


def unit_of_load(
    request_id: str,
    transfers: Sequence[Any],
    wanted: Wanted,
    pools: DevicePoolGroup,
    deadline: float,
    ready: Fence | None,
) -> TransferUnit:
    """What a load's transfers name, with slots. Pages before a window have none.

    Args:
        request_id: the unit's name.
        transfers: those of the load.
        wanted: what was looked up, with the windows as they were then: a shorter load shows a shorter one.
        pools: the pools.
        deadline: seconds.
        ready: the engine's fence.
    """
    by_pool = {PoolName(str(transfer.name)): transfer for transfer in transfers}
    keys = tuple(by_pool[PoolName.KV].keys)
    target = []
    for pool, transfer in by_pool.items():
        slots = transfer.device_indices.to(torch.int64)
        if pool in wanted.windows:
            lacking = len(keys) - len(transfer.keys)
            absent = torch.full((lacking * (slots.numel() // len(transfer.keys)),), -1, dtype=torch.int64)
            slots = torch.cat([absent.to(slots.device), slots])
            target.append(ComponentTransfer(pool, keys, slots, HitPolicy.TRAILING_PAGES, wanted.windows[pool]))
        else:
            target.append(ComponentTransfer(pool, keys, slots))
    return TransferUnit(request_id, tuple(target), draft_of(target, pools), deadline, ready)


def unit_of_offload(
    request_id: str, transfers: Sequence[Any], pools: DevicePoolGroup, ready: Fence | None
) -> TransferUnit:
    """What an offload's transfers name: each pool with the pages that it has."""
    target = [
        ComponentTransfer(PoolName(str(transfer.name)), tuple(transfer.keys), transfer.device_indices.to(torch.int64))
        for transfer in transfers
    ]
    return TransferUnit(request_id, tuple(target), draft_of(target, pools), None, ready, partial=True)


def draft_of(target: Sequence[ComponentTransfer], pools: DevicePoolGroup) -> tuple[ComponentTransfer, ...] | None:
    """The components of a draft in pools of its own, which go by the target's slots.

    All of them or none: a draft is valid only as a whole.
    """
    if not pools.draft_pools:
        return None
    by_source = {component.pool: component for component in target}
    draft = {}
    for pool in pools.draft_pools:
        logical = PoolName.DRAFT if pool.index_source is PoolName.KV else PoolName.DRAFT_SWA
        source = by_source.get(pool.index_source)
        if source is None:
            return None
        draft[logical] = ComponentTransfer(logical, source.keys, source.slots, source.hit_policy, source.window)
    return tuple(draft.values())
