"""Layout: heads of a cache [kv_heads, tokens, width] to the columns of a block [tokens, channels], and back.

Keys are turned on the way: out of their rotation for coding, into it for the cache. `Rope.undo` and `Rope.apply` are
the plain reference of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqkv.cuda_kernels.scalar import LARGEST_HALF, bfloat16_bits, rotated
from seqkv.engine.cache import KVCache, Rope


def block_widths(shape: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    """Channels of each block, of a cache of this KVCache.shape."""
    return tuple(heads * width for heads, *sides in shape for width in sides)


def block_starts(widths: tuple[int, ...]) -> NDArray[np.int32]:
    """First coefficient of each block, and their number: [blocks + 1]."""
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)


def blocks_of(kv: KVCache, tokens: slice, turns: Any) -> Callable[[int], Any]:
    """The blocks of some tokens of a cache: block -> [tokens, channels] float32, keys before rotation.

    turns: the rotation of these tokens, a Turns, or what does the same where the cache is.
    """

    def values(block: int) -> Any:
        layer, is_value = divmod(block, 2)
        if is_value:
            return turns.to_block(kv.values[layer][:, tokens], None)
        return turns.to_block(kv.keys[layer][:, tokens], kv.rope[layer])

    return values


@dataclass
class Turns:
    """The rotation of some tokens, for every Rope that asks; angles are computed once for each."""

    positions: NDArray[np.int64]

    def __post_init__(self) -> None:
        self._tables: dict[Rope, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}

    def to_block(self, heads: NDArray[Any], rope: Rope | None) -> NDArray[np.float32]:
        """[kv_heads, tokens, width] -> [tokens, channels] float32, turned back if there is a rope."""
        by_token = heads.astype(np.float32, copy=False).transpose(1, 0, 2)
        out = np.empty(by_token.shape, np.float32)
        factor = np.float32(1.0 if rope is None else 1.0 / rope.scaling)
        self._turn(by_token, rope, factor, -factor, out)
        return out.reshape(heads.shape[1], heads.shape[0] * heads.shape[2])

    def to_heads(
        self, block: NDArray[np.float32], rope: Rope | None, out: NDArray[Any], slots: NDArray[np.int64] | None = None
    ) -> None:
        """[tokens, channels] -> out [blocks, kv_heads, block, width], written in place, turned if there is a rope.

        out: float32; float16, to whose range values are clipped; or uint16, the bits of bfloat16. Any strides, so that
            it may be the first or last columns of a wider array. [kv_heads, tokens, width] is one block.
        slots: [tokens], distinct: token t goes to out[slots[t] // block, :, slots[t] % block]; t itself if not given.
            ValueError if one is outside `out`.
        """
        blocks = out if out.ndim == 4 else out[None]
        count, heads, size, width = blocks.shape
        by_token = block.reshape(len(block), heads, width)
        factor = np.float32(1.0 if rope is None else rope.scaling)
        if slots is None and out.dtype == np.float32 and count == 1 and len(block) <= size:
            self._turn(by_token, rope, factor, factor, blocks[0, :, : len(block)].transpose(1, 0, 2))
            return
        place = np.arange(len(block)) if slots is None else slots
        if place.shape != (len(block),) or ((place < 0) | (place >= count * size)).any():
            raise ValueError(f"a slot from 0 to {count * size - 1} is needed for each of {len(block)} tokens")
        turned = np.empty(by_token.shape, np.float32)
        self._turn(by_token, rope, factor, factor, turned)
        blocks[place // size, :, place % size] = _stored(turned, out.dtype)

    def _turn(
        self,
        source: NDArray[np.float32],
        rope: Rope | None,
        cos_factor: np.float32,
        sin_factor: np.float32,
        out: NDArray[np.float32],
    ) -> None:
        """[tokens, kv_heads, width] -> [tokens, kv_heads, width]."""
        if rope is None:
            out[...] = source
            return
        cos, sin = self.angles(rope)
        _turn(*_pairs(source, rope), cos * cos_factor, sin * sin_factor, *_pairs(out, rope))
        out[..., rope.rotary_dim :] = source[..., rope.rotary_dim :]

    def angles(self, rope: Rope) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosine and sine for each token and pair of channels, [tokens, rotary_dim / 2], without the scaling."""
        if rope not in self._tables:
            self._tables[rope] = rope.tables(self.positions)
        return self._tables[rope]


def _pairs(x: NDArray[np.float32], rope: Rope) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """First and second channels of the turned pairs, [..., pairs] each, as views."""
    count = rope.inv_freq.size
    if rope.layout == "half":
        return x[..., :count], x[..., count : 2 * count]
    return x[..., : 2 * count : 2], x[..., 1 : 2 * count : 2]


def _stored(values: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Rounded to what a cache holds."""
    if dtype == np.float32:
        return values
    if dtype == np.float16:
        return np.clip(values, -LARGEST_HALF, LARGEST_HALF).astype(np.float16)
    if dtype != np.uint16:
        raise ValueError(f"a cache holds float32, float16 or bfloat16 as uint16, not {dtype}")
    bits = np.empty(values.shape, np.uint16)
    _round_to_bfloat16(values.reshape(-1), bits.reshape(-1))
    return bits


@njit(cache=True, nogil=True)
def _turn(
    first: NDArray[np.float32],
    second: NDArray[np.float32],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    out_first: NDArray[np.float32],
    out_second: NDArray[np.float32],
) -> None:
    tokens, heads, pairs = first.shape
    for t in range(tokens):
        for h in range(heads):
            for i in range(pairs):
                a, b = first[t, h, i], second[t, h, i]
                out_first[t, h, i] = rotated(a, b, cos[t, i], -sin[t, i])
                out_second[t, h, i] = rotated(b, a, cos[t, i], sin[t, i])


@njit(cache=True, nogil=True)
def _round_to_bfloat16(values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    for i in range(values.size):
        out[i] = bfloat16_bits(values[i])
