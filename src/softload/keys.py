"""Names of objects in the store. Keys are data: nothing is ever parsed back out of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from softload.config import Layout, LoaderConfig
from softload.transfer import PoolName

__all__ = ["FORMAT_VERSION", "KeySpace"]

FORMAT_VERSION = 1
"""Changes whenever the bytes of an object would be read differently."""


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Makes object keys for one loader.

    Args:
        layout: `Layout.GROUPED` keys start with `prefix`; `Layout.PAGE` keys end in `rank`, as SGLang's do.
        prefix: namespace and a digest of everything that changes an object's meaning.
        rank: the parallel ranks whose bytes these are.
    """

    layout: Layout
    prefix: str
    rank: str

    @classmethod
    def create(cls, config: LoaderConfig, fingerprint: str, *, rank_replicated: bool) -> KeySpace:
        """The key space of a loader whose pools have the geometry `fingerprint`."""
        ranks = [] if rank_replicated else [f"tp{config.tp_rank}"]
        rank = "_".join([*ranks, f"cp{config.cp_rank}", f"pp{config.pp_rank}"])
        meaning = "\x00".join((str(FORMAT_VERSION), config.namespace, fingerprint, config.layout, rank))
        prefix = f"{config.namespace}@{xxhash.xxh3_64_hexdigest(meaning.encode())}"
        return cls(config.layout, prefix, rank)

    def object_key(self, page_key: str, pool: PoolName, part: str) -> str:
        """The key of one object.

        Args:
            page_key: the page's prefix hash.
            pool: the pool whose bytes it holds.
            part: which of the page's objects in that pool; empty for `Layout.PAGE` with one object a page.
        """
        return self.object_keys((page_key,), pool, part)[0]

    def object_keys(self, page_keys: Iterable[str], pool: PoolName, part: str) -> tuple[str, ...]:
        """`object_key` of many pages."""
        if self.layout is Layout.GROUPED:
            head, tail = f"{self.prefix}/", f"/{pool}.{part}"
        else:
            head, tail = "", f"_{self.rank}_{'k' if pool is PoolName.KV else pool}{part}"
        return tuple([f"{head}{page_key}{tail}" for page_key in page_keys])
