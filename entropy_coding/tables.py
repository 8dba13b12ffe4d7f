"""The shipped integer tables, and what is derived from them by integer arithmetic.

``FREQUENCIES`` uint16 [CLASSES, TOKENS]: every entry at least 1, every row sums to TOTAL = 2^PRECISION.
``SCORES`` int16 [CLASSES, TOKENS]: see :mod:`seqkv.entropy_coding.contexts`.
Rows of the derived tables are padded to 2^ROW_BITS entries, so that a row's index is a shift.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from seqkv.entropy_coding.alphabet import ESCAPE, PRECISION, TOKENS, TOTAL, raw_bits
from seqkv.entropy_coding.contexts import CLASSES

ROW_BITS = 6
ROW = 1 << ROW_BITS
BUCKET_BITS = 7  # a decoder's look-up of the highest bits of a slot


def _frozen(array: npt.NDArray) -> npt.NDArray:
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return array


def _padded(rows: npt.NDArray, dtype: npt.DTypeLike, fill: int = 0) -> npt.NDArray:
    padded = np.full((CLASSES, ROW), fill, dtype)
    padded[:, : rows.shape[1]] = rows
    return _frozen(padded.reshape(-1))


with np.load(Path(__file__).with_name("tables.npz"), allow_pickle=False) as _file:
    FREQUENCIES: npt.NDArray[np.uint16] = _frozen(_file["frequencies"])
    SCORES: npt.NDArray[np.int16] = _frozen(_file["scores"])

_ENDS = np.cumsum(FREQUENCIES, axis=1, dtype=np.int64)

STARTS: npt.NDArray[np.int32] = _padded(_ENDS - FREQUENCIES, np.int32, TOTAL)
"""First slot of each token, int32 [CLASSES * ROW]; the entry after the last token, and all beyond it, are TOTAL."""

_BUCKET_STARTS = np.arange(1 << BUCKET_BITS) << (PRECISION - BUCKET_BITS)
BUCKET_TOKENS: npt.NDArray[np.uint8] = _frozen(
    np.stack([np.searchsorted(ends, _BUCKET_STARTS, side="right") for ends in _ENDS]).astype(np.uint8).reshape(-1)
)
"""Token that holds the first slot of each of 2^BUCKET_BITS equal parts, uint8 [CLASSES * 2^BUCKET_BITS]: a search for a
slot's token starts there."""

SCORE_ROWS: npt.NDArray[np.int32] = _padded(SCORES, np.int32)
"""SCORES as int32 [CLASSES * ROW]."""

_RAW = np.array([raw_bits(token) if token >= ESCAPE else 0 for token in range(TOKENS)])
BITS: npt.NDArray[np.float64] = _padded(PRECISION - np.log2(FREQUENCIES) + _RAW, np.float64)
"""Ideal code length of each token with its raw bits, float64 [CLASSES * ROW]; for estimates, never for coding."""
