"""Layout: heads of a cache [kv_heads, tokens, width] to the columns of a block [tokens, channels], and back.

Keys are turned on the way: out of their rotation for coding, into it for the cache. `Rope.undo` and `Rope.apply` are
the plain reference of the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqkv.cuda_kernels.scalar import rotated
from seqkv.engine.cache import Rope

_NOTHING = np.zeros((0, 0), np.float32), np.zeros((0, 0), np.float32)
_NO_PAIRS = np.zeros(0, np.intp), np.zeros(0, np.intp)


def block_widths(shape: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    """Channels of each block, of a cache of this KVCache.shape."""
    return tuple(heads * width for heads, *sides in shape for width in sides)


def block_starts(widths: tuple[int, ...]) -> NDArray[np.int32]:
    """First coefficient of each block, and their number: [blocks + 1]."""
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)


@dataclass
class Turns:
    """The rotation of some tokens, for every Rope that asks; angles are computed once for each."""

    positions: NDArray[np.int64]

    def __post_init__(self) -> None:
        self._tables: dict[Rope, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}

    def to_block(self, heads: NDArray[Any], rope: Rope | None) -> NDArray[np.float32]:
        """[kv_heads, tokens, width] -> [tokens, channels] float32, turned back if there is a rope."""
        out = np.empty((heads.shape[1], heads.shape[0] * heads.shape[2]), np.float32)
        cos, sin = self._angles(rope)
        first, second = _NO_PAIRS if rope is None else rope.pairs()
        factor = np.float32(1.0 if rope is None else 1.0 / rope.scaling)
        _to_block(heads.astype(np.float32, copy=False), cos * factor, sin * -factor, first, second, out)
        return out

    def to_heads(self, block: NDArray[np.float32], rope: Rope | None, heads: NDArray[Any]) -> None:
        """[tokens, channels] -> heads [kv_heads, tokens, width], written in place, turned if there is a rope."""
        cos, sin = self._angles(rope)
        first, second = _NO_PAIRS if rope is None else rope.pairs()
        factor = np.float32(1.0 if rope is None else rope.scaling)
        out = heads if heads.dtype == np.float32 else np.empty(heads.shape, np.float32)
        _to_heads(block, cos * factor, sin * factor, first, second, out)
        if out is not heads:
            heads[...] = np.clip(out, -_LARGEST_HALF, _LARGEST_HALF)

    def _angles(self, rope: Rope | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        if rope is None:
            return _NOTHING
        if rope not in self._tables:
            self._tables[rope] = rope.tables(self.positions)
        return self._tables[rope]


_LARGEST_HALF = float(np.finfo(np.float16).max)


@njit(cache=True, nogil=True)
def _to_block(
    heads: NDArray[np.float32],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    first: NDArray[np.intp],
    second: NDArray[np.intp],
    out: NDArray[np.float32],
) -> None:
    count, tokens, width = heads.shape
    for t in range(tokens):
        for h in range(count):
            for c in range(width):
                out[t, h * width + c] = heads[h, t, c]
            for i in range(first.size):
                a, b = heads[h, t, first[i]], heads[h, t, second[i]]
                out[t, h * width + first[i]] = rotated(a, b, cos[t, i], -sin[t, i])
                out[t, h * width + second[i]] = rotated(b, a, cos[t, i], sin[t, i])


@njit(cache=True, nogil=True)
def _to_heads(
    block: NDArray[np.float32],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    first: NDArray[np.intp],
    second: NDArray[np.intp],
    out: NDArray[np.float32],
) -> None:
    count, tokens, width = out.shape
    for t in range(tokens):
        for h in range(count):
            start = h * width
            for c in range(width):
                out[h, t, c] = block[t, start + c]
            for i in range(first.size):
                a, b = block[t, start + first[i]], block[t, start + second[i]]
                out[h, t, first[i]] = rotated(a, b, cos[t, i], -sin[t, i])
                out[h, t, second[i]] = rotated(b, a, cos[t, i], sin[t, i])
