"""The replay's engine memory: pools, a page allocator, and bytes that are written, checked and poisoned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from softload.geometry import DevicePoolGroup
from softload.replay.contents import PageContents
from softload.replay.shapes import DraftKind
from softload.transfer import ComponentTransfer, HitPolicy, PoolName, TransferUnit

__all__ = ["KEPT_SHARE", "WINDOW_PAGES", "EngineMemory", "PageAllocator", "Verification"]

WINDOW_PAGES = 1
"""Pages in a sliding window: DeepSeek V4's 128 tokens are within one page."""

_KEPT_EVERY = 2
KEPT_SHARE = 1 / _KEPT_EVERY
"""Share of a prompt's pages whose window is stored."""

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


@dataclass(frozen=True, slots=True)
class _Part:
    """The buffers that go by the slots of one logical component: the target's among them, or the draft's.

    Args:
        component: what units name them by.
        contents: what they hold.
        rows: engine page -> row.
        window: pages in a trailing window; ``None`` where every page is needed.
    """

    component: PoolName
    contents: PageContents
    rows: Pages
    window: int | None

    def needed(self, pages: int) -> range:
        """The pages of a prefix that are brought."""
        return range(pages) if self.window is None else range(max(0, pages - self.window), pages)


class EngineMemory:
    """Pools of one shape, their allocator and what their pages must hold.

    One allocator gives out pages; each component but KV has them under numbers of its own, by a fixed permutation.
    Pages of a sliding window are stored where every second page ends, and where a request does: boundaries are sparse.

    Args:
        pools: the group.
        draft: how drafts are stored.
        generation: see `PageContents`.
    """

    def __init__(self, pools: DevicePoolGroup, draft: DraftKind, generation: int = 0) -> None:
        self.pools = pools
        self.draft_kind = draft
        self.num_pages = min(pool.num_pages for pool in pools.pools)
        self._parts = tuple(self._make_parts(draft=False, generation=generation))
        self._draft_parts = tuple(self._make_parts(draft=True, generation=generation))
        self.allocator = PageAllocator(self.num_pages)
        self.poison(np.arange(self.num_pages, dtype=np.int64))

    def unit(
        self,
        request_id: str,
        keys: tuple[str, ...],
        pages: Pages | None = None,
        deadline: float | None = None,
        *,
        saved_from: int | None = None,
    ) -> TransferUnit:
        """A transfer unit for `keys`, with slots where `pages` are given.

        Args:
            request_id: the request.
            keys: page keys.
            pages: the engine's pages.
            deadline: see `TransferUnit`.
            saved_from: the prompt's page that `keys` start with, for a save: windows have slots where they are kept.
        """
        target = tuple(self._component(part, keys, pages, saved_from) for part in self._parts)
        draft = None
        if self.draft_kind is DraftKind.SIDECAR:
            draft = tuple(self._component(part, keys, pages, saved_from) for part in self._draft_parts)
        return TransferUnit(request_id, target, draft, deadline)

    def compute(self, pages: Pages, keys: Sequence[str]) -> None:
        """Write what a forward pass over these pages would, the draft's bytes too."""
        for part in (*self._parts, *self._draft_parts):
            part.contents.fill(part.rows[pages], keys)

    def verify(self, pages: Pages, keys: Sequence[str], draft_pages: int, restored: int) -> Verification:
        """Compare pages with what they must hold.

        Args:
            pages: the pages, in prefix order.
            keys: their keys.
            draft_pages: pages from the first whose draft slots hold the draft's own bytes.
            restored: pages from the first that were restored: their draft slots beyond `draft_pages` hold zeros, and
                those before a trailing window what they held before. Pages beyond were computed and hold all.
        """
        wrong = np.zeros(len(pages), dtype=np.int64)
        restored = max(restored, draft_pages)
        for part in self._parts:
            brought = part.needed(restored)
            rows = part.rows[pages]
            wrong[: brought.start] += part.contents.unpoisoned(rows[: brought.start])
            wrong[brought.start :] += part.contents.mismatches(rows[brought.start :], keys[brought.start :])
        for part in self._draft_parts:
            brought = part.needed(draft_pages)
            rows = part.rows[pages]
            good = slice(brought.start, brought.stop)
            zeroed = slice(max(draft_pages, part.needed(restored).start), restored)
            wrong[good] += part.contents.mismatches(rows[good], keys[good])
            wrong[zeroed] += part.contents.nonzero(rows[zeroed])
            wrong[restored:] += part.contents.mismatches(rows[restored:], keys[restored:])
        return Verification(int(wrong.sum()), int(np.count_nonzero(wrong)))

    def poison(self, pages: Pages) -> None:
        """Overwrite pages that nobody owns."""
        for part in (*self._parts, *self._draft_parts):
            part.contents.poison(part.rows[pages])

    def _make_parts(self, *, draft: bool, generation: int) -> Iterator[_Part]:
        """By component: buffers of the target's pools, or the draft's, packed in those or in pools of its own."""
        views: dict[PoolName, list[torch.Tensor]] = {}
        for pool in self.pools.pools:
            component = pool.index_source
            if pool.name.is_draft:
                component = PoolName.DRAFT if component is PoolName.KV else PoolName.DRAFT_SWA
            chosen = [view for index, view in enumerate(pool.page_views) if pool.is_draft_buffer(index) is draft]
            views.setdefault(component, []).extend(chosen)
        for component, chosen in views.items():
            if chosen:
                salt = f"{'draft' if draft else 'target'} {component}"
                contents = PageContents(chosen, salt=salt, generation=generation)
                window = WINDOW_PAGES if component in (PoolName.SWA, PoolName.DRAFT_SWA) else None
                yield _Part(component, contents, self._rows(component, generation), window)

    def _rows(self, component: PoolName, generation: int) -> Pages:
        if component is PoolName.KV:
            return np.arange(self.num_pages, dtype=np.int64)
        seed = (generation, list(PoolName).index(component))
        return np.random.default_rng(seed).permutation(self.num_pages).astype(np.int64)

    def _component(
        self, part: _Part, keys: tuple[str, ...], pages: Pages | None, saved_from: int | None
    ) -> ComponentTransfer:
        slots = None if pages is None else self._slots(part.rows[pages])
        if part.window is None:
            return ComponentTransfer(part.component, keys, slots)
        if slots is not None and saved_from is not None:
            ends = np.arange(saved_from, saved_from + len(keys)) % _KEPT_EVERY == _KEPT_EVERY - 1
            ends[-1:] = True
            slots[torch.from_numpy(np.repeat(~ends, self.pools.page_size))] = -1
        return ComponentTransfer(part.component, keys, slots, HitPolicy.TRAILING_PAGES, part.window)

    def _slots(self, pages: Pages) -> torch.Tensor:
        size = self.pools.page_size
        return torch.from_numpy((pages[:, None] * size + np.arange(size)).ravel())
