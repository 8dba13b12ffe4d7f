"""The near tier: predict, transform, quantise and code a cache chunk by chunk; and back.

A chunk is CHUNK tokens of all layers and decodes alone. Within it blocks are coded in order (engine.prediction), each
predicted from blocks already decoded, the encoder using what the decoder will have: errors do not add up over layers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from seqkv.engine import importance, quantiser
from seqkv.engine.errors import StreamError
from seqkv.engine.profile import Profile
from seqkv.entropy_coding import CorruptGroup, decode_group, encode_group

CHUNK = 256  # tokens

_LENGTH = struct.Struct("<I")


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


def gains(profile: Profile, classes: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Gain indices [blocks, tokens] of importance classes [layers, tokens]."""
    by_side = np.take_along_axis(profile.gains, classes[None].astype(np.intp), axis=2)
    return np.ascontiguousarray(by_side.transpose(1, 0, 2)).reshape(-1, classes.shape[1])


def predicted(profile: Profile, block: int, side: Side, decoded: dict[int, NDArray[np.float32]]) -> NDArray[np.float32]:
    """What `block` is expected to hold, [tokens, channels]."""
    weights, bias, _ = profile.maps[block]
    rank = side.rows.shape[1]
    out = (side.rows @ weights[:rank] + bias)[side.index]
    before = [decoded[b] for b in profile.sources(block)]
    if before:
        out += np.concatenate(before, axis=1) @ weights[rank:]
    if side.first:
        start, end = profile.starts[block : block + 2]
        out[: importance.SINKS] += profile.sink_bias[: len(out), start:end]
    return out


def encode_chunk(
    profile: Profile, side: Side, values: Callable[[int], NDArray[np.float32]]
) -> tuple[NDArray[np.int32], Loss]:
    """Symbols [tokens, coefs] of a chunk. values(block) -> [tokens, channels] float32, asked for in order, once each."""
    tokens = side.gain.shape[1]
    symbols = np.empty((tokens, profile.starts[-1]), np.int32)
    decoded: dict[int, NDArray[np.float32]] = {}
    loss = Loss(0.0, np.zeros(2), np.zeros(2), tokens)
    every = np.ones(tokens, np.float32)
    energy = quantiser.step_size(side.step) ** 2
    for block, width in enumerate(profile.widths):
        true, steps = values(block), side.token_steps(block)
        out = predicted(profile, block, side, decoded)
        coefs = symbols[:, profile.starts[block] :][:, :width]
        loss.fisher += energy * quantiser.quantise((true - out) @ profile.forward[block], 1 / steps, coefs, every)
        live = np.flatnonzero(coefs.any(axis=0))
        out += (coefs[:, live] * steps[:, None]) @ profile.maps[block][2][live]
        decoded[block] = out
        decoded.pop(block - 2 * (profile.depth + 1), None)
        loss.error[block % 2] += np.square(true - out).sum()
        loss.energy[block % 2] += np.square(true - true.mean(axis=0)).sum()
    return symbols, loss


