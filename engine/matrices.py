"""What the near tier is computed with on a CUDA device: a model's matrices, and what is known of a batch of tokens."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from seqkv.cuda_kernels import device, elementwise
from seqkv.cuda_kernels.linear import multiply
from seqkv.engine import importance, near, prediction, quantiser
from seqkv.engine.arrays import module_of
from seqkv.engine.free import Diagonal
from seqkv.engine.modes import Mode
from seqkv.engine.probs import TokenProbs
from seqkv.engine.profile import Profile

Made = TypeVar("Made")


def _once(make: Callable[[near.Model], Made]) -> Callable[[near.Model], Made]:
    """`make`, called once for a profile and a device. What it makes must not refer to the profile."""
    made: weakref.WeakKeyDictionary[Profile, dict[int, Made]] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def of(model: near.Model) -> Made:
        if not isinstance(model, Profile):  # fitted to one chunk
            return make(model)
        by_device, current = made.setdefault(model, {}), int(device.cupy().cuda.Device().id)
        if current not in by_device:
            by_device[current] = make(model)
        return by_device[current]

    return of


class Matrices:
    """The matrices of a near.Model that decoding needs, float32 on the device."""

    def __init__(self, model: near.Model) -> None:
        xp = device.cupy()
        self.starts = [int(start) for start in model.starts]
        self.sources = [model.sources(block) for block in range(len(model.widths))]
        self.token_map, self.bias, self.sink_bias = (
            xp.asarray(x, np.float32) for x in (model.token_map, model.bias, model.sink_bias)
        )
        self.maps = [(xp.asarray(weights, np.float32), _dense(back)) for weights, back in model.maps]


matrices = _once(Matrices)


@_once
def forward_matrices(model: near.Model) -> list[Any]:
    """Values to coefficients, for each block: what encoding needs besides."""
    return [_dense(x) for x in model.forward]


def _dense(matrix: Any) -> Any:
    """As an array on the device."""
    if isinstance(matrix, Diagonal):
        matrix = module_of(matrix.values).diag(matrix.values)
    return device.cupy().asarray(matrix, np.float32)


class Decoded:
    """Decoded blocks [tokens, channels] that others are predicted from.

    TF32 rounds a number to a part of its size, and keys may lie far from 0 for what they vary. So a block is kept as
    what is left of it after a mean, and the mean is multiplied in float32.
    """

    def __init__(self) -> None:
        self._parts: dict[int, tuple[Any, Any]] = {}

    def put(self, block: int, values: Any) -> None:
        mean = values[: near.CHUNK].mean(axis=0, keepdims=True)
        self._parts[block] = values - mean, mean

    def add_products(self, sources: range, weights: Any, out: Any) -> None:
        """out += sources side by side @ weights."""
        constant, row = device.cupy().zeros((1, out.shape[1]), np.float32), 0
        for source in sources:
            rest, mean = self._parts[source]
            part = weights[row : row + rest.shape[1]]
            multiply(rest, part, out, accumulate=True)
            multiply(mean, part, constant, accumulate=True, exact=True)
            row += rest.shape[1]
        if len(sources):
            out += constant

    def forget(self, sources: list[range], layer: int) -> None:
        """Drop the blocks that no layer after this one is predicted from."""
        yet = {source for later in sources[2 * layer + 2 : 2 * layer + 4] for source in later}
        for block in [block for block in self._parts if block not in yet]:
            del self._parts[block]

    def whole(self) -> Any:
        """All that is there, side by side in order: [tokens, channels]."""
        return device.cupy().concatenate([rest + mean for _, (rest, mean) in sorted(self._parts.items())], axis=1)


class Batch:
    """Tokens that are coded together, a column each, and what the decoder knows of them.

    bounds: [chunks, 2] first token of each chunk and the one after its last, one chunk after the other.
    probs, classes [layers, tokens]: of the whole sequence. steps: step index of each chunk.

    ProbsError if a token is outside the table.
    """

    def __init__(
        self,
        bounds: NDArray[np.int64],
        mode: Mode,
        probs: TokenProbs,
        classes: NDArray[np.uint8],
        steps: Sequence[int],
    ) -> None:
        xp = device.cupy()
        self.start, self.stop = int(bounds[0, 0]), int(bounds[-1, 1])
        self.first = bounds[:, 0] - self.start
        self.tokens = (bounds[:, 1] - bounds[:, 0]).astype(np.int32)
        self.begins = bool(classes[0, self.start] >= importance.LEVELS)  # no other token has a sink's class
        part = probs.part(self.start, self.stop)
        features = prediction.token_features(mode.table, part, mode.predictor)
        self.rows, self.index, self.weights = (xp.asarray(x) for x in features)
        gain = near.gains(xp.asarray(mode.gains), xp.asarray(classes[:, self.start : self.stop]))
        self.offset = quantiser.gain_units(gain)
        step = np.repeat([quantiser.step_size(i) for i in steps], self.tokens).astype(np.float32)
        # powers of two from a table of the CPU's, so that both sides mean the same step to the last bit
        value = xp.asarray(quantiser.gain_value(np.arange(-128, 128)))
        self.steps = xp.asarray(step) / value[gain.astype(np.intp) + 128]
        self.fineness = np.float32(1) / self.steps
        # windows of means: all of near.WINDOW columns, as chunks are, but the last
        self.mean_tokens = np.array([near.windows(int(count)) for count in self.tokens], np.int32)
        self.mean_first = np.cumsum(self.mean_tokens, dtype=np.int64) - self.mean_tokens
        self.window = xp.arange(self.columns) // near.WINDOW
        pairs = zip(steps, self.mean_tokens, strict=True)
        self.mean_steps = xp.asarray(np.concatenate([near.mean_steps(step, int(count)) for step, count in pairs]))

    @property
    def columns(self) -> int:
        return self.stop - self.start

    def means(self, error: Any, block: int) -> Any:
        """Means over windows [coefs, windows] float32 of an error [coefs, columns]; as near.code_means has them. And
        the weights that they were taken with, [windows]."""
        weight = self.fineness[block].astype(np.float64) ** 2
        total = self._over_windows(weight[None])[0]
        return (self._over_windows(error * weight) / total).astype(np.float32), total

    def _over_windows(self, x: Any) -> Any:
        """Sums over windows: [rows, columns] -> [rows, windows]."""
        xp, whole = device.cupy(), self.columns // near.WINDOW
        parts = x[:, : whole * near.WINDOW].reshape(len(x), whole, near.WINDOW).sum(axis=2)
        if self.columns % near.WINDOW == 0:
            return parts
        return xp.concatenate([parts, x[:, whole * near.WINDOW :].sum(axis=1, keepdims=True)], axis=1)

    def predicted(self, model: Matrices, block: int, decoded: Decoded) -> Any:
        """What `block` is expected to hold, [tokens, channels]. decoded: blocks before it, those it is predicted from
        at least."""
        start, end = model.starts[block : block + 2]
        out = device.cupy().empty((self.columns, end - start), np.float32)
        self._from_tokens(model.token_map[:, start:end], model.bias[start:end], out)
        decoded.add_products(model.sources[block], model.maps[block][0], out)
        if self.begins:
            sinks = out[: importance.SINKS]
            sinks += model.sink_bias[: len(sinks), start:end]
        return out

    def _from_tokens(self, token_map: Any, bias: Any, out: Any) -> None:
        """out = bias + the tokens' rows @ token_map; each distinct token's row is multiplied once."""
        xp = device.cupy()
        if self.weights.shape[1] == 1:
            products = xp.empty((len(self.rows), token_map.shape[1]), np.float32)
            multiply(self.rows, token_map, products)
            elementwise.accumulate(products, self.index, self.weights, bias, out)
        else:
            mean = xp.empty((self.columns, self.rows.shape[1]), np.float32)
            elementwise.accumulate(self.rows, self.index, self.weights, xp.zeros(mean.shape[1], np.float32), mean)
            out[...] = bias
            multiply(mean, token_map, out, accumulate=True)
