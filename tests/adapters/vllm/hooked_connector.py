"""The connector with a store that tests can reach into. Named by module path in the engine's configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import ClassVar

from softload.adapters.vllm import SoftloadConnector
from softload.outcomes import PageStatus
from softload.protocols import Answer, Descriptor, PageStore
from softload.stores import WrapperStore
from softload.testing import FaultyStore, parse_fault


class PageFaults(WrapperStore):
    """Pages that cannot be had, by their prefix hash, from one call on; all object keys of a page fail alike."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self.gone_at_admission: set[str] = set()
        self.gone_while_landing: set[str] = set()
        self.removed_once_admitted: set[str] = set()
        """These are really removed, so that they can be saved again."""
        self.draft_gone: Callable[[str], bool] = lambda key: False
        """Of a draft's object keys."""
        self.keys: set[str] = set()
        """Object keys that were saved."""

    def descriptors(self, keys: Sequence[str]) -> Sequence[Descriptor | PageStatus]:
        """As the inner store, without the pages that are gone."""
        answers = self.inner.descriptors(keys)
        self.inner.remove([key for key in keys if page_of(key) in self.removed_once_admitted], force=True)
        return [
            PageStatus.NOT_FOUND if self._is_gone(key) else answer for key, answer in zip(keys, answers, strict=True)
        ]

    def _is_gone(self, key: str) -> bool:
        return page_of(key) in self.gone_at_admission or (is_draft(key) and self.draft_gone(key))

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """As the inner store, without the pages that are gone."""
        answers = self.inner.read(keys, pointers, sizes)
        return [
            PageStatus.NOT_FOUND if page_of(key) in self.gone_while_landing else answer
            for key, answer in zip(keys, answers, strict=True)
        ]

    def put_end(self, keys: Sequence[str]) -> Sequence[Answer]:
        """As the inner store."""
        self.keys.update(keys)
        return self.inner.put_end(keys)


class HookedConnector(SoftloadConnector):
    """Wraps the store, and can be made to hide failures, as a careless connector would."""

    wrap: ClassVar[Callable[[PageStore], PageStore]] = lambda store: store
    silent: ClassVar[bool] = False
    seen_bad_blocks: ClassVar[list[set[int]]] = []

    def make_store(self) -> PageStore:
        """The configured store, wrapped."""
        store = super().make_store()
        if specs := os.environ.get("SOFTLOAD_TEST_FAULTS"):
            store = FaultyStore(store, [parse_fault(spec) for spec in json.loads(specs)])
        return type(self).wrap(store)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The truth, or nothing."""
        bad = super().get_block_ids_with_load_errors()
        if bad:
            self.seen_bad_blocks.append(bad)
        return set() if self.silent else bad


def page_of(key: str) -> str:
    """The prefix hash in an object's key."""
    return key.split("/")[-2]


def is_draft(key: str) -> bool:
    """Whether an object holds a draft's bytes."""
    return key.rsplit("/", 1)[-1].startswith("draft")
