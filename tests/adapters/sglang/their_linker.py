"""SGLang 0.5.23's own Mooncake linker for plain MHA, which it refuses; named by module path in a launch line."""

from __future__ import annotations

from typing import Any
from unittest import mock

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import linker_pool_assembler as assembler
from sglang.srt.mem_cache.storage.mooncake_store import mooncake_direct_linker as direct


class TheirLinker(direct.MooncakeDirectLinker):  # type: ignore[misc]
    """`MooncakeDirectLinker`: its constructor, threads, lookups, loads and saves.

    Its assembler refuses plain MHA, which the tests' model has: that pool is described by the assembler's own function
    for the MHA part of a hybrid.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(direct, "resolve_hybrid_device_pool_group", _plain_mha):
            super().__init__(*args, **kwargs)


def config_of(master: str) -> dict[str, Any]:
    """Its settings for a client that owns no memory."""
    return {
        "master_server_address": master,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "local_hostname": "127.0.0.1",
        "global_segment_size": 0,
        "check_server": False,
    }


def _plain_mha(*, kvcache: Any, page_size: int, params: Any, components: Any) -> Any:
    layers = len(kvcache.k_buffer)
    entry = assembler._mha_device_pool_entry(
        PoolName.KV, kvcache, {layer: layer for layer in range(layers)}, page_size, PoolName.KV
    )
    return assembler.DevicePoolGroup([entry], layers, page_size)
