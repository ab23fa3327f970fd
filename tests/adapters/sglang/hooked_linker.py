"""Our linker with a store that tests can reach into, and a store whose objects can be made to fail."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from softload.adapters.sglang import SoftloadLinker
from softload.outcomes import PageStatus
from softload.protocols import Answer, Descriptor, PageStore
from softload.stores import WrapperStore


class Faults(WrapperStore):
    """A store whose objects can be made to fail, by what their keys contain."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self.gone: Callable[[str], bool] = lambda key: False
        """Objects that cannot be read although they are there."""
        self.torn: Callable[[str, int], bool] = lambda key, offset: False
        """Ranges of objects that cannot be read, by key and first offset."""
        self.removed: Callable[[str], bool] = lambda key: False
        """Objects that are removed once they were said to be there."""
        self.seconds = 0.0
        """How long a read takes at least."""
        self.lasts = 0.0
        """How long after the first read since this was set any read ends at the earliest: what a whole load takes."""
        self._first_read: float | None = None
        self.damaged: Callable[[str], bool] = lambda key: False
        """Objects whose bytes change between the store and here."""

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        answers = self.inner.descriptors(keys)
        self.inner.remove([key for key in keys if self.removed(key)], force=True)
        return answers

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        if self._first_read is None or not self.lasts:
            self._first_read = time.monotonic()
        time.sleep(max(self.seconds, self._first_read + self.lasts - time.monotonic(), 0.0))
        answers = list(self.inner.read(keys, pointers, sizes))
        for index, key in enumerate(keys):
            if self.gone(key):
                answers[index] = PageStatus.NOT_FOUND
            if self.damaged(key):
                ctypes.memset(pointers[index], 0x40, sizes[index] - 32)  # all but the tail: numbers near 3
        return answers

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        answers = self.inner.read_ranges(keys, pointers, sizes, offsets)
        return [
            PageStatus.NOT_FOUND if self.torn(key, starts[0]) else answer
            for key, starts, answer in zip(keys, offsets, answers, strict=True)
        ]


class HookedLinker(SoftloadLinker):
    """See the module. Keeps what it was made with, so that others can be."""

    wrap: ClassVar[Callable[[PageStore], PageStore]] = lambda store: store
    made: ClassVar[tuple[tuple[Any, ...], dict[str, Any]]]
    looked_up: ClassVar[dict[str, tuple[str, ...]]] = {}
    """The page hashes of each request."""
    lookups: ClassVar[Counter[str]] = Counter()
    """How often each request was looked up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        type(self).made = args, kwargs
        super().__init__(*args, **kwargs)

    def make_store(self) -> PageStore:
        return HookedLinker.wrap(super().make_store())

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        HookedLinker.looked_up[rid] = self._units.wanted(transfers).keys
        HookedLinker.lookups[rid] += 1
        return super().lookup(rid, transfers)