def decode_chunk(
    profile: Profile, side: Side, symbols: NDArray[np.int32], live: NDArray[np.intp], layers: int
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(block, decoded [tokens, channels]) of the first `layers` layers, in order.

    symbols [tokens, len(live)]: of the coefficients `live`, increasing; the others are zero.
    """
    decoded: dict[int, NDArray[np.float32]] = {}
    bounds = np.searchsorted(live, profile.starts)
    for block in range(2 * layers):
        out = predicted(profile, block, side, decoded)
        first, last = bounds[block], bounds[block + 1]
        if first < last:
            rows = live[first:last] - profile.starts[block]
            out += (symbols[:, first:last] * side.token_steps(block)[:, None]) @ profile.maps[block][2][rows]
        decoded[block] = out
        decoded.pop(block - 2 * (profile.depth + 1), None)
        yield block, out


def pack_chunk(profile: Profile, side: Side, symbols: NDArray[np.int32]) -> bytes:
    """A chunk's symbols as bytes: u32 length of the map of live coefficients, the map, the coded group."""
    live = symbols.any(axis=0)
    # in the order of calibrated variance the map is one run of ones, a mixed part, and one of zeros
    order = np.argsort(-profile.scale, kind="stable")
    bitmap = zstandard.ZstdCompressor(level=19).compress(np.packbits(live[order]).tobytes())
    index = np.flatnonzero(live)
    group = encode_group(symbols[:, index], *_contexts(profile, side, index))
    return _LENGTH.pack(len(bitmap)) + bitmap + group


def unpack_chunk(
    profile: Profile, side: Side, data: memoryview, layers: int
) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """Symbols of the live coefficients of the first `layers` layers, and which these are. StreamError on damage."""
    total = int(profile.starts[-1])
    bitmap_bytes = (total + 7) // 8
    if len(data) < _LENGTH.size:
        raise StreamError("truncated chunk")
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    try:
        frame = data[_LENGTH.size : _LENGTH.size + length]
        if zstandard.get_frame_parameters(frame).content_size != bitmap_bytes:
            raise StreamError("altered chunk: its map has the wrong size")
        bitmap = zstandard.ZstdDecompressor().decompress(frame, max_output_size=bitmap_bytes)
        order = np.argsort(-profile.scale, kind="stable")
        live = np.zeros(total, bool)
        live[order] = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=total).astype(bool)
        index = np.flatnonzero(live)
        group = data[_LENGTH.size + length :]
        symbols = decode_group(group, side.gain.shape[1], *_contexts(profile, side, index), segments=2 * layers)
    except (zstandard.ZstdError, CorruptGroup) as error:
        raise StreamError(f"altered chunk: {error}") from error
    return symbols, index[: symbols.shape[1]]


def _contexts(
    profile: Profile, side: Side, live: NDArray[np.intp]
) -> tuple[NDArray[np.int16], NDArray[np.int16], NDArray[np.int32]]:
    """Where the coder's contexts start: base [live], offset [tokens, blocks], segment starts [blocks + 1]."""
    base = profile.scale[live].astype(np.int32) + quantiser.step_units(side.step)
    offset = np.ascontiguousarray(quantiser.gain_units(side.gain).T)
    return (
        np.clip(base, -(2**15), 2**15 - 1).astype(np.int16),
        offset,
        np.searchsorted(live, profile.starts).astype(np.int32),
    )


_CLASS_STEP = importance.LEVELS // 2
_CLASS_SCALE = (1.5, 0.4)  # mean change of class: of the first layer from the middle, of others from the layer below


def pack_classes(classes: NDArray[np.uint8]) -> bytes:
    """Importance classes [layers, tokens] as a coded group; those of sinks follow from their place and are left out."""
    plain = np.where(classes < importance.LEVELS, classes, _CLASS_STEP).astype(np.int32)
    change = np.diff(plain, axis=0, prepend=np.int32(_CLASS_STEP))
    return encode_group(np.ascontiguousarray(change.T), *_class_contexts(*classes.shape))


def unpack_classes(data: memoryview, layers: int, tokens: int) -> NDArray[np.uint8]:
    """The inverse of `pack_classes`. StreamError on damage."""
    try:
        change = decode_group(data, tokens, *_class_contexts(layers, tokens))
    except CorruptGroup as error:
        raise StreamError(f"altered importance classes: {error}") from error
    plain = np.cumsum(change.T, axis=0, dtype=np.int64) + _CLASS_STEP
    if plain.min() < 0 or plain.max() >= importance.LEVELS:
        raise StreamError("altered importance classes: out of range")
    out = plain.astype(np.uint8)
    sinks = min(importance.SINKS, tokens)
    out[:, :sinks] = importance.LEVELS + np.arange(sinks, dtype=np.uint8)
    return out


def _class_contexts(layers: int, tokens: int) -> tuple[NDArray[np.int16], NDArray[np.int16], NDArray[np.int32]]:
    scale = np.full(layers, _CLASS_SCALE[1])
    scale[:1] = _CLASS_SCALE[0]
    return quantiser.scale_units(scale), np.zeros((tokens, layers), np.int16), np.arange(layers + 1, dtype=np.int32)
