"""Who may write which slots.

| slot state | entered | left by |
| --- | --- | --- |
| IDLE | never named, or computed by the engine | a unit names it: RESERVED |
| RESERVED | the unit names it | first copy: FILLING; a miss: RELEASED, unwritten |
| FILLING | first chunk copied | last layer: COMMITTED; failure, deadline, cancel: RELEASED after the running chunk |
| ZEROING | a restored page's draft slot without its bytes | zeros complete, or the deadline: RELEASED |
| COMMITTED | last layer copied | the engine owns it |
| RELEASED | | the engine may reuse it: nothing of ours will write it again; a draft's may hold anything |

A slot is named by its pool and page row. A RELEASED one may not be saved under the key that it failed to hold until
the engine says that it computed it: by the key, not by the number, since the engine gives numbers to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from softload.geometry.device_pool import DevicePool
from softload.transfer import PoolName

__all__ = ["SlotClaim", "SlotState", "SlotTable"]

Rows = npt.NDArray[np.int64]


class SlotState(IntEnum):
    """Where a page's slots are in their life; see the module's table."""

    IDLE = 0
    RESERVED = 1
    FILLING = 2
    ZEROING = 3
    COMMITTED = 4
    RELEASED = 5


class SlotClaim(NamedTuple):
    """What one component of one unit wants: `rows` of `pool`, one key per row; pages without slots have row -1."""

    request_id: str
    pool: DevicePool
    rows: Rows
    keys: Sequence[str]


def _is_active(states: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    held: npt.NDArray[np.bool_] = (states >= SlotState.RESERVED) & (states <= SlotState.ZEROING)
    return held


class SlotTable:
    """The states of all slots of one loader's pools, by page row."""

    def __init__(self) -> None:
        self._states: dict[PoolName, npt.NDArray[np.uint8]] = {}
        self._keys: dict[PoolName, npt.NDArray[np.int64]] = {}
        self._draftless: dict[PoolName, npt.NDArray[np.bool_]] = {}

    def reserve(self, claims: Sequence[SlotClaim]) -> None:
        """RESERVED: all that the units of one call want, or nothing: who is refused leaves no trace.

        Raises:
            ValueError: rows named twice, or held by another unit.
        """
        wanted = [_with_slots(claim) for claim in claims]
        taken: list[tuple[npt.NDArray[np.uint8], Rows, npt.NDArray[np.uint8]]] = []
        try:
            for claim in wanted:
                self._check(claim)
                states = self._of(claim.pool)[0]
                taken.append((states, claim.rows, states[claim.rows]))
                states[claim.rows] = SlotState.RESERVED
        except ValueError:
            for states, rows, before in taken:
                states[rows] = before
            raise
        for claim in wanted:
            self._of(claim.pool)[1][claim.rows] = _hashes(claim.keys)
            self._draftless[claim.pool.name][claim.rows] = False

    def move(self, pool: DevicePool, rows: Rows, state: SlotState) -> None:
        """Put a unit's own slots into `state`; pages without slots have none."""
        self._of(pool)[0][rows[rows >= 0]] = state

    def lack_draft(self, pool: DevicePool, rows: Rows) -> None:
        """The target's bytes are committed, the packed draft's slots hold zeros."""
        self._of(pool)
        self._draftless[pool.name][rows[rows >= 0]] = True

    def state(self, pool: DevicePool, row: int) -> SlotState:
        """The state of one page row."""
        return SlotState(int(self._of(pool)[0][row]))

    def computed(self, pool: DevicePool, rows: Rows, page_keys: Sequence[str]) -> None:
        """The engine has computed these pages in these slots; rows that another page has been named for since stay.

        Args:
            pool: the slots' pool.
            rows: the pages' rows.
            page_keys: one key per page.
        """
        states, keys = self._of(pool)
        # The last row of a pool stands in for -1, a page without slots.
        mine = rows[(rows >= 0) & (keys[rows] == _hashes(page_keys))]
        states[mine[states[mine] == SlotState.RELEASED]] = SlotState.IDLE
        self._draftless[pool.name][mine] = False

    def may_save(
        self, pool: DevicePool, rows: Rows, page_keys: Sequence[str], *, with_draft: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Per page, whether its slots may be stored under its key: not while a unit fills them, not after it failed.

        Args:
            pool: the slots' pool.
            rows: the pages' rows.
            page_keys: one key per page.
            with_draft: whether the packed draft's bytes are to be stored too: not where they are zeros.
        """
        states, keys = self._of(pool)
        mine = states[rows]
        failed = mine == SlotState.RELEASED
        if with_draft:
            failed |= self._draftless[pool.name][rows]
        failed &= keys[rows] == _hashes(page_keys)
        allowed: npt.NDArray[np.bool_] = ~(_is_active(mine) | failed)
        return allowed

    def count(self, *states: SlotState) -> int:
        """Page rows that are in one of `states`."""
        return sum(int(np.isin(table, states).sum()) for table in self._states.values())

    def _check(self, claim: SlotClaim) -> None:
        # No sorting here: numpy lets go of the interpreter for that, and the event loop may wait long to get it back.
        if len(set(claim.rows.tolist())) != len(claim.rows):
            unique, counts = np.unique(claim.rows, return_counts=True)
            raise ValueError(
                f"request {claim.request_id!r}, pool {claim.pool.name}: expected each page of slots once, "
                f"got page row {int(unique[counts > 1][0])} twice"
            )
        states = self._of(claim.pool)[0][claim.rows]
        held = _is_active(states)
        if held.any():
            raise ValueError(
                f"request {claim.request_id!r}, pool {claim.pool.name}: expected slots that no unit holds, got page "
                f"row {int(claim.rows[held][0])}, which is {SlotState(int(states[held][0])).name}"
            )

    def _of(self, pool: DevicePool) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        if pool.name not in self._states:
            self._states[pool.name] = np.zeros(pool.num_pages, np.uint8)
            self._keys[pool.name] = np.zeros(pool.num_pages, np.int64)
            self._draftless[pool.name] = np.zeros(pool.num_pages, np.bool_)
        return self._states[pool.name], self._keys[pool.name]


def _hashes(keys: Sequence[str]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(hash, keys), np.int64, len(keys))


def _with_slots(claim: SlotClaim) -> SlotClaim:
    """Without the pages that have no slots, which only pages before a trailing window may lack."""
    named = claim.rows >= 0
    if named.all():
        return claim
    keys = [key for key, has_row in zip(claim.keys, named.tolist(), strict=True) if has_row]
    return claim._replace(rows=claim.rows[named], keys=keys)
