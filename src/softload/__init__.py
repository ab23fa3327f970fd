"""Fail-soft loading of KV-cache pages from a distributed store into an LLM engine's device pools."""

from softload.config import DraftPolicy, Integrity, Layout, LoaderConfig, ReadMode
from softload.errors import LandingMemoryError, LoaderClosedError, SoftloadError, StoreSetupError
from softload.geometry import DevicePool, DevicePoolGroup
from softload.loader import PageLoader
from softload.native_calls import CallSpan
from softload.outcomes import (
    Action,
    Admission,
    Landed,
    LateFailure,
    LayerReady,
    LoadReport,
    Lookup,
    PageOutcome,
    PageSave,
    PageStatus,
    SaveOutcome,
    SaveReport,
    SaveStatus,
    UnitOutcome,
)
from softload.protocols import Descriptor, PageStore, PutRefusal, RankConsensus, SoloConsensus
from softload.stores import open_store
from softload.telemetry import Statistics
from softload.transfer import ComponentTransfer, HitPolicy, PoolName, TransferUnit

__all__ = [
    "Action",
    "Admission",
    "CallSpan",
    "ComponentTransfer",
    "Descriptor",
    "DevicePool",
    "DevicePoolGroup",
    "DraftPolicy",
    "HitPolicy",
    "Integrity",
    "Landed",
    "LandingMemoryError",
    "LateFailure",
    "LayerReady",
    "Layout",
    "LoadReport",
    "LoaderClosedError",
    "LoaderConfig",
    "Lookup",
    "PageLoader",
    "PageOutcome",
    "PageSave",
    "PageStatus",
    "PageStore",
    "PoolName",
    "PutRefusal",
    "RankConsensus",
    "ReadMode",
    "SaveOutcome",
    "SaveReport",
    "SaveStatus",
    "SoftloadError",
    "SoloConsensus",
    "Statistics",
    "StoreSetupError",
    "TransferUnit",
    "UnitOutcome",
    "open_store",
]
