"""Copies in chunks: every row once, in order, and no chunk above its bound."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from softload.copies import Copy, chunks, execute

copies = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 20), st.booleans()), max_size=6)


def make(shape: list[tuple[int, int, bool]]) -> list[Copy]:
    made = []
    rng = np.random.default_rng(0)
    for width, rows, filled in shape:
        pages = torch.zeros((32, width), dtype=torch.uint8)
        landing = rng.integers(1, 255, size=(rows, width), dtype=np.uint8) if filled else None
        made.append(Copy(pages, rng.permutation(32)[:rows].astype(np.int64), landing))
    return made


@given(copies, st.integers(1, 300))
def test_chunks_hold_every_row_once_and_stay_below_their_bound(
    shape: list[tuple[int, int, bool]], max_bytes: int
) -> None:
    wanted = make(shape)
    parts = list(chunks(wanted, max_bytes))
    for part in parts:
        assert part
        rows = sum(len(copy.rows) for copy in part)
        assert sum(copy.nbytes for copy in part) <= max_bytes or rows == 1
    flat = [(id(copy.pages), int(row)) for part in parts for copy in part for row in copy.rows]
    assert flat == [(id(copy.pages), int(row)) for copy in wanted for row in copy.rows]


@given(copies, st.integers(1, 300))
def test_copies_in_chunks_do_what_the_whole_copies_do(shape: list[tuple[int, int, bool]], max_bytes: int) -> None:
    whole, parts = make(shape), make(shape)
    for copy in (*whole, *parts):
        copy.pages.fill_(7)
    execute(whole)
    for part in chunks(parts, max_bytes):
        execute(part)
    for expected, got in zip(whole, parts, strict=True):
        assert torch.equal(expected.pages, got.pages)


@given(st.integers(1, 64), st.integers(1, 20), st.integers(1, 300))
def test_what_was_copied_in_comes_out_again(width: int, rows: int, max_bytes: int) -> None:
    (inward,) = make([(width, rows, True)])
    execute([inward])
    out = Copy(inward.pages, inward.rows, np.zeros((rows, width), np.uint8), outward=True)
    for part in chunks([out], max_bytes):
        execute(part)
    assert inward.landing is not None and out.landing is not None
    assert np.array_equal(out.landing, inward.landing)
    untouched = np.setdiff1d(np.arange(32), inward.rows)
    assert not inward.pages.numpy()[untouched].any()
