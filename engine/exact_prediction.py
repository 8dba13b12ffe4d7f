"""What a chunk is expected to hold, block after block, computed alike to the bit everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import exact_values
from seqkv.engine.cache import Rope
from seqkv.engine.exact_model import Model
from seqkv.engine.exact_products import STEP, TILE, padded, product
from seqkv.engine.exact_values import TURN_BITS


class Prediction:
    """A chunk's blocks in turn: `expected`, then `learn` what it holds.

    ids, positions: of its tokens. ProfileError if an id is outside the profile's token table.
    """

    def __init__(
        self, model: Model, ropes: list[Rope | None], positions: NDArray[np.int64], ids: NDArray[np.int64]
    ) -> None:
        self.model, self.ropes, self.angles = model, ropes, _Angles(positions)
        self.rows, self.index = model.rows(ids)
        self.window = _Window(model, len(ids))

    def expected(self, block: int) -> NDArray[np.int32]:
        """In fixed point, [tokens, channels]."""
        model, here = self.model, self.model.columns(block)
        of_tokens, of_blocks = model.of_tokens[block], model.of_blocks[block]
        said = np.empty((len(self.rows), len(of_tokens.weights)), np.int32)
        product(self.rows, 0, of_tokens.weights, said)
        before = np.empty((len(self.window.columns), len(of_blocks.weights)), np.int32)
        product(self.window.columns, self.window.start(block), of_blocks.weights, before)
        out = np.empty((len(self.index), model.widths[block]), np.int32)
        exact_values.expected(said, self.index, of_tokens.scale, before, of_blocks.scale, model.bias[here], out)
        self._turn(out, block, back=False)
        return out

    def learn(self, block: int, values: NDArray[np.float32]) -> None:
        """What a block holds, [tokens, channels], predicts others."""
        model, here = self.model, self.model.columns(block)
        if model.profile is None:
            return
        numbers = np.empty(values.shape, np.int32)
        exact_values.fixed(values, 1 / model.unit[here], numbers)
        self._turn(numbers, block, back=True)
        columns, start = self.window.columns, self.window.room(block)
        exact_values.features(numbers, model.mean[here], model.to_steps[here], columns, start)

    def _turn(self, numbers: NDArray[np.int32], block: int, back: bool) -> None:
        layer, side = divmod(block, 2)
        rope = self.ropes[layer]
        if not side and rope is not None:
            self.angles.turn(numbers, self.model.heads[layer], rope, back)


class _Window:
    """Features of the blocks that are still needed, side by side: columns [tokens, channels], padded as exact_products
    has it."""

    def __init__(self, model: Model, tokens: int) -> None:
        self.model, self.end = model, 0
        self.places: dict[int, int] = {}
        spans = [sum(model.widths[b] for b in (*model.sources(block), block)) for block in range(len(model.widths))]
        self.room_for = 0 if model.profile is None else 2 * max(spans)
        self.columns = np.zeros((padded(tokens, TILE), self.room_for + STEP), np.int16)  # a product may read beyond

    def start(self, block: int) -> int:
        """Where the features of the blocks that predict a block begin."""
        before = self.model.sources(block)
        return self.places[before[0]] if len(before) else 0

    def room(self, block: int) -> int:
        """Where the features of the next block are to be written."""
        width, before = self.model.widths[block], self.model.sources(block)
        if self.end + width > self.room_for:
            first = self.start(block) if len(before) else self.end
            self.columns[:, : self.end - first] = self.columns[:, first : self.end].copy()
            self.places = {b: self.places[b] - first for b in before}
            self.end -= first
        self.places[block] = self.end
        self.end += width
        return self.places[block]


class _Angles:
    """Cosines and sines of tokens in fixed point, for every Rope that asks."""

    def __init__(self, positions: NDArray[np.int64]) -> None:
        self.positions = positions
        self._tables: dict[Rope, tuple[Any, ...]] = {}

    def turn(self, numbers: NDArray[np.int32], heads: int, rope: Rope, back: bool) -> None:
        """Turn keys [tokens, channels] in place, or turn them back."""
        if rope not in self._tables:
            angles = self.positions[:, None] * rope.inv_freq.astype(np.float64)
            tables: list[NDArray[np.float64]] = []
            for factor, direction in ((rope.scaling, 1), (1 / rope.scaling, -1)):
                factor = min(max(factor, 2.0**-6), 2.0**6) * (1 << TURN_BITS)
                tables += [np.rint(np.cos(angles) * factor), np.rint(np.sin(angles) * factor * direction)]
            first, second = (side.astype(np.int64) for side in rope.pairs())
            self._tables[rope] = first, second, *tables
        first, second, *rest = self._tables[rope]
        exact_values.turn(numbers, heads, first, second, *(rest[2:] if back else rest[:2]))
