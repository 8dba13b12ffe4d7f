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
LARGEST_FEATURE = 255.0
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
def fixed(values: NDArray[np.float32], scale: NDArray[np.float64], out: NDArray[np.int64]) -> None:
    """values [tokens, channels] * scale [channels], rounded, within LIMIT; NaN as 0."""
    for t in range(values.shape[0]):
        for c in range(values.shape[1]):
            x = np.float64(values[t, c]) * scale[c]
            x = x if x == x else 0.0
            out[t, c] = np.int64(math.floor(min(max(x, -LIMIT), LIMIT) + 0.5))


@njit(cache=True, nogil=True)
def turn(
    numbers: NDArray[np.int64], heads: int, first: NDArray[np.int64], second: NDArray[np.int64], cos: Any, sin: Any
) -> None:
    """Turn channels first[i] and second[i] of every head of numbers [tokens, channels], in place; cos, sin
    [tokens, pairs] int64 in fixed point."""
    width = numbers.shape[1] // heads
    for t in range(numbers.shape[0]):
        for h in range(heads):
            for i in range(first.size):
                a, b = numbers[t, h * width + first[i]], numbers[t, h * width + second[i]]
                numbers[t, h * width + first[i]] = (a * cos[t, i] - b * sin[t, i]) >> TURN_BITS
                numbers[t, h * width + second[i]] = (b * cos[t, i] + a * sin[t, i]) >> TURN_BITS


@njit(cache=True, nogil=True)
def features(
    numbers: NDArray[np.int64], mean: NDArray[np.int64], scale: NDArray[np.float64], out: NDArray[np.float32]
) -> None:
    """Numbers less their mean, in steps that 255 of are enough: integers, [tokens, channels]."""
    for t in range(numbers.shape[0]):
        for c in range(numbers.shape[1]):
            x = np.float64(numbers[t, c] - mean[c]) * scale[c]
            x = math.floor(min(max(x, -LARGEST_FEATURE), LARGEST_FEATURE) + 0.5)
            out[t, c] = np.float32(x)


@njit(cache=True, nogil=True)
def expected(
    of_tokens: NDArray[np.float32],
    index: NDArray[np.int64],
    token_scale: NDArray[np.float64],
    of_blocks: NDArray[np.float32],
    block_scale: NDArray[np.float64],
    bias: NDArray[np.int64],
    out: NDArray[np.int64],
) -> None:
    """What a block is expected to hold, in fixed point [tokens, channels]: the sum of what the tokens say,
    of_tokens[index] * token_scale, of what other blocks say, of_blocks * block_scale, and of the bias."""
    for t in range(out.shape[0]):
        row = index[t]
        for c in range(out.shape[1]):
            x = np.float64(of_tokens[row, c]) * token_scale[c]
            y = np.float64(of_blocks[t, c]) * block_scale[c]
            x = math.floor(min(max(x, -LIMIT), LIMIT) + 0.5)
            y = math.floor(min(max(y, -LIMIT), LIMIT) + 0.5)
            z = np.int64(x) + np.int64(y) + bias[c]
            out[t, c] = min(max(z, -np.int64(LIMIT)), np.int64(LIMIT))


@njit(cache=True, nogil=True)
def errors(
    values: NDArray[np.float32],
    predicted: NDArray[np.int64],
    unit: NDArray[np.float64],
    spread: NDArray[np.float64],
    size: NDArray[np.float64],
) -> None:
    """Of each channel, summed over tokens: the root of how far numbers are from what was expected, and of themselves.
    unit [channels]: of the fixed point. Numbers that are none, or enormous, do not count."""
    for t in range(values.shape[0]):
        for c in range(values.shape[1]):
            x = np.float64(values[t, c])
            if abs(x) < 3e38:
                spread[c] += math.sqrt(abs(x - np.float64(predicted[t, c]) * unit[c]))
                size[c] += math.sqrt(abs(x))


