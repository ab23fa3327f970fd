"""SGLang's radix cache and wrapper with our linker: insert, offload, evict, match, load back, wait, finish."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName as SglangPoolName
from sglang.srt.mem_cache.hicache_storage import PoolTransfer

from softload.protocols import PageStore
from softload.stores import open_store
from softload.testing import HangingStore

from .trees import KINDS, Tree, tree_of

ADMISSIONS = ("hold", "stream", "sync")


def tokens(tree: Tree, pages: int = 3, start: int = 1000) -> list[int]:
    return list(range(start, start + pages * tree.page_size))


def stored(tree: Tree, pages: int = 3) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Tokens that are in the store and not on the device, and the bytes of their last pages."""
    asked = tokens(tree, pages)
    written = tree.compute(asked)
    tree.settle()
    tree.evict_all()
    return asked, written


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert got.keys() == expected.keys()
    return all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_evicted_comes_back(kind: str, admission: str) -> None:
    with tree_of(KINDS[kind], {"admission": admission}) as tree:
        asked, written = stored(tree)
        req = tree.request([*asked, 7])
        assert tree.match(req) == len(asked)
        slots = tree.load_back(req)
        assert slots is not None and len(slots) == len(asked)
        tree.forward(tree.linker.pool_group.num_layers)
        assert same(tree.restored(req, slots), written)
        assert tree.cache.finish_external_linker_loads([req]) == []
        assert req.discard_output_reason is None


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_nothing_stored_is_a_miss(admission: str) -> None:
    with tree_of(KINDS["mha"], {"admission": admission}) as tree:
        req = tree.request([*tokens(tree), 7])
        assert tree.match(req) == 0
        assert not tree.cache.linker.has_hit(req.rid)


@pytest.mark.parametrize("admission", ["hold", "stream"])
def test_a_queued_load_is_aborted(admission: str) -> None:
    """Nothing is written into the slots that the request gives back."""
    with tree_of(KINDS["mha"], {"admission": admission}) as tree:
        asked, _ = stored(tree)
        free = tree.free_tokens()
        req = tree.request([*asked, 7])
        tree.match(req)
        slots = tree.load_back(req)
        assert slots is not None
        before = tree.restored(req, slots)
        tree.cache.release_aborted_request(req.cache_request_handle)
        tree.allocator.free(slots)
        assert tree.forward(3) == -1
        assert same(tree.restored(req, slots), before)
        assert tree.free_tokens() == free
        again = tree.request([*asked, 7])
        assert tree.match(again) == len(asked)


def hanging(method: str) -> tuple[HangingStore, Callable[[], PageStore]]:
    store = HangingStore(open_store("memory://"))
    return store, lambda: store


@pytest.mark.parametrize("what", ["reset", "close"])
@pytest.mark.parametrize("admission", ["hold", "stream"])
def test_reset_and_close_do_not_wait_for_a_frozen_read(admission: str, what: str) -> None:
    """And the slots stay as they are when the read returns late."""
    store, make = hanging("read")
    with tree_of(KINDS["mha"], {"admission": admission, "deadline": "3s"}, store=make) as tree:
        asked, _ = stored(tree)
        store.hold("read")
        req = tree.request([*asked, 7])
        slots = None
        if admission == "stream":
            tree.match(req)
            slots = tree.load_back(req)
            tree.cache.ready_to_load_host_cache()
        else:
            assert tree.start_match(req)
        assert store.wait_held("read")
        since = time.monotonic()
        if what == "reset":
            tree.linker.reset()
        else:
            tree.linker.close()
        assert time.monotonic() - since < 15  # in `stream` a reset waits for the deadline
        before = None if slots is None else tree.restored(req, slots)
        store.release()
        if what == "reset":
            tree.linker._bridge.call(lambda: tree.linker._bridge.loader.drain(), 60)  # type: ignore[union-attr]
        if slots is not None and before is not None:
            assert same(tree.restored(req, slots), before)


