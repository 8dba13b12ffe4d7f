"""The near tier: predict, transform, quantise and code a cache chunk by chunk; and back.

A chunk is CHUNK tokens of all layers and decodes alone. Within it blocks are coded in order (engine.prediction), each
predicted from blocks already decoded, the encoder using what the decoder will have: errors do not add up over layers.

Errors of single tokens average out where attention mixes many; what quantisation leaves out of all tokens of a chunk
alike does not. Most coefficients are 0 in all of a chunk's symbols, though another text's residuals are seldom 0 on
average. So the mean over the chunk of what is left out is coded apart, finely, and added to all of its tokens: 2 % more
bytes for a quarter less KL.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from seqkv.engine import importance, quantiser
from seqkv.engine.arrays import module_of
from seqkv.engine.cached import cached_property
from seqkv.engine.errors import CacheError, StreamError
from seqkv.entropy_coding import CorruptGroup, decode_group, encode_group

CHUNK = 256  # tokens
WINDOW = 64  # tokens, of which the mean of what quantisation leaves out is coded
MEAN_GAIN = 14  # an index: means are quantised 11 times finer than a token of gain 1
MEAN_SHIFT = -2 * quantiser.UNITS_PER_OCTAVE  # how much smaller they are expected to be than residuals of one token

_LENGTH = struct.Struct("<I")


Maps = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Of a block: the weights of the decoded blocks that predict it, and the inverse transform."""


class Model(Protocol):
    """What blocks are predicted and transformed with: a Profile, or what `free` fits to the tokens before a chunk."""

    @property
    def widths(self) -> tuple[int, ...]: ...
    @property
    def starts(self) -> NDArray[np.int32]: ...
    @property
    def token_map(self) -> NDArray[np.float32]: ...
    @property
    def bias(self) -> NDArray[np.float32]: ...
    @property
    def sink_bias(self) -> NDArray[np.float32]: ...
    @property
    def maps(self) -> list[Maps]: ...
    @property
    def forward(self) -> list[NDArray[np.float32]]: ...
    def sources(self, block: int) -> range: ...


@dataclass(frozen=True)
class Side:
    """What a chunk's blocks are predicted and quantised with, all known to the decoder.

    rows, index: as prediction.token_rows gives them: [rows, rank] float32, [tokens].
    gain: [blocks, tokens] int8, gain indices.
    step: step index.
    first: whether the chunk begins the sequence, so that its first tokens are sinks.
    """

    rows: NDArray[np.float32]
    index: NDArray[np.intp]
    gain: NDArray[np.int8]
    step: int
    first: bool

    def token_steps(self, block: int) -> NDArray[np.float32]:
        """The step of each token, [tokens]."""
        return (quantiser.step_size(self.step) / quantiser.gain_value(self.gain[block])).astype(np.float32)


@dataclass
class Loss:
    """What quantisation changed, in sums over tokens.

    fisher: sum over blocks and tokens of the error's energy in the Fisher metric, weighted by the token's own energy.
    error, energy: for keys and values, sum of squared errors, and of squared values around the block's mean.
    tokens: how many.
    """

    fisher: float
    error: NDArray[np.float64]
    energy: NDArray[np.float64]
    tokens: int

    @classmethod
    def none(cls) -> Loss:
        return cls(0.0, np.zeros(2), np.zeros(2), 0)

    def __add__(self, other: Loss) -> Loss:
        return Loss(
            self.fisher + other.fisher,
            self.error + other.error,
            self.energy + other.energy,
            self.tokens + other.tokens,
        )


