"""Where decoded keys and values go: arrays made for them, or the caller's own, pages of a paged cache among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.engine.arrays import host_integers, on_device, place_of, shared
from seqkv.engine.errors import CacheError


@dataclass
class Target:
    """For each layer, keys and values as [blocks, kv_heads, block, width]: token t of what is decoded goes to slot
    slots[t], that is place slots[t] % block of block slots[t] // block.

    slots: [tokens] int64 in host memory. own: whether the arrays were made for this and have one block.
    """

    keys: list[Any]
    values: list[Any]
    slots: NDArray[np.int64]
    own: bool

    @classmethod
    def new(cls, shape: Sequence[tuple[int, int, int]], tokens: int, empty: Callable[[tuple[int, ...]], Any]) -> Target:
        """Arrays of their own, one block of all tokens. empty: makes an array of this shape."""
        keys = [empty((1, heads, tokens, width)) for heads, width, _ in shape]
        values = [empty((1, heads, tokens, width)) for heads, _, width in shape]
        return cls(keys, values, np.arange(tokens, dtype=np.int64), own=True)

    @classmethod
    def owned(
        cls, keys: Any, values: Any, slots: Any, shape: Sequence[tuple[int, int, int]], tokens: int
    ) -> tuple[Target, str]:
        """The caller's arrays, and the backend that they belong to. CacheError unless everything fits."""
        sides = [[shared(array, name) for array in given] for name, given in (("keys", keys), ("values", values))]
        if any(len(side) != len(shape) for side in sides):
            raise CacheError(f"{len(sides[0])} keys and {len(sides[1])} values were given for {len(shape)} layers")
        paged = slots is not None
        places = host_integers(slots, "slots") if paged else np.arange(tokens, dtype=np.int64)
        if places.shape != (tokens,) or len(np.unique(places)) != tokens or places.min() < 0:
            raise CacheError(f"slots: expected {tokens} different integers, not negative; got shape {places.shape}")
        for side, name in enumerate(("keys", "values")):
            for layer, (heads, *widths) in enumerate(shape):
                array = sides[side][layer]
                if array.ndim != (4 if paged else 3):
                    expected = "[blocks, kv_heads, block, width]" if paged else "[kv_heads, tokens, width]"
                    raise CacheError(f"{name} of layer {layer}: expected {expected}, got shape {array.shape}")
                whole = sides[side][layer] = array if paged else array[None]
                blocks, rows, block, width = whole.shape
                if (rows, width) != (heads, widths[side]):
                    raise CacheError(
                        f"{name} of layer {layer}: {rows} heads of {width}, the stream has {heads} of {widths[side]}"
                    )
                if (not paged and block != tokens) or places.max() >= blocks * block:
                    raise CacheError(f"{name} of layer {layer}: {tokens} tokens do not fit shape {array.shape}")
                if _overlaps_itself(whole):
                    raise CacheError(f"{name} of layer {layer}: several numbers of the array share memory")
        arrays = [array for side in sides for array in side]
        if len({_address(array) for array in arrays}) != len(arrays):
            raise CacheError("keys and values of all layers need arrays of their own: one was given twice")
        if len({place_of(array) for array in arrays}) != 1:
            raise CacheError("keys and values must all be in host memory, or all on the same device")
        return cls(sides[0], sides[1], places, own=False), "cuda" if on_device(sides[0][0]) else "cpu"

    def side(self, layer: int, is_value: int) -> Any:
        """The array of a layer's keys or values."""
        return (self.values if is_value else self.keys)[layer]


def _overlaps_itself(array: Any) -> bool:
    """Whether a step along an axis may end where the axes of smaller steps have been, as it does in what is broadcast;
    never so in an array without gaps, or a slice of one, in whatever order its axes are."""
    axes = sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True) if size > 1)
    reach = array.itemsize
    for stride, size in axes:
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def _address(array: Any) -> int:
    """Of the first number."""
    return int(array.data.ptr if on_device(array) else array.__array_interface__["data"][0])
