"""Prediction that every machine computes to the bit: integers, in floats that hold them exactly.

Features are integers of at most 255, weights integers whose magnitudes add up to no more than float32 sums exactly: a
matrix product of these is the same whatever order it is summed in, so that any BLAS will do. Everything else is
products by powers of two, and sums in an order that is written down.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqkv.engine import exact_values
from seqkv.engine.cache import KVCache, Rope
from seqkv.engine.errors import ProfileError
from seqkv.engine.exact_values import LARGEST_FEATURE, LIMIT, TURN_BITS
from seqkv.engine.host import blocks_of
from seqkv.engine.layout import block_starts, block_widths
from seqkv.engine.profile import Profile

MEANS_PER_SCALE = 8
LARGEST_EXPONENT = 150  # of a channel's scale
_STEPS = 5  # features have 2 ** 5 steps to a channel's scale
_FINE = 14  # numbers in fixed point have 2 ** 14
_SUM = (1 << 24) / LARGEST_FEATURE  # what magnitudes of weights may add up to
_ROWS = 768  # of the token table, that its features are measured on
_SAMPLE = 64  # tokens that channels are measured on


def measured(kv: KVCache) -> NDArray[np.int16]:
    """Scale (as a power of two) and mean (in eighths of it) of each channel, [2, channels], on a sample of tokens."""
    some = np.linspace(0, kv.tokens - 1, min(kv.tokens, _SAMPLE)).astype(np.intp)
    part = KVCache.of_parts(
        [np.nan_to_num(k[:, some].astype(np.float32), posinf=0, neginf=0) for k in kv.keys],
        [np.nan_to_num(v[:, some].astype(np.float32), posinf=0, neginf=0) for v in kv.values],
        "float32",
        kv.positions[some],
        kv.rope,
        exact=True,
    )
    values, out = blocks_of(part, slice(None)), []
    for block in range(2 * kv.layers):
        with np.errstate(invalid="ignore", over="ignore"):
            x = np.nan_to_num(values(block).astype(np.float64), posinf=0, neginf=0)
            mean = np.median(x, axis=0)
            spread = np.sqrt(np.abs(x - mean)).mean(axis=0) ** 2 * 1.5  # as a deviation; a few tokens do not move it
            scale = np.rint(np.log2(np.maximum(np.maximum(spread, np.abs(mean) / 1024), 1e-40)))
        out.append([scale, np.rint(mean / np.exp2(scale) * MEANS_PER_SCALE)])
    return np.clip(np.concatenate(out, axis=1), [[-140], [-32768]], [[140], [32767]]).astype(np.int16)


Map = tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.float64]]
"""Of a block: weights [features, channels], integers; what their products are worth in fixed point; what the means of
the features add."""


class Model:
    """What blocks are predicted with. channels: as `measured` gives them; profile: None if there is none."""

    def __init__(
        self, shape: tuple[tuple[int, int, int], ...], channels: NDArray[np.int16], profile: Profile | None
    ) -> None:
        self.profile, self.widths = profile, block_widths(shape)
        self.starts = block_starts(self.widths)
        self.scale = channels[0].astype(np.int64)
        fine = np.empty(len(self.scale), np.int64)
        for block in range(len(self.widths)):
            here = self.columns(block)
            # keys that are turned are all in one unit
            fine[here] = (self.scale[here] if block % 2 else self.scale[here].max()) - _FINE
        self.fine = fine
        self.unit = power(fine)  # of the fixed point
        mean = channels[1] * power(self.scale) / MEANS_PER_SCALE
        self.mean = _integers(mean / self.unit)
        step = power(self.scale - _STEPS)  # of features
        self.to_steps = self.unit / step
        self.rank = 0 if profile is None else profile.table.shape[1]
        self.token_map, self.token_scale = np.zeros((0, len(mean)), np.float32), np.zeros(len(mean))
        if profile is not None and self.rank:
            self.token_map, self.token_scale = self._token_maps(profile)
        bias = mean if profile is None else profile.bias.astype(np.float64)
        self.maps = [self._map(b, step, mean) for b in range(len(self.widths))]
        offset = np.concatenate([m[2] for m in self.maps])
        self.bias = _integers((bias + offset) / self.unit)

    def columns(self, block: int) -> slice:
        return slice(int(self.starts[block]), int(self.starts[block + 1]))

    def sources(self, block: int) -> range:
        """The blocks that predict a block."""
        return range(block, block) if self.profile is None else self.profile.sources(block)

    def _map(self, block: int, step: NDArray[np.float64], mean: NDArray[np.float64]) -> Map:
        """From the blocks before."""
        some = self.sources(block)
        before = slice(int(self.starts[some.start]), int(self.starts[some.stop]))
        if self.profile is None or len(some) == 0:
            return _nothing(self.widths[block])
        unit, weights = self.unit[self.columns(block)], self.profile.maps[block][0]
        return self._integers(f"block {block}", weights, step[before], mean[before], unit)

    def _token_maps(self, profile: Profile) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """From tokens: weights of all blocks, side by side, and what their products are worth."""
        some = profile.table[:: max(1, len(profile.table) // _ROWS)].astype(np.float32)
        largest = np.abs(some).max(axis=0, initial=0)
        self.token_step = power(np.frexp(largest)[1] - 8)  # room for twice the largest of these rows
        return self._integers("all blocks", profile.token_map, self.token_step, np.zeros(self.rank), self.unit)[:2]

    def _integers(
        self,
        what: str,
        weights: NDArray[np.float32],
        step: NDArray[np.float64],
        mean: NDArray[np.float64],
        unit: NDArray[np.float64],
    ) -> Map:
        """Weights [features, channels] as integers."""
        count, width = weights.shape
        budget = _SUM - count / 2
        if budget < 1024:
            raise ProfileError(f"lossless: {count} features predict {what}, more than can be summed exactly")
        total, offset = np.zeros(width), np.zeros(width)
        sums(weights, step, mean, total, offset)
        exponent = np.frexp(total / budget)[1]
        out = np.empty(weights.shape, np.float32)
        integers(weights, step, power(-exponent), out)
        return out, power(exponent) / unit, offset

    def rows(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """What tokens are to the model: distinct rows of the token table as integers, and the row of each token.
        ProfileError if an id is outside the table."""
        if self.profile is None or self.rank == 0:
            return np.zeros((1, 0), np.float32), np.zeros(len(ids), np.int64)
        if int(ids.max()) >= len(self.profile.table):
            raise ProfileError(
                f"token id {int(ids.max())} is outside the profile's vocabulary of {len(self.profile.table)}"
            )
        distinct, index = np.unique(ids, return_inverse=True)
        rows = np.rint(self.profile.table[distinct] / self.token_step)
        rows = np.clip(rows, -LARGEST_FEATURE, LARGEST_FEATURE).astype(np.float32)
        return rows, index.reshape(-1).astype(np.int64)

    def of_tokens(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """What rows say of all blocks, [rows, channels]."""
        return rows @ self.token_map


class Window:
    """Features of the blocks that are still needed, side by side, [tokens, channels]."""

    def __init__(self, model: Model, tokens: int) -> None:
        self.model, self.end = model, 0
        self.places: dict[int, slice] = {}
        spans = [sum(model.widths[b] for b in (*model.sources(block), block)) for block in range(len(model.widths))]
        self.columns = np.empty((tokens, 0 if model.profile is None else 2 * max(spans)), np.float32)

    def expected(self, block: int) -> NDArray[np.float32]:
        """What the blocks before say of a block: products of integers, [tokens, channels]."""
        before = self.model.sources(block)
        start, stop = (self.places[before[0]].start, self.places[before[-1]].stop) if len(before) else (0, 0)
        return self.columns[:, start:stop] @ self.model.maps[block][0]

    def room(self, block: int) -> NDArray[np.float32]:
        """Where the features of the next block are to be written."""
        width, before = self.model.widths[block], self.model.sources(block)
        if self.end + width > self.columns.shape[1]:
            first = self.places[before[0]].start if len(before) else self.end
            self.columns[:, : self.end - first] = self.columns[:, first : self.end].copy()
            self.places = {b: slice(self.places[b].start - first, self.places[b].stop - first) for b in before}
            self.end -= first
        self.places[block] = slice(self.end, self.end + width)
        self.end += width
        return self.columns[:, self.places[block]]


class Angles:
    """Cosines and sines of tokens in fixed point, for every Rope that asks."""

    def __init__(self, positions: NDArray[np.int64]) -> None:
        self.positions = positions
        self._tables: dict[Rope, tuple[Any, ...]] = {}

    def turn(self, numbers: NDArray[np.int64], heads: int, rope: Rope, back: bool) -> None:
        """Turn keys [tokens, channels] in place, or turn them back."""
        if rope not in self._tables:
            angles = self.positions[:, None] * rope.inv_freq.astype(np.float64)
            tables: list[NDArray[np.int64]] = []
            for factor, direction in ((rope.scaling, 1), (1 / rope.scaling, -1)):
                factor = min(max(factor, 2.0**-6), 2.0**6) * (1 << TURN_BITS)
                tables += [np.rint(np.cos(angles) * factor), np.rint(np.sin(angles) * factor * direction)]
            first, second = (side.astype(np.int64) for side in rope.pairs())
            self._tables[rope] = first, second, *(table.astype(np.int64) for table in tables)
        first, second, *rest = self._tables[rope]
        exact_values.turn(numbers, heads, first, second, *(rest[2:] if back else rest[:2]))


def power(exponent: Any) -> Any:
    """2 ** exponent, exactly."""
    return np.ldexp(1.0, exponent)


def _nothing(width: int) -> Map:
    return np.zeros((0, width), np.float32), np.zeros(width), np.zeros(width)


def _integers(numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(np.clip(numbers, -LIMIT, LIMIT)).astype(np.int64)


@njit(cache=True, nogil=True)
def sums(
    weights: NDArray[np.float32],
    step: NDArray[np.float64],
    mean: NDArray[np.float64],
    total: NDArray[np.float64],
    offset: NDArray[np.float64],
) -> None:
    """Of weights [features, channels]: the magnitudes, times a feature's step, and what the features' means add up to,
    each in the order of features. [channels] both."""
    for f in range(weights.shape[0]):
        for c in range(weights.shape[1]):
            weight = np.float64(weights[f, c])
            total[c] += abs(weight) * step[f]  # a product by a power of two is exact: no order of rounding to agree on
    for f in range(weights.shape[0]):
        for c in range(weights.shape[1]):
            offset[c] += np.float64(weights[f, c]) * mean[f]  # exact too: 11 bits by 16


@njit(cache=True, nogil=True)
def integers(
    weights: NDArray[np.float32], step: NDArray[np.float64], scale: NDArray[np.float64], out: NDArray[np.float32]
) -> None:
    """weights [features, channels] * step [features] * scale [channels], rounded to integers."""
    for f in range(weights.shape[0]):
        for c in range(weights.shape[1]):
            out[f, c] = np.float32(np.rint(np.float64(weights[f, c]) * step[f] * scale[c]))
