"""Matrix products of 16-bit integers, summed in 32 bits: exact, on the thread that asks for them.

BLAS knows none. A tile of 4 tokens and 4 channels is written in LLVM's own language: products of vectors, neighbours
added, which becomes one instruction where a processor has one (vpdpwssd, vpmaddwd), and is right everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

TILE = 4  # tokens and channels come in multiples of this,
STEP = 16  # features of this


def padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@intrinsic
def _tile(_: Any, features: Any, row: Any, weights: Any, column: Any, count: Any, out: Any, out_row: Any) -> Any:
    """Addresses of a tile's first feature, weight and sum, and bytes from one row of them to the next; count: features,
    at least 1."""
    i16, i32, i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
    sums, factors = ir.VectorType(i32, STEP // 2), ir.VectorType(i16, STEP)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        features, row, weights, column, count, out, out_row = args
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        end = builder.mul(count, i64(i16.width // 8))
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(i64)
        at.add_incoming(i64(0), before)
        totals = [[builder.phi(sums) for _ in range(TILE)] for _ in range(TILE)]

        def load(start: Any, pitch: Any, i: int) -> Any:
            place = builder.add(builder.add(start, builder.mul(pitch, i64(i))), at)
            vector = builder.load(builder.inttoptr(place, factors.as_pointer()), align=2)
            return builder.sext(vector, ir.VectorType(i32, STEP))

        x, y = ([load(*matrix, i) for i in range(TILE)] for matrix in ((features, row), (weights, column)))
        even, odd = (ir.Constant(sums, list(range(first, STEP, 2))) for first in (0, 1))
        following = builder.add(at, i64(STEP * i16.width // 8))
        at.add_incoming(following, loop)
        for i, line in enumerate(totals):
            for j, total in enumerate(line):
                product = builder.mul(x[i], y[j])
                pairs = builder.add(*(builder.shuffle_vector(product, product, side) for side in (even, odd)))
                total.add_incoming(ir.Constant(sums, [0] * sums.count), before)
                total.add_incoming(builder.add(total, pairs), loop)
        builder.cbranch(builder.icmp_signed("<", following, end), loop, after)
        builder.position_at_end(after)
        name = f"llvm.vector.reduce.add.v{sums.count}i32"
        reduce = builder.module.declare_intrinsic(name, (), ir.FunctionType(i32, [sums]))
        for i, line in enumerate(totals):
            for j, total in enumerate(line):
                place = builder.add(builder.add(out, builder.mul(out_row, i64(i))), i64(j * i32.width // 8))
                last = total.incomings[1][0]
                builder.store(builder.call(reduce, [last]), builder.inttoptr(place, i32.as_pointer()))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7), generate


@njit(cache=True, nogil=True)
def product(features: NDArray[np.int16], start: int, weights: NDArray[np.int16], out: NDArray[np.int32]) -> None:
    """out [tokens, channels] = features [tokens, start : start + count] @ weights [channels, count].T.

    All arrays are contiguous; tokens and channels multiples of TILE, count of STEP. Sums must not exceed 32 bits.
    ValueError for other arrays: nothing else keeps a tile from what lies around them, as it works on addresses.
    """
    (tokens, columns), (channels, count) = features.shape, weights.shape
    if start < 0 or start + count > columns or out.shape != (tokens, channels):
        raise ValueError("the matrices do not fit each other")
    if tokens % TILE or channels % TILE or count % STEP:
        raise ValueError("the matrices are not padded")
    if (features.itemsize, weights.itemsize, out.itemsize) != (2, 2, 4):
        raise ValueError("the matrices are not of 16 and 32 bits")
    if not (features.flags.c_contiguous and weights.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError("the matrices are not contiguous")
    if count == 0:
        out[:] = 0
        return
    row, column, out_row = features.strides[0], weights.strides[0], out.strides[0]
    for t in range(0, tokens, TILE):
        x = features.ctypes.data + t * row + start * features.itemsize
        for n in range(0, channels, TILE):
            y, to = weights.ctypes.data + n * column, out.ctypes.data + t * out_row + n * out.itemsize
            _tile(x, row, y, column, count, to, out_row)  # type: ignore[call-arg] # Numba gives the first
