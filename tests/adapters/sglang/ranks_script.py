"""One rank of several, each a process with a tree and a store of its own: what became of a request at each stage.

Run as a program with rank, number of ranks and port. One rank fails at each stage in turn; every rank prints, as a line
of JSON for each stage, how many pages were matched, whether they were loaded, and whether the load failed afterwards.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from tests.adapters.sglang_pools import stand_ins

from softload.geometry import layout
from softload.outcomes import PageStatus
from softload.protocols import Answer, PageStore
from softload.stores import WrapperStore, open_store
from softload.testing import HangingStore

PAGES = 4


class Faults(WrapperStore):
    """Objects that cannot be read although they are there."""

    gone: tuple[str, ...] = ()

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        answers = self.inner.read(keys, pointers, sizes)
        return [
            PageStatus.NOT_FOUND if any(part in key for part in self.gone) else answer
            for key, answer in zip(keys, answers, strict=True)
        ]


def main(rank: int, ranks: int, port: int) -> None:
    """Run every stage."""
    assert stand_ins.install()
    from .trees import KINDS, tree_of

    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    # The trees' layers have some bytes: each group is an object of its own, so that a later one can fail alone.
    layout._FIRST_BYTES = layout._LATER_BYTES = 1
    failing = rank == ranks - 1
    stages = [
        ("nothing", "mha", "hold"),
        ("lookup", "mha", "hold"),
        ("absent", "mha", "hold"),
        ("absent", "swa", "hold"),
        ("landing", "mha", "hold"),
        ("placing", "mha", "hold"),
        ("nothing", "mha", "stream"),
        ("absent", "mha", "stream"),
        ("reading", "mha", "stream"),
        ("nothing", "mha", "sync"),
        ("absent", "mha", "sync"),
        ("placing", "mha", "sync"),
    ]
    for stage, kind, admission in stages:
        hanging = HangingStore(open_store("memory://"))
        faults = Faults(hanging)
        options = {"admission": admission, "blocking_limit": "20s", "deadline": "20s", "lookup_deadline": "10s"}
        if stage == "lookup":
            options |= {"deadline": "3s", "lookup_deadline": "1500ms"}

        def make(store: PageStore = faults) -> PageStore:
            return store

        with tree_of(KINDS[kind], options, store=make, group=dist.group.WORLD) as tree:
            asked = list(range(1000, 1000 + PAGES * tree.page_size))
            tree.compute(asked[: 2 * tree.page_size])
            tree.settle()
            tree.evict_all()
            tree.compute(asked)
            tree.settle()
            tree.evict_all()
            probe = tree.request([*asked, 7])
            hashes = pages_of(tree, probe)
            if failing:
                fail(stage, tree, faults, hanging, hashes)
            elif (stage, kind) == ("absent", "swa"):
                remove(faults, f"{hashes[1]}/swa.")  # 4 pages can be restored here or 1, and 1, 2 or 3 there
            since = time.monotonic()
            req = tree.request([*asked, 7])
            matched = tree.match(req) // tree.page_size
            slots = tree.load_back(req) if matched else None
            tree.forward(tree.linker.pool_group.num_layers)
            tree.cache.finish_external_linker_loads([req])
            seen: dict[str, Any] = {
                "stage": f"{stage}, {kind}, {admission}",
                "matched": matched,
                "loaded": slots is not None,
                "failed": req.discard_output_reason is not None,
            }
            print(json.dumps({**seen, "seconds": round(time.monotonic() - since, 2)}), flush=True)
            hanging.release()
            dist.barrier()
    dist.destroy_process_group()


def pages_of(tree: Any, req: Any) -> list[str]:
    """The hashes of a request's pages, as SGLang makes them."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = RadixKey(req.origin_input_ids[:-1])
    hashes = get_storage_hash_str(key, None, page_size=tree.page_size)
    assert isinstance(hashes, list)
    return hashes


def fail(stage: str, tree: Any, faults: Faults, hanging: HangingStore, hashes: list[str]) -> None:
    """Make this rank fail."""
    match stage:
        case "lookup":
            hanging.hold("exists")
        case "absent":
            remove(faults, hashes[3])
        case "landing":
            faults.gone = (hashes[1],)
        case "reading":
            faults.gone = (f"{hashes[1]}/kv.g1",)
        case "placing":
            tree.linker._holds.place = lambda placements: [placement.ended(False) for _, placement in placements]


def remove(store: WrapperStore, part: str) -> None:
    """Remove the objects of the store in memory whose keys have this in them."""
    inner: Any = store
    while isinstance(inner, WrapperStore):
        inner = inner.inner
    known = [key for key in inner._objects if part in key]
    assert known
    store.remove(known, force=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
