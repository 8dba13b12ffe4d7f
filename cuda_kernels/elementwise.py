"""What is done to each value of a cache on the device: Numba CUDA kernels around the steps of `scalar`, and launchers.

Launchers take CuPy arrays of any strides and any size from 0, check shapes and dtypes (ValueError), and run on the
current stream. They are fastest where the last axis is contiguous: there neighbouring threads are neighbours in memory.
A bfloat16 is given as the uint16 of its bits, since CuPy has no such type.

A thread has a place in the last axes and goes through the others: what depends on the place alone, above all the
division that finds it, is done once for many values. Inner loops go through views, from 0, by `while`: Numba's `range`,
and indices that might be negative, cost a GPU more instructions than the arithmetic. Threads write what no other thread
reads or writes, so kernels need no barriers; `finite` alone shares a flag.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from seqkv.cuda_kernels import device
from seqkv.cuda_kernels.scalar import (
    as_float32,
    bfloat16_bits,
    clipped_to_half,
    dequantised,
    from_bfloat16,
    is_finite,
    plus_product,
    quantised,
    rotated,
)

SLAB = 16  # rows that a thread goes through


@register_jitable
def slabs(rows: int) -> int:
    """How many slabs of SLAB rows there are; the last may be shorter."""
    return (rows + SLAB - 1) // SLAB


class Turn(NamedTuple):
    """The rotation of some tokens, as device arrays; for keys that are turned back, sin is negated.

    cos, sin: [tokens, pairs] float32, times the scaling of the rope, or divided by it to turn back.
    pair: [turned] int32: the pair that each of the leading channels of a head is of, a column of cos and sin.
    partner: [turned] int32: the other channel of its pair; the first channel of a pair has the larger partner.
    """

    cos: Any
    sin: Any
    pair: Any
    partner: Any

    @classmethod
    def of(cls, cos: Any, sin: Any, first: Any, second: Any) -> Turn:
        """From tables in host or device memory, and the channels of each pair, [pairs] host integers, first[i] <
        second[i], that together are 0, 1, 2, ..."""
        first, second = np.asarray(first), np.asarray(second)
        channels = np.concatenate([first, second])
        if not np.array_equal(np.sort(channels), np.arange(channels.size)) or (first >= second).any():
            raise ValueError("the channels of pairs must be 0, 1, 2, ..., each once, the first of a pair the smaller")
        pair, partner = np.empty(channels.size, np.int32), np.empty(channels.size, np.int32)
        pair[first] = pair[second] = np.arange(first.size)
        partner[first], partner[second] = second, first
        asarray = device.cupy().asarray
        return cls(asarray(cos), asarray(sin), asarray(pair), asarray(partner))

    @classmethod
    def none(cls, tokens: int) -> Turn:
        """Of tokens that are not turned."""
        empty = device.cupy().empty
        return cls(*(empty((tokens, 0), np.float32) for _ in "cs"), *(empty(0, np.int32) for _ in "pp"))


def accumulate(rows: Any, index: Any, weights: Any, bias: Any, out: Any) -> None:
    """Predicted-KV accumulation: out[t] = bias + sum over k of weights[t, k] * rows[index[t, k]], in float64, in order.

    rows [rows, width] float32; index [tokens, k] int32, each from 0 to rows - 1 (the caller answers for that); weights
    [tokens, k] float32; bias [width] float32; out [tokens, width] float32, written.
    """
    (tokens, k), width = index.shape, out.shape[-1]
    _check("rows", rows, np.float32, (len(rows), width))
    _check("index", index, np.int32, (tokens, k))
    _check("weights", weights, np.float32, (tokens, k))
    _check("bias", bias, np.float32, (width,))
    _check("out", out, np.float32, (tokens, width))
    device.launch(_accumulate, slabs(tokens) * width, rows, index, weights, bias, out)


def to_block(heads: Any, turn: Turn | None, out: Any) -> None:
    """[kv_heads, tokens, width] float32, float16 or uint16 -> out [tokens, kv_heads * width] float32, turned."""
    count, tokens, width = heads.shape
    _check("out", out, np.float32, (tokens, count * width))
    turn = _checked(turn, tokens, width)
    by_head = out.reshape(tokens, count, width)  # a view: an axis is only split
    device.launch(_of_dtype(_TO_BLOCK, "heads", heads), tokens * width, heads, *turn, by_head)


def to_heads(block: Any, turn: Turn | None, slots: Any, out: Any) -> None:
    """[tokens, kv_heads * width] float32 -> out [blocks, kv_heads, block, width], turned, rounded to out's dtype.

    out: float32; float16, to whose range values are clipped; or uint16, the nearest bfloat16. It may be the first or
        last columns of a wider array, as in a paged cache that holds keys and values side by side.
    slots: [tokens] int64, distinct: token t goes to out[slots[t] // block, :, slots[t] % block]; t itself if None. A
        token whose slot is outside `out` is written nowhere: memory stays safe, but whoever has slots in host memory
        should refuse those before.
    """
    blocks, count, size, width = out.shape
    tokens = len(block)
    _check("block", block, np.float32, (tokens, count * width))
    if slots is None:
        if tokens > blocks * size:
            raise ValueError(f"{tokens} tokens do not fit into {blocks} blocks of {size}")
        slots = device.cupy().empty(0, np.int64)
    else:
        _check("slots", slots, np.int64, (tokens,))
    turn = _checked(turn, tokens, width)
    by_head = block.reshape(tokens, count, width)
    device.launch(_of_dtype(_TO_HEADS, "out", out), tokens * width, by_head, *turn, slots, out)


def quantise(residual: Any, fineness: Any, symbols: Any, lost: Any) -> None:
    """Symbols of residuals, and what that loses.

    residual [coefs, columns] float32; fineness [columns] float32: 1 / step of each column; symbols [coefs, columns]
    int32, written; lost [slabs(coefs), columns] float32, written: the sum of (error in steps)^2 over the coefficients
    of a slab, infinity if a residual is beyond LARGEST_SYMBOL steps, or NaN.
    """
    coefs, columns = residual.shape
    _check("residual", residual, np.float32, (coefs, columns))
    _check("fineness", fineness, np.float32, (columns,))
    _check("symbols", symbols, np.int32, (coefs, columns))
    _check("lost", lost, np.float32, (slabs(coefs), columns))
    device.launch(_quantise, slabs(coefs) * columns, residual, fineness, symbols, lost)


def dequantise(symbols: Any, steps: Any, out: Any) -> None:
    """Residuals of symbols [coefs, columns] int32: each times its column's step, [columns] float32, into out [coefs,
    columns] float32."""
    coefs, columns = symbols.shape
    _check("symbols", symbols, np.int32, (coefs, columns))
    _check("steps", steps, np.float32, (columns,))
    _check("out", out, np.float32, (coefs, columns))
    device.launch(_dequantise, slabs(coefs) * columns, symbols, steps, out)


def energies(true: Any, decoded: Any, chunk: int, out: Any) -> None:
    """Squared errors, and squared values around their mean, of each channel in each chunk of `chunk` tokens.

    true, decoded [tokens, channels] float32; out [2, chunks, channels] float64, written: sums of (true - decoded)^2 and
    of (true - mean of the chunk)^2. The last chunk may be shorter.
    """
    tokens, channels = true.shape
    if chunk < 1:
        raise ValueError(f"a chunk has at least one token, not {chunk}")
    chunks = -(-tokens // chunk)
    _check("true", true, np.float32, (tokens, channels))
    _check("decoded", decoded, np.float32, (tokens, channels))
    _check("out", out, np.float64, (2, chunks, channels))
    device.launch(_energies, chunks * channels, true, decoded, np.int64(chunk), out)


def finite(heads: Any, found: Any) -> None:
    """Set found [1] int32 to 1 if heads [kv_heads, tokens, width] float32, float16 or uint16 has infinity or NaN; leave
    it as it is if not."""
    _check("found", found, np.int32, (1,))
    _, tokens, width = heads.shape
    device.launch(_of_dtype(_FINITE, "heads", heads), tokens * width, heads, found)


def _check(name: str, array: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name}: {np.dtype(dtype)} of shape {shape} is needed, not {array.dtype} of {array.shape}")


def _checked(turn: Turn | None, tokens: int, width: int) -> Turn:
    if turn is None:
        return Turn.none(tokens)
    turned = len(turn.pair)
    if turned > width:
        raise ValueError(f"{turned} channels are turned, heads have {width}")
    _check("cos", turn.cos, np.float32, (tokens, turned // 2))
    _check("sin", turn.sin, np.float32, (tokens, turned // 2))
    _check("pair", turn.pair, np.int32, (turned,))
    _check("partner", turn.partner, np.int32, (turned,))
    return turn


def _of_dtype(kernels: dict[str, Any], name: str, array: Any) -> Any:
    try:
        return kernels[array.dtype.name]
    except KeyError:
        raise ValueError(f"{name}: {', '.join(kernels)} is needed, not {array.dtype}") from None


@cuda.jit
def _accumulate(rows, index, weights, bias, out):
    tokens, width = out.shape
    for place in range(cuda.grid(1), slabs(tokens) * width, cuda.gridsize(1)):
        slab = place // width
        channel = place - slab * width
        source, to = rows[:, channel], out[slab * SLAB : (slab + 1) * SLAB, channel]
        i = 0
        while i < to.size:
            chosen, weight = index[slab * SLAB + i], weights[slab * SLAB + i]
            total = np.float64(bias[channel])
            k = 0
            while k < chosen.size:
                total = plus_product(total, weight[k], source[chosen[k]])
                k += 1
            to[i] = total
            i += 1


def _to_block(widened):
    """The kernel for heads of which `widened` makes float32."""

    @cuda.jit
    def kernel(heads, cos, sin, pair, partner, out):
        count, tokens, width = heads.shape
        for place in range(cuda.grid(1), tokens * width, cuda.gridsize(1)):
            token = place // width
            channel = place - token * width
            own, to = heads[:, token, channel], out[token, :, channel]
            if channel >= pair.size:
                head = 0
                while head < count:
                    to[head] = widened(own[head])
                    head += 1
            else:
                other = heads[:, token, partner[channel]]
                c, s = cos[token, pair[channel]], sin[token, pair[channel]]
                s = s if partner[channel] < channel else -s
                head = 0
                while head < count:
                    to[head] = rotated(widened(own[head]), widened(other[head]), c, s)
                    head += 1

    return kernel


def _to_heads(stored):
    """The kernel for heads of what `stored` makes of float32."""

    @cuda.jit
    def kernel(block, cos, sin, pair, partner, slots, out):
        blocks, count, size, width = out.shape
        for place in range(cuda.grid(1), block.shape[0] * width, cuda.gridsize(1)):
            token = place // width
            channel = place - token * width
            slot = slots[token] if slots.size > 0 else token
            if slot < 0 or slot >= blocks * size:
                continue
            page = slot // size
            own, to = block[token, :, channel], out[page, :, slot - page * size, channel]
            if channel >= pair.size:
                head = 0
                while head < count:
                    to[head] = stored(own[head])
                    head += 1
            else:
                other = block[token, :, partner[channel]]
                c, s = cos[token, pair[channel]], sin[token, pair[channel]]
                s = s if partner[channel] < channel else -s
                head = 0
                while head < count:
                    to[head] = stored(rotated(own[head], other[head], c, s))
                    head += 1

    return kernel


@cuda.jit
def _quantise(residual, fineness, symbols, lost):
    coefs, columns = residual.shape
    for place in range(cuda.grid(1), slabs(coefs) * columns, cuda.gridsize(1)):
        slab = place // columns
        column = place - slab * columns
        source = residual[slab * SLAB : (slab + 1) * SLAB, column]
        to = symbols[slab * SLAB : (slab + 1) * SLAB, column]
        fine = fineness[column]
        total = 0.0
        i = 0
        while i < source.size:
            to[i], error = quantised(source[i], fine)
            total = plus_product(total, error, error)
            i += 1
        lost[slab, column] = total


@cuda.jit
def _dequantise(symbols, steps, out):
    coefs, columns = symbols.shape
    for place in range(cuda.grid(1), slabs(coefs) * columns, cuda.gridsize(1)):
        slab = place // columns
        column = place - slab * columns
        source = symbols[slab * SLAB : (slab + 1) * SLAB, column]
        to = out[slab * SLAB : (slab + 1) * SLAB, column]
        step = steps[column]
        i = 0
        while i < source.size:
            to[i] = dequantised(source[i], step)
            i += 1


@cuda.jit
def _energies(true, decoded, chunk, out):
    channels = true.shape[1]
    for place in range(cuda.grid(1), out.shape[1] * channels, cuda.gridsize(1)):
        part = place // channels
        channel = place - part * channels
        values = true[part * chunk : (part + 1) * chunk, channel]
        guesses = decoded[part * chunk : (part + 1) * chunk, channel]
        total = error = energy = 0.0
        i = 0
        while i < values.size:
            total += np.float64(values[i])
            lost = np.float32(values[i] - guesses[i])
            error = plus_product(error, lost, lost)
            i += 1
        mean = np.float32(total / values.size)
        i = 0
        while i < values.size:
            around = np.float32(values[i] - mean)
            energy = plus_product(energy, around, around)
            i += 1
        out[0, part, channel] = error
        out[1, part, channel] = energy


def _finite(widened):
    """The kernel for heads of which `widened` makes float32."""

    @cuda.jit
    def kernel(heads, found):
        count, tokens, width = heads.shape
        for place in range(cuda.grid(1), tokens * width, cuda.gridsize(1)):
            token = place // width
            values = heads[:, token, place - token * width]
            fine = True
            head = 0
            while head < count:
                fine &= is_finite(widened(values[head]))
                head += 1
            if not fine:
                cuda.atomic.max(found, 0, 1)

    return kernel


_WIDENED = {"float32": as_float32, "float16": as_float32, "uint16": from_bfloat16}
_STORED = {"float32": as_float32, "float16": clipped_to_half, "uint16": bfloat16_bits}
_TO_BLOCK = {name: _to_block(widened) for name, widened in _WIDENED.items()}
_FINITE = {name: _finite(widened) for name, widened in _WIDENED.items()}
_TO_HEADS = {name: _to_heads(stored) for name, stored in _STORED.items()}
