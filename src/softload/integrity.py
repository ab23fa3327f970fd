"""The tail that ends every object of the grouped layout, and its digests.

Tail, 32 bytes, little-endian: format (u64), payload length (u64), sample digest (u64), full digest (u64); a digest of 0
was not computed. The sample digest covers 64 bytes of every 4 KiB and the last 64 bytes: it finds foreign objects and
torn ones at a few per cent of the price; the full digest covers every byte. Both are xxh3-64, seeded by the object's
key: memory that was reused by another whole object holds a valid tail, but not this key's.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from softload.config import Integrity

__all__ = ["check_tail", "sample_digest", "write_tail"]

Bytes = npt.NDArray[np.uint8]

_TAIL: Final = struct.Struct("<4Q")
_FORMAT: Final = int.from_bytes(b"softld01", "little")
_STRIDE: Final = 4096
_SAMPLE: Final = 64


def write_tail(key: str, memory: Bytes) -> None:
    """Fill in the last 32 bytes of an object whose payload is in place.

    Args:
        key: the object's key.
        memory: the whole object, uint8 `[payload + 32]`, contiguous.
    """
    payload = memory[: -_TAIL.size]
    seed = _seed(key)
    _TAIL.pack_into(
        memory.data, payload.size, _FORMAT, payload.size, sample_digest(payload, seed), _full_digest(payload, seed)
    )


def check_tail(key: str, memory: Bytes, integrity: Integrity) -> bool:
    """Whether an object that landed is whole and its own.

    Args:
        key: the key under which it was read.
        memory: the whole object, uint8 `[payload + 32]`, contiguous.
        integrity: which digest is compared; `Integrity.OFF` checks the tail's format and length alone.
    """
    payload = memory[: -_TAIL.size]
    kind, length, sample, full = _TAIL.unpack_from(memory.data, payload.size)
    if kind != _FORMAT or length != payload.size:
        return False
    if integrity is Integrity.FULL and full:
        return bool(_full_digest(payload, _seed(key)) == full)
    if integrity is Integrity.OFF or not sample:
        return True
    return bool(sample_digest(payload, _seed(key)) == sample)


def sample_digest(payload: Bytes, seed: int = 0) -> int:
    """The digest of 64 bytes in every 4 KiB of `payload` and of its last 64; never 0."""
    size = payload.size
    if size <= _SAMPLE:
        return _full_digest(payload, seed)
    blocks = size // _STRIDE
    hasher = xxhash.xxh3_64(seed=seed)
    if blocks:
        hasher.update(payload[: blocks * _STRIDE].reshape(blocks, _STRIDE)[:, :_SAMPLE].tobytes())
    # The last block may be a part of one: its start and the very end are sampled too.
    hasher.update(payload[blocks * _STRIDE : blocks * _STRIDE + _SAMPLE].tobytes())
    hasher.update(payload[-_SAMPLE:].tobytes())
    return hasher.intdigest() or 1


def _full_digest(payload: Bytes, seed: int) -> int:
    # 0 means "not computed" in the tail.
    return xxhash.xxh3_64_intdigest(payload.data, seed=seed) or 1


def _seed(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode())
