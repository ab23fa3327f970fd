"""Reader of the FAST'25 request traces: one JSON object a line, one prefix hash per block of 512 tokens.

A request's last block is usually partial. It has a hash of its own but is neither stored nor matched, so what a replay
works with is `TraceRequest.full_blocks`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from softload.errors import SoftloadError

__all__ = ["BLOCK_TOKENS", "TraceError", "TraceRequest", "TraceStatistics", "iter_trace", "read_trace", "write_trace"]

BLOCK_TOKENS = 512
"""Tokens that one hash of a trace stands for."""


class TraceError(SoftloadError, ValueError):
    """A line of a trace is not what the format asks for; the message names file, line, expected and got."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Args:
        index: its position in the trace, from 0.
        timestamp: arrival in milliseconds since the start of the trace.
        input_length: prompt tokens.
        output_length: generated tokens.
        hash_ids: one prefix hash per block of `BLOCK_TOKENS` tokens, the partial last block's included.
    """

    index: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """Hashes of the blocks that are complete: the only ones that a store may hold."""
        return self.hash_ids[: self.input_length // BLOCK_TOKENS]


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """What a trace asks of a cache; blocks are full blocks, hits are counted from block 0 to the first miss."""

    requests: int
    blocks: int
    unique_blocks: int
    hit_blocks: int

    @property
    def hit_rate(self) -> float:
        """Blocks hit by an infinite cache, as a share of all."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @classmethod
    def of(cls, requests: Iterable[TraceRequest]) -> TraceStatistics:
        """Count over `requests` in their order."""
        seen: set[int] = set()
        count = blocks = hits = 0
        for request in requests:
            count += 1
            full = request.full_blocks
            blocks += len(full)
            hits += next((i for i, block in enumerate(full) if block not in seen), len(full))
            seen.update(full)
        return cls(count, blocks, len(seen), hits)


def iter_trace(path: Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """Yield the requests of the trace file `path`, at most `limit` of them, each checked.

    Raises:
        TraceError: a line is malformed; blank lines are allowed at the end only.
        OSError: the file cannot be read.
    """
    previous = float("-inf")
    blank: int | None = None
    index = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and index >= limit:
                return
            where = f"{path}:{number}"
            if not line.strip():
                blank = blank or number
                continue
            if blank is not None:
                raise TraceError(f"{path}:{blank}: expected a JSON object, got an empty line")
            request = _parse_line(line, where, index)
            if request.timestamp < previous:
                raise TraceError(
                    f"{where}: timestamp: expected at least {previous:g} ms (the line before), "
                    f"got {request.timestamp:g} ms"
                )
            previous = request.timestamp
            yield request
            index += 1


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of the trace file `path` as a list; see `iter_trace`.

    Raises:
        TraceError: a line is malformed, or there is no request at all.
    """
    requests = list(iter_trace(path, limit))
    if not requests and limit != 0:
        raise TraceError(f"{path}:1: expected at least one request, got an empty file")
    return requests


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write `requests` in the format that `read_trace` reads."""
    with path.open("w", encoding="utf-8") as out:
        for request in requests:
            line = {
                "timestamp": request.timestamp,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": request.hash_ids,
            }
            out.write(json.dumps(line) + "\n")


def _parse_line(line: bytes, where: str, index: int) -> TraceRequest:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise TraceError(f"{where}: expected UTF-8 text, got byte 0x{line[error.start]:02x}") from None
    except json.JSONDecodeError as error:
        raise TraceError(
            f"{where}: expected a JSON object, got malformed JSON ({error.msg} at column {error.colno})"
        ) from None
    except RecursionError:
        raise TraceError(f"{where}: expected a JSON object, got JSON nested too deeply") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: expected a JSON object, got {_kind(record)}")
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in record:
            got = ", ".join(sorted(map(str, record))) or "no field"
            raise TraceError(f"{where}: expected the field {name!r}, got {got}")

    timestamp = record["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise TraceError(f"{where}: timestamp: expected a number of milliseconds, got {_kind(timestamp)}")
    if not 0 <= timestamp < float("inf"):
        raise TraceError(f"{where}: timestamp: expected a finite number of 0 or more, got {timestamp}")
    input_length = _whole_number(record["input_length"], "input_length", where)
    output_length = _whole_number(record["output_length"], "output_length", where)
    hash_ids = record["hash_ids"]
    if not isinstance(hash_ids, list):
        raise TraceError(f"{where}: hash_ids: expected a list of integers, got {_kind(hash_ids)}")
    for position, hash_id in enumerate(hash_ids):
        _whole_number(hash_id, f"hash_ids[{position}]", where)
    blocks = -(-input_length // BLOCK_TOKENS)
    if len(hash_ids) != blocks:
        raise TraceError(
            f"{where}: hash_ids: expected {blocks} (input_length {input_length} in blocks of {BLOCK_TOKENS} tokens), "
            f"got {len(hash_ids)}"
        )
    return TraceRequest(index, float(timestamp), input_length, output_length, tuple(hash_ids))


def _whole_number(value: object, name: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TraceError(f"{where}: {name}: expected an integer, got {_kind(value)}")
    if value < 0:
        raise TraceError(f"{where}: {name}: expected 0 or more, got {value}")
    return value


def _kind(value: object) -> str:
    if value is None:
        return "null"
    text = json.dumps(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
