"""What a model expects of the next token, as integers: intervals that a range coder takes.

Logits are rounded to 32nds of a nat below the largest; a token that lies d of these below it gets the whole number
nearest to 2**26 * exp(-d / 32), and at least 1. Rounding costs about 4e-5 nats a token, the least of 1 less than
0.01 bits even for vocabularies of 256,000.
"""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal, localcontext

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqkv.engine.errors import ProbsError

_PARTS = 32  # of a nat
_LARGEST = 1 << 26


def _table() -> NDArray[np.int64]:
    """2**26 * exp(-d / 32) for d = 0, 1, ..., down to the first 1. In decimals: no two libraries disagree on it."""
    sizes: list[int] = []
    with localcontext() as context:
        context.prec = 40
        while not sizes or sizes[-1] > 1:
            value = _LARGEST * (Decimal(-len(sizes)) / _PARTS).exp()
            sizes.append(max(1, int(value.to_integral_value(ROUND_HALF_EVEN))))
    return np.array(sizes, np.int64)


_SIZES = _table()


def interval(logits: NDArray[np.float32], token: int) -> tuple[int, int, int]:
    """(start, size, total) of a token. logits: [vocab] float32. ProbsError if there is NaN or +inf among them, or if
    they have no such token."""
    if not 0 <= token < logits.size:
        raise ProbsError(f"token id {token} is outside the {logits.size} that the model predicts")
    return _interval(logits, _largest(logits), token, _SIZES)


def total(logits: NDArray[np.float32]) -> int:
    """The sum of the sizes of all tokens. ProbsError as `interval`."""
    return _interval(logits, _largest(logits), 0, _SIZES)[2]


def token_at(logits: NDArray[np.float32], place: int) -> tuple[int, int, int]:
    """(token, start, size) of the token whose interval holds a place in [0, total)."""
    return _token_at(logits, _largest(logits), place, _SIZES)


def _largest(logits: NDArray[np.float32]) -> np.float32:
    top = logits.max()
    if not np.isfinite(top):  # NaN shows in the maximum too
        raise ProbsError("the model's logits hold NaN or +inf, or nothing but -inf")
    return top


@njit(cache=True, nogil=True)
def _size(logit, top, sizes):
    below = (top - logit) * np.float32(_PARTS) + np.float32(0.5)
    return sizes[np.int64(below)] if below < sizes.size else 1


@njit(cache=True, nogil=True)
def _interval(logits, top, token, sizes):
    start = total = 0
    for i in range(logits.size):
        if i == token:
            start = total
        total += _size(logits[i], top, sizes)
    return start, _size(logits[token], top, sizes), total


@njit(cache=True, nogil=True)
def _token_at(logits, top, place, sizes):
    start = 0
    for i in range(logits.size):
        size = _size(logits[i], top, sizes)
        if start + size > place:
            return i, start, size
        start += size
    return -1, 0, 0  # not reached for a place below the total
