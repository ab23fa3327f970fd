"""Agreement between the ranks of one engine over `torch.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import torch
import torch.distributed as dist

__all__ = ["TorchDistributedConsensus"]


class TorchDistributedConsensus:
    """All ranks take the smallest answer, entry by entry: a `RankConsensus`.

    Every rank must call it equally often, in the same order and with equally many values, and no other thread may use
    its groups meanwhile.

    Args:
        groups: process groups of a CPU backend, reduced over one after another; those of one rank are left out.
    """

    def __init__(self, *groups: Any) -> None:
        self._groups = tuple(group for group in groups if group is not None and dist.get_world_size(group=group) > 1)

    @property
    def is_alone(self) -> bool:
        """Whether there is only this rank."""
        return not self._groups

    async def minimum(self, values: Sequence[int]) -> Sequence[int]:
        """See `RankConsensus`; waits on a thread."""
        return await anyio.to_thread.run_sync(self.minimum_now, values)

    def minimum_now(self, values: Sequence[int]) -> list[int]:
        """The element-wise minimum over all ranks, on the caller's thread; without values, no rank is asked."""
        if not self._groups or not values:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.int64)
        for group in self._groups:
            dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=group)
        return [int(value) for value in reduced.tolist()]
