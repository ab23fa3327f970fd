"""What digests find: `full` every flip, `sample` whole foreign objects and torn ones, also with valid tails."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from softload.config import Integrity
from softload.geometry import TAIL_BYTES
from softload.integrity import check_tail, check_tails, sample_digest, write_tail

BLOCK = 4096
SIZES = (1, 63, 64, 65, 127, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 63, 2 * BLOCK, 3 * BLOCK + 100, 5 * BLOCK + 4095)
CHECKED = (Integrity.SAMPLE, Integrity.FULL)


def made(key: str, payload: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """An object as it is stored: random bytes and its tail."""
    memory = np.random.default_rng(seed).integers(0, 256, payload + TAIL_BYTES, dtype=np.uint8)
    write_tail(key, memory)
    return memory


@pytest.mark.parametrize("integrity", Integrity)
@pytest.mark.parametrize("payload", SIZES)
def test_an_object_is_its_own(payload: int, integrity: Integrity) -> None:
    assert check_tail("key", made("key", payload), integrity)


@given(st.sampled_from(SIZES), st.integers(0, 1 << 30), st.integers(1, 255))
def test_full_finds_every_single_flip_in_the_payload(payload: int, place: int, flip: int) -> None:
    memory = made("key", payload)
    memory[place % payload] ^= flip
    assert not check_tail("key", memory, Integrity.FULL)


@given(st.sampled_from(SIZES), st.integers(0, 15), st.integers(1, 255), st.sampled_from(Integrity))
def test_a_flip_in_format_or_length_is_found_whatever_is_checked(
    payload: int, place: int, flip: int, integrity: Integrity
) -> None:
    memory = made("key", payload)
    memory[payload + place] ^= flip
    assert not check_tail("key", memory, integrity)


@pytest.mark.parametrize("integrity", CHECKED)
@pytest.mark.parametrize("payload", SIZES)
def test_a_whole_foreign_object_with_its_valid_tail_is_found(payload: int, integrity: Integrity) -> None:
    for seed in (0, 1):  # the same bytes under another key are foreign too
        assert not check_tail("key", made("another", payload, seed), integrity)


@pytest.mark.parametrize("integrity", CHECKED)
@pytest.mark.parametrize("foreign_first", [True, False])
@pytest.mark.parametrize("payload", [size for size in SIZES if size > BLOCK])
def test_a_torn_object_is_found_at_every_block(payload: int, foreign_first: bool, integrity: Integrity) -> None:
    mine, foreign = made("key", payload), made("another", payload, seed=1)
    for boundary in range(BLOCK, payload + 1, BLOCK):
        torn = np.concatenate(
            [foreign[:boundary], mine[boundary:]] if foreign_first else [mine[:boundary], foreign[boundary:]]
        )
        assert not check_tail("key", torn, integrity), f"torn at {boundary} of {payload}"


@pytest.mark.parametrize("integrity", CHECKED)
@pytest.mark.parametrize("payload", [size for size in SIZES if size > BLOCK])
def test_a_block_that_was_not_written_is_found(payload: int, integrity: Integrity) -> None:
    for start in range(0, payload, BLOCK):
        torn = made("key", payload)
        torn[start : min(start + BLOCK, payload)] = 0
        assert not check_tail("key", torn, integrity), f"nothing at {start} of {payload}"


@pytest.mark.parametrize("integrity", CHECKED)
def test_two_blocks_in_each_others_place_are_found(integrity: Integrity) -> None:
    memory = made("key", 4 * BLOCK)
    first, second = memory[:BLOCK].copy(), memory[BLOCK : 2 * BLOCK].copy()
    memory[:BLOCK], memory[BLOCK : 2 * BLOCK] = second, first
    assert not check_tail("key", memory, integrity)


def test_garbage_without_a_tail_is_never_accepted() -> None:
    for integrity in Integrity:
        assert not check_tail("key", np.zeros(1000, np.uint8), integrity)
        assert not check_tail("key", np.full(1000, 255, np.uint8), integrity)


def test_a_digest_that_was_not_computed_is_not_compared() -> None:
    memory = made("key", 100)
    memory[-16:] = 0
    for integrity in Integrity:
        assert check_tail("key", memory, integrity)
    only_sample = made("key", 100)
    only_sample[-8:] = 0
    only_sample[50] ^= 1
    assert not check_tail("key", only_sample, Integrity.FULL), "full falls back to what is there"


@given(st.binary(min_size=1, max_size=3 * BLOCK))
def test_no_digest_looks_as_if_it_was_not_computed(payload: bytes) -> None:
    assert sample_digest(np.frombuffer(payload, np.uint8)) != 0


@pytest.mark.parametrize("payload", SIZES)
def test_the_sample_digest_is_that_of_the_stored_format(payload: int) -> None:
    """What other processes, and other versions, have stored must go on being accepted."""
    data = np.random.default_rng(payload).integers(0, 256, payload, dtype=np.uint8).tobytes()
    whole, blocks = b"", payload // BLOCK
    for block in range(blocks):
        whole += data[block * BLOCK : block * BLOCK + 64]
    if payload > 64:
        whole += data[blocks * BLOCK : blocks * BLOCK + 64] + data[-64:]
    else:
        whole = data
    assert sample_digest(np.frombuffer(data, np.uint8), 7) == xxhash.xxh3_64_intdigest(whole, seed=7)


@pytest.mark.parametrize("integrity", Integrity)
@pytest.mark.parametrize("payload", SIZES)
def test_many_objects_are_checked_each_on_its_own(payload: int, integrity: Integrity) -> None:
    keys = [f"key{index}" for index in range(5)]
    stride = payload + TAIL_BYTES + 24  # segments are aligned
    memory = np.zeros((5, stride), np.uint8)
    objects = memory[:, : payload + TAIL_BYTES]
    for index, key in enumerate(keys):
        objects[index] = made(key, payload, index)
    assert check_tails(keys, objects, integrity) == [True] * 5
    objects[1, payload] ^= 1  # the format
    objects[3] = made("another", payload, 3)
    foreign_is_found = integrity is not Integrity.OFF
    assert check_tails(keys, objects, integrity) == [True, False, True, not foreign_is_found, True]
