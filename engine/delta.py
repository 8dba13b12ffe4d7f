"""Delta coding: a chunk of which another session, its reference, holds the same tokens (arXiv 2604.15356, layer 1).

Un-rotated keys and values of the same tokens in another context differ by a thousandth to a tenth of their variance:
less than what quantisation leaves out. So where a token is aligned, the reference's decoded values are the prediction,
and nearly all symbols are 0. Two things keep the loss where it was asked for:

- What the other context changes, it changes in all tokens alike, and attention adds up what it finds alike in many
  tokens, where it averages out noise. The mean of what differs over a chunk's aligned tokens is therefore coded apart,
  finely, and added to all of them. It costs 2 to 3 % of what a chunk alone does, and takes a third off the KL.
- A symbol that would be 1 only because the reference was rounded to the other side costs far more bits than it saves
  error. Of symbols 0 and 1 the one that is cheaper, at a price a bit, is taken. The price is lowered for a chunk that
  would lose more than it does alone: where deltas are not small, bits are cheaper than they look.

Tokens that are not aligned are coded in the same chunk as ever, as a group of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqkv.engine import near, quantiser
from seqkv.entropy_coding import tables
from seqkv.entropy_coding.contexts import CLASSES, CLASSES_PER_OCTAVE, UNIT_BITS

SHIFT = -3 * quantiser.UNITS_PER_OCTAVE  # how much smaller symbols of aligned tokens are expected to be
MEAN_SHIFT = -2 * quantiser.UNITS_PER_OCTAVE
MEAN_GAIN = 4 * quantiser.GAINS_PER_OCTAVE  # means are quantised 16 times finer than a token of gain 1
PRICES = (0.12, 0.06, 0.03, 0.0)  # squared steps that a bit is worth, the first that will do

_BITS = tables.BITS.reshape(CLASSES, -1)
_MORE_BITS: NDArray[np.float64] = _BITS[:, 1] - _BITS[:, 0]  # of a symbol 1 than of a 0, for each scale class

assert CLASSES_PER_OCTAVE << UNIT_BITS == quantiser.UNITS_PER_OCTAVE


@dataclass(frozen=True)
class Coded:
    """A chunk coded with a reference: symbols [tokens, coefs], symbols of the means [1, coefs], what a decoder makes of
    them, [tokens, coefs], and what was lost."""

    symbols: NDArray[np.int32]
    means: NDArray[np.int32]
    decoded: NDArray[np.float32]
    loss: near.Loss


def mean_side(side: near.Side) -> near.Side:
    """What the means are quantised with: as a token of its own, of gain MEAN_GAIN."""
    gain = np.full((side.gain.shape[0], 1), MEAN_GAIN, np.int8)
    return near.Side(side.rows[:1], np.zeros(1, np.intp), gain, side.step, first=False)


def part(side: near.Side, tokens: NDArray[np.bool_]) -> near.Side:
    """What some of a chunk's tokens are quantised with."""
    gain = np.ascontiguousarray(side.gain[:, tokens])
    return near.Side(side.rows, side.index[tokens], gain, side.step, first=False)


