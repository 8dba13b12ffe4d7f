"""Delta coding: a chunk of which another session, its reference, holds the same tokens (arXiv 2604.15356, layer 1).

Un-rotated keys and values of the same tokens in another context differ by a thousandth to a tenth of their variance:
less than what quantisation leaves out. So where a token is aligned, the reference's decoded values are the prediction,
and nearly all symbols are 0. Two things keep the loss where it was asked for:

- What the other context changes, it changes in all tokens alike, and attention adds up what it finds alike in many
  tokens, where it averages out noise. The mean of what differs over a chunk's aligned tokens is therefore taken out
  before they are quantised, coded apart, finely, and added to all of them. It takes a third off the KL.
- A symbol that would be 1 only because the reference was rounded to the other side costs far more bits than it saves
  error. Of symbols 0 and 1 the one that is cheaper, at a price a bit, is taken. The price is lowered for a chunk that
  would lose more than it does alone: where deltas are not small, bits are cheaper than they look.

Tokens that are not aligned are coded in the same chunk as ever, as a group of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqkv.engine import near, quantiser
from seqkv.entropy_coding import tables
from seqkv.entropy_coding.contexts import CLASSES, CLASSES_PER_OCTAVE, UNIT_BITS

SHIFT = -3 * quantiser.UNITS_PER_OCTAVE  # how much smaller symbols of aligned tokens are expected to be
PRICES = (0.12, 0.06, 0.03, 0.0)  # squared steps that a bit is worth, the first that will do

_BITS = tables.BITS.reshape(CLASSES, -1)
_MORE_BITS: NDArray[np.float64] = _BITS[:, 1] - _BITS[:, 0]  # of a symbol 1 than of a 0, for each scale class

assert CLASSES_PER_OCTAVE << UNIT_BITS == quantiser.UNITS_PER_OCTAVE


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
) -> tuple[near.Coded, NDArray[np.int32]]:
    """As near.encode_chunk, and the symbols of the means of what differs, [1, coefs].

    aligned [tokens]; reference [aligned tokens, coefs]: decoded blocks, keys un-rotated; price: of a bit (PRICES).
    """
    # the magnitude below which 0 is the cheaper symbol: e^2 - (1 - e)^2 = price * bits
    dead = (0.5 + price / 2 * _MORE_BITS).astype(np.float32)
    tokens, total = side.gain.shape[1], int(model.starts[-1])
    out_of, differing = near.Coded.empty(tokens, total), np.zeros((1, total), np.int32)
    loss, expected, places = out_of.loss, near.from_tokens(model, side), scale.at_step(side.step)
    finely, once = near.mean_side(side, len(out_of.means)), np.zeros(len(reference), np.intp)
    window = np.arange(tokens)[~aligned] // near.WINDOW
    for block in range(len(model.widths)):
        start, end = model.starts[block : block + 2]
        true, steps, coefs = values(block), side.token_steps(block), out_of.symbols[:, start:end]
        mean_steps, fineness = finely.token_steps(block), (1 / steps).astype(np.float32)
        out = near.predicted(model, block, side, expected, out_of.decoded)
        out[aligned] = reference[:, start:end]
        residual = np.asarray((true - out) @ model.forward[block], np.float32)
        means = differing[:, start:end]
        added, saved = near.code_means(residual[aligned], steps[aligned], once, mean_steps[:1], means)
        residual[aligned] -= added
        lost = quantiser.quantise(residual, fineness, coefs)
        if not np.isfinite(lost + saved):
            raise near.too_far(block, side.step)
        offset = quantiser.gain_units(side.gain[block]) + np.int16(SHIFT)
        lost += _drop(residual, fineness, places[start:end], offset, aligned, dead, coefs)
        coded = quantiser.dequantise(coefs, steps)
        coded[aligned] += added
        if block % 2:
            error, means = (residual - coded)[~aligned], out_of.means[:, start:end]
            shared, saved = near.code_means(error, steps[~aligned], window, mean_steps, means)
            coded[~aligned] += shared[window]
            lost -= saved
        loss.fisher += lost
        out += coded @ model.maps[block][1]
        out_of.decoded[:, start:end] = out
        loss.error[block % 2] += near.energy(true - out)
        loss.energy[block % 2] += near.energy(true - true.mean(axis=0))
    loss.fisher *= quantiser.step_size(side.step) ** 2
    return out_of, differing


def decode_chunk(
    model: near.Model,
    side: near.Side,
    symbols: NDArray[np.int32],
    means: tuple[NDArray[np.int32], NDArray[np.int32]],
    aligned: NDArray[np.bool_],
    reference: NDArray[np.float32],
    layers: int,
) -> NDArray[np.float32]:
    """Decoded blocks of the first `layers` layers, side by side: [tokens, channels of all of them].

    symbols [tokens, channels] of these layers; means: of the tokens that are not aligned, [windows, channels], and of
    those that are, [1, channels]. The rest as encode_chunk has it.
    """
    decoded = np.empty((side.gain.shape[1], model.starts[2 * layers]), np.float32)
    expected, finely = near.from_tokens(model, side), near.mean_side(side, len(means[0]))
    window = np.arange(len(decoded))[~aligned] // near.WINDOW
    for block in range(2 * layers):
        start, end = model.starts[block : block + 2]
        mean_steps = finely.token_steps(block)
        out = near.predicted(model, block, side, expected, decoded)
        out[aligned] = reference[:, start:end]
        coded = quantiser.dequantise(symbols[:, start:end], side.token_steps(block))
        coded[~aligned] += quantiser.dequantise(means[0][:, start:end], mean_steps)[window]
        coded[aligned] += quantiser.dequantise(means[1][:, start:end], mean_steps[:1])
        out += coded @ model.maps[block][1]
        decoded[:, start:end] = out
    return decoded


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
