"""What blocks are predicted with so that every machine computes the same: integers.

Features are integers of at most 1,023, weights integers of 16 bits, and their products add up to 32 bits. Everything
else is products by powers of two, and sums in an order that is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqkv.engine.cache import KVCache
from seqkv.engine.errors import ProfileError
from seqkv.engine.exact_products import STEP, TILE, padded
from seqkv.engine.exact_values import LARGEST_FEATURE, LIMIT
from seqkv.engine.host import blocks_of
from seqkv.engine.layout import block_starts, block_widths
from seqkv.engine.profile import Profile

MEANS_PER_SCALE = 8
LARGEST_EXPONENT = 150  # of a channel's scale
_STEPS = 6  # features have 2 ** 6 steps to a channel's scale
_FINE = 14  # numbers in fixed point have 2 ** 14
_SUM = ((1 << 31) - 1) // LARGEST_FEATURE  # what magnitudes of weights may add up to,
_LARGEST = (1 << 15) - 1  # and how large one may be
_ROWS = 768  # of the token table, that its features are measured on
_SAMPLE = 64  # tokens that channels are measured on


Each = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]
"""Does something for each block, as `map` does, or a pool's."""


def measured(kv: KVCache, each: Each = map) -> NDArray[np.int16]:
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
    values = blocks_of(part, slice(None))

    def one(block: int) -> list[NDArray[np.float64]]:
        with np.errstate(invalid="ignore", over="ignore"):
            x = np.nan_to_num(values(block).astype(np.float64), posinf=0, neginf=0)
            mean = np.median(x, axis=0)
            spread = np.sqrt(np.abs(x - mean)).mean(axis=0) ** 2 * 1.5  # as a deviation; a few tokens do not move it
            scale = np.rint(np.log2(np.maximum(np.maximum(spread, np.abs(mean) / 1024), 1e-40)))
        return [scale, np.rint(mean / np.exp2(scale) * MEANS_PER_SCALE)]

    return np.clip(
        np.concatenate(list(each(one, range(2 * kv.layers))), axis=1), [[-140], [-32768]], [[140], [32767]]
    ).astype(np.int16)


@dataclass(frozen=True)
class Map:
    """From features to a block's channels: integer weights, what their products are worth in fixed point, and what the
    means of the features add. Weights are [channels, features], padded with zeros as exact_products has it."""

    weights: NDArray[np.int16]
    scale: NDArray[np.float64]
    offset: NDArray[np.float64]


