"""The puts of one Mooncake client: sessions of the native library, and which keys it has reserved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from softload.outcomes import PageStatus
from softload.protocols import Answer, PutAnswer, PutRefusal
from softload.stores.checks import check_lengths
from softload.stores.gate import CallGate
from softload.stores.native_codes import INVALID_PARAMS, expect
from softload.stores.reservations import Reservations

__all__ = ["MooncakePuts"]


class AskPerKey(Protocol):
    """One native call that answers per key."""

    def __call__(
        self,
        keys: Sequence[str],
        ask: Callable[[Any], Any],
        *,
        invalid: PageStatus = PageStatus.MALFORMED,
        asks_master: bool = True,
    ) -> list[int | PageStatus | PutRefusal]:
        """See `MooncakeStore`: `invalid` is what it means by -600."""


class MooncakePuts:
    """The puts of one client.

    Args:
        gate: whether native calls may be made.
        reservations: what is reserved, and what is left over of it; added to.
        call: one native call: what it answered, or a status.
        ask: one native call that answers per key.
    """

    def __init__(
        self, gate: CallGate, reservations: Reservations, call: Callable[[Callable[[Any], Any]], Any], ask: AskPerKey
    ) -> None:
        self._gate = gate
        self._reservations = reservations
        self._call = call
        self._ask = ask

    def start(self, keys: Sequence[str], sizes: Sequence[int]) -> Sequence[PutAnswer]:
        """Reserve objects, one replica each; a size below one byte answers `MALFORMED`."""
        check_lengths(keys=keys, sizes=sizes)
        if not self._gate.admitting:
            return [PageStatus.STORE_UNREACHABLE] * len(keys)
        self._revoke(self._reservations.take_left_over(keys))
        pending = self._reservations.reserve(keys, sizes)
        wanted = [sizes[index] for index in pending.asked]
        answers = self._ask(pending.keys, lambda native: native.batch_put_session_start(pending.keys, wanted))
        for index, answer in zip(pending.asked, answers, strict=True):
            pending.answers[index] = answer if isinstance(answer, PutRefusal) else expect(answer, 0)
        self._reservations.refused(keys[index] for index in pending.asked if pending.answers[index] != 0)
        return pending.answers

    def write(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        """Write reserved objects; `NOT_FOUND` without a reservation, `WRONG_SIZE` for another size than reserved."""
        check_lengths(keys=keys, pointers=pointers, sizes=sizes)
        if not self._gate.admitting:
            return [PageStatus.STORE_UNREACHABLE] * len(keys)
        pending = self._reservations.write(keys, sizes)
        sources = [[pointers[index]] for index in pending.asked]
        wanted = [[sizes[index]] for index in pending.asked]
        answers = self._ask(
            pending.keys,
            lambda native: native.batch_put_from_multi_buffer_ranges(
                pending.keys, sources, wanted, [[0]] * len(sources)
            ),
            invalid=PageStatus.WRONG_SIZE,
            asks_master=False,
        )
        for index, answer in zip(pending.asked, answers, strict=True):
            pending.answers[index] = expect(answer, sizes[index])
        self._reservations.written(keys[index] for index in pending.asked if pending.answers[index] == sizes[index])
        return pending.answers

    def end(self, keys: Sequence[str]) -> Sequence[Answer]:
        """Make objects visible; `NOT_FOUND` without a reservation, `NOT_READY` for one that was not written whole.

        The native call would make an unwritten object visible, so it is asked only for written ones.
        """
        if not self._gate.admitting:
            return [PageStatus.STORE_UNREACHABLE] * len(keys)
        pending = self._reservations.finish(keys)
        answers = self._ask(pending.keys, lambda native: native.batch_put_session_end(pending.keys))
        for index, answer in zip(pending.asked, answers, strict=True):
            pending.answers[index] = expect(answer, 0)
        self._reservations.settle(keys[index] for index in pending.asked if pending.answers[index] == 0)
        self._reservations.leave_over(pending.keys)
        return pending.answers

    def revoke(self, keys: Sequence[str]) -> None:
        """Give reservations back; one that the master could not take back is tried again before later puts."""
        self._revoke(self._reservations.give_up(keys))

    def _revoke(self, keys: list[str]) -> None:
        codes = self._call(lambda native: native.batch_put_session_revoke(keys)) if keys else []
        if isinstance(codes, list) and len(codes) == len(keys):
            gone = (0, INVALID_PARAMS)
            self._reservations.settle(key for key, code in zip(keys, codes, strict=True) if code in gone)
        self._reservations.leave_over(keys)
