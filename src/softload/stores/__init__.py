"""Page stores: `open_store` by URL, one in memory, Mooncake's, and a wrapper to build others on."""

from softload.stores.cluster import MooncakeCluster
from softload.stores.embedded import EmbeddedMooncakeStore
from softload.stores.memory import MemoryStatistics, MemoryStore
from softload.stores.mooncake import MooncakeStore
from softload.stores.quiet_start import QuietStart
from softload.stores.urls import open_store, parse_duration, parse_size
from softload.stores.wrapper import LendingWrapperStore, WrapperStore

__all__ = [
    "EmbeddedMooncakeStore",
    "LendingWrapperStore",
    "MemoryStatistics",
    "MemoryStore",
    "MooncakeCluster",
    "MooncakeStore",
    "QuietStart",
    "WrapperStore",
    "open_store",
    "parse_duration",
    "parse_size",
]
