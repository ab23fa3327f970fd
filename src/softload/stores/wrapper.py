"""A store around a store: delegates everything, for subclasses that change one thing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from softload.outcomes import PageStatus
from softload.protocols import Answer, Descriptor, LendingStore, PageStore, PutAnswer

__all__ = ["LendingWrapperStore", "WrapperStore"]


class WrapperStore:
    """A `PageStore` that hands every call to `inner`. It lends no memory, so that nothing comes past its `read`.

    Args:
        inner: the store that does the work; it is opened and closed with the wrapper.
    """

    def __init__(self, inner: PageStore) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"

    def open(self) -> None:
        """Open the inner store."""
        self.inner.open()

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()

    def register(self, pointer: int, nbytes: int) -> bool:
        """See `PageStore.register`."""
        return self.inner.register(pointer, nbytes)

    def unregister(self, pointer: int) -> None:
        """See `PageStore.unregister`."""
        self.inner.unregister(pointer)

    def exists(self, keys: Sequence[str]) -> Sequence[bool | PageStatus]:
        """See `PageStore.exists`."""
        return self.inner.exists(keys)

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        """See `PageStore.descriptors`."""
        return self.inner.descriptors(keys)

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """See `PageStore.read`."""
        return self.inner.read(keys, pointers, sizes)

    def session_start(self, keys: Sequence[str]) -> Sequence[Answer]:
        """See `PageStore.session_start`."""
        return self.inner.session_start(keys)

    def session_end(self, keys: Sequence[str]) -> None:
        """See `PageStore.session_end`."""
        self.inner.session_end(keys)

    def read_ranges(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Sequence[Answer]:
        """See `PageStore.read_ranges`."""
        return self.inner.read_ranges(keys, pointers, sizes, offsets)

    def put_start(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[PutAnswer]:
        """See `PageStore.put_start`."""
        return self.inner.put_start(keys, sizes)

    def put_write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """See `PageStore.put_write`."""
        return self.inner.put_write(keys, pointers, sizes)

    def put_end(self, keys: Sequence[str]) -> Sequence[Answer]:
        """See `PageStore.put_end`."""
        return self.inner.put_end(keys)

    def put_revoke(self, keys: Sequence[str]) -> None:
        """See `PageStore.put_revoke`."""
        self.inner.put_revoke(keys)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> Sequence[Answer]:
        """See `PageStore.remove`."""
        return self.inner.remove(keys, force=force)

    @property
    def lease_ttl(self) -> float:
        """Seconds that a lease of the inner store lasts."""
        return self.inner.lease_ttl


class LendingWrapperStore(WrapperStore):
    """A `WrapperStore` that lends what `inner` lends: for those that change nothing of what reads bring."""

    def lend(self, key: str, descriptor: Descriptor) -> range | None:
        """See `LendingStore.lend`."""
        return self.inner.lend(key, descriptor) if isinstance(self.inner, LendingStore) else None

    def hold(self) -> AbstractContextManager[bool]:
        """See `LendingStore.hold`."""
        return self.inner.hold() if isinstance(self.inner, LendingStore) else nullcontext(False)