def gains(table: NDArray[np.int8], classes: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Gain indices [blocks, tokens] of classes [layers, tokens]; table [2, layers, classes]. All NumPy, or all CuPy."""
    xp = module_of(classes)
    by_side = xp.take_along_axis(table, classes[None].astype(np.intp), axis=2)
    return xp.ascontiguousarray(by_side.transpose(1, 0, 2)).reshape(-1, classes.shape[1])


def from_tokens(model: Model, side: Side) -> NDArray[np.float32]:
    """What the tokens alone say of all blocks, for each distinct row of the token table: [rows, coefs]."""
    out = side.rows @ model.token_map
    out += model.bias
    return out


def predicted(
    model: Model, block: int, side: Side, tokens: NDArray[np.float32], decoded: NDArray[np.float32]
) -> NDArray[np.float32]:
    """What `block` is expected to hold, [tokens, channels].

    tokens: as `from_tokens` gives it. decoded [tokens, coefs]: all blocks, of which those before are known.
    """
    start, end = model.starts[block : block + 2]
    out = tokens[side.index, start:end]
    before = model.sources(block)
    if len(before):
        out += decoded[:, model.starts[before.start] : model.starts[before.stop]] @ model.maps[block][0]
    if side.first:
        out[: importance.SINKS] += model.sink_bias[: len(out), start:end]
    return out


@dataclass(frozen=True)
class Coded:
    """A chunk on its way to bytes: symbols [tokens, coefs]; symbols of the means of what these leave out, [windows,
    coefs]; what a decoder makes of both, [tokens, coefs]; and what was lost."""

    symbols: NDArray[np.int32]
    means: NDArray[np.int32]
    decoded: NDArray[np.float32]
    loss: Loss

    @classmethod
    def empty(cls, tokens: int, coefs: int) -> Coded:
        symbols, decoded = np.empty((tokens, coefs), np.int32), np.empty((tokens, coefs), np.float32)
        return cls(
            symbols, np.zeros((windows(tokens), coefs), np.int32), decoded, Loss(0.0, np.zeros(2), np.zeros(2), tokens)
        )


def mean_steps(step: int, count: int) -> NDArray[np.float32]:
    """The steps of `count` means, for a step index."""
    value = quantiser.step_size(step) / quantiser.gain_value(np.full(count, MEAN_GAIN))
    return value.astype(np.float32)


def windows(tokens: int) -> int:
    """How many means are coded of a chunk of that many tokens."""
    return -(-tokens // WINDOW)


def mean_side(side: Side, count: int) -> Side:
    """What `count` means are quantised with: as tokens of their own, of gain MEAN_GAIN."""
    gain = np.full((side.gain.shape[0], count), MEAN_GAIN, np.int8)
    return Side(side.rows[:1], np.zeros(count, np.intp), gain, side.step, first=False)


def encode_chunk(model: Model, side: Side, values: Callable[[int], NDArray[np.float32]], means: bool) -> Coded:
    """Quantise a chunk. values(block) -> [tokens, channels] float32; asked for in order, once each.

    means: whether the mean of what the symbols leave out is coded; else its symbols are 0.
    """
    tokens, total = side.gain.shape[1], int(model.starts[-1])
    out_of = Coded.empty(tokens, total)
    loss, expected, finely = out_of.loss, from_tokens(model, side), mean_side(side, windows(tokens))
    window = np.arange(tokens) // WINDOW
    for block in range(len(model.widths)):
        start, end = model.starts[block : block + 2]
        true, steps, coefs = values(block), side.token_steps(block), out_of.symbols[:, start:end]
        out = predicted(model, block, side, expected, out_of.decoded)
        fineness = (1 / steps).astype(np.float32)
        residual = np.asarray((true - out) @ model.forward[block], np.float32)
        lost = quantiser.quantise(residual, fineness, coefs)
        if not np.isfinite(lost):
            raise too_far(block, side.step)
        live = np.flatnonzero(coefs.any(axis=0))
        out += quantiser.dequantise(coefs[:, live], steps) @ model.maps[block][1][live]
        if means and block % 2:
            error = residual - quantiser.dequantise(coefs, steps)
            shared, saved = code_means(error, steps, window, finely.token_steps(block), out_of.means[:, start:end])
            lost -= saved
            out += (shared @ model.maps[block][1])[window]
        loss.fisher += lost
        out_of.decoded[:, start:end] = out
        loss.error[block % 2] += energy(true - out)
        loss.energy[block % 2] += energy(true - true.mean(axis=0))
    loss.fisher *= quantiser.step_size(side.step) ** 2
    return out_of


def code_means(
    error: NDArray[np.float32],
    steps: NDArray[np.float32],
    window: NDArray[np.intp],
    mean_steps: NDArray[np.float32],
    symbols: NDArray[np.int32],
) -> tuple[NDArray[np.float32], float]:
    """Quantise the means of an error [tokens, coefs] over windows, into `symbols` [windows, coefs].

    steps [tokens]: a token is as heavy as its energy in the Fisher metric, the inverse square of its step.
    window [tokens]: of each, increasing. mean_steps: [windows].
    Returns the means as they are decoded, and by how much taking them out lowers the sum of (error in steps)^2; minus
    infinity if one is beyond the largest symbol.
    """
    weight = np.square(1 / steps.astype(np.float64))
    sums, total = np.zeros(symbols.shape), np.zeros((len(symbols), 1))
    np.add.at(total[:, 0], window, weight)
    for w in np.unique(window):
        here = window == w
        sums[w] = weight[here] @ error[here]
    mean = sums / np.maximum(total, 1e-30)
    reached = quantiser.quantise(mean.astype(np.float32), (1 / mean_steps).astype(np.float32), symbols)
    shared = quantiser.dequantise(symbols, mean_steps)
    saved = float((total * (2 * mean - shared) * shared).sum())
    return shared, saved if np.isfinite(reached) else -np.inf


def too_far(block: int, step: int) -> CacheError:
    """A block is further from what is expected than symbols reach."""
    name = "values" if block % 2 else "keys"
    return CacheError(
        f"{name} of layer {block // 2} differ from what is expected by too much for a step of "
        f"{quantiser.step_size(step):.3g}: ask for a larger step or kl"
    )


def energy(x: NDArray[np.floating]) -> float:
    """Sum of squares."""
    return float(np.vdot(x, x))


Symbols = tuple[NDArray[np.int32], NDArray[np.intp]]
"""Symbols [tokens, live] of the coefficients `live` [live], increasing; those of the others are zero."""


def decode_chunk(model: Model, side: Side, own: Symbols, means: Symbols | None, layers: int) -> NDArray[np.float32]:
    """Decoded blocks of the first `layers` layers, side by side: [tokens, channels of all of them]."""
    decoded = np.empty((side.gain.shape[1], model.starts[2 * layers]), np.float32)
    tokens = len(decoded)
    expected, finely, window = from_tokens(model, side), mean_side(side, windows(tokens)), np.arange(tokens) // WINDOW
    for block in range(2 * layers):
        start, end = model.starts[block : block + 2]
        out = predicted(model, block, side, expected, decoded)
        out += _values(own, side, model, block)
        if means is not None:
            out += _values(means, finely, model, block)[window]
        decoded[:, start:end] = out
    return decoded


def _values(coded: Symbols, side: Side, model: Model, block: int) -> NDArray[np.float32]:
    """What symbols of a block stand for: [tokens, channels]."""
    symbols, live = coded
    first, last = np.searchsorted(live, model.starts[block : block + 2])
    residual = quantiser.dequantise(symbols[:, first:last], side.token_steps(block))
    return residual @ model.maps[block][1][live[first:last] - model.starts[block]]


@dataclass(frozen=True)
class Scale:
    """How large residuals are expected to be: place of each coefficient on the coder's scale axis at step 1 and gain 1,
    [coefs] int16."""

    places: NDArray[np.int16]

    @cached_property
    def order(self) -> NDArray[np.intp]:
        """The coefficients, those of the largest residuals first."""
        return np.argsort(-self.places.astype(np.int32), kind="stable")

    def at_step(self, step: int) -> NDArray[np.int16]:
        """Where the coder's contexts start at a step."""
        places = self.places.astype(np.int32) + quantiser.step_units(step)
        return np.clip(places, -(2**15), 2**15 - 1).astype(np.int16)


def encode_symbols(
    scale: Scale, starts: NDArray[np.int32], side: Side, symbols: NDArray[np.int32], shift: int = 0
) -> bytes:
    """A chunk's symbols [tokens, coefs] as bytes; no bytes for no tokens. starts: [blocks + 1].

    shift: how much larger than `scale` says the symbols are expected to be, in units of the scale axis.
    """
    if len(symbols) == 0:
        return b""
    live = np.asarray(symbols.any(axis=0))
    index = np.flatnonzero(live)
    return join(scale, live, encode_group(symbols[:, index], *_contexts(scale, starts, side, index, shift)))


def decode_symbols(
    scale: Scale, starts: NDArray[np.int32], side: Side, data: memoryview, layers: int, shift: int = 0
) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """Symbols of the live coefficients of the first `layers` layers, and which these are. StreamError on damage."""
    if side.gain.shape[1] == 0 and len(data) == 0:
        return np.zeros((0, 0), np.int32), np.zeros(0, np.intp)
    live, group = split(scale, data)
    index = np.flatnonzero(live)
    contexts = _contexts(scale, starts, side, index, shift)
    try:
        symbols = decode_group(group, side.gain.shape[1], *contexts, segments=2 * layers)
    except CorruptGroup as error:
        raise StreamError(f"altered chunk: {error}") from error
    return symbols, index[: symbols.shape[1]]


def join(scale: Scale, live: NDArray[np.bool_], group: bytes | memoryview) -> bytes:
    """A chunk's bytes: u32 length of the map of live coefficients, the map, the coded group of these."""
    # in the order of expected variance the map is one run of ones, a mixed part, and one of zeros
    bitmap = zstandard.ZstdCompressor(level=19).compress(np.packbits(live[scale.order]).tobytes())
    return b"".join((_LENGTH.pack(len(bitmap)), bitmap, group))


def split(scale: Scale, data: memoryview) -> tuple[NDArray[np.bool_], memoryview]:
    """The live coefficients [coefs] and the group that `join` put together. StreamError on damage."""
    total = len(scale.places)
    bitmap_bytes = (total + 7) // 8
    if len(data) < _LENGTH.size:
        raise StreamError("truncated chunk")
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    frame, group = data[_LENGTH.size : _LENGTH.size + length], data[_LENGTH.size + length :]
    try:
        if zstandard.get_frame_parameters(frame).content_size != bitmap_bytes:
            raise StreamError("altered chunk: its map has the wrong size")
        bitmap = zstandard.ZstdDecompressor().decompress(frame, max_output_size=bitmap_bytes)
    except zstandard.ZstdError as error:
        raise StreamError(f"altered chunk: {error}") from error
    live = np.zeros(total, bool)
    live[scale.order] = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=total).astype(bool)
    return live, group


