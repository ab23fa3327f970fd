"""Agreement between the ranks of one engine, on the engine's own thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankGroup"]


class RankGroup:
    """The ranks whose caches go together. Every rank must call it equally often, in the same order, with equal lengths.

    Args:
        groups: process groups of a CPU backend, reduced over one after another; those of one rank are left out.
    """

    def __init__(self, groups: Sequence[Any] = ()) -> None:
        self._groups = tuple(group for group in groups if group is not None and dist.get_world_size(group=group) > 1)

    @property
    def is_alone(self) -> bool:
        """Whether there is only this rank."""
        return not self._groups

    def minimum(self, values: Sequence[int]) -> list[int]:
        """The element-wise minimum over all ranks; without values, no rank is asked."""
        if not self._groups or not values:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.int64)
        for group in self._groups:
            dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=group)
        return [int(value) for value in reduced.tolist()]
