"""Importance: how finely each token is quantised in each layer.

The loss that an error causes is its energy in the Fisher metric of its token, and tokens differ by orders of magnitude:
what the last queries of the prefill attended to, the next ones will attend to. Tokens are sorted into classes by the
attention received, and a class's gain is the square root of its mean Fisher energy on calibration texts. The class of
each token and layer is sent. The first tokens of a sequence, which soak up attention whatever they are, have classes
of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.engine.arrays import module_of, to_numpy
from seqkv.engine.errors import CacheError

SINKS = 4  # tokens at the start with classes of their own
LEVELS = 21  # attention received, as a multiple of the mean: 2^-10 or less, 2^-9, ..., 2^10 or more
CLASSES = LEVELS + SINKS
SMALLEST_GAIN, LARGEST_GAIN, LARGEST_SINK_GAIN = 0.25, 32.0, 128.0  # unread tokens must stay readable


def sinks(positions: NDArray[np.int64]) -> int:
    """How many of these tokens are sinks, the first ones: none of a part that does not begin its sequence."""
    return min(SINKS, len(positions)) if positions[0] == 0 else 0


def classes(importance: NDArray[np.float32], sinks: int = SINKS) -> NDArray[np.uint8]:
    """Class of each token and layer, [layers, tokens].

    importance: attention received, [layers, tokens], in any unit, by a sequence, of which the first `sinks` tokens, or
        all that there are, have classes of their own.
    """
    return classes_of(relative(importance, sinks), sinks)


def classes_of(relative: NDArray[np.float32], sinks: int) -> NDArray[np.uint8]:
    """The same of attention received in multiples of its layer's mean."""
    octaves = np.log2(np.maximum(relative, 2.0**-20))
    out = np.clip(np.rint(octaves) + LEVELS // 2, 0, LEVELS - 1).astype(np.uint8)
    own = np.arange(min(sinks, out.shape[1]), dtype=np.uint8)
    out[:, : own.size] = LEVELS + own
    return out


def relative(importance: NDArray[np.float32], sinks: int = SINKS) -> NDArray[np.float32]:
    """Attention received in multiples of its layer's mean, that of the sinks left out of the mean."""
    plain = importance[:, sinks:] if importance.shape[1] > sinks else importance
    return importance / np.maximum(plain.mean(axis=1, keepdims=True), 1e-30)


def checked(importance: Any, layers: int, tokens: int) -> NDArray[np.float32]:
    """Attention received as float32 [layers, tokens]. CacheError if it has another shape or is not finite."""
    out = np.asarray(to_numpy(importance)[0], np.float32)
    if out.shape != (layers, tokens):
        raise CacheError(f"importance: expected [{layers} layers, {tokens} tokens], got shape {out.shape}")
    if not (np.isfinite(out).all() and (out >= 0).all()):
        raise CacheError("importance must be finite and not negative: it is attention received")
    return out


def features(values: Callable[[int], Any], layer: int) -> Any:
    """What attention received is estimated from: [tokens, channels + 1], un-rotated key, value, and 1.

    values(block) -> [tokens, channels] float32, NumPy or CuPy.
    """
    key, value = values(2 * layer), values(2 * layer + 1)
    xp = module_of(key)
    return xp.concatenate([key, value, xp.ones((len(key), 1), np.float32)], axis=1)


def estimated(
    weights: Sequence[NDArray[np.float32]], tokens: int, values_of: Callable[[slice], Callable[[int], Any]], span: int
) -> NDArray[np.float32]:
    """Attention received, [layers, tokens], estimated from keys and values (Profile.attention), `span` tokens at a
    time."""
    out = np.empty((len(weights), tokens), np.float32)
    for start in range(0, tokens, span):
        part = slice(start, min(start + span, tokens))
        values = values_of(part)
        for layer, weight in enumerate(weights):
            x = features(values, layer)
            out[layer, part] = to_numpy(x @ module_of(x).asarray(weight))[0]
    return np.exp2(np.clip(out, -12, 12))


class EnergyTable:
    """Collects Fisher energies by class, and turns them into gains."""

    def __init__(self, layers: int) -> None:
        self.energy = np.zeros((2, layers, CLASSES))
        self.count = np.zeros((layers, CLASSES))

    def add(self, token_classes: NDArray[np.uint8], energy: NDArray[np.float64]) -> None:
        """token_classes [layers, tokens], energy [2, layers, tokens]: of the gradients for keys and values."""
        for layer, row in enumerate(token_classes):
            self.count[layer] += np.bincount(row, minlength=CLASSES)
            for side in (0, 1):
                self.energy[side, layer] += np.bincount(row, energy[side, layer], CLASSES)

    def gains(self, weight: float = 64.0) -> NDArray[np.float64]:
        """Gain by side, layer and class, [2, layers, CLASSES]; a token of mean energy has gain 1.

        Classes with few tokens in a layer lean on all layers' mean of the class, which counts as `weight` tokens.
        """
        plain = slice(0, LEVELS)
        mean = self.energy[:, :, plain].sum(2) / np.maximum(self.count[:, plain].sum(1), 1)
        relative = self.energy / np.maximum(mean, 1e-30)[:, :, None]
        pooled = relative.sum(1) / np.maximum(self.count.sum(0), 1)
        for side in pooled:  # a class that no layer met takes its neighbour's energy
            met = np.flatnonzero(self.count[:, plain].sum(0))
            side[plain] = np.interp(np.arange(LEVELS), met, side[met]) if met.size else 1.0
        energy = (relative + weight * pooled[:, None]) / (self.count + weight)
        largest = np.where(np.arange(CLASSES) < LEVELS, LARGEST_GAIN, LARGEST_SINK_GAIN)
        return np.clip(np.sqrt(energy), SMALLEST_GAIN, largest)
