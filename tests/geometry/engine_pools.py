"""What engines' pool objects look like, as far as it matters: the attributes that SGLang's have, under their names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

PAGE, PAGES = 4, 6


class MHATokenToKVPool:
    def __init__(self, layers: int = 2, *, page_size: int = PAGE) -> None:
        self.page_size, self.layer_num = page_size, layers
        self.k_buffer = [torch.zeros(PAGES * page_size, 2, 8, dtype=torch.bfloat16) for _ in range(layers)]
        self.v_buffer = [torch.zeros(PAGES * page_size, 2, 6, dtype=torch.bfloat16) for _ in range(layers)]
        self.k_scale_buffer: Any = None


class MLATokenToKVPool:
    def __init__(self, layers: int = 2, *, page_size: int = PAGE) -> None:
        self.page_size, self.layer_num = page_size, layers
        self.kv_buffer = [torch.zeros(PAGES * page_size, 1, 12, dtype=torch.bfloat16) for _ in range(layers)]


class DSATokenToKVPool(MLATokenToKVPool):
    """The indexer is behind a property; a layer without one has a buffer without rows."""

    def __init__(self, layers: int = 4, *, page_size: int = PAGE, without: tuple[int, ...] = ()) -> None:
        super().__init__(layers, page_size=page_size)
        rows = [0 if layer in without else PAGES for layer in range(layers)]
        self.index_key_cache = SimpleNamespace(buffer=[torch.zeros(n, 16, dtype=torch.uint8) for n in rows])

    @property
    def index_k_with_scale_buffer(self) -> list[torch.Tensor]:
        return self.index_key_cache.buffer  # type: ignore[no-any-return]


class SinglePool:
    """A pool with a page in a row; one of the pools that DeepSeek V4's is made of."""

    def __init__(self, layers: int, width: int, page_size: int) -> None:
        self.layer_num, self.page_size = layers, page_size
        self.kv_buffer = [torch.zeros(PAGES, width, dtype=torch.uint8) for _ in range(layers)]


class HiSparseC4DevicePool(SinglePool):
    pass


class IndexerPool:
    def __init__(self, layers: int, page_size: int) -> None:
        self.page_size = page_size
        self.index_k_with_scale_buffer: Any = [torch.zeros(PAGES, 8, dtype=torch.uint8) for _ in range(layers)]


def state_pool(ring_size: int = 8, width: int = 3) -> SimpleNamespace:
    """With a row more than its rings."""
    state = torch.zeros(PAGES * ring_size + 1, width)
    return SimpleNamespace(ring_size=ring_size, kv_score_buffer=SimpleNamespace(kv_score=state))


class DeepSeekV4TokenToKVPool:
    """Of a page of 256 tokens: 64 of ratio 4, 2 of ratio 128. Some layers belong to other pipeline stages."""

    def __init__(
        self, ratios: tuple[int, ...] = (0, 4, 128, 4), *, start: int = 0, end: int | None = None, page_size: int = 256
    ) -> None:
        end = len(ratios) if end is None else end
        stage = ratios[start:end]
        self.page_size = self.swa_page_size = page_size
        self.start_layer, self.end_layer = start, end
        self.swa_req_ring_size: int | None = None
        self.unified_kv_pool: Any = None
        self.swa_kv_pool: Any = SinglePool(len(stage), 24, page_size)
        self.c4_kv_pool: Any = SinglePool(stage.count(4), 12, page_size // 4)
        self.c4_indexer_kv_pool: Any = IndexerPool(stage.count(4), page_size // 4)
        self.c128_kv_pool: Any = SinglePool(stage.count(128), 6, page_size // 128)
        counts: dict[int, int] = {}
        self.layer_mapping: list[Any] = [None] * len(ratios)
        self.compress_state_pools: list[Any] = [None] * len(ratios)
        self.indexer_compress_state_pools: list[Any] = [None] * len(ratios)
        for layer in range(start, end):
            ratio = ratios[layer]
            index = counts[ratio] = counts.get(ratio, -1) + 1
            self.layer_mapping[layer] = SimpleNamespace(compress_ratio=ratio, compress_layer_id=index)
            if ratio:
                self.compress_state_pools[layer] = state_pool()
            if ratio == 4:
                self.indexer_compress_state_pools[layer] = state_pool(width=2)


class HybridLinearKVPool:
    def __init__(self, full: tuple[int, ...] = (0, 3), *, start: int = 0, inner: Any = None) -> None:
        self.page_size, self.start_layer = PAGE, start
        self.full_kv_pool = inner if inner is not None else MLATokenToKVPool(len(full))
        self.full_attention_layer_id_mapping = {layer: index for index, layer in enumerate(full)}


class SWAKVPool:
    def __init__(
        self, full: tuple[int, ...] = (0, 3), swa: tuple[int, ...] = (1, 4), *, full_indices: bool = False
    ) -> None:
        self.page_size, self.start_layer = PAGE, 0
        self.full_kv_pool, self.swa_kv_pool = MHATokenToKVPool(len(full)), MHATokenToKVPool(len(swa))
        self.layers_mapping = {layer: (index, False) for index, layer in enumerate(full)}
        self.layers_mapping |= {layer: (index, True) for index, layer in enumerate(swa)}
        self.swa_uses_full_indices = full_indices


class MambaPool:
    def __init__(self, layers: int, *, temporal: bool = True) -> None:
        shape = (layers, PAGES, 2, 3) if temporal else (0,)
        # A convolution's state whose dimensions a kernel has swapped.
        conv = torch.zeros(layers, PAGES, 8, 3, dtype=torch.bfloat16).transpose(2, 3)
        self.mamba_cache = SimpleNamespace(temporal=torch.zeros(shape), conv=[conv])


class HybridReqToTokenPool:
    def __init__(self, layers: tuple[int, ...] = (1, 2), *, temporal: bool = True) -> None:
        self.mamba_pool = MambaPool(len(layers), temporal=temporal)
        self.mamba_map = {layer: index for index, layer in enumerate(layers)}
        self.mamba_ckpt_pool: Any = None
        self.short_conv_pool: Any = SimpleNamespace(enabled=False)