def _contexts(
    scale: Scale, starts: NDArray[np.int32], side: Side, live: NDArray[np.intp], shift: int
) -> tuple[NDArray[np.int16], NDArray[np.int16], NDArray[np.int32]]:
    """Where the coder's contexts start: base [live], offset [tokens, blocks], segment starts [blocks + 1]."""
    offset = np.ascontiguousarray(quantiser.gain_units(side.gain).T + np.int16(shift))
    return scale.at_step(side.step)[live], offset, np.searchsorted(live, starts).astype(np.int32)


_MIDDLE = importance.LEVELS // 2
_CLASS_SCALE = (1.5, 0.4)  # mean change of class: of the first layer from the middle, of others from the layer below
_KNOWN_SHIFT = -2 * quantiser.UNITS_PER_OCTAVE  # where a reference's class is known, changes are smaller


def pack_classes(classes: NDArray[np.uint8], known: NDArray[np.uint8] | None = None) -> bytes:
    """Importance classes of a chunk, [layers, tokens], as a coded group. Those of sinks are left out: they follow from
    their place.

    known [layers, tokens]: the classes that a reference gives the same tokens, or UNKNOWN.
    """
    plain = _without_sinks(classes)
    change = np.diff(plain, axis=0, prepend=np.int32(_MIDDLE))
    if known is not None:
        change = np.where(known == UNKNOWN, change, plain - _without_sinks(known))
    layers, tokens = classes.shape
    return encode_group(np.ascontiguousarray(change.T), *_class_contexts(layers, tokens, known))


