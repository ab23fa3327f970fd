"""What the engine's description of its caches means."""

from __future__ import annotations

import pytest
import torch
from engines import BLOCK
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from softload.adapters.vllm.layers import ranks_are_alike

try:
    from vllm.v1.core.kv_cache_planning import kv_cache_groups_tp_replicas
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas

MLA = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1)
HEADS = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("specs", "ranks", "alike"),
    [
        ({"target": MLA}, 2, True),
        ({"target": MLA}, 1, False),
        ({"target": HEADS}, 2, False),
        ({"target": MLA, "draft": MLA}, 2, True),
        ({"target": MLA, "draft": HEADS}, 2, False),
    ],
    ids=["MLA", "one rank", "heads", "a draft like its target", "a draft whose heads are divided"],
)
def test_ranks_share_objects_where_every_layer_is_the_same_on_all(
    specs: dict[str, FullAttentionSpec], ranks: int, alike: bool
) -> None:
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs))
    replicas = kv_cache_groups_tp_replicas([group], ranks)
    config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[group], kv_tp_replicas=replicas)
    assert ranks_are_alike(config, ranks) == alike
