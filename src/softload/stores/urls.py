"""Stores by URL: `memory://`, `mooncake://embedded`, `mooncake://host:port`, with settings as query parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from softload.protocols import PageStore
from softload.stores.embedded import EmbeddedMooncakeStore
from softload.stores.memory import MemoryStore
from softload.stores.mooncake import MooncakeStore

__all__ = ["open_store", "parse_duration", "parse_size"]

_SIZE_UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DURATION_UNITS: Final = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0}
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes, from `4096`, `256MiB`, `1.5GiB`.

    Raises:
        ValueError: not a number, or an unknown unit.
    """
    return round(_quantity(text, _SIZE_UNITS, "a size like 256MiB or 1GiB"))


def parse_duration(text: str) -> float:
    """Seconds, from `5`, `5s`, `500ms`, `2min`.

    Raises:
        ValueError: not a number, or an unknown unit.
    """
    return _quantity(text, _DURATION_UNITS, "a duration like 500ms or 5s")


def _quantity(text: str, units: Mapping[str, float], expected: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise ValueError(f"expected {expected} (units {known}), got {text!r}")
    return float(match[1]) * units[match[2]]


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"expected a whole number, got {text!r}")
    return int(text)


def _ratio(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text!r}") from None


Parser = Callable[[str], object]

_EVICTION: Final[dict[str, Parser]] = {"lease": parse_duration, "high_watermark": _ratio, "eviction_ratio": _ratio}
_MEMORY: Final[dict[str, Parser]] = {"capacity": parse_size, **_EVICTION}
_CLIENT: Final[dict[str, Parser]] = {"segment": parse_size, "local_buffer": parse_size, "lease": parse_duration}
_EMBEDDED: Final[dict[str, Parser]] = {**_CLIENT, **_EVICTION, "owners": _count, "client_ttl": parse_duration}
_CLUSTER: Final[dict[str, Parser]] = {**_CLIENT, "protocol": str, "device": str, "metadata": str, "tenant": str}


def open_store(url: str, **options: Any) -> PageStore:
    """The store that `url` names, not yet opened: a `PageLoader` opens and closes it.

    * ``memory://?capacity=1GiB&lease=5s&high_watermark=0.95&eviction_ratio=0.05``: in this process.
    * ``mooncake://embedded?segment=256MiB&lease=5s&owners=0``: starts its own master on free loopback ports, and ends
      it; with ``owners=N`` the segment belongs to N processes of its own. Also ``high_watermark``, ``eviction_ratio``,
      ``client_ttl``, ``local_buffer``.
    * ``mooncake://host:port?protocol=tcp&device=&metadata=P2PHANDSHAKE&segment=0``: a running master. Also
      ``local_buffer``, ``tenant``, and ``lease``, which must not be longer than what the master is set to.

    Args:
        url: as above; sizes like ``256MiB``, durations like ``5s`` or ``500ms``.
        options: the same parameters as keywords, as text or as numbers (bytes, seconds); they win over the URL's.

    Raises:
        ValueError: an unknown scheme, host or parameter, or a value that does not parse; known ones are named.
    """
    try:
        return _store(url, options)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(repr(url)) else f"{url!r}: {text}") from None


def _store(url: str, options: Mapping[str, Any]) -> PageStore:
    parts = urlsplit(url)
    kind, where = parts.scheme, parts.netloc
    if kind not in ("memory", "mooncake"):
        raise ValueError(
            f"{url!r}: expected a URL like memory://, mooncake://embedded or mooncake://host:port, got scheme {kind!r}"
        )
    if parts.path not in ("", "/") or parts.fragment:
        raise ValueError(f"{url!r}: expected nothing between the host and '?', got {parts.path + parts.fragment!r}")
    settings: dict[str, Any] = {**_query(parts.query), **options}
    if kind == "memory":
        if where:
            raise ValueError(f"{url!r}: expected memory:// without a host, got {where!r}")
        clock = {"clock": settings.pop("clock")} if "clock" in options else {}
        return MemoryStore(**_parsed(url, settings, _MEMORY), **clock)
    if where == "embedded":
        return EmbeddedMooncakeStore(**_parsed(url, settings, _EMBEDDED))
    host, colon, port = where.rpartition(":")
    if not (colon and host and "@" not in host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{url!r}: expected mooncake://embedded or mooncake://host:port, got {where!r}")
    return MooncakeStore(master=where, **_parsed(url, settings, _CLUSTER))


def _query(text: str) -> dict[str, str]:
    query: dict[str, str] = {}
    for field in text.split("&") if text else ():
        name, equals, _ = field.partition("=")
        if not (name and equals):
            raise ValueError(f"expected NAME=VALUE after '?', parted by '&', got {field!r}")
        ((name, value),) = parse_qsl(field, keep_blank_values=True)
        if name in query:
            raise ValueError(f"{name}: expected it once, got {query[name]!r} and {value!r}")
        query[name] = value
    return query


def _parsed(url: str, settings: Mapping[str, Any], parsers: Mapping[str, Parser]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for name, value in settings.items():
        parser = parsers.get(name)
        if parser is None:
            raise ValueError(f"{url!r}: expected parameters out of {', '.join(sorted(parsers))}, got {name!r}")
        if isinstance(value, str):
            try:
                value = parser(value)
            except ValueError as error:
                raise ValueError(f"{url!r}: {name}: {error}") from None
        parsed[name] = value
    return parsed
