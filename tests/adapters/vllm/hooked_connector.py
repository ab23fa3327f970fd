"""The connector with a store that tests can reach into. Named by module path in the engine's configuration."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from softload.adapters.vllm import SoftloadConnector
from softload.adapters.vllm.options import LoadMode
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
        self.unread: dict[str, set[str]] = defaultdict(set)
        """Of every page that was saved, the object keys whose bytes were not read since."""

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
        answers = [
            PageStatus.NOT_FOUND if page_of(key) in self.gone_while_landing else answer
            for key, answer in zip(keys, self.inner.read(keys, pointers, sizes), strict=True)
        ]
        for key, answer in zip(keys, answers, strict=True):
            if not isinstance(answer, PageStatus):
                self.unread[page_of(key)].discard(key)
        return answers

    def put_end(self, keys: Sequence[str]) -> Sequence[Answer]:
        """As the inner store."""
        self.keys.update(keys)
        for key in keys:
            self.unread[page_of(key)].add(key)
        return self.inner.put_end(keys)


class HookedConnector(SoftloadConnector):
    """Wraps the store, and can be made to hide failures, as a careless connector would."""

    wrap: ClassVar[Callable[[PageStore], PageStore]] = lambda store: store
    silent: ClassVar[bool] = False
    seen_bad_blocks: ClassVar[list[set[int]]] = []
    ordered: ClassVar[list[str]] = []
    """Requests that loads into blocks were ordered for, order by order."""

    received: ClassVar[list[str]] = []
    """Requests that were told as received, each time they were."""

    failed: ClassVar[list[str]] = []
    """Requests that were told as failed, each time they were."""

    @classmethod
    def forget(cls) -> None:
        """Nothing was seen so far."""
        for seen in (cls.seen_bad_blocks, cls.ordered, cls.received, cls.failed):
            seen.clear()

    def make_store(self) -> PageStore:
        """The configured store, wrapped."""
        store = super().make_store()
        if specs := os.environ.get("SOFTLOAD_TEST_FAULTS"):
            store = FaultyStore(store, [parse_fault(spec) for spec in json.loads(specs)])
        return type(self).wrap(store)

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        """As told; what is ordered is written down."""
        orders = self._get_connector_metadata()
        if self._options.mode is not LoadMode.LAYERWISE:  # there the step itself is the answer
            self.ordered.extend(order.ticket[0] for order in (*orders.places, *orders.loads))
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The truth, written down."""
        results = super().get_transfer_results(finished_req_ids)
        self.received.extend(results.finished_recving)
        self.failed.extend(results.failed_recving)
        return results

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
