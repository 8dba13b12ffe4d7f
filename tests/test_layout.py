from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from seqkv.engine.arrays import bfloat16_bits
from seqkv.engine.cache import Rope
from seqkv.engine.layout import Turns

RNG = np.random.default_rng(0)
ROPES = [None, Rope.from_theta(1e4, 8), Rope(np.array([1.0, 0.1]), scaling=1.5, layout="interleaved")]


def block_of(heads: NDArray[np.float32]) -> NDArray[np.float32]:
    return heads.transpose(1, 0, 2).reshape(heads.shape[1], -1)


@given(st.integers(1, 9), st.integers(1, 3), st.sampled_from(ROPES), st.integers(0, 2**32 - 1))
def test_keys_are_turned_back_and_again(tokens: int, heads: int, rope: Rope | None, seed: int) -> None:
    keys = np.random.default_rng(seed).standard_normal((heads, tokens, 8), np.float32)
    turns = Turns(np.arange(tokens) * 1000)
    block = turns.to_block(keys, rope)
    plain = keys if rope is None else rope.undo(keys, turns.positions)
    np.testing.assert_allclose(block, block_of(plain), atol=1e-6)
    out = np.empty_like(keys)
    turns.to_heads(block, rope, out)
    np.testing.assert_allclose(out, keys, atol=1e-6)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_tokens_go_to_their_slots(rope: Rope | None, dtype: type) -> None:
    """Keys in the first half of the last axis, values in the second, as in a paged cache."""
    turns, slots = Turns(np.arange(11)), RNG.permutation(4 * 5)[:11]
    block, plain = RNG.standard_normal((11, 3 * 8), np.float32), np.empty((3, 11, 8), dtype)
    turns.to_heads(block, rope, plain)
    pages = np.zeros((4, 3, 5, 16), dtype)
    turns.to_heads(block, rope, pages[..., 8:], slots)
    assert not pages[..., :8].any()
    by_slot = pages[..., 8:].transpose(0, 2, 1, 3).reshape(20, 3, 8)
    np.testing.assert_array_equal(by_slot[slots], plain.transpose(1, 0, 2))
    assert not np.delete(by_slot, slots, axis=0).any()


def test_values_are_rounded_to_what_the_cache_holds() -> None:
    values = np.array([1.00390625, 1.01171875, -0.0, 1e-40, 3e38, 1e5, -1e5, 2049.0], np.float32)  # ties among them
    bits, halves = np.empty((1, 8, 1), np.uint16), np.empty((1, 8, 1), np.float16)
    turns = Turns(np.arange(8))
    turns.to_heads(values[:, None], None, bits)
    np.testing.assert_array_equal(bits[0, :, 0], bfloat16_bits(values))
    turns.to_heads(values[:, None], None, halves)
    assert halves[0, -4:, 0].tolist() == [65504.0, 65504.0, -65504.0, 2048.0]
    turns.to_heads(np.full((8, 1), np.nan, np.float32), None, bits)
    assert np.isnan((bits.astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize("slots", [[0, 1, 6], [0, -1, 2], [0, 1], [0, 1, 2, 3]])
def test_slots_outside_the_cache_are_refused(slots: list[int]) -> None:
    with pytest.raises(ValueError, match="a slot from 0 to 5 is needed for each of 3 tokens"):
        Turns(np.arange(3)).to_heads(np.zeros((3, 4), np.float32), None, np.zeros((2, 1, 3, 4)), np.array(slots))


def test_more_tokens_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="a slot from 0 to 1 is needed for each of 3 tokens"):
        Turns(np.arange(3)).to_heads(np.zeros((3, 4), np.float32), None, np.zeros((1, 2, 4), np.float32))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        Turns(np.arange(3)).to_heads(np.zeros((3, 4), np.float32), None, np.zeros((1, 3, 4)))