def encode_chunk(
    model: near.Model,
    side: near.Side,
    scale: near.Scale,
    values: Callable[[int], NDArray[np.float32]],
    aligned: NDArray[np.bool_],
    reference: NDArray[np.float32],
    price: float,
) -> Coded:
    """As near.encode_chunk.

    aligned [tokens]; reference [aligned tokens, coefs]: decoded blocks, keys un-rotated; price: of a bit (PRICES).
    """
    # the magnitude below which 0 is the cheaper symbol: e^2 - (1 - e)^2 = price * bits
    dead = (0.5 + price / 2 * _MORE_BITS).astype(np.float32)
    tokens, total = side.gain.shape[1], int(model.starts[-1])
    symbols, decoded = np.empty((tokens, total), np.int32), np.empty((tokens, total), np.float32)
    means = np.zeros((1, total), np.int32)
    loss = near.Loss(0.0, np.zeros(2), np.zeros(2), tokens)
    expected, places, finely = near.from_tokens(model, side), scale.at_step(side.step), mean_side(side)
    for block in range(len(model.widths)):
        start, end = model.starts[block : block + 2]
        true, steps, coefs = values(block), side.token_steps(block), symbols[:, start:end]
        out = near.predicted(model, block, side, expected, decoded)
        out[aligned] = reference[:, start:end]
        residual = np.asarray((true - out) @ model.forward[block], np.float32)
        mean = _mean(residual[aligned], steps[aligned])
        mean_step, fineness = finely.token_steps(block), (1 / steps).astype(np.float32)
        reached = quantiser.quantise(mean, (1 / mean_step).astype(np.float32), means[:, start:end])
        shared = quantiser.dequantise(means[:, start:end], mean_step)
        residual[aligned] -= shared
        lost = quantiser.quantise(residual, fineness, coefs)
        if not np.isfinite(lost + reached):
            raise near.too_far(block, side.step)
        offset = quantiser.gain_units(side.gain[block]) + np.int16(SHIFT)
        loss.fisher += lost + _drop(residual, fineness, places[start:end], offset, aligned, dead, coefs)
        coded = quantiser.dequantise(coefs, steps)
        coded[aligned] += shared
        out += coded @ model.maps[block][1]
        decoded[:, start:end] = out
        loss.error[block % 2] += near.energy(true - out)
        loss.energy[block % 2] += near.energy(true - true.mean(axis=0))
    loss.fisher *= quantiser.step_size(side.step) ** 2
    return Coded(symbols, means, decoded, loss)


def decode_chunk(
    model: near.Model,
    side: near.Side,
    symbols: NDArray[np.int32],
    means: NDArray[np.int32],
    aligned: NDArray[np.bool_],
    reference: NDArray[np.float32],
    layers: int,
) -> NDArray[np.float32]:
    """Decoded blocks of the first `layers` layers, side by side: [tokens, channels of all of them].

    symbols [tokens, channels], means [1, channels]: of these layers. The rest as encode_chunk has it.
    """
    decoded = np.empty((side.gain.shape[1], model.starts[2 * layers]), np.float32)
    expected, finely = near.from_tokens(model, side), mean_side(side)
    for block in range(2 * layers):
        start, end = model.starts[block : block + 2]
        out = near.predicted(model, block, side, expected, decoded)
        out[aligned] = reference[:, start:end]
        coded = quantiser.dequantise(symbols[:, start:end], side.token_steps(block))
        coded[aligned] += quantiser.dequantise(means[:, start:end], finely.token_steps(block))
        out += coded @ model.maps[block][1]
        decoded[:, start:end] = out
    return decoded


def _mean(residual: NDArray[np.float32], steps: NDArray[np.float32]) -> NDArray[np.float32]:
    """Mean over tokens [1, coefs], each as heavy as its energy in the Fisher metric: the inverse square of its step."""
    weight = (steps.min() / steps) ** 2
    return ((weight @ residual) / weight.sum())[None].astype(np.float32)


@njit(cache=True, nogil=True)
def _drop(
    residual: NDArray[np.float32],
    fineness: NDArray[np.float32],
    places: NDArray[np.int16],
    offset: NDArray[np.int16],
    aligned: NDArray[np.bool_],
    dead: NDArray[np.float32],
    symbols: NDArray[np.int32],
) -> float:
    """Make symbols of aligned tokens 0 where that is cheaper; returns how much the sum of (error in steps)^2 grows."""
    more = 0.0
    for t in range(residual.shape[0]):
        if not aligned[t]:
            continue
        for j in range(residual.shape[1]):
            q = symbols[t, j]
            if q == 0:
                continue
            size = abs(np.float64(residual[t, j]) * np.float64(fineness[t]))
            place = (np.int32(places[j]) + np.int32(offset[t])) >> UNIT_BITS
            if size < dead[min(max(place, 0), CLASSES - 1)]:
                symbols[t, j] = 0
                more += size * size - (size - abs(q)) * (size - abs(q))
    return more
