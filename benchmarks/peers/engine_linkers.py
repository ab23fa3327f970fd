"""The linkers of `sglang_faults.py`, SGLang's own and ours, and the moments at which they are struck."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.adapters.sglang.their_linker import TheirLinker

from softload.adapters.sglang import SoftloadLinker
from softload.outcomes import PageStatus
from softload.protocols import Answer, Descriptor, PageStore
from softload.stores import WrapperStore

__all__ = ["MOMENTS", "Moments", "StruckOurLinker", "StruckTheirLinker"]


class Moments:
    """What happens to the pages of one request, once each. Both linkers have the pages' hashes in their keys."""

    def __init__(self) -> None:
        self.hashes: frozenset[str] = frozenset()
        """The concerned request's pages; empty: nothing happens yet."""
        self.admitted: Callable[[Any], object] = lambda remove: None
        """After the last look at what is there, before the first byte: called with a function that removes keys."""
        self.reading: Callable[[], object] = lambda: None
        """Before the first byte is read."""
        self.torn: str | None = None
        """A page of which a read fails in mid-stream, once."""

    def names(self, keys: Sequence[str]) -> bool:
        """Whether any of these are the concerned request's."""
        return any(self.is_of(key, self.hashes) for key in keys)

    def is_of(self, key: str, hashes: frozenset[str]) -> bool:
        """Whether a key is one of these pages'."""
        return any(each in key for each in hashes)

    def take_admitted(self, keys: Sequence[str], remove: Callable[[str], object]) -> None:
        """The look has been answered."""
        if self.names(keys):
            strike, self.admitted = self.admitted, lambda remove: None
            strike(lambda hashes: [remove(key) for key in keys if self.is_of(key, hashes)])

    def take_reading(self, keys: Sequence[str]) -> None:
        """A read comes."""
        if self.names(keys):
            strike, self.reading = self.reading, lambda: None
            strike()


MOMENTS = Moments()


class _StruckStore(WrapperStore):
    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        answers = self.inner.descriptors(keys)
        MOMENTS.take_admitted(keys, lambda key: self.inner.remove([key], force=True))
        return answers

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        MOMENTS.take_reading(keys)
        answers = list(self.inner.read(keys, pointers, sizes))
        for index, key in enumerate(keys):
            if MOMENTS.torn is not None and MOMENTS.torn in key and ".g1" in key:
                MOMENTS.torn, answers[index] = None, PageStatus.TRANSFER_FAILED
        return answers


class StruckOurLinker(SoftloadLinker):
    """softload's linker as it is, over a store that can be struck."""

    def make_store(self) -> PageStore:
        """See `SoftloadLinker.make_store`."""
        return _StruckStore(super().make_store())


class _StruckClient:
    """Mooncake's own client, struck where the linker calls it."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self._ranges = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def batch_get_session_start(self, keys: list[str]) -> Any:
        MOMENTS.take_admitted(keys, lambda key: self._native.remove(key, True))
        return self._native.batch_get_session_start(keys)

    def batch_get_into_multi_buffer_ranges(self, keys: list[str], *ranges: Any) -> Any:
        MOMENTS.take_reading(keys)
        answers = list(self._native.batch_get_into_multi_buffer_ranges(keys, *ranges))
        if MOMENTS.torn is not None and any(MOMENTS.torn in key for key in keys):
            self._ranges += 1
            if self._ranges == 2:  # the second layer's
                answers = [-800 if MOMENTS.torn in key else answer for key, answer in zip(keys, answers, strict=True)]
                MOMENTS.torn = None
        return answers


class StruckTheirLinker(TheirLinker):
    """SGLang's own linker as it is, over a client that can be struck."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.storage.store = _StruckClient(self.storage.store)
