"""Model shapes to replay with: how many layers, how many bytes a page and layer, which pool family."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from softload.geometry import DevicePoolGroup, DraftBuffers, DraftMode, mha_pool_group, mla_pool_group
from softload.replay.trace import BLOCK_TOKENS
from softload.transfer import PoolName

__all__ = ["SHAPES", "DraftKind", "PoolFamily", "Shape", "build_pools", "find_shape"]


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
        layer_bytes: bytes a page and layer, K and V together.
        num_draft_layers: layers of the draft model, of the same bytes a page and layer.
        pool_pages: pages of the device pool that a replay makes when not told otherwise.
        note: what the figures stand for.
    """

    name: str
    family: PoolFamily
    num_layers: int
    page_size: int
    layer_bytes: int
    num_draft_layers: int
    pool_pages: int
    note: str

    @property
    def supported(self) -> bool:
        """Whether this release has the pool family."""
        return self.family in (PoolFamily.MHA, PoolFamily.MLA)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers of the target."""
        return self.num_layers * self.layer_bytes

    @property
    def pages_per_block(self) -> int:
        """Pages that one hash of a trace stands for."""
        return BLOCK_TOKENS // self.page_size

    def page_keys(self, block: int) -> tuple[str, ...]:
        """Page keys of the trace's block `block`: one, or several where pages are smaller than blocks."""
        if self.pages_per_block == 1:
            return (f"{block:016x}",)
        return tuple(f"{block:016x}.{part}" for part in range(self.pages_per_block))


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("mini", PoolFamily.MLA, 4, 512, 8_192, 1, 4_096, "one page a block; fits any machine"),
        Shape("llama-3.1-8b", PoolFamily.MHA, 32, 64, 262_144, 1, 512, "GQA, 8 heads of 128, bf16"),
        Shape("qwen3-8b", PoolFamily.MHA, 36, 64, 262_144, 1, 512, "GQA, 8 heads of 128, bf16"),
        Shape("kimi-k2", PoolFamily.MLA, 61, 64, 73_728, 1, 512, "MLA, 576 a token, bf16"),
        Shape("deepseek-v3.2", PoolFamily.DSA, 61, 64, 50_432, 1, 512, "KV 41,984 and indexer 8,448 in every layer"),
        Shape("glm-5.2", PoolFamily.DSA, 78, 64, 41_984, 1, 512, "KV in 78 layers, indexer of 8,448 in 21 of them"),
        Shape("dsv4-flash", PoolFamily.DEEPSEEK_V4, 43, 256, 23_214, 1, 512, "C4, C128, indexer; mean of the layers"),
    )
}  # fmt: skip


def find_shape(name: str) -> Shape:
    """The shape called `name`.

    Raises:
        ValueError: no such shape, or one whose pool family this release does not have.
    """
    shape = SHAPES.get(name)
    if shape is None:
        raise ValueError(f"shape: expected one of {', '.join(SHAPES)}, got {name!r}")
    if not shape.supported:
        usable = ", ".join(known.name for known in SHAPES.values() if known.supported)
        raise ValueError(
            f"shape: {name!r} needs pool families of a later release ({shape.family}); expected one of {usable}"
        )
    return shape


def build_pools(shape: Shape, num_pages: int, draft: DraftKind = DraftKind.NONE) -> DevicePoolGroup:
    """Allocate CPU pools of `num_pages` pages and describe them as a `DevicePoolGroup`.

    A sidecar draft has pools of its own, of the same number of pages.

    Raises:
        ValueError: a shape that `find_shape` would refuse, or fewer than one page.
    """
    find_shape(shape.name)
    if num_pages < 1:
        raise ValueError(f"num_pages: expected at least 1, got {num_pages}")
    target = _buffers(shape, shape.num_layers, num_pages)
    attached = None
    if draft is not DraftKind.NONE:
        attached = DraftBuffers(
            pools={PoolName.KV: _buffers(shape, shape.num_draft_layers, num_pages)},
            page_size=shape.page_size,
            mode=DraftMode(draft),
        )
    if shape.family is PoolFamily.MHA:
        keys, values = target
        return mha_pool_group(keys, values, shape.page_size, draft=attached)
    (latents,) = target
    return mla_pool_group(latents, shape.page_size, draft=attached)


def _buffers(shape: Shape, layers: int, num_pages: int) -> list[list[torch.Tensor]]:
    """Zeroed buffers per component (K and V, or one for MLA), one per layer, of bf16 rows of one token."""
    components = 2 if shape.family is PoolFamily.MHA else 1
    width = shape.layer_bytes // components // shape.page_size // torch.bfloat16.itemsize
    rows = num_pages * shape.page_size
    return [[torch.zeros(rows, 1, width, dtype=torch.bfloat16) for _ in range(layers)] for _ in range(components)]
