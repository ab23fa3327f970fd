"""What kinds of pools engines have, and which of them an engine's pool object is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from softload.geometry.deepseek_v4 import assemble_deepseek_v4, deepseek_v4_parts
from softload.geometry.device_pool import ComponentSource
from softload.geometry.dsa import assemble_dsa, dsa_parts
from softload.geometry.group import DevicePoolGroup
from softload.geometry.mha import assemble_mha, mha_components
from softload.geometry.mla import assemble_mla, mla_components
from softload.transfer import PoolName

__all__ = ["SINGLE_FAMILIES", "PoolFamily", "family_of"]

_STORAGE = ("_buffer", "_kv_pool", "_state_pools")
"""How attributes that hold bytes, or pools with bytes, end."""


@dataclass(frozen=True, slots=True)
class PoolFamily:
    """A kind of engine pool.

    Args:
        name: what people call it.
        engine_class: the engine's class; one that derives from it has changed something, and is not of this family.
        buffers: the attributes that hold its bytes, all of them but those in `optional`: names that end in `_buffer`,
            `_kv_pool` or `_state_pools`.
        parts: the buffers of such a pool as a draft's, by the target pool that they are the counterpart of. Raises a
            `DraftMismatchError` for one that would be left out in part.
        assemble: makes the group from pool, page size and draft, and from the pool of states if it `takes_states`.
        optional: more attributes that may hold some of its bytes.
        takes_states: whether such a model may keep states in a pool apart.
        draft_page_size: tokens per page of such a pool when it is a draft's.
    """

    name: str
    engine_class: str
    buffers: frozenset[str]
    parts: Callable[[Any], Mapping[PoolName, ComponentSource]]
    assemble: Callable[..., DevicePoolGroup]
    optional: frozenset[str] = frozenset()
    takes_states: bool = False
    draft_page_size: Callable[[Any], int] = attrgetter("page_size")


SINGLE_FAMILIES: tuple[PoolFamily, ...] = (
    PoolFamily(
        "MHA/GQA",
        "MHATokenToKVPool",
        frozenset({"k_buffer", "v_buffer"}),
        lambda kvcache: {PoolName.KV: mha_components(kvcache)},
        assemble_mha,
    ),
    PoolFamily(
        "MLA",
        "MLATokenToKVPool",
        frozenset({"kv_buffer"}),
        lambda kvcache: {PoolName.KV: mla_components(kvcache)},
        assemble_mla,
    ),
    PoolFamily(
        "DSA", "DSATokenToKVPool", frozenset({"index_k_with_scale_buffer", "kv_buffer"}), dsa_parts, assemble_dsa
    ),
    PoolFamily(
        "DeepSeek V4",
        "DeepSeekV4TokenToKVPool",
        frozenset({"compress_state_pools", "indexer_compress_state_pools"}),
        deepseek_v4_parts,
        assemble_deepseek_v4,
        optional=frozenset({"c128_kv_pool", "c4_indexer_kv_pool", "c4_kv_pool", "swa_kv_pool", "unified_kv_pool"}),
        draft_page_size=attrgetter("swa_page_size"),
    ),
)
"""Families whose bytes are all in one pool object."""


def family_of(kvcache: Any, families: Sequence[PoolFamily]) -> PoolFamily:
    """By the buffers that the pool has: one more than the family's would be left out of the store without a word.

    Raises:
        ValueError: a pool of none of them; the message lists them.
    """
    held = _held(kvcache)
    lineage = [each.__name__ for each in type(kvcache).__mro__]
    classes = {family.engine_class for family in families}
    derived = lineage[0] not in classes and any(name in classes for name in lineage)
    for family in families:
        if family.buffers <= held <= family.buffers | family.optional and not derived:
            return family
    known = "; ".join(f"{family.name} ({', '.join(sorted(family.buffers))})" for family in families)
    what = f"{lineage[0]} with {', '.join(sorted(held)) or 'no buffers'}"
    if derived:
        what += f", derived from {next(name for name in lineage if name in classes)}"
    raise ValueError(f"expected a pool of a known family, {known}; got {what}")


def _held(kvcache: Any) -> frozenset[str]:
    names = (name for name in dir(kvcache) if name.endswith(_STORAGE) and not name.startswith("_"))
    values = {name: getattr(kvcache, name) for name in names}
    return frozenset(name for name, value in values.items() if value is not None and not callable(value))
