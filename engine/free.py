"""Calibration-free coding: the near tier with a model of each chunk that both sides fit to the tokens decoded before.

Nothing is known of the cache but what the stream says: mean and scale of each channel (sent), and, from the second
chunk on, how layers predict each other (fitted by ridge regression on decoded tokens, not sent). A chunk therefore
needs those before it. What the two sides fit may differ in the last bits of a float; symbols and contexts do not
depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import importance, prediction, quantiser
from seqkv.engine.arrays import module_of, to_numpy
from seqkv.engine.cached import cached_property
from seqkv.engine.layout import block_starts

WINDOW = 768  # decoded tokens that a chunk's model is fitted to
DEPTH = 1
RIDGE = 100.0  # tokens' worth of belief that layers do not predict each other
SCALES_PER_OCTAVE = 4
MEANS_PER_SCALE = 8
"""Channel scales are powers of 2 ** (1/4), means multiples of an eighth of the scale: both are sent as integers."""

_SMALLEST = 2.0**-40  # scale of a channel that is always 0
_LEAST = 2.0**-6  # scale of a channel that never changes, as a part of its mean

_SINK_GAINS = (36, 24, 16, 16)
_KEY_GAIN, _VALUE_GAIN = 3, -5

CURVE = np.array([[4.0, -3.84], [20.0, -6.64]])
"""Step index and log2 of the KL in nats, as in Profile.curve: measured on SmolLM2-135M, taken for any model."""


def gain_table(layers: int) -> NDArray[np.int8]:
    """Gain indices [2, layers, importance.CLASSES]: the square of attention received is a token's energy.

    Keys are taken finer than values: their errors turn attention itself. Chosen on SmolLM2-135M.
    """
    octaves = np.arange(importance.LEVELS) - importance.LEVELS // 2
    plain = np.clip(quantiser.GAINS_PER_OCTAVE * octaves - 2, 0, 24)
    by_class = np.concatenate([plain, _SINK_GAINS])
    return np.stack([np.tile(by_class + side, (layers, 1)) for side in (_KEY_GAIN, _VALUE_GAIN)]).astype(np.int8)


def statistics(values: Callable[[int], Any], blocks: int) -> NDArray[np.int16]:
    """Scale and mean of each channel as integers, [2, coefs]; values(block) -> [tokens, channels] of the whole cache,
    NumPy or CuPy.

    Keys have a scale for each channel, the values of a layer one together: errors of values add up over channels.
    """
    scales, means = [], []
    for block in range(blocks):
        x = values(block)
        mean, deviation = (
            to_numpy(moment)[0] for moment in (x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64))
        )
        if block % 2:
            deviation = np.full_like(deviation, np.sqrt(np.mean(deviation**2)))
        deviation = np.maximum(deviation, _LEAST * np.abs(mean))
        exponent = np.rint(np.log2(np.maximum(deviation, _SMALLEST)) * SCALES_PER_OCTAVE)
        scales.append(exponent)
        means.append(np.rint(mean / _unit(exponent) * MEANS_PER_SCALE))
    return np.clip([np.concatenate(scales), np.concatenate(means)], -(2**15), 2**15 - 1).astype(np.int16)


def _unit(exponent: NDArray[np.number]) -> NDArray[np.float64]:
    return np.exp2(np.clip(exponent.astype(np.float64) / SCALES_PER_OCTAVE, -64, 64))


def remembered(history: Any, decoded: Any) -> Any:
    """The last WINDOW tokens of what was decoded, [tokens, coefs], NumPy or CuPy; history: of those before, or None."""
    if history is None:
        return decoded[-WINDOW:].copy()
    return module_of(decoded).concatenate([history[len(decoded) - WINDOW :], decoded])[-WINDOW:]


class Diagonal:
    """A diagonal matrix as its diagonal [channels], NumPy or CuPy float32, or rows of one; x @ it, as for an array."""

    __array_ufunc__ = None  # NumPy leaves the product to this class

    def __init__(self, values: Any, rows: Any = None) -> None:
        self.values, self.rows = values, rows

    def __getitem__(self, rows: Any) -> Diagonal:
        return Diagonal(self.values, rows)

    def __rmatmul__(self, left: Any) -> Any:
        if self.rows is None:
            return left * self.values
        out = module_of(left).zeros((len(left), len(self.values)), np.float32)
        out[:, self.rows] = left * self.values[self.rows]
        return out


class Model:
    """A near.Model of one chunk.

    widths: of the blocks. channels: as `statistics` gives them. history [tokens, coefs]: the decoded tokens before,
    the last WINDOW of them at most; None at the start. Its matrices are in the memory that `history` is in.
    """

    def __init__(self, widths: tuple[int, ...], channels: NDArray[np.int16], history: Any) -> None:
        self.widths = widths
        self.starts = block_starts(widths)
        self.sink_bias = np.zeros((importance.SINKS, self.starts[-1]), np.float32)
        unit = _unit(channels[0]).astype(np.float32)
        mean = (channels[1] * unit / MEANS_PER_SCALE).astype(np.float32)
        self.fitted = history is not None
        self.xp = module_of(history)
        self.unit, self.mean = self.xp.asarray(unit), self.xp.asarray(mean)
        self.token_map = np.zeros((0, self.starts[-1]), np.float32)
        self.bias = self.mean.copy()
        self.maps = [self._map(b, history) for b in range(len(widths))]

    def sources(self, block: int) -> range:
        """The decoded blocks that predict a block: none while nothing is decoded."""
        return prediction.sources(block, "layers" if self.fitted else "mean", DEPTH)

    @cached_property
    def forward(self) -> list[Any]:
        """Values to coefficients, for each block."""
        return [Diagonal(1 / self.unit[self._columns(b)]) for b in range(len(self.widths))]

    def _columns(self, block: int) -> slice:
        return slice(int(self.starts[block]), int(self.starts[block + 1]))

    def _map(self, block: int, history: Any) -> tuple[Any, Any]:
        """Weights and inverse transform of a block; sets its bias."""
        here = self._columns(block)
        before = self.sources(block)
        first, last = int(self.starts[before.start]), int(self.starts[before.stop])
        back = Diagonal(self.unit[here])
        if first == last:
            return np.zeros((0, self.widths[block]), np.float32), back
        x = (history[:, first:last] - self.mean[first:last]) / self.unit[first:last]
        y = (history[:, here] - self.mean[here]) / self.unit[here]
        gram = (x.T @ x).astype(np.float64)
        gram += RIDGE * self.xp.eye(last - first)
        w = self.xp.linalg.solve(gram, (x.T @ y).astype(np.float64)).astype(np.float32)
        w = w / self.unit[first:last, None] * self.unit[here]
        self.bias[here] -= self.mean[first:last] @ w
        return w, back


def scales(magnitude: NDArray[np.int64], tokens: int) -> NDArray[np.int8]:
    """Class of each coefficient of a chunk on the coder's scale axis, [coefs], from the sum of the magnitudes of its
    symbols, [coefs]."""
    mean = magnitude / tokens
    # below about one step rounding hides what is there: a Laplace density of scale s has mean |q| = 1 / (2 sinh(1/2s))
    scale = 0.5 / np.arcsinh(0.5 / np.maximum(mean, 0.25 / tokens))
    return np.clip(np.rint((np.log2(scale) + 6) * SCALES_PER_OCTAVE), 0, 63).astype(np.int8)


def places(classes: NDArray[np.int8], step: int) -> NDArray[np.int16]:
    """Places on the scale axis at step 1, from the classes that `scales` gave at step index `step`."""
    units = quantiser.UNITS_PER_OCTAVE // SCALES_PER_OCTAVE
    at_step = classes.astype(np.int32) * units + units // 2 - quantiser.step_units(step)
    return np.clip(at_step, -(2**15), 2**15 - 1).astype(np.int16)
