"""Checks of what callers hand in: clear errors that name what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["check_fraction", "check_lengths", "check_positive"]

Number = TypeVar("Number", int, float)


def check_positive(name: str, value: Number) -> Number:
    """`value`, if it is finite and above 0.

    Raises:
        ValueError: it is not.
    """
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: expected a value above 0, got {value}")
    return value


def check_fraction(name: str, value: float) -> float:
    """`value`, if it lies in (0, 1].

    Raises:
        ValueError: it does not.
    """
    if not 0 < value <= 1:
        raise ValueError(f"{name}: expected a fraction above 0 and at most 1, got {value}")
    return value


def check_lengths(**sequences: Sequence[object]) -> None:
    """Parallel arguments have one length.

    Raises:
        ValueError: they do not; the message names every length.
    """
    lengths = [len(sequence) for sequence in sequences.values()]
    if lengths.count(lengths[0]) != len(lengths):
        got = ", ".join(f"{name}={length}" for name, length in zip(sequences, lengths, strict=True))
        raise ValueError(f"expected arguments of one length, got {got}")
