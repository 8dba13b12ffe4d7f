"""The arithmetic of one value, the same on CPU and GPU bit for bit: what the loops of engine and the kernels share.

Numba for CUDA joins a * b + c into one rounding (FMA) wherever it can, and cannot be told not to; on a CPU it does not.
So nothing here depends on it: the product of two float32 is exact in float64, of 48 bits, and a sum of an exact product
is rounded once, joined or not. Every sum of products is a float64 sum of exact products of float32, rounded to float32
at its end. Whoever squares or multiplies a result further rounds it to float32 before.

The functions are plain Python on NumPy scalars, which Numba compiles into its callers, for either target.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

LARGEST_SYMBOL = 1 << 30
LARGEST_HALF = 65504.0  # of float16


@register_jitable
def plus_product(total: float, a: np.float32, b: np.float32) -> float:
    """total + a * b for a sum in float64."""
    return total + np.float64(a) * np.float64(b)


@register_jitable
def quantised(residual: np.float32, fineness: np.float32) -> tuple[np.int32, np.float32]:
    """The symbol of a residual: residual * fineness to the nearest integer, halves away from zero. And the error, in
    steps, |error| <= 1/2.

    What is beyond LARGEST_SYMBOL, or NaN, becomes a symbol of that size with an infinite error.
    """
    scaled = np.float64(residual) * np.float64(fineness)
    size = abs(scaled)
    inside = size < LARGEST_SYMBOL
    # choices without branches, so that loops over this compile to vector instructions; an integer of a float too large
    # for it is undefined. Of a product of 48 bits, size + 1/2 is exact wherever its rounding could change the integer
    magnitude = np.int32((size if inside else np.float64(LARGEST_SYMBOL)) + 0.5)
    symbol = magnitude if scaled > 0 else np.int32(-magnitude)
    return symbol, np.float32(scaled - symbol) if inside else np.float32(np.inf)


@register_jitable
def dequantised(symbol: np.int32, step: np.float32) -> np.float32:
    """The residual that a symbol stands for: their product in float64, rounded."""
    return np.float32(np.float64(symbol) * np.float64(step))


@register_jitable
def rotated(own: np.float32, other: np.float32, cos: np.float32, sin: np.float32) -> np.float32:
    """One channel of a turned pair: own * cos + other * sin. The first channel of a pair takes -sin, the second sin."""
    return np.float32(plus_product(np.float64(own) * np.float64(cos), other, sin))


@register_jitable
def as_float32(value: float) -> np.float32:
    """The float32 nearest to a float32 or float16: itself."""
    return np.float32(value)


@register_jitable
def bfloat16_bits(value: np.float32) -> np.uint16:
    """The bfloat16 nearest to a float32 (ties to even), as its 16 bits. NaN stays NaN."""
    bits = np.float32(value).view(np.uint32)
    if value != value:
        return np.uint16((bits >> 16) | 0x40)  # what is left of a NaN's digits must not be zero
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@register_jitable
def from_bfloat16(bits: np.uint16) -> np.float32:
    """The value of a bfloat16 given as its 16 bits."""
    return np.uint32(np.uint32(bits) << 16).view(np.float32)


@register_jitable
def clipped_to_half(value: np.float32) -> np.float32:
    """A float32 that converting to float16 does not make infinite. NaN stays NaN."""
    if value > LARGEST_HALF:
        return np.float32(LARGEST_HALF)
    return np.float32(-LARGEST_HALF if value < -LARGEST_HALF else value)


@register_jitable
def is_finite(value: np.float32) -> bool:
    """Whether a value is neither infinite nor NaN."""
    return abs(value) < np.inf
