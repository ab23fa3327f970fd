"""Objects that SGLang's own Mooncake linker has written are read by ours in layout `page`, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_direct_linker import MooncakeDirectLinker

from softload.stores.cluster import MooncakeCluster

from .their_linker import config_of
from .trees import KINDS, Tree, tree_of

pytestmark = pytest.mark.mooncake


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    cluster = MooncakeCluster(segment=64 << 20, lease=5, owners=1)
    cluster.start()
    try:
        yield cluster.address
    finally:
        cluster.close()


def theirs(master: str) -> Any:
    """Makes SGLang's own linker."""

    def make(server_args: object, params: Any, *, components: Any, extra_config: object) -> Any:
        arguments = SimpleNamespace(enable_linker_mla_dedup=False)
        return MooncakeDirectLinker(arguments, params, components=components, extra_config=config_of(master))

    return make


def restore(tree: Tree, asked: list[int], num_layers: int, *, ours: bool) -> dict[str, torch.Tensor] | None:
    """Load what the store has of these tokens."""
    req = tree.request([*asked, 7])
    if ours:
        tree.match(req)
    else:
        match_kv_cache(req, tree.cache, req.origin_input_ids)
    if req.host_hit_length != len(asked):
        return None
    slots = tree.load_back(req)
    assert slots is not None
    tree.forward(num_layers)
    assert tree.cache.finish_external_linker_loads([req]) == []
    assert req.discard_output_reason is None
    return tree.restored(req, slots)


@pytest.mark.parametrize("writer", ["theirs", "ours"])
@pytest.mark.parametrize("kind", ["dsa", "dsa, packed draft", "deepseek v4", "mamba"])
def test_objects_of_one_are_read_by_the_other(kind: str, writer: str, master: str) -> None:
    url = f"mooncake://{master}?metadata=P2PHANDSHAKE&protocol=tcp&segment=0"
    options = {"store": url, "layout": "page", "require_store": True}
    start = 1000 * (1 + list(KINDS).index(kind)) + (50_000 if writer == "ours" else 0)
    with (
        tree_of(KINDS[kind], options) as mine,
        tree_of(KINDS[kind], make_linker=theirs(master)) as other,
    ):
        source, target = (other, mine) if writer == "theirs" else (mine, other)
        asked = list(range(start, start + 3 * mine.page_size))
        written = source.compute(asked, seed=start)
        source.settle()
        target.evict_all()
        got = restore(target, asked, mine.group.num_layers, ours=target is mine)
        assert got is not None
        assert all(torch.equal(got[name], written[name]) for name in written)