@njit(cache=True, nogil=True)
def split(
    bits: NDArray[np.uint32],
    values: NDArray[np.float32],
    predicted: NDArray[np.int64],
    to_cells: NDArray[np.float64],
    scale: NDArray[np.float64],
    grid: NDArray[np.int64],
    form: tuple[int, int, int],
    symbols: NDArray[np.int32],
    words: NDArray[np.uint32],
    strange: NDArray[np.int64],
) -> tuple[int, int]:
    """Symbols [tokens, channels] and the bits below, of a block.

    predicted: in fixed point; to_cells [channels]: from there to cells. grid [channels]: exponents; scale [channels]:
    2 ** -grid. form: bits of the exponent and of the mantissa, bias. strange: receives the places (token * channels +
    channel) of numbers that have no cell, coded as 0. Returns how many words and how many strange numbers there are.
    """
    exponent_bits, mantissa_bits, bias = form
    sign_shift = exponent_bits + mantissa_bits
    exponent_mask, mantissa_mask = (1 << exponent_bits) - 1, (1 << mantissa_bits) - 1
    held, count, used, odd = np.uint64(0), np.int64(0), 0, 0
    for t in range(bits.shape[0]):
        for c in range(bits.shape[1]):
            whole, magnitude = np.int64(bits[t, c]), abs(np.float64(values[t, c])) * scale[c]
            if not magnitude < LIMIT:
                strange[odd] = t * bits.shape[1] + c
                odd += 1
                whole, magnitude = np.int64(0), 0.0
            cell = np.int64(magnitude)
            low, exponent = whole & mantissa_mask, whole >> mantissa_bits & exponent_mask
            above = exponent - (grid[c] + bias)
            if above >= 0:
                length = max(mantissa_bits - above, 0)
                low &= (np.int64(1) << length) - 1
            else:
                ones = -1 - above
                if ones < FAR:
                    low = low << (ones + 1) | (np.int64(1) << ones) - 1
                    length = ones + 1 + mantissa_bits
                else:
                    low = (low << exponent_bits | exponent) << FAR | (np.int64(1) << FAR) - 1
                    length = FAR + exponent_bits + mantissa_bits
            if whole >> sign_shift & 1:
                cell = -1 - cell
            guess = math.floor(min(max(np.float64(predicted[t, c]) * to_cells[c], -LIMIT), LIMIT))
            symbols[t, c] = np.int32(cell - np.int64(guess))
            if length > 32:
                held |= np.uint64(low & 0xFFFF) << np.uint64(count)
                count += 16
                low >>= 16
                length -= 16
                if count >= 32:
                    words[used] = np.uint32(held & np.uint64(0xFFFFFFFF))
                    held >>= np.uint64(32)
                    count -= 32
                    used += 1
            held |= np.uint64(low) << np.uint64(count)
            count += length
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
    predicted: NDArray[np.int64],
    to_cells: NDArray[np.float64],
    grid: NDArray[np.int64],
    form: tuple[int, int, int],
    words: NDArray[np.uint32],
    bits: NDArray[np.uint32],
) -> bool:
    """The inverse of `split`: writes bits [tokens, channels]. Returns whether there were as many words as needed."""
    exponent_bits, mantissa_bits, bias = form
    sign_shift = exponent_bits + mantissa_bits
    exponent_mask, mantissa_mask = (1 << exponent_bits) - 1, (1 << mantissa_bits) - 1
    held, count, used = np.uint64(0), np.int64(0), 0
    for t in range(bits.shape[0]):
        for c in range(bits.shape[1]):
            if count < 32:
                if used < words.size:
                    held |= np.uint64(words[used]) << np.uint64(count)
                used += 1
                count += 32
            guess = math.floor(min(max(np.float64(predicted[t, c]) * to_cells[c], -LIMIT), LIMIT))
            cell = np.int64(symbols[t, c]) + np.int64(guess)
            sign = np.int64(0)
            if cell < 0:
                sign, cell = np.int64(1), -1 - cell
            if cell:
                above = (np.float64(cell).view(np.int64) >> 52) - 1023  # floor of log2
                exponent = grid[c] + bias + above
                top = cell - (np.int64(1) << above)
                length = max(mantissa_bits - above, 0)
                low = np.int64(held & ((np.uint64(1) << np.uint64(length)) - np.uint64(1)))
                mantissa = top << length | low if above <= mantissa_bits else top >> (above - mantissa_bits)
                held >>= np.uint64(length)
                count -= length
            else:
                ones = np.int64(0)
                while ones < FAR and held >> np.uint64(ones) & np.uint64(1):
                    ones += 1
                length = min(ones + 1, FAR)
                held >>= np.uint64(length)
                count -= length
                exponent = grid[c] + bias - 1 - ones
                length = mantissa_bits if ones < FAR else mantissa_bits + exponent_bits
                if count < 32:
                    if used < words.size:
                        held |= np.uint64(words[used]) << np.uint64(count)
                    used += 1
                    count += 32
                low = np.int64(held & ((np.uint64(1) << np.uint64(length)) - np.uint64(1)))
                held >>= np.uint64(length)
                count -= length
                mantissa = low
                if ones == FAR:
                    exponent, mantissa = low & exponent_mask, low >> exponent_bits
            whole = sign << sign_shift | (exponent & exponent_mask) << mantissa_bits | mantissa & mantissa_mask
            bits[t, c] = np.uint32(whole)
    return used - count // 32 == words.size
