"""For tests of engines, loaders and stores: faults of calls and of a cluster's processes, and stores that help.

Those record, hang, follow a script, or do something at a named moment.
`softload.testing.store_suite` has the contract of a `PageStore` as a test class; it needs pytest, so import it by name.
"""

from softload.testing.cluster_faults import ClusterFaults
from softload.testing.doubles import HangingStore, RecordedCall, RecordingStore, ScriptedStore
from softload.testing.fault_specs import Fault, FaultKind, parse_fault
from softload.testing.faults import FaultyStore
from softload.testing.moments import Moment, MomentStore

__all__ = [
    "ClusterFaults",
    "Fault",
    "FaultKind",
    "FaultyStore",
    "HangingStore",
    "Moment",
    "MomentStore",
    "RecordedCall",
    "RecordingStore",
    "ScriptedStore",
    "parse_fault",
]
