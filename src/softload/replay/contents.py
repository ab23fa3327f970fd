"""Bytes of a page that follow from its key: what lets a replay find every wrong, stale or foreign byte.

Each 8-byte word of a page's row in one buffer is ``pattern[word] ^ seed(key, salt, buffer, generation)``. Another
page's bytes, another layer's, another generation's or shifted ones differ in nearly every byte; a torn row differs in
its torn part. A page that is computed again holds the same bytes, as prefix hashes promise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

__all__ = ["POISON", "PageContents"]

POISON = 0xDB
"""What every byte of a slot is set to when the slot is released."""

_POISON_WORD = np.uint64(int.from_bytes(bytes([POISON]) * 8))
_CHUNK_BYTES = 512 << 10  # stays in a core's second-level cache
_WORD = np.dtype("<u8")


class PageContents:
    """Writes and checks the rows of pages in a set of buffers. All methods may be called from any thread.

    Args:
        views: per buffer a uint8 view of shape ``[num_pages, page_bytes]``, `page_bytes` being a multiple of 8.
        salt: sets buffers with equal indices apart: the pool's name, and whether it is a draft's.
        generation: another generation holds other bytes under the same keys.

    Raises:
        ValueError: a view of another type, shape or size.
    """

    def __init__(self, views: Sequence[torch.Tensor], *, salt: str, generation: int = 0) -> None:
        self._buffers = tuple(_words(view, salt, index) for index, view in enumerate(views))
        self._salts = tuple(
            np.array([xxhash.xxh3_64_intdigest(f"{salt}\x00{index}\x00{generation}".encode())], dtype=_WORD)
            for index in range(len(views))
        )
        widths = {buffer.shape[1] for buffer in self._buffers}
        self._patterns = {width: _pattern(width) for width in widths}
        self._scratch = threading.local()
        self.page_bytes = sum(buffer.shape[1] * 8 for buffer in self._buffers)

    def fill(self, pages: NDArray[np.int64], keys: Sequence[str]) -> None:
        """Write the rows `pages` of all buffers with what the pages named `keys` hold."""
        seeds = _key_seeds(keys, pages)
        for words, part, rows, expected in self._expected(pages, seeds):
            del part
            words[rows] = expected

    def mismatches(self, pages: NDArray[np.int64], keys: Sequence[str]) -> NDArray[np.int64]:
        """Count, per page, the bytes that differ from what the pages named `keys` hold; shape ``[pages]``."""
        counts = np.zeros(len(pages), dtype=np.int64)
        seeds = _key_seeds(keys, pages)
        for words, part, rows, expected in self._expected(pages, seeds):
            np.bitwise_xor(expected, words[rows], out=expected)
            _add_nonzero_bytes(expected, counts[part])
        return counts

    def nonzero(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count, per page, the bytes that are not zero; shape ``[pages]``."""
        counts = np.zeros(len(pages), dtype=np.int64)
        for words in self._buffers:
            for part in _chunks(len(pages), words.shape[1]):
                _add_nonzero_bytes(words[pages[part]], counts[part])
        return counts

    def unpoisoned(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count, per page, the bytes that are not `POISON`; shape ``[pages]``."""
        counts = np.zeros(len(pages), dtype=np.int64)
        for words in self._buffers:
            for part in _chunks(len(pages), words.shape[1]):
                _add_nonzero_bytes(words[pages[part]] ^ _POISON_WORD, counts[part])
        return counts

    def poison(self, pages: NDArray[np.int64]) -> None:
        """Overwrite the rows `pages` of all buffers with `POISON`, so that a stale slot is found."""
        for words in self._buffers:
            words[pages] = _POISON_WORD

    def _expected(
        self, pages: NDArray[np.int64], key_seeds: NDArray[np.uint64]
    ) -> Iterator[tuple[NDArray[np.uint64], slice, NDArray[np.int64], NDArray[np.uint64]]]:
        """Yield (buffer, part of `pages`, its rows, expected words); the last is scratch memory of this thread."""
        for words, salt in zip(self._buffers, self._salts, strict=True):
            width = words.shape[1]
            pattern = self._patterns[width]
            seeds = _mix(key_seeds ^ salt)
            for part in _chunks(len(pages), width):
                expected = self._scratch_rows(part.stop - part.start, width)
                np.bitwise_xor(pattern[None, :], seeds[part, None], out=expected)
                yield words, part, pages[part], expected

    def _scratch_rows(self, rows: int, width: int) -> NDArray[np.uint64]:
        needed = rows * width
        held: NDArray[np.uint64] | None = getattr(self._scratch, "words", None)
        if held is None or held.size < needed:
            held = self._scratch.words = np.empty(max(needed, _CHUNK_BYTES // 8), dtype=_WORD)
        return held[:needed].reshape(rows, width)


def _words(view: torch.Tensor, salt: str, index: int) -> NDArray[np.uint64]:
    if view.dtype != torch.uint8 or view.dim() != 2 or view.shape[1] % 8 or view.shape[1] == 0:
        raise ValueError(
            f"buffer {index} of {salt!r}: expected a uint8 view [num_pages, page_bytes] with page_bytes a multiple "
            f"of 8, got {view.dtype} of shape {tuple(view.shape)}"
        )
    return view.numpy().view(_WORD)


def _pattern(width: int) -> NDArray[np.uint64]:
    return np.random.default_rng(width).integers(0, 1 << 64, size=width, dtype=np.uint64)


def _key_seeds(keys: Sequence[str], pages: NDArray[np.int64]) -> NDArray[np.uint64]:
    if len(keys) != len(pages):
        raise ValueError(f"expected one key per page, got {len(keys)} keys for {len(pages)} pages")
    return np.fromiter((xxhash.xxh3_64_intdigest(key.encode()) for key in keys), dtype=_WORD, count=len(keys))


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: neighbouring inputs get unrelated outputs."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _chunks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // (width * 8))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _add_nonzero_bytes(difference: NDArray[np.uint64], counts: NDArray[np.int64]) -> None:
    if difference.any():
        counts += np.count_nonzero(difference.view(np.uint8), axis=1)
