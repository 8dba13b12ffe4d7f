"""Numbers of a float format, bit for bit: what is predicted of them, and what is not.

A channel has a grid: the multiples of 2 ** grid. A number's sign and its magnitude, rounded down to the grid, are its
*cell*: cell m >= 0 holds positive numbers from m * 2 ** grid up, cell -1 - m the negative ones. The symbol that is
coded is the cell, less the cell that was predicted. The bits of the number below its cell are noise: they are stored as
they are.

    magnitude at least 2 ** grid    the bits of the mantissa below the grid, if there are any
    below it                        how many octaves below, in unary, a 0 behind; from FAR octaves on FAR ones and the
                                    exponent; in front of the mantissa

Bits are stored lowest first in 32-bit words. Everything that both sides compute is an integer, or a product of floats
by a power of two, which is exact: all machines agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

FAR = 12
LIMIT = float(1 << 29)  # of cells and of numbers in fixed point
LARGEST_FEATURE = 1023.0
TURN_BITS = 14  # of cosines and sines in fixed point


@dataclass(frozen=True)
class Format:
    """A float format of `exponent` and `mantissa` bits; bits: unsigned integers that hold it."""

    exponent: int
    mantissa: int
    bits: Any

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def most(self) -> int:
        """Bits that a number below its grid may take."""
        return FAR + self.exponent + self.mantissa

    def stored(self, values: NDArray[Any]) -> NDArray[np.uint32]:
        """The bits of numbers as a KVCache holds them in host memory."""
        if self.bits is np.uint16 and values.dtype == np.float32:  # bfloat16
            return values.view(np.uint32) >> np.uint32(16)
        return values.view(self.bits).astype(np.uint32)

    def values(self, bits: NDArray[np.uint32]) -> NDArray[Any]:
        """As a KVCache holds them in host memory."""
        if self.exponent == 8:
            return (bits << np.uint32(23 - self.mantissa)).view(np.float32)
        return bits.astype(np.uint16).view(np.float16)


FORMATS = {
    "float32": Format(8, 23, np.uint32),
    "float16": Format(5, 10, np.uint16),
    "bfloat16": Format(8, 7, np.uint16),
}


@njit(cache=True, nogil=True)
def rounded(x: float) -> int:
    """A number to the nearest integer within LIMIT; NaN is 0."""
    x = x if x == x else 0.0
    return np.int32(math.floor(min(max(x, -LIMIT), LIMIT) + 0.5))


@njit(cache=True, nogil=True)
def guessed(predicted: int, to_cells: float) -> int:
    """The cell of a prediction in fixed point."""
    return np.int32(math.floor(min(max(np.float64(predicted) * to_cells, -LIMIT), LIMIT)))


@njit(cache=True, nogil=True)
def fixed(values: NDArray[np.float32], scale: NDArray[np.float64], out: NDArray[np.int32]) -> None:
    """values [tokens, channels] * scale [channels], rounded, within LIMIT; NaN as 0."""
    for t in range(values.shape[0]):
        for c in range(values.shape[1]):
            out[t, c] = rounded(np.float64(values[t, c]) * scale[c])


@njit(cache=True, nogil=True)
def turn(
    numbers: NDArray[np.int32], heads: int, first: NDArray[np.int64], second: NDArray[np.int64], cos: Any, sin: Any
) -> None:
    """Turn channels first[i] and second[i] of every head of numbers [tokens, channels], in place; cos, sin
    [tokens, pairs] float64 that hold integers, in fixed point. Nothing exceeds 2 ** 53: it is exact."""
    width = numbers.shape[1] // heads
    for t in range(numbers.shape[0]):
        for h in range(heads):
            head = numbers[t, h * width : (h + 1) * width]
            for i in range(first.size):
                a, b = np.float64(head[first[i]]), np.float64(head[second[i]])
                x, y = a * cos[t, i] - b * sin[t, i], b * cos[t, i] + a * sin[t, i]
                head[first[i]] = np.int32(math.floor(min(max(x * 0.5**TURN_BITS, -LIMIT), LIMIT)))
                head[second[i]] = np.int32(math.floor(min(max(y * 0.5**TURN_BITS, -LIMIT), LIMIT)))


@njit(cache=True, nogil=True)
def features(
    numbers: NDArray[np.int32],
    mean: NDArray[np.int32],
    scale: NDArray[np.float64],
    out: NDArray[np.int16],
    start: int,
) -> None:
    """Numbers less their mean, in steps that 1,023 of are enough, in the channels of `out` from `start` on."""
    for t in range(numbers.shape[0]):
        row = out[t, start : start + numbers.shape[1]]
        for c in range(numbers.shape[1]):
            x = (np.float64(numbers[t, c]) - np.float64(mean[c])) * scale[c]
            row[c] = np.int16(math.floor(min(max(x, -LARGEST_FEATURE), LARGEST_FEATURE) + 0.5))


@njit(cache=True, nogil=True)
def expected(
    of_tokens: NDArray[np.int32],
    index: NDArray[np.int64],
    token_scale: NDArray[np.float64],
    of_blocks: NDArray[np.int32],
    block_scale: NDArray[np.float64],
    bias: NDArray[np.int32],
    out: NDArray[np.int32],
) -> None:
    """What a block is expected to hold, in fixed point [tokens, channels]: the sum of what the tokens say,
    of_tokens[index] * token_scale, of what other blocks say, of_blocks * block_scale, and of the bias."""
    for t in range(out.shape[0]):
        row = of_tokens[index[t]]
        for c in range(out.shape[1]):
            x, y = np.float64(row[c]) * token_scale[c], np.float64(of_blocks[t, c]) * block_scale[c]
            x = math.floor(min(max(x, -LIMIT), LIMIT) + 0.5)
            y = math.floor(min(max(y, -LIMIT), LIMIT) + 0.5)
            out[t, c] = np.int32(min(max(x + y + np.float64(bias[c]), -LIMIT), LIMIT))


@njit(cache=True, nogil=True)
def errors(
    values: NDArray[np.float32],
    predicted: NDArray[np.int32],
    unit: NDArray[np.float64],
    step: int,
    spread: NDArray[np.float64],
    size: NDArray[np.float64],
) -> None:
    """Of each channel, summed over every step-th token: the root of how far numbers are from what was expected, and of
    themselves. unit [channels]: of the fixed point. Numbers that are none, or enormous, do not count."""
    for t in range(0, values.shape[0], step):
        for c in range(values.shape[1]):
            x = np.float64(values[t, c])
            fine = abs(x) < 3e38
            spread[c] += math.sqrt(abs(x - np.float64(predicted[t, c]) * unit[c])) if fine else 0.0
            size[c] += math.sqrt(abs(x)) if fine else 0.0


@njit(cache=True, nogil=True)
def split(
    bits: NDArray[np.uint32],
    values: NDArray[np.float32],
    predicted: NDArray[np.int32],
    to_cells: NDArray[np.float64],
    scale: NDArray[np.float64],
    grid: NDArray[np.int64],
    form: tuple[int, int, int],
    symbols: NDArray[np.int32],
    start: int,
    words: NDArray[np.uint32],
    strange: NDArray[np.int64],
) -> tuple[int, int]:
    """The bits below and the symbols of a block; these into symbols [tokens, ...], its channels from `start` on.

    predicted: in fixed point; to_cells [channels]: from there to cells. grid [channels]: exponents; scale [channels]:
    2 ** -grid. form: bits of the exponent and of the mantissa, bias. strange: receives the places (token * channels +
    channel) of numbers that have no cell, coded as 0. Returns how many words and how many strange numbers there are.
    """
    exponent_bits, mantissa_bits, bias = form
    width = bits.shape[1]
    sign_shift, mantissa_mask = np.int32(exponent_bits + mantissa_bits), np.int32((1 << mantissa_bits) - 1)
    exponent_mask, most = np.int32((1 << exponent_bits) - 1), np.int32(mantissa_bits)
    lowest = (grid + bias).astype(np.int32)  # exponent of the first cell
    low, length = np.empty(width, np.int32), np.empty(width, np.int32)
    held, count, used, odd = np.uint64(0), np.int64(0), 0, 0
    for t in range(bits.shape[0]):
        row = symbols[t, start : start + width]
        for c in range(width):
            whole, magnitude = np.int32(bits[t, c]), abs(np.float64(values[t, c])) * scale[c]
            fine = magnitude < LIMIT
            whole = whole if fine else np.int32(0)
            cell = np.int32(magnitude if fine else 0.0)
            guess = guessed(predicted[t, c], to_cells[c])
            above = np.int32((whole >> most & exponent_mask) - lowest[c])
            below = min(max(np.int32(most - above), np.int32(0)), most)
            low[c] = whole & np.int32((np.int32(1) << below) - np.int32(1))
            length[c] = below if above >= 0 else np.int32(-1)
            row[c] = np.int32((cell ^ np.int32(-(whole >> sign_shift & 1))) - guess)
        for c in range(width):
            some, piece = np.int64(length[c]), np.int64(low[c])
            if some < 0:  # below the first cell, or without a cell
                whole = np.int64(bits[t, c])
                if not abs(np.float64(values[t, c])) * scale[c] < LIMIT:
                    strange[odd] = t * width + c
                    odd += 1
                    whole = np.int64(0)
                exponent, piece = whole >> mantissa_bits & exponent_mask, whole & mantissa_mask
                ones = lowest[c] - 1 - exponent
                if ones < FAR:
                    piece = piece << (ones + 1) | (np.int64(1) << ones) - 1
                    some = ones + 1 + mantissa_bits
                else:
                    piece = (piece << exponent_bits | exponent) << FAR | (np.int64(1) << FAR) - 1
                    some = FAR + exponent_bits + mantissa_bits
                if some > 32:
                    held |= np.uint64(piece & 0xFFFF) << np.uint64(count)
                    count += 16
                    piece >>= 16
                    some -= 16
                    if count >= 32:
                        words[used] = np.uint32(held & np.uint64(0xFFFFFFFF))
                        held >>= np.uint64(32)
                        count -= 32
                        used += 1
            held |= np.uint64(piece) << np.uint64(count)
            count += some
            if count >= 32:
                words[used] = np.uint32(held & np.uint64(0xFFFFFFFF))
                held >>= np.uint64(32)
                count -= 32
                used += 1
    if count:
        words[used] = np.uint32(held)
        used += 1
    return used, odd


@njit(cache=True, nogil=True)
def joined(
    symbols: NDArray[np.int32],
    start: int,
    predicted: NDArray[np.int32],
    to_cells: NDArray[np.float64],
    grid: NDArray[np.int64],
    form: tuple[int, int, int],
    words: NDArray[np.uint32],
    bits: NDArray[np.uint32],
) -> bool:
    """The inverse of `split`: writes bits [tokens, channels]. Returns whether there were as many words as needed."""
    exponent_bits, mantissa_bits, bias = form
    width = bits.shape[1]
    sign_shift, mantissa_mask = np.int32(exponent_bits + mantissa_bits), np.int32((1 << mantissa_bits) - 1)
    exponent_mask, most = np.int32((1 << exponent_bits) - 1), np.int32(mantissa_bits)
    lowest = (grid + bias).astype(np.int32)
    length = np.empty(width, np.int32)
    held, count, used = np.uint64(0), np.int64(0), 0
    for t in range(bits.shape[0]):
        row, out = symbols[t, start : start + width], bits[t]
        for c in range(width):
            guess = guessed(predicted[t, c], to_cells[c])
            cell = np.int32(row[c] + guess)
            sign = np.int32(cell >> 31)
            cell ^= sign
            above = np.int32((np.float64(cell).view(np.int64) >> 52) - 1023)  # floor of log2, if there is one
            length[c] = max(np.int32(most - above), np.int32(0)) if cell else np.int32(-1)
            above = max(above, np.int32(0))
            top = np.int32(cell - (np.int32(1) << above))
            left, right = max(np.int32(most - above), np.int32(0)), max(np.int32(above - most), np.int32(0))
            mantissa = np.int32(np.int32(top << left) >> right) & mantissa_mask
            exponent = np.int32(lowest[c] + above) & exponent_mask
            out[c] = np.uint32(np.int32(np.int32(sign & 1) << sign_shift) | np.int32(exponent << most) | mantissa)
        for c in range(width):
            if count < 32:
                if used < words.size:
                    held |= np.uint64(words[used]) << np.uint64(count)
                used += 1
                count += 32
            some = np.int64(length[c])
            if some >= 0:
                out[c] |= np.uint32(held & ((np.uint64(1) << np.uint64(some)) - np.uint64(1)))
                held >>= np.uint64(some)
                count -= some
                continue
            ones = np.int64(0)
            while ones < FAR and held >> np.uint64(ones) & np.uint64(1):
                ones += 1
            some = min(ones + 1, FAR)
            held >>= np.uint64(some)
            count -= some
            exponent = np.int64(lowest[c]) - 1 - ones
            some = mantissa_bits if ones < FAR else mantissa_bits + exponent_bits
            if count < 32:
                if used < words.size:
                    held |= np.uint64(words[used]) << np.uint64(count)
                used += 1
                count += 32
            mantissa = np.int64(held & ((np.uint64(1) << np.uint64(some)) - np.uint64(1)))
            held >>= np.uint64(some)
            count -= some
            if ones == FAR:
                exponent, mantissa = mantissa & exponent_mask, mantissa >> exponent_bits
            sign = np.int32(row[c] + guessed(predicted[t, c], to_cells[c])) < 0
            whole = np.int64(sign) << sign_shift | (exponent & exponent_mask) << mantissa_bits | mantissa
            out[c] = np.uint32(whole & ((np.int64(1) << (sign_shift + 1)) - 1))
    return used - count // 32 == words.size
