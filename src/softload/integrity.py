"""The tail that ends every object of the grouped layout, and its digests.

Tail, 32 bytes, little-endian: format (u64), payload length (u64), sample digest (u64), full digest (u64); a digest of 0
was not computed. The sample digest covers 64 bytes of every 4 KiB and the last 64 bytes: it finds foreign objects and
torn ones at a few per cent of the price; the full digest covers every byte. Both are xxh3-64, seeded by the object's
key: memory that was reused by another whole object holds a valid tail, but not this key's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from softload.config import Integrity

__all__ = ["check_blocks", "check_tail", "check_tails", "sample_digest", "write_tail"]

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
    return check_tails([key], memory[None, :], integrity)[0]


def check_tails(keys: Sequence[str], objects: Bytes, integrity: Integrity) -> list[bool]:
    """`check_tail` of many objects of one size: what they have in common is done once, without the GIL.

    Args:
        keys: the keys under which they were read.
        objects: uint8 `[objects, payload + 32]`, each row contiguous.
        integrity: see `check_tail`.
    """
    return check_blocks(keys, [objects], integrity)


def check_blocks(
    keys: Sequence[str], blocks: Sequence[Bytes], integrity: Integrity, *, needs_digest: bool = False
) -> list[bool]:
    """`check_tails` of objects of one size that lie here and there.

    Args:
        keys: of all objects, one after another.
        blocks: the objects, as in `check_tails`.
        integrity: see `check_tail`.
        needs_digest: refuse an object that does not say what its digest is, instead of checking its length alone.
    """
    size = blocks[0].shape[1] - _TAIL.size
    tails = [block[:, size:] for block in blocks]
    kinds, lengths, samples, fulls = (
        (np.concatenate(tails) if len(tails) > 1 else np.ascontiguousarray(tails[0])).view("<u8").T
    )
    formed: list[bool] = ((kinds == _FORMAT) & (lengths == size)).tolist()
    if integrity is Integrity.OFF:
        return formed
    payloads = [block[:, :size] for block in blocks]
    if integrity is Integrity.FULL and fulls.all():
        wanted, parts = fulls.tolist(), [payload.data for each in payloads for payload in each]
    elif integrity is Integrity.FULL and fulls.any():  # written by different writers: each on its own
        every = zip(keys, (block[index, None] for block in blocks for index in range(len(block))), strict=True)
        return [check_blocks([key], [each], integrity, needs_digest=needs_digest)[0] for key, each in every]
    else:
        found = [_samples(each) for each in payloads]
        gathered = np.concatenate(found) if len(found) > 1 else found[0]
        flat, width = gathered.reshape(-1).data, gathered.shape[1]
        wanted, parts = samples.tolist(), [flat[at : at + width] for at in range(0, len(flat), width)]
    digest = xxhash.xxh3_64_intdigest
    # 0 stands for a digest that was not computed: in the tail nothing is compared, of the bytes it is 1.
    return [
        is_formed and ((digest(part, seed=digest(key)) or 1) == stored if stored else not needs_digest)
        for is_formed, stored, part, key in zip(formed, wanted, parts, map(str.encode, keys), strict=True)
    ]


def sample_digest(payload: Bytes, seed: int = 0) -> int:
    """The digest of 64 bytes in every 4 KiB of `payload` and of its last 64; never 0."""
    return xxhash.xxh3_64_intdigest(_samples(payload[None, :]).data, seed=seed) or 1


def _samples(payloads: Bytes) -> Bytes:
    """What sample digests are made of, in this order, for every row: uint8 `[rows, n]`, contiguous."""
    rows, size = payloads.shape
    if size <= _SAMPLE:
        return np.ascontiguousarray(payloads)
    blocks = size // _STRIDE
    whole = payloads[:, : blocks * _STRIDE].reshape(rows, blocks, _STRIDE)[:, :, :_SAMPLE]  # a view
    # The last block may be a part of one: its start and the very end are sampled too.
    rest = payloads[:, blocks * _STRIDE : blocks * _STRIDE + _SAMPLE]
    return np.concatenate((whole.reshape(rows, -1), rest, payloads[:, -_SAMPLE:]), axis=1)


def _full_digest(payload: Bytes, seed: int) -> int:
    # 0 means "not computed" in the tail.
    return xxhash.xxh3_64_intdigest(payload.data, seed=seed) or 1


def _seed(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode())
