"""The quantiser: one step for every coefficient of a stream, divided by the gain of its token.

Steps and gains are powers of two in exact fractions of an octave, sent as integers, so that what a step or a gain does
to the scale class of a symbol is an integer too and never depends on a float that the other side recomputes.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqkv.cuda_kernels.scalar import LARGEST_SYMBOL as LARGEST_SYMBOL
from seqkv.cuda_kernels.scalar import dequantised, plus_product, quantised
from seqkv.entropy_coding.contexts import CLASSES_PER_OCTAVE, LOWEST_OCTAVE, UNITS

UNITS_PER_OCTAVE = UNITS * CLASSES_PER_OCTAVE  # of the scale axis of entropy_coding.contexts
STEPS_PER_OCTAVE = 16
GAINS_PER_OCTAVE = 4


def step_size(index: int) -> float:
    """The step with this index: 2 ** (-index / 16), so a larger index is a finer step."""
    return float(2.0 ** (-index / STEPS_PER_OCTAVE))


def step_index(step: float) -> int:
    """The index of the largest step that is not above `step`."""
    return int(np.ceil(-np.log2(step) * STEPS_PER_OCTAVE - 1e-9))


def step_units(index: int) -> int:
    """How far a step moves symbols on the scale axis, beside step 1."""
    return index * (UNITS_PER_OCTAVE // STEPS_PER_OCTAVE)


def gain_value(index: NDArray[np.integer]) -> NDArray[np.float32]:
    """Gains with these indices: 2 ** (index / 4)."""
    return np.exp2(index.astype(np.float32) / GAINS_PER_OCTAVE).astype(np.float32)


def gain_index(gain: NDArray[np.floating]) -> NDArray[np.int8]:
    """Indices of the gains nearest to these."""
    return np.rint(np.log2(gain) * GAINS_PER_OCTAVE).astype(np.int8)


def gain_units(index: NDArray[np.integer]) -> NDArray[np.int16]:
    """How far gains move symbols on the scale axis."""
    return (index.astype(np.int32) * (UNITS_PER_OCTAVE // GAINS_PER_OCTAVE)).astype(np.int16)


def scale_units(scale: NDArray[np.floating]) -> NDArray[np.int16]:
    """Place on the scale axis of residuals whose mean magnitude is `scale` at step 1 (the middle of their class)."""
    octaves = np.log2(np.maximum(scale, 1e-30)) - LOWEST_OCTAVE
    return np.clip(np.rint(octaves * UNITS_PER_OCTAVE) + UNITS // 2, -(2**15), 2**15 - 1).astype(np.int16)


def scale_values(units: NDArray[np.integer]) -> NDArray[np.float64]:
    """The inverse of `scale_units`."""
    return np.exp2((units.astype(np.float64) - UNITS // 2) / UNITS_PER_OCTAVE + LOWEST_OCTAVE)


@njit(cache=True, nogil=True)
def quantise(residual: NDArray[np.float32], fineness: NDArray[np.float32], symbols: NDArray[np.int32]) -> float:
    """Quantise a block: symbols [tokens, coefs] int32 are written.

    residual [tokens, coefs] float32; fineness [tokens] float32: 1 / step of each token.
    Returns the sum of (error in steps)^2; infinity if a residual is beyond LARGEST_SYMBOL steps, or NaN.
    """
    tokens, coefs = residual.shape
    # a row and a sum for each coefficient: loops that compile to vector instructions, whatever the strides of symbols
    row, lost = np.empty(coefs, np.int32), np.zeros(coefs)
    for t in range(tokens):
        for j in range(coefs):
            row[j], error = quantised(residual[t, j], fineness[t])
            lost[j] = plus_product(lost[j], error, error)
        symbols[t] = row
    return lost.sum()


@njit(cache=True, nogil=True)
def dequantise(symbols: NDArray[np.int32], steps: NDArray[np.float32]) -> NDArray[np.float32]:
    """Residual [tokens, coefs] float32 of symbols [tokens, coefs]: each times its token's step, [tokens]."""
    out = np.empty(symbols.shape, np.float32)
    for t in range(symbols.shape[0]):
        for j in range(symbols.shape[1]):
            out[t, j] = dequantised(symbols[t, j], steps[t])
    return out
