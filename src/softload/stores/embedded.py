"""A Mooncake store with a cluster of its own."""

from __future__ import annotations

from contextlib import ExitStack

from softload.stores.checks import check_fraction
from softload.stores.cluster import MooncakeCluster
from softload.stores.master_contact import MasterContact
from softload.stores.mooncake import MooncakeStore
from softload.stores.setup_checks import check_segment

__all__ = ["EmbeddedMooncakeStore"]


class EmbeddedMooncakeStore(MooncakeStore):
    """A `PageStore` over a real Mooncake whose master, and owners where asked for, are children of this process.

    Everything is on loopback and over TCP; `cluster` has the handles of the children. They end with `close`, and with
    this process however it ends.

    Args:
        segment: bytes of the store's memory in all; at least 16 MiB for each owner.
        lease: seconds that a lease lasts, at least a millisecond.
        owners: processes that own that memory; 0 for this process.
        high_watermark: the fraction of memory above which the master evicts; None for Mooncake's default.
        eviction_ratio: the fraction of objects that one pass evicts; None for Mooncake's default.
        client_ttl: seconds, whole ones, after which the master forgets a silent client; None for Mooncake's default.
        local_buffer: bytes of the client's own buffer.

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        *,
        segment: int = 256 << 20,
        lease: float = 5.0,
        owners: int = 0,
        high_watermark: float | None = None,
        eviction_ratio: float | None = None,
        client_ttl: float | None = None,
        local_buffer: int = 16 << 20,
    ) -> None:
        if owners < 0:
            raise ValueError(f"owners: expected 0 or more, got {owners}")
        check_segment(segment, max(1, owners))
        if lease < 1e-3:
            raise ValueError(f"lease: expected at least 1ms, got {lease} seconds")
        if high_watermark is not None:
            check_fraction("high_watermark", high_watermark)
        if eviction_ratio is not None:
            check_fraction("eviction_ratio", eviction_ratio)
        if client_ttl is not None and (client_ttl < 1 or client_ttl % 1):
            raise ValueError(f"client_ttl: expected whole seconds, at least 1, got {client_ttl}")
        self.cluster = MooncakeCluster(
            segment=segment,
            lease=lease,
            owners=owners,
            high_watermark=high_watermark,
            eviction_ratio=eviction_ratio,
            client_ttl=client_ttl,
        )
        super().__init__(
            master="127.0.0.1:0",
            hostname="127.0.0.1",
            segment=0 if owners else segment,
            local_buffer=local_buffer,
            lease=lease,
        )
        self._says_goodbye = False  # the cluster ends with the process

    def open(self) -> None:
        """Start the cluster and connect to it.

        Raises:
            StoreSetupError: the wheel or a system library is missing, or a child did not come up.
        """
        if self._native is None and not self._closing.is_set():
            self._prepare()
            self.cluster.start()
            self._master = self.cluster.address
            self._contact = MasterContact(self._master)
        with ExitStack() as undo:
            undo.callback(self.cluster.close)
            super().open()
            undo.pop_all()

    def close(self) -> None:
        """Disconnect and end the children: about 2 s at most.

        A call that hangs on a frozen owner returns when that is killed. The master is killed with it, so that the
        native client is left behind: its close would come on top.
        """
        self._start_closing()
        if not self._gate.wait_idle(0.3):
            self.cluster.close()
        self._await_closed(1.5)
        self.cluster.close()
