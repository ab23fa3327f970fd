"""SGLang's transfers as transfer units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from softload.geometry.group import DevicePoolGroup
from softload.transfer import ComponentTransfer, Fence, HitPolicy, PoolName, TransferUnit

__all__ = ["UnitMaker", "Wanted"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a lookup asks for.

    Args:
        keys: one page key per page, from the first page that the device does not have.
        windows: pages in the trailing window of each logical pool that has one.
    """

    keys: tuple[str, ...]
    windows: Mapping[PoolName, int]

    @property
    def is_sparse(self) -> bool:
        """Whether not every prefix of what was found is restorable."""
        return bool(self.windows)


class UnitMaker:
    """Makes units.

    Args:
        pools: the rank's pools.
        prefix: what page keys start with, before SGLang's hash.
    """

    def __init__(self, pools: DevicePoolGroup, prefix: str = "") -> None:
        self._pools = pools
        self._prefix = prefix

    def wanted(self, transfers: Sequence[Any]) -> Wanted:
        """From the transfers of a lookup.

        SGLang names a window by its keys: those of the last pages, one for a recurrent state.
        """
        keys = self._keys(next(transfer.keys for transfer in transfers if transfer.name == PoolName.KV.value))
        windows = {
            PoolName(str(transfer.name)): len(transfer.keys)
            for transfer in transfers
            if transfer.hit_policy == HitPolicy.TRAILING_PAGES.value
        }
        return Wanted(keys, windows)

    def lookup(self, request_id: str, wanted: Wanted, pages: int, deadline: float) -> TransferUnit:
        """The first `pages` pages, without slots."""
        keys = wanted.keys[:pages]
        target = [ComponentTransfer(PoolName.KV, keys)]
        target += [
            ComponentTransfer(pool, keys, None, HitPolicy.TRAILING_PAGES, window)
            for pool, window in wanted.windows.items()
        ]
        return TransferUnit(request_id, tuple(target), self._draft(target), deadline)

    def load(
        self, request_id: str, transfers: Sequence[Any], wanted: Wanted, deadline: float, ready: Fence | None
    ) -> TransferUnit:
        """What a load's transfers name, with slots. Pages before a window have none.

        Args:
            request_id: the unit's name.
            transfers: those of the load.
            wanted: what was looked up, with the windows as they were then: a shorter load shows a shorter one.
            deadline: seconds.
            ready: the engine's fence.
        """
        by_pool = {PoolName(str(transfer.name)): transfer for transfer in transfers}
        keys = self._keys(by_pool[PoolName.KV].keys)
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
        return TransferUnit(request_id, tuple(target), self._draft(target), deadline, ready)

    def offload(
        self,
        request_id: str,
        transfers: Sequence[Any],
        ready: Fence | None,
        is_stored: Callable[[PoolName, str], bool] = lambda pool, key: False,
    ) -> TransferUnit | None:
        """What an offload's transfers name: each pool with the pages that it has. ``None`` where nothing is left.

        Args:
            request_id: the unit's name.
            transfers: those of the offload.
            ready: the engine's fence.
            is_stored: pages that are left out.
        """
        target = []
        for transfer in transfers:
            pool, keys, slots = PoolName(str(transfer.name)), self._keys(transfer.keys), transfer.device_indices
            left = [page for page, key in enumerate(keys) if not is_stored(pool, key)]
            if not left:
                continue
            if len(left) < len(keys):
                keys, slots = tuple(keys[page] for page in left), slots.view(len(keys), -1)[left].reshape(-1)
            target.append(ComponentTransfer(pool, keys, slots.to(torch.int64)))
        return (
            TransferUnit(request_id, tuple(target), self._draft(target), None, ready, partial=True) if target else None
        )

    def _keys(self, hashes: Sequence[str]) -> tuple[str, ...]:
        prefix = self._prefix
        return tuple(prefix + each for each in hashes) if prefix else tuple(hashes)

    def _draft(self, target: Sequence[ComponentTransfer]) -> tuple[ComponentTransfer, ...] | None:
        """The components of a draft in pools of its own, which go by the target's slots.

        All of them or none: a draft is valid only as a whole.
        """
        if not self._pools.draft_pools:
            return None
        by_source = {component.pool: component for component in target}
        draft = {}
        for pool in self._pools.draft_pools:
            logical = PoolName.DRAFT if pool.index_source is PoolName.KV else PoolName.DRAFT_SWA
            source = by_source.get(pool.index_source)
            if source is None:
                return None
            draft[logical] = ComponentTransfer(logical, source.keys, source.slots, source.hit_policy, source.window)
        return tuple(draft.values())
