"""Matrix products of integers in float32: exact whatever the order of the sums, on the thread that asks for them.

BLAS would start threads of its own, which wait for each other where several chunks are coded at the same time.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def product(features: NDArray[np.float32], start: int, weights: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """out [tokens, channels] = features [tokens, start : start + count] @ weights [channels, count].T.

    All arrays are contiguous, and hold integers of which no partial sum exceeds 2 ** 24. Tiles of 4 tokens and 3
    channels: their sums fit in the registers of AVX2 too.
    """
    tokens, (channels, count) = features.shape[0], weights.shape
    if tokens < 4 or channels < 3:
        for t in range(tokens):
            for n in range(channels):
                total = np.float32(0)
                for k in range(count):
                    total += features[t, start + k] * weights[n, k]
                out[t, n] = total
        return
    for t in range(0, tokens, 4):
        t = min(t, tokens - 4)  # the last tiles may overlap others
        for n in range(0, channels, 3):
            n = min(n, channels - 3)
            # rows of their own: an index that might be negative keeps a loop from being vectorised
            x0, x1 = features[t, start : start + count], features[t + 1, start : start + count]
            x2, x3 = features[t + 2, start : start + count], features[t + 3, start : start + count]
            y0, y1, y2 = weights[n], weights[n + 1], weights[n + 2]
            c00 = c01 = c02 = c10 = c11 = c12 = c20 = c21 = c22 = c30 = c31 = c32 = np.float32(0)
            for k in range(count):
                a0, a1, a2, a3 = x0[k], x1[k], x2[k], x3[k]
                b0, b1, b2 = y0[k], y1[k], y2[k]
                c00 += a0 * b0
                c01 += a0 * b1
                c02 += a0 * b2
                c10 += a1 * b0
                c11 += a1 * b1
                c12 += a1 * b2
                c20 += a2 * b0
                c21 += a2 * b1
                c22 += a2 * b2
                c30 += a3 * b0
                c31 += a3 * b1
                c32 += a3 * b2
            out[t, n], out[t, n + 1], out[t, n + 2] = c00, c01, c02
            out[t + 1, n], out[t + 1, n + 1], out[t + 1, n + 2] = c10, c11, c12
            out[t + 2, n], out[t + 2, n + 1], out[t + 2, n + 2] = c20, c21, c22
            out[t + 3, n], out[t + 3, n + 1], out[t + 3, n + 2] = c30, c31, c32