class Model:
    """What blocks are predicted with. channels: as `measured` gives them; profile: None if there is none.

    Attributes, of blocks: of_tokens and of_blocks, their maps from tokens and from the blocks before. Of all channels:
    scale, an exponent of two; unit, of the fixed point; mean and bias in it; to_steps, from it to steps of features.
    """

    def __init__(
        self,
        shape: tuple[tuple[int, int, int], ...],
        channels: NDArray[np.int16],
        profile: Profile | None,
        each: Each = map,
    ) -> None:
        self.profile, self.widths, self.heads = profile, block_widths(shape), [heads for heads, _, _ in shape]
        self.starts = block_starts(self.widths)
        self.scale = channels[0].astype(np.int64)
        fine = np.empty(len(self.scale), np.int64)
        for block in range(len(self.widths)):
            here = self.columns(block)
            # keys that are turned are all in one unit
            fine[here] = (self.scale[here] if block % 2 else self.scale[here].max()) - _FINE
        self.unit = power(fine)
        mean = channels[1] * power(self.scale) / MEANS_PER_SCALE
        self.mean = _integers(mean / self.unit)
        self.step = power(self.scale - _STEPS)  # of features
        self.to_steps = self.unit / self.step
        self.rank = 0 if profile is None else profile.table.shape[1]
        if profile is not None and self.rank:
            some = profile.table[:: max(1, len(profile.table) // _ROWS)].astype(np.float32)
            largest = np.abs(some).max(axis=0, initial=0)
            self.token_step = power(np.frexp(largest)[1] - 8)  # room for twice the largest of these rows
        maps = list(each(lambda block: self._maps(block, mean), range(len(self.widths))))
        self.of_tokens, self.of_blocks = ([two[i] for two in maps] for i in (0, 1))
        bias = mean if profile is None else profile.bias.astype(np.float64)
        self.bias = _integers((bias + np.concatenate([m.offset for m in self.of_blocks])) / self.unit)

    def columns(self, block: int) -> slice:
        return slice(int(self.starts[block]), int(self.starts[block + 1]))

    def sources(self, block: int) -> range:
        """The blocks that predict a block."""
        return range(block, block) if self.profile is None else self.profile.sources(block)

    def _maps(self, block: int, mean: NDArray[np.float64]) -> tuple[Map, Map]:
        """From tokens, and from the blocks before."""
        here, some = self.columns(block), self.sources(block)
        if self.profile is None:
            weights = np.zeros((padded(self.widths[block], TILE), 0), np.int16)
            nothing = Map(weights, *np.zeros((2, self.widths[block])))
            return nothing, nothing
        before = slice(int(self.starts[some.start]), int(self.starts[some.stop]))
        of_tokens, of_blocks, unit = self.profile.token_map[:, here], self.profile.maps[block][0], self.unit[here]
        token_step = self.token_step if self.rank else np.zeros(0)
        return (
            _map(of_tokens, token_step, np.zeros(self.rank), unit),
            _map(of_blocks, self.step[before], mean[before], unit),
        )

    def rows(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """What tokens are to the model: distinct rows of the token table as integers, padded as exact_products has it,
        and the row of each token. ProfileError if an id is outside the table."""
        if self.profile is None or self.rank == 0:
            return np.zeros((TILE, 0), np.int16), np.zeros(len(ids), np.int64)
        if int(ids.max()) >= len(self.profile.table):
            raise ProfileError(
                f"token id {int(ids.max())} is outside the profile's vocabulary of {len(self.profile.table)}"
            )
        distinct, index = np.unique(ids, return_inverse=True)
        rows = np.zeros((padded(len(distinct), TILE), padded(self.rank, STEP)), np.int16)
        exact = np.rint(self.profile.table[distinct] / self.token_step)
        rows[: len(distinct), : self.rank] = np.clip(exact, -LARGEST_FEATURE, LARGEST_FEATURE)
        return rows, index.reshape(-1).astype(np.int64)


def power(exponent: Any) -> Any:
    """2 ** exponent, exactly."""
    return np.ldexp(1.0, exponent)


def _map(
    weights: NDArray[np.float32], step: NDArray[np.float64], mean: NDArray[np.float64], unit: NDArray[np.float64]
) -> Map:
    """Weights [features, channels] as integers; step, mean: of the features."""
    count, width = weights.shape
    total, largest, offset = np.zeros((3, width))
    sums(weights, step, mean, total, largest, offset)
    exponent = np.frexp(np.maximum(total / (_SUM - count), largest / _LARGEST))[1]
    out = np.zeros((padded(width, TILE), padded(count, STEP)), np.int16)
    integers(weights, step, power(-exponent), out)
    return Map(out, power(exponent) / unit, offset)


def _integers(numbers: NDArray[np.float64]) -> NDArray[np.int32]:
    return np.rint(np.clip(numbers, -LIMIT, LIMIT)).astype(np.int32)


@njit(cache=True, nogil=True)
def sums(
    weights: NDArray[np.float32],
    step: NDArray[np.float64],
    mean: NDArray[np.float64],
    total: NDArray[np.float64],
    largest: NDArray[np.float64],
    offset: NDArray[np.float64],
) -> None:
    """Of weights [features, channels]: the sum and the largest of magnitudes, times a feature's step, and what the
    features' means add up to, each in the order of features. [channels] all."""
    for f in range(weights.shape[0]):
        for c in range(weights.shape[1]):
            weight = abs(np.float64(weights[f, c])) * step[f]
            total[c] += weight  # a product by a power of two is exact: no order of rounding to agree on
            largest[c] = max(largest[c], weight)
    for f in range(weights.shape[0]):
        for c in range(weights.shape[1]):
            offset[c] += np.float64(weights[f, c]) * mean[f]  # exact too: 11 bits by 16


@njit(cache=True, nogil=True)
def integers(
    weights: NDArray[np.float32], step: NDArray[np.float64], scale: NDArray[np.float64], out: NDArray[np.int16]
) -> None:
    """weights [features, channels] * step [features] * scale [channels], rounded to integers, [channels, features]."""
    for f in range(weights.shape[0]):
        for c in range(weights.shape[1]):
            out[c, f] = np.int16(np.rint(np.float64(weights[f, c]) * step[f] * scale[c]))
