"""Model shapes to replay with: how many layers, how many bytes a page and layer, which pool family."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import torch

from softload.geometry import (
    DevicePoolGroup,
    DraftBuffers,
    DraftMode,
    deepseek_v4_pool_group,
    dsa_pool_group,
    mha_pool_group,
    mla_pool_group,
    ring_view,
)
from softload.replay.trace import BLOCK_TOKENS
from softload.transfer import PoolName

__all__ = ["SHAPES", "DraftKind", "PoolFamily", "Shape", "build_pools", "find_shape"]

Buffers: TypeAlias = list[torch.Tensor]

_INDEXER_BYTES = 8_448
"""Of DSA and of DeepSeek V4, a page and layer."""

_RING_ROWS = 8
_V4_BYTES = {
    PoolName.C4: 37_440,
    PoolName.C4_INDEXER: _INDEXER_BYTES,
    PoolName.C128: 1_728,
    PoolName.C4_STATE: _RING_ROWS * 8_192,
    PoolName.C4_INDEXER_STATE: _RING_ROWS * 2_048,
}
"""Of DeepSeek V4, a page and layer; its sliding window's are the shape's `layer_bytes`."""


class PoolFamily(StrEnum):
    """Which pools a model keeps its cache in."""

    MHA = "mha"
    MLA = "mla"
    DSA = "dsa"
    DEEPSEEK_V4 = "deepseek_v4"


class DraftKind(StrEnum):
    """How the draft model's pages are stored."""

    NONE = "none"
    PACKED = "packed"
    SIDECAR = "sidecar"


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's cache geometry.

    Args:
        name: what `--shape` takes.
        family: the pools.
        num_layers: layers of the target model.
        page_size: tokens a page; divides the 512 tokens of a trace's block.
        layer_bytes: bytes a page and layer: K and V together, DSA's KV without the indexer, DeepSeek V4's window.
        num_draft_layers: layers of the draft model, of the same bytes a page and layer.
        pool_pages: pages of the device pool that a replay makes when not told otherwise.
        note: what the figures stand for.
        indexer_layers: DSA's layers that have an indexer.
        compress_ratios: DeepSeek V4's, by layer.
        scale: what all bytes are divided by, so that a small machine can replay a large model's layers and objects.
    """

    name: str
    family: PoolFamily
    num_layers: int
    page_size: int
    layer_bytes: int
    num_draft_layers: int
    pool_pages: int
    note: str
    indexer_layers: tuple[int, ...] = ()
    compress_ratios: tuple[int, ...] = ()
    scale: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers of the target."""
        total = self.num_layers * self.scaled_layer_bytes
        total += len(self.indexer_layers) * self.scaled(_INDEXER_BYTES)
        return total + sum(len(self.layers_of(name)) * self.scaled(nbytes) for name, nbytes in _V4_BYTES.items())

    @property
    def scaled_layer_bytes(self) -> int:
        """`layer_bytes`, scaled, in whole tokens of whole bf16 elements where a row is a token."""
        if self.family is PoolFamily.DEEPSEEK_V4:
            return self.scaled(self.layer_bytes)
        unit = self.page_size * torch.bfloat16.itemsize * (2 if self.family is PoolFamily.MHA else 1)
        return max(1, self.layer_bytes // self.scale // unit) * unit

    def scaled(self, nbytes: int) -> int:
        """Bytes of a row that is a page: a multiple of 64."""
        return nbytes if self.scale == 1 else max(1, nbytes // self.scale // 64) * 64

    def layers_of(self, name: PoolName) -> tuple[int, ...]:
        """DeepSeek V4's layers that have a part in a pool of compressed KV or of state."""
        ratio = 128 if name is PoolName.C128 else 4
        return tuple(layer for layer, each in enumerate(self.compress_ratios) if each == ratio)

    @property
    def pages_per_block(self) -> int:
        """Pages that one hash of a trace stands for."""
        return BLOCK_TOKENS // self.page_size

    def page_keys(self, block: int) -> tuple[str, ...]:
        """Page keys of the trace's block `block`: one, or several where pages are smaller than blocks."""
        if self.pages_per_block == 1:
            return (f"{block:016x}",)
        return tuple(f"{block:016x}.{part}" for part in range(self.pages_per_block))


_GLM_INDEXERS = (0, 1, *range(2, 78, 4))
_V4_RATIOS = (0, 0, *(128 if layer % 2 else 4 for layer in range(41)))

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("mini", PoolFamily.MLA, 4, 512, 8_192, 1, 4_096, "one page a block; fits any machine"),
        Shape("llama-3.1-8b", PoolFamily.MHA, 32, 64, 262_144, 1, 512, "GQA, 8 heads of 128, bf16"),
        Shape("qwen3-8b", PoolFamily.MHA, 36, 64, 262_144, 1, 512, "GQA, 8 heads of 128, bf16"),
        Shape("kimi-k2", PoolFamily.MLA, 61, 64, 73_728, 1, 512, "MLA, 576 a token, bf16"),
        Shape("deepseek-v3.2", PoolFamily.DSA, 61, 64, 41_984, 1, 512, "an indexer in every layer", tuple(range(61))),
        Shape("glm-5.2", PoolFamily.DSA, 78, 64, 41_984, 1, 512, "an indexer in 21 layers", _GLM_INDEXERS),
        Shape(
            "dsv4-flash", PoolFamily.DEEPSEEK_V4, 43, 256, 149_760, 1, 512, "C4 in 21 layers, C128 in 20; SWA",
            compress_ratios=_V4_RATIOS,
        ),
    )
}  # fmt: skip