def test_a_slow_store_is_a_miss_within_the_bound() -> None:
    """In `sync`, lookup and load together wait no longer than `blocking_limit` in a step."""
    store, make = hanging("exists")
    with tree_of(KINDS["mha"], {"admission": "sync", "blocking_limit": "1s"}, store=make) as tree:
        asked, _ = stored(tree)
        store.hold("exists")
        waiting = [tree.request([*asked, last]) for last in range(5)]
        tree.linker.num_completed_offloads()
        since = time.monotonic()
        assert [tree.match(req) for req in waiting] == [0] * 5
        assert time.monotonic() - since < 4  # and not five times that
        store.release()


def test_offloads_are_bounded_and_unlock_their_nodes() -> None:
    """A store that takes nothing holds nodes for `offload_limit` at most."""
    store, make = hanging("put_write")
    with tree_of(KINDS["mha"], {"offload_limit": "300ms"}, store=make) as tree:
        store.hold("put_write")
        free = tree.free_tokens()
        tree.compute(tokens(tree))
        assert store.wait_held("put_write")
        tree.settle(20)  # a save has 30 s
        tree.evict_all()
        assert tree.free_tokens() == free
        store.release()


def result_of_offload(tree: Tree, keys: tuple[str, ...], slots: torch.Tensor) -> bool:
    """Offer slots for saving as the tree would, and wait for what became of it."""
    assert tree.linker.offload([PoolTransfer(SglangPoolName.KV, device_indices=slots, keys=list(keys))])
    until = time.monotonic() + 60
    while not tree.linker.num_completed_offloads():
        assert time.monotonic() < until
        time.sleep(0.002)
    return tree.linker.pop_completed_offload()


def test_slots_of_a_failed_load_are_not_offloaded_before_they_were_computed() -> None:
    """And the failed request is a miss until then."""
    store, make = hanging("read")
    with tree_of(KINDS["mha"], {"admission": "stream", "deadline": "3s"}, store=make) as tree:
        asked, _ = stored(tree)
        store.hold("read")
        req = tree.request([*asked, 7])
        tree.match(req)
        hold = tree.linker._holds.get(req.rid)
        slots = tree.load_back(req)
        assert hold is not None and slots is not None
        tree.forward(3)
        assert tree.cache.finish_external_linker_loads([req]) == []
        assert req.discard_output_reason is not None and req.skip_radix_cache_insert
        assert tree.match(req) == 0 and not tree.linker.is_held(req.rid)
        store.release()
        inner = store.inner
        assert inner is not None
        for key in list(inner._objects):  # type: ignore[attr-defined]
            inner.remove([key], force=True)
        assert not result_of_offload(tree, hold.wanted.keys, slots)
        tree.linker.computed([req.rid])
        assert result_of_offload(tree, hold.wanted.keys, slots)
        assert tree.match(req) == len(asked)


def test_a_held_request_whose_prefix_is_on_the_device_by_now_goes_on() -> None:
    """Another one has computed it; nothing is looked up then, and nothing may hold it any more."""
    store, make = hanging("exists")
    with tree_of(KINDS["mha"], store=make) as tree:
        store.hold("exists")
        asked = tokens(tree)
        req = tree.request([*asked, 7])
        assert tree.start_match(req)
        tree.compute(asked)
        assert not tree.start_match(req)
        assert req.prefix_len == len(asked)
        store.release()


def test_a_prefix_that_grows_on_the_device_leaves_the_rest_to_be_loaded() -> None:
    with tree_of(KINDS["mha"]) as tree:
        asked, written = stored(tree)
        req = tree.request([*asked, 7])
        assert tree.match(req) == len(asked)
        tree.compute(asked[: tree.page_size], seed=5)
        assert tree.match(req) == len(asked) - tree.page_size
        slots = tree.load_back(req)
        assert slots is not None
        tree.forward(3)
        assert same(tree.restored(req, slots), {name: rows[1:] for name, rows in written.items()})
        assert tree.cache.finish_external_linker_loads([req]) == []
        assert req.discard_output_reason is None
