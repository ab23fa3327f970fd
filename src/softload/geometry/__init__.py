"""Device pools as pages of bytes: what is where, and how a page becomes objects of the store."""

from softload.geometry.assembly import FAMILIES, build_pool_group
from softload.geometry.deepseek_v4 import deepseek_v4_pool_group, ring_view
from softload.geometry.device_pool import BufferMeta, Components, ComponentSource, DevicePool, IndexMapper
from softload.geometry.drafts import (
    DraftBuffers,
    DraftMismatchError,
    DraftMode,
    attach_draft,
    plan_draft,
    without_unfit_draft,
)
from softload.geometry.dsa import dsa_pool_group
from softload.geometry.families import PoolFamily
from softload.geometry.group import DevicePoolGroup, ResolvedComponent
from softload.geometry.layout import TAIL_BYTES, Fragment, ObjectSpec, layer_groups, object_specs, ranges_of
from softload.geometry.mamba import HybridLayers, hybrid_pool_group
from softload.geometry.mha import mha_pool_group
from softload.geometry.mla import mla_pool_group

__all__ = [
    "FAMILIES",
    "TAIL_BYTES",
    "BufferMeta",
    "ComponentSource",
    "Components",
    "DevicePool",
    "DevicePoolGroup",
    "DraftBuffers",
    "DraftMismatchError",
    "DraftMode",
    "Fragment",
    "HybridLayers",
    "IndexMapper",
    "ObjectSpec",
    "PoolFamily",
    "ResolvedComponent",
    "attach_draft",
    "build_pool_group",
    "deepseek_v4_pool_group",
    "dsa_pool_group",
    "hybrid_pool_group",
    "layer_groups",
    "mha_pool_group",
    "mla_pool_group",
    "object_specs",
    "plan_draft",
    "ranges_of",
    "ring_view",
    "without_unfit_draft",
]
