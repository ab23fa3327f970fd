"""Contents that follow from the key find every kind of wrong byte."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from softload.replay.contents import POISON, PageContents

PAGES, PAGE_BYTES, BUFFERS = 24, 4096, 3
KEYS = tuple(f"{number:016x}" for number in range(8))


@pytest.fixture
def views() -> list[torch.Tensor]:
    return [torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8) for _ in range(BUFFERS)]


@pytest.fixture
def pages() -> np.ndarray:
    return np.random.default_rng(1).permutation(PAGES)[: len(KEYS)].astype(np.int64)


def test_what_was_filled_has_no_mismatch(views: list[torch.Tensor], pages: np.ndarray) -> None:
    contents = PageContents(views, salt="kv")
    contents.fill(pages, KEYS)
    assert contents.page_bytes == BUFFERS * PAGE_BYTES
    assert not contents.mismatches(pages, KEYS).any()
    untouched = np.setdiff1d(np.arange(PAGES), pages)
    assert not contents.nonzero(untouched).any()


def test_bytes_follow_from_the_key_alone(views: list[torch.Tensor], pages: np.ndarray) -> None:
    PageContents(views, salt="kv").fill(pages, KEYS)
    first = [view[pages[0]].clone() for view in views]
    PageContents(views, salt="kv").fill(np.array([pages[3]]), KEYS[:1])
    assert all(torch.equal(view[pages[3]], before) for view, before in zip(views, first, strict=True))


def flip_one_bit(views: list[torch.Tensor], row: int, other: int) -> None:
    views[1][row, 1234] ^= 1


def stale(views: list[torch.Tensor], row: int, other: int) -> None:
    views[2][row] = POISON


def foreign_page(views: list[torch.Tensor], row: int, other: int) -> None:
    views[0][row] = views[0][other]


def foreign_layer(views: list[torch.Tensor], row: int, other: int) -> None:
    views[0][row] = views[1][row]


def torn(views: list[torch.Tensor], row: int, other: int) -> None:
    views[2][row, PAGE_BYTES // 2 :] = 0


def shifted(views: list[torch.Tensor], row: int, other: int) -> None:
    views[0][row] = views[0][row].roll(8)


@pytest.mark.parametrize(
    ("fault", "at_least", "at_most"),
    [
        (flip_one_bit, 1, 1),
        (stale, 0.95 * PAGE_BYTES, PAGE_BYTES),
        (foreign_page, 0.5 * PAGE_BYTES, PAGE_BYTES),
        (foreign_layer, 0.5 * PAGE_BYTES, PAGE_BYTES),
        (torn, 0.45 * PAGE_BYTES, 0.5 * PAGE_BYTES),
        (shifted, 0.95 * PAGE_BYTES, PAGE_BYTES),
    ],
)
def test_each_kind_of_wrong_byte_is_found(
    views: list[torch.Tensor],
    pages: np.ndarray,
    fault: Callable[[list[torch.Tensor], int, int], None],
    at_least: float,
    at_most: float,
) -> None:
    contents = PageContents(views, salt="kv")
    contents.fill(pages, KEYS)
    fault(views, int(pages[4]), int(pages[5]))
    wrong = contents.mismatches(pages, KEYS)
    assert np.flatnonzero(wrong).tolist() == [4]
    assert at_least <= wrong[4] <= at_most


@pytest.mark.parametrize("other", [PageContents.__init__, None])
def test_salt_and_generation_set_contents_apart(views: list[torch.Tensor], pages: np.ndarray, other: object) -> None:
    PageContents(views, salt="kv").fill(pages, KEYS)
    different = PageContents(views, salt="draft") if other is None else PageContents(views, salt="kv", generation=1)
    assert different.mismatches(pages, KEYS).all()


def test_poison_is_in_every_byte(views: list[torch.Tensor], pages: np.ndarray) -> None:
    contents = PageContents(views, salt="kv")
    contents.poison(pages)
    assert all((view[pages] == POISON).all() for view in views)
    assert (contents.nonzero(pages) == contents.page_bytes).all()


def test_no_pages_are_no_error(views: list[torch.Tensor]) -> None:
    contents, none = PageContents(views, salt="kv"), np.empty(0, dtype=np.int64)
    contents.fill(none, ())
    assert contents.mismatches(none, ()).shape == contents.nonzero(none).shape == (0,)


def test_rows_of_strided_buffers() -> None:
    whole = torch.zeros(PAGES, 2 * PAGE_BYTES, dtype=torch.uint8)
    contents = PageContents([whole[:, :PAGE_BYTES]], salt="kv")
    pages = np.arange(len(KEYS))
    contents.fill(pages, KEYS)
    assert not contents.mismatches(pages, KEYS).any()
    assert not whole[:, PAGE_BYTES:].any()


def test_bad_views_and_keys_are_named(views: list[torch.Tensor], pages: np.ndarray) -> None:
    with pytest.raises(
        ValueError, match=r"buffer 0 of 'kv': expected a uint8 view .* got torch.uint8 of shape \(3, 12\)"
    ):
        PageContents([torch.zeros(3, 12, dtype=torch.uint8)], salt="kv")
    with pytest.raises(ValueError, match="expected one key per page, got 2 keys for 8 pages"):
        PageContents(views, salt="kv").fill(pages, KEYS[:2])
