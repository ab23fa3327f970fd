"""SGLang's radix cache and wrapper with our linker: insert, offload, evict, match, load back, wait, finish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.adapters.sglang_pools import engine_pools as pools

from .trees import PAGE_SIZE, tree_of

TOKENS = list(range(1000, 1000 + 3 * PAGE_SIZE))
LAYERS = 3

KINDS: dict[str, Callable[[], Any]] = {"mha": lambda: pools.mha(LAYERS), "mla": lambda: pools.mla(LAYERS)}


@pytest.mark.parametrize("admission", ["hold", "stream", "sync"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_evicted_comes_back(kind: str, admission: str) -> None:
    with tree_of(KINDS[kind](), {"admission": admission, "blocking_limit": "2s"}) as tree:
        written = tree.compute(TOKENS)
        tree.settle()
        tree.evict_all()
        req = tree.request([*TOKENS, 7])
        assert tree.match(req) == len(TOKENS)
        slots = tree.load_back(req)
        assert slots is not None and len(slots) == len(TOKENS)
        tree.forward(LAYERS)
        for got, expected in zip(tree.bytes_of(slots), written, strict=True):
            assert torch.equal(got, expected)
        assert tree.cache.finish_external_linker_loads([req]) == []
        assert req.discard_output_reason is None
