"""Faults as they are written down: `evict=0.05`, `slow=0.1:0.25`, `kill-owner@10:5`, `kill-master@read`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from softload.testing.moments import Moment

__all__ = ["Fault", "FaultKind", "parse_fault"]


class FaultKind(StrEnum):
    """What goes wrong. The values are the names in fault specifications."""

    EVICT = "evict"
    """`descriptors` finds the object gone, and gone it is."""

    REMOVE = "remove"
    """The object is removed by force right after `descriptors` was answered well; its memory may be reused."""

    LATE = "late"
    """A read answers `LEASE_EXPIRED` once; the next try is good."""

    SLOW = "slow"
    """A read starts late."""

    HANG = "hang"
    """A read returns late, having written its bytes at the end."""

    CORRUPT = "corrupt"
    """One byte of the object is flipped as it is stored."""

    DRAFT_LOSS = "draft-loss"
    """`descriptors` never finds a draft's object."""

    MALFORMED = "malformed"
    """A call that asks or reads answers what no store should: a wrong length, type, sign or count, or an exception."""

    KILL_OWNER = "kill-owner"
    """A process that owns memory is killed; another takes its place after a while."""

    FREEZE_OWNER = "freeze-owner"
    """It stops where it is, and goes on after a while."""

    KILL_MASTER = "kill-master"
    FREEZE_MASTER = "freeze-master"

    PART_OWNER = "part-owner"
    """Nothing reaches its ports, and nothing comes from them, not even a reset; they are joined again after a while."""

    PART_MASTER = "part-master"

    KILL_LOADER = "kill-loader"
    """This process is killed, with all that is under way."""

    RESTART_MASTER = "restart-master"
    """The master is killed and started again at once, with an empty memory."""

    @property
    def is_scheduled(self) -> bool:
        """Whether it happens to a cluster's process, not to a call: `ClusterFaults` does that, no `FaultyStore`."""
        return self in _SCHEDULED

    @property
    def needs_owner(self) -> bool:
        """Whether it happens to a process that owns memory."""
        return self in (FaultKind.KILL_OWNER, FaultKind.FREEZE_OWNER, FaultKind.PART_OWNER)

    @property
    def cuts_off(self) -> bool:
        """Whether it takes ports from the network: only in a namespace of one's own."""
        return self in (FaultKind.PART_OWNER, FaultKind.PART_MASTER)


_SCHEDULED: Final = (
    FaultKind.KILL_OWNER,
    FaultKind.FREEZE_OWNER,
    FaultKind.KILL_MASTER,
    FaultKind.FREEZE_MASTER,
    FaultKind.PART_OWNER,
    FaultKind.PART_MASTER,
    FaultKind.KILL_LOADER,
    FaultKind.RESTART_MASTER,
)
_INSTANT: Final = (FaultKind.KILL_LOADER, FaultKind.RESTART_MASTER)
"""Scheduled kinds that nothing undoes."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        kind: what goes wrong.
        probability: per key, or per call for `SLOW` and `MALFORMED`; 0 for kinds that have none.
        calls: how many read calls hang, for `HANG`.
        seconds: how long it takes (`SLOW`, `HANG`), or when it happens after the start (scheduled kinds).
        moment: when it happens instead (scheduled kinds): the first time that a call comes there.
        lasts: seconds until what was killed is started again, what was frozen goes on, and what was cut off is joined;
            ``None`` for never.
    """

    kind: FaultKind
    probability: float = 0.0
    calls: int = 0
    seconds: float = 0.0
    moment: Moment | None = None
    lasts: float | None = None


_MOST_HANGS: Final = 100_000
"""Each is planned before the run."""

_NUMBER: Final = r"(\d+(?:\.\d+)?|\.\d+)"
_MOMENT: Final = f"({'|'.join(Moment)})"
_FORMS: Final[Mapping[FaultKind, tuple[str, re.Pattern[str]]]] = {
    **{
        kind: (f"{kind}=P", re.compile(f"={_NUMBER}"))
        for kind in (
            FaultKind.EVICT,
            FaultKind.REMOVE,
            FaultKind.LATE,
            FaultKind.CORRUPT,
            FaultKind.DRAFT_LOSS,
            FaultKind.MALFORMED,
        )
    },
    FaultKind.SLOW: ("slow=P:SECONDS", re.compile(f"={_NUMBER}:{_NUMBER}")),
    FaultKind.HANG: ("hang=N:SECONDS", re.compile(rf"=(\d+):{_NUMBER}")),
    **{
        kind: (f"{kind}@SECONDS|MOMENT[:SECONDS]", re.compile(f"@(?:{_NUMBER}|{_MOMENT})(?::{_NUMBER})?"))
        for kind in _SCHEDULED
        if kind not in _INSTANT
    },
    **{kind: (f"{kind}@SECONDS|MOMENT", re.compile(f"@(?:{_NUMBER}|{_MOMENT})()")) for kind in _INSTANT},
}


def parse_fault(text: str) -> Fault:
    """A fault from its specification: `evict=0.05`, `slow=0.1:0.25`, `hang=3:2`, `kill-owner@10:5`, `kill-master@read`.

    Raises:
        ValueError: an unknown kind, another form than the kind's, or a probability above 1.
    """
    name = re.split("[=@]", text, maxsplit=1)[0]
    try:
        kind = FaultKind(name)
    except ValueError:
        of_calls = ", ".join(form for kind, (form, _) in _FORMS.items() if not kind.is_scheduled)
        of_processes = ", ".join(form for kind, (form, _) in _FORMS.items() if kind.is_scheduled)
        raise ValueError(
            f"fault {text!r}: expected one of {of_calls}; or, of a cluster's processes, {of_processes}; got {name!r}"
        ) from None
    form, pattern = _FORMS[kind]
    match = pattern.fullmatch(text[len(name) :])
    if match is None:
        raise ValueError(f"fault {text!r}: expected {form}")
    if kind.is_scheduled:
        after, moment, lasts = match.groups()
        return Fault(
            kind,
            seconds=float(after or 0.0),
            moment=Moment(moment) if moment else None,
            lasts=float(lasts) if lasts else None,
        )
    values = [float(value) for value in match.groups()]
    if kind is FaultKind.HANG:
        if int(match[1]) > _MOST_HANGS:
            raise ValueError(f"fault {text!r}: expected at most {_MOST_HANGS} calls, got {match[1]}")
        return Fault(kind, calls=int(match[1]), seconds=values[1])
    if values[0] > 1:
        raise ValueError(f"fault {text!r}: expected a probability of at most 1, got {match[1]}")
    return Fault(kind, probability=values[0], seconds=values[1] if len(values) > 1 else 0.0)
