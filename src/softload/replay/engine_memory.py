"""The replay's engine memory: pools, a page allocator, and bytes that are written, checked and poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from softload.geometry import DevicePoolGroup
from softload.replay.contents import PageContents
from softload.replay.shapes import DraftKind
from softload.transfer import ComponentTransfer, PoolName, TransferUnit

__all__ = ["EngineMemory", "PageAllocator", "Verification"]

Pages = NDArray[np.int64]


class PageAllocator:
    """Hands out page numbers, the longest unused first, so that a late write has the most time to be found."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free: NDArray[np.int64] = np.arange(num_pages, dtype=np.int64)  # a ring, oldest at `_head`
        self._head = 0
        self.free = num_pages

    @property
    def allocated(self) -> int:
        """Pages that are out."""
        return self.num_pages - self.free

    def allocate(self, count: int) -> Pages | None:
        """Take `count` pages, or ``None`` if fewer are free."""
        if count > self.free:
            return None
        at = (self._head + np.arange(count)) % self.num_pages
        self._head = (self._head + count) % self.num_pages
        self.free -= count
        return self._free[at]

    def release(self, pages: Pages) -> None:
        """Give pages back.

        Raises:
            ValueError: more pages than are out.
        """
        if len(pages) > self.allocated:
            raise ValueError(f"expected at most {self.allocated} pages to come back, got {len(pages)}")
        at = (self._head + self.free + np.arange(len(pages))) % self.num_pages
        self._free[at] = pages
        self.free += len(pages)


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check of some pages found: wrong bytes, and pages that hold any."""

    wrong_bytes: int = 0
    wrong_pages: int = 0


class EngineMemory:
    """Pools of one shape, their allocator and what their pages must hold.

    A sidecar draft's pages are those of the target under a fixed permutation: one allocator, other numbers.

    Args:
        pools: the group; its KV pool holds the target and a packed draft, a DRAFT pool a sidecar's pages.
        draft: how drafts are stored.
        generation: see `PageContents`.
    """

    def __init__(self, pools: DevicePoolGroup, draft: DraftKind, generation: int = 0) -> None:
        self.pools = pools
        self.draft_kind = draft
        kv = pools.pool(PoolName.KV)
        views = kv.page_views
        if draft is DraftKind.PACKED:
            drafted = [kv.is_draft_buffer(index) for index in range(len(views))]
            target = [view for view, is_draft in zip(views, drafted, strict=True) if not is_draft]
            packed = [view for view, is_draft in zip(views, drafted, strict=True) if is_draft]
            self.target = PageContents(target, salt="target", generation=generation)
            self.draft: PageContents | None = PageContents(packed, salt="draft", generation=generation)
        else:
            self.target = PageContents(views, salt="target", generation=generation)
            self.draft = None
        self.num_pages = kv.num_pages
        self._draft_of = np.arange(self.num_pages, dtype=np.int64)
        if draft is DraftKind.SIDECAR:
            self.draft = PageContents(pools.pool(PoolName.DRAFT).page_views, salt="draft", generation=generation)
            self._draft_of = np.random.default_rng(generation).permutation(self.num_pages).astype(np.int64)
        self.allocator = PageAllocator(self.num_pages)
        self.poison(np.arange(self.num_pages, dtype=np.int64))

    def unit(
        self, request_id: str, keys: tuple[str, ...], pages: Pages | None = None, deadline: float | None = None
    ) -> TransferUnit:
        """A transfer unit for `keys`, with slots where `pages` are given."""
        draft = None
        if self.draft_kind is DraftKind.SIDECAR:
            slots = None if pages is None else self._slots(self._draft_of[pages])
            draft = (ComponentTransfer(PoolName.DRAFT, keys, slots),)
        slots = None if pages is None else self._slots(pages)
        return TransferUnit(request_id, (ComponentTransfer(PoolName.KV, keys, slots),), draft, deadline)

    def compute(self, pages: Pages, keys: Sequence[str]) -> None:
        """Write what a forward pass over these pages would, the draft's bytes too."""
        self.target.fill(pages, keys)
        if self.draft is not None:
            self.draft.fill(self._draft_of[pages], keys)

    def verify(self, pages: Pages, keys: Sequence[str], draft_pages: int, zeroed_pages: int) -> Verification:
        """Compare pages with what they must hold.

        Args:
            pages: the pages, in prefix order.
            keys: their keys.
            draft_pages: pages from the first whose draft slots hold the draft's own bytes.
            zeroed_pages: pages from the first up to which draft slots beyond `draft_pages` hold zeros; those beyond
                hold the draft's own bytes again, having been computed.
        """
        wrong = self.target.mismatches(pages, keys)
        if self.draft is not None and len(pages):
            rows = self._draft_of[pages]
            zeroed_pages = max(zeroed_pages, draft_pages)
            wrong[:draft_pages] += self.draft.mismatches(rows[:draft_pages], keys[:draft_pages])
            wrong[draft_pages:zeroed_pages] += self.draft.nonzero(rows[draft_pages:zeroed_pages])
            wrong[zeroed_pages:] += self.draft.mismatches(rows[zeroed_pages:], keys[zeroed_pages:])
        return Verification(int(wrong.sum()), int(np.count_nonzero(wrong)))

    def poison(self, pages: Pages) -> None:
        """Overwrite pages that nobody owns."""
        self.target.poison(pages)
        if self.draft is not None:
            self.draft.poison(self._draft_of[pages])

    def _slots(self, pages: Pages) -> torch.Tensor:
        size = self.pools.page_size
        return torch.from_numpy((pages[:, None] * size + np.arange(size)).ravel())
