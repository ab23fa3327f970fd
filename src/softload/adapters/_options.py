"""Settings that an engine's configuration holds as JSON: parsed and checked alike for every adapter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar

from softload.stores import open_store, parse_duration, parse_size

__all__ = ["OptionKinds"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionKinds:
    """What the settings of one adapter are, by name.

    Args:
        where: what the engine calls the place of these settings; errors begin with it.
        choices: settings that are one of an enumeration's values.
        sizes: whole bytes, also as text like ``"2GiB"``.
        durations: seconds, also as text like ``"500ms"``.
        counts: whole numbers.
        flags: true or false.
        optional: settings that may be ``None``.
    """

    where: str
    choices: Mapping[str, type[StrEnum]]
    sizes: tuple[str, ...]
    durations: tuple[str, ...]
    counts: tuple[str, ...]
    flags: tuple[str, ...]
    optional: tuple[str, ...]

    def check(self, options: object) -> None:
        """Check a frozen dataclass's values, and make its choices members of their enumerations.

        Raises:
            ValueError: a value out of range.
        """
        for name, value in self._given(options, self.choices):
            kind = self.choices[name]
            if value not in list(kind):
                raise ValueError(f"{self.where}: {name}: expected one of {', '.join(kind)}, got {value!r}")
            object.__setattr__(options, name, kind(value))
        for name, value in self._given(options, self.flags):
            if not isinstance(value, bool):
                raise ValueError(f"{self.where}: {name}: expected true or false, got {value!r}")
        for name, value in self._given(options, (*self.sizes, *self.counts)):
            if not isinstance(value, int) or isinstance(value, bool) or value < (0 if name == "truncate_pages" else 1):
                raise ValueError(f"{self.where}: {name}: expected a positive whole number, got {value!r}")
        for name, value in self._given(options, self.durations):
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise ValueError(f"{self.where}: {name}: expected 0 or more seconds, got {value!r}")

    def parse(self, kind: type[T], extra: Mapping[str, Any]) -> T:
        """The settings, a dataclass `kind`, that an engine's configuration holds.

        Raises:
            ValueError: no store, an unknown key, or a value that does not parse.
        """
        known = [option.name for option in fields(kind)]  # type: ignore[arg-type]
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise ValueError(f"{self.where}: expected keys out of {', '.join(known)}, got {', '.join(unknown)}")
        if not isinstance(extra.get("store"), str):
            raise ValueError(
                f"{self.where}: store: expected a URL like mooncake://host:port, got {extra.get('store')!r}"
            )
        values = dict(extra)
        for names, parse in ((self.sizes, parse_size), (self.durations, parse_duration)):
            for name in names:
                if isinstance(values.get(name), str):
                    try:
                        values[name] = parse(values[name])
                    except ValueError as error:
                        raise ValueError(f"{self.where}: {name}: {error}") from None
        options = kind(**values)
        open_store(values["store"])  # only parsed: it connects when a loader opens it
        return options

    def _given(self, options: object, names: Iterable[str]) -> Iterable[tuple[str, Any]]:
        for name in names:
            value = getattr(options, name)
            if value is not None or name not in self.optional:
                yield name, value
