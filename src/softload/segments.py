"""Pieces of landing memory.

| segment state | entered | left by |
| --- | --- | --- |
| FREE | | a grant |
| GRANTED | a unit or a save was granted it | the native call is submitted, or the grant is given back |
| STAGING | a save copies out of slots | the copy is complete: the slots are the engine's again; IN_FLIGHT |
| IN_FLIGHT | native call submitted | the call returned: LANDED (read) or FREE (save) |
| LANDED | checked | last copy done and nobody pins it: FREE |
| QUARANTINED | deadline, cancel or close while the call is out | the call returns: FREE |
| LENT | it is the store's own memory, which a unit copies from | never: it was not granted, and is not given back |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from softload.arena import Arena

__all__ = ["Segment", "SegmentState", "Share"]


class SegmentState(StrEnum):
    """Where a segment is in its life; see the module's table."""

    FREE = "free"
    GRANTED = "granted"
    STAGING = "staging"
    IN_FLIGHT = "in_flight"
    LANDED = "landed"
    QUARANTINED = "quarantined"
    LENT = "lent"


class Share(StrEnum):
    """Who asks for memory. A quarter is for streaming only, an eighth for saves only."""

    STREAMING = "streaming"
    PREFETCH = "prefetch"
    SAVE = "save"


@dataclass(slots=True, eq=False)
class Segment:
    """The landing memory of objects of one size, side by side; of one, as a rule.

    Holds its arena alive, whatever became of the loader.

    Args:
        arena: where it lies.
        offset: of the first object, in bytes.
        nbytes: of each object.
        reserved: bytes in all.
        share: who was granted it.
        count: objects.
    """

    arena: Arena
    offset: int
    nbytes: int
    reserved: int
    share: Share
    state: SegmentState = SegmentState.GRANTED
    endpoint: str = ""
    count: int = 1

    @property
    def stride(self) -> int:
        """Bytes from one object to the next."""
        return self.reserved // self.count

    def piece(self, first: int, count: int) -> Segment:
        """The memory of some of the objects. Whoever has a segment cut into pieces uses these in its stead."""
        stride = self.stride
        offset, reserved = self.offset + first * stride, count * stride
        return Segment(self.arena, offset, self.nbytes, reserved, self.share, self.state, self.endpoint, count)

    @property
    def pointer(self) -> int:
        """Address of the first byte."""
        return self.arena.pointer + self.offset

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The bytes, uint8 `[nbytes]`."""
        return self.arena.memory[self.offset : self.offset + self.nbytes]
