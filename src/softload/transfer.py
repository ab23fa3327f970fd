"""What a request asks for: pools, components and transfer units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import torch

__all__ = ["ComponentTransfer", "Fence", "HitPolicy", "PoolName", "SupportsSynchronize", "TransferUnit"]


class PoolName(StrEnum):
    """Well-known pools. The values are part of object keys and never change."""

    KV = "kv"
    INDEXER = "indexer"
    SWA = "swa"
    C4 = "deepseek_v4_c4"
    C4_INDEXER = "deepseek_v4_c4_indexer"
    C128 = "deepseek_v4_c128"
    C4_STATE = "deepseek_v4_c4_state"
    C4_INDEXER_STATE = "deepseek_v4_c4_indexer_state"
    MAMBA = "mamba"
    DRAFT = "draft"
    DRAFT_INDEXER = "draft_indexer"
    DRAFT_SWA = "draft_swa"

    @property
    def is_draft(self) -> bool:
        """Whether the pool belongs to a draft model."""
        return self in (PoolName.DRAFT, PoolName.DRAFT_INDEXER, PoolName.DRAFT_SWA)


class HitPolicy(StrEnum):
    """Which pages of a component must be there for a prefix boundary to be restorable."""

    ALL_PAGES = "all_pages"
    """Every page up to the boundary."""

    TRAILING_PAGES = "trailing_pages"
    """Only the window of pages that ends at the boundary."""


class SupportsSynchronize(Protocol):
    """An event of the engine, `torch.cuda.Event` for example."""

    def synchronize(self) -> object:
        """Return once the event has happened."""


Fence: TypeAlias = Callable[[], object] | SupportsSynchronize
"""Returns, from a thread of ours, once the engine no longer uses the slots. A CPU engine needs none."""


@dataclass(frozen=True, slots=True, eq=False)
class ComponentTransfer:
    """One pool's part of a transfer unit.

    Args:
        pool: the logical pool; a `DevicePoolGroup` expands it to every pool that takes its indices from it.
        keys: one page key (prefix hash) per page, in prefix order.
        slots: int64 tensor, `[pages * page_size]` token slots, or `[pages]` for pools with one row a page. ``None``
            where no slots are taken yet (lookup, prefetch). With `HitPolicy.TRAILING_PAGES` pages before the window
            need no slots: -1 for every slot of such a page.
        hit_policy: which pages a boundary needs.
        window: pages in a trailing window; used with `HitPolicy.TRAILING_PAGES` alone.

    Raises:
        TypeError: `keys` is not a tuple of strings, or `slots` is not a tensor.
        ValueError: an empty key, slots that are not one-dimensional int64, or a window below one page.
    """

    pool: PoolName
    keys: tuple[str, ...]
    slots: torch.Tensor | None = None
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    window: int = 1

    def __post_init__(self) -> None:
        if type(self.keys) is not tuple or any(type(key) is not str for key in self.keys):
            raise TypeError(f"pool {self.pool}: keys must be a tuple of str, got {type(self.keys).__name__}")
        if not all(self.keys):
            raise ValueError(f"pool {self.pool}: expected non-empty page keys, got '' at page {self.keys.index('')}")
        if self.slots is not None:
            if not isinstance(self.slots, torch.Tensor):
                raise TypeError(f"pool {self.pool}: slots must be a torch.Tensor, got {type(self.slots).__name__}")
            if self.slots.dtype != torch.int64 or self.slots.dim() != 1:
                raise ValueError(
                    f"pool {self.pool}: expected one-dimensional int64 slots, "
                    f"got {self.slots.dtype} of shape {tuple(self.slots.shape)}"
                )
        if self.window < 1:
            raise ValueError(f"pool {self.pool}: expected a window of at least one page, got {self.window}")


@dataclass(frozen=True, slots=True, eq=False)
class TransferUnit:
    """What one request asks for: its target components and, optionally, its draft components.

    Args:
        request_id: the engine's name of the request; unique among the units of one call.
        target: the target model's components. None of them, or components without pages, make a unit of zero pages.
        draft: the draft model's components, valid only together; ``None`` for none (a packed draft needs none).
        deadline: seconds from submission until the unit's waiters are answered; ``None`` for the loader's default.
        ready: the engine's fence; slots are not written (load) or read (save) before it returned.
        partial: whether pools may be left out: the engine has of them what it needs (load), or nothing (save). A loaded
            tail may hold side pools alone. A lookup is about all pools, and has none of it.

    Raises:
        ValueError: a negative deadline, an empty request id, or a pool named twice.
    """

    request_id: str
    target: tuple[ComponentTransfer, ...]
    draft: tuple[ComponentTransfer, ...] | None = None
    deadline: float | None = None
    ready: Fence | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        if not self.request_id:
            raise ValueError("expected a non-empty request_id, got ''")
        if self.deadline is not None and not self.deadline >= 0:
            raise ValueError(
                f"request {self.request_id!r}: expected a deadline of 0 or more seconds, got {self.deadline}"
            )
        pools = [component.pool for component in (*self.target, *(self.draft or ()))]
        if len(set(pools)) != len(pools):
            twice = sorted({pool for pool in pools if pools.count(pool) > 1})
            raise ValueError(f"request {self.request_id!r}: expected each pool once, got {', '.join(twice)} twice")

    @property
    def num_pages(self) -> int:
        """Pages asked for: the longest target component's."""
        return max((len(component.keys) for component in self.target), default=0)