def unpack_classes(
    data: memoryview, layers: int, tokens: int, first: bool, known: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8]:
    """The inverse of `pack_classes`; first: whether the chunk begins with the sinks. StreamError on damage."""
    try:
        change = decode_group(data, tokens, *_class_contexts(layers, tokens, known)).T
    except CorruptGroup as error:
        raise StreamError(f"altered importance classes: {error}") from error
    plain = np.cumsum(change, axis=0, dtype=np.int64) + _MIDDLE
    if known is not None:
        plain = np.where(known == UNKNOWN, plain, change.astype(np.int64) + _without_sinks(known))
    if plain.min() < 0 or plain.max() >= importance.LEVELS:
        raise StreamError("altered importance classes: out of range")
    out = plain.astype(np.uint8)
    if first:
        sinks = min(importance.SINKS, tokens)
        out[:, :sinks] = importance.LEVELS + np.arange(sinks, dtype=np.uint8)
    return out


UNKNOWN = 255  # a class


def _without_sinks(classes: NDArray[np.uint8]) -> NDArray[np.int32]:
    return np.where(classes < importance.LEVELS, classes, _MIDDLE).astype(np.int32)


def _class_contexts(
    layers: int, tokens: int, known: NDArray[np.uint8] | None
) -> tuple[NDArray[np.int16], NDArray[np.int16], NDArray[np.int32]]:
    scale = np.full(layers, _CLASS_SCALE[1])
    scale[:1] = _CLASS_SCALE[0]
    offset = np.zeros((tokens, layers), np.int16)
    if known is not None:
        offset[known[0] != UNKNOWN] = _KNOWN_SHIFT
    return quantiser.scale_units(scale), offset, np.arange(layers + 1, dtype=np.int32)
