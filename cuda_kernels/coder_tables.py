"""The coder's tables as its kernels read them, with a class more, that of idle lanes: one token of probability 1.

Rows are so long that neighbouring classes, which the lanes of a warp have, lie in different banks of shared memory.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from seqkv.entropy_coding.alphabet import ESCAPE, LARGEST_PLAIN, PRECISION, TOKENS, TOTAL, plain_value
from seqkv.entropy_coding.contexts import CLASSES
from seqkv.entropy_coding.tables import BUCKET_TOKENS, FREQUENCIES, ROW, SCORES, STARTS

ENTRY_STRIDE = TOKENS + 1
ENTRY_BYTES = 8
ENTRIES = CLASSES * ENTRY_STRIDE + 1
SCORE_STRIDE = ROW + 2


@functools.cache
def entries() -> npt.NDArray[np.uint32]:
    """For decoding, [ENTRIES, 2]: a token's last slot, above its frequency; its score, above its value, which for the
    token with k + 1 raw bits is LARGEST_PLAIN + 1 + k. Scores and values are signed, of 16 bits."""
    frequencies, values, scores = np.zeros((3, CLASSES, ENTRY_STRIDE), np.int64)
    frequencies[:, :TOKENS] = FREQUENCIES
    values[:, :ESCAPE] = [plain_value(token) for token in range(ESCAPE)]
    values[:, ESCAPE:TOKENS] = LARGEST_PLAIN + 1 + np.arange(TOKENS - ESCAPE)
    scores[:, :TOKENS] = SCORES
    last = np.cumsum(frequencies, axis=1) - 1
    table = np.stack([last << (32 - PRECISION) | frequencies, scores << 16 | values & 0xFFFF], axis=-1).reshape(-1, 2)
    idle = [(TOTAL - 1) << (32 - PRECISION) | TOTAL, 0]
    return np.vstack([table, idle]).astype(np.uint32)


@functools.cache
def buckets() -> npt.NDArray[np.uint16]:
    """For decoding, [CLASSES + 1, buckets]: where in the entries, in bytes, the search for a bucket's slots begins."""
    tokens = BUCKET_TOKENS.reshape(CLASSES, -1)
    table = np.full((CLASSES + 1, tokens.shape[1]), ENTRIES - 1)
    table[:-1] = np.arange(CLASSES)[:, None] * ENTRY_STRIDE + tokens
    return (table * ENTRY_BYTES).astype(np.uint16)


@functools.cache
def codes() -> npt.NDArray[np.uint32]:
    """For encoding, [CLASSES + 1, ROW, 2]: start << 16 | frequency and reciprocal; unused tokens code nothing."""
    frequencies, starts = np.full((CLASSES + 1, ROW), TOTAL, np.int64), np.zeros((CLASSES + 1, ROW), np.int64)
    frequencies[:-1, :TOKENS] = FREQUENCIES
    starts[:-1, :TOKENS] = STARTS.reshape(CLASSES, ROW)[:, :TOKENS]
    return np.stack([starts << 16 | frequencies, reciprocal(frequencies)], axis=-1).astype(np.uint32)


def reciprocal(frequency: Any) -> Any:
    """What a state is multiplied with to divide it by a frequency of at least 1: see `encode` in coder.cu."""
    return (2**32 - 1) // frequency


@functools.cache
def scores() -> npt.NDArray[np.int16]:
    """For encoding, [CLASSES + 1, SCORE_STRIDE]: scores, 0 of unused tokens."""
    table = np.zeros((CLASSES + 1, SCORE_STRIDE), np.int16)
    table[:-1, :TOKENS] = SCORES
    return table
