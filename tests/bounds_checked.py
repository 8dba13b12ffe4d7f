"""Fails unless compiled code checks its bounds, and all of it was run so.

    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR="$(mktemp -d)" python -m pytest @tests/bounds_checked.txt

runs this behind all tests that reach compiled code; a plain `pytest` does not collect it. The folder must be new: what
was compiled without checks is loaded without them.
"""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from seqkv.engine import layout, quantiser
from seqkv.entropy_coding import contexts, encode_group, interleaved, tables
from seqkv.entropy_coding.interleaved import LANES
from tests.test_native_code import kernels

# an index may be too large for a view, never for the array: without checks the tests fail, and nothing is harmed


def test_the_flag_is_on() -> None:
    @njit
    def element(array, i):
        return array[i]

    with pytest.raises(IndexError):
        element(np.arange(8)[:4], 5)


def test_functions_that_are_kept_on_disk_are_checked() -> None:
    with pytest.raises(IndexError):
        layout._round_to_bfloat16(np.zeros(4, np.float32), np.zeros(8, np.uint16)[:2])
    with pytest.raises(IndexError):
        quantiser.dequantise(np.zeros((4, 3), np.int32), np.ones(8, np.float32)[:2])


def test_functions_that_are_inlined_are_checked() -> None:
    base, offset, starts = np.zeros(4, np.int16), np.zeros((LANES, 1), np.int16), np.array([0, 4], np.int32)
    symbols = np.full((LANES, 4), 1000, np.int32)
    words = np.frombuffer(encode_group(symbols, base, offset, starts), "<u2").astype(np.uint16)[2 * LANES :]
    assert words.size >= 2 + interleaved.MOST_WORDS_A_STEP
    rates = contexts.TOKEN_RATE, contexts.COEF_RATE, contexts.DECAY_SHIFT
    fixed = tables.STARTS, tables.BUCKET_TOKENS, tables.SCORE_ROWS, rates
    states = np.full(LANES, interleaved.LOWEST_STATE, np.uint32)
    with pytest.raises(IndexError):  # without the spare words behind the group
        interleaved.decode(words[:2], 2, base, offset, starts, *fixed, states, symbols)


def test_every_function_was_compiled_in_this_run() -> None:
    assert [name for name, kernel in kernels().items() if not kernel.signatures] == []