def find_shape(name: str) -> Shape:
    """The shape called `name`; `NAME/FACTOR` has its bytes divided by a whole number.

    Raises:
        ValueError: no such shape, or no such factor.
    """
    base, slash, factor = name.partition("/")
    shape = SHAPES.get(base)
    if shape is None:
        raise ValueError(f"shape: expected one of {', '.join(SHAPES)}, got {base!r}")
    if not slash:
        return shape
    if not factor.isdecimal() or int(factor) < 1:
        raise ValueError(f"shape: expected {base}/FACTOR with a factor of 1 or more, got {name!r}")
    return dataclasses.replace(shape, name=name, scale=int(factor))


def build_pools(shape: Shape, num_pages: int, draft: DraftKind = DraftKind.NONE) -> DevicePoolGroup:
    """Allocate CPU pools of `num_pages` pages and describe them as a `DevicePoolGroup`.

    A sidecar draft has pools of its own, of the same number of pages.

    Raises:
        ValueError: fewer than one page.
    """
    if num_pages < 1:
        raise ValueError(f"num_pages: expected at least 1, got {num_pages}")
    if shape.family is PoolFamily.DEEPSEEK_V4:
        return _deepseek_v4(shape, num_pages, draft)
    target = _token_buffers(shape, shape.num_layers, num_pages)
    parts: dict[PoolName, list[Buffers]] = {PoolName.KV: _token_buffers(shape, shape.num_draft_layers, num_pages)}
    if shape.family is PoolFamily.DSA:
        parts[PoolName.INDEXER] = [_page_buffers(shape, _INDEXER_BYTES, shape.num_draft_layers, num_pages)]
    attached = _draft(shape, draft, parts)
    if shape.family is PoolFamily.MHA:
        return mha_pool_group(target[0], target[1], shape.page_size, draft=attached)
    if shape.family is PoolFamily.MLA:
        return mla_pool_group(target[0], shape.page_size, draft=attached)
    indexer = _page_buffers(shape, _INDEXER_BYTES, len(shape.indexer_layers), num_pages)
    return dsa_pool_group(target[0], indexer, shape.page_size, indexer_layers=shape.indexer_layers, draft=attached)


def _deepseek_v4(shape: Shape, num_pages: int, draft: DraftKind) -> DevicePoolGroup:
    buffers = {PoolName.SWA: _page_buffers(shape, shape.layer_bytes, shape.num_layers, num_pages)}
    for name, nbytes in _V4_BYTES.items():
        count = len(shape.layers_of(name))
        if name in (PoolName.C4_STATE, PoolName.C4_INDEXER_STATE):
            width = shape.scaled(nbytes) // _RING_ROWS // torch.float32.itemsize
            states = [torch.zeros(num_pages * _RING_ROWS + 1, width) for _ in range(count)]
            buffers[name] = [ring_view(state, _RING_ROWS, name) for state in states]
        else:
            buffers[name] = _page_buffers(shape, nbytes, count, num_pages)
    part = _page_buffers(shape, shape.layer_bytes, shape.num_draft_layers, num_pages)
    attached = _draft(shape, draft, {PoolName.SWA: [part]})
    return deepseek_v4_pool_group(shape.compress_ratios, shape.page_size, buffers, draft=attached)


def _draft(shape: Shape, draft: DraftKind, parts: dict[PoolName, list[Buffers]]) -> DraftBuffers | None:
    if draft is DraftKind.NONE:
        return None
    return DraftBuffers(pools=parts, page_size=shape.page_size, mode=DraftMode(draft))


def _token_buffers(shape: Shape, layers: int, num_pages: int) -> list[Buffers]:
    """Zeroed buffers per component (K and V, or one latent), one per layer, of bf16 rows of one token."""
    components = 2 if shape.family is PoolFamily.MHA else 1
    width = shape.scaled_layer_bytes // components // shape.page_size // torch.bfloat16.itemsize
    rows = num_pages * shape.page_size
    return [[torch.zeros(rows, 1, width, dtype=torch.bfloat16) for _ in range(layers)] for _ in range(components)]


def _page_buffers(shape: Shape, nbytes: int, layers: int, num_pages: int) -> Buffers:
    """Zeroed buffers, one per layer, of rows of one page."""
    return [torch.zeros(num_pages, shape.scaled(nbytes), dtype=torch.uint8) for _ in range(layers)]
