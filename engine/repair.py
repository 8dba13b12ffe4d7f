"""What makes a recomputed cache the stored one bit for bit: how many floats lie between each number and its own.

The integer order of a format has its numbers in a row, from the lowest to the highest, -0 before 0. A cache that was
computed in other parts, or by another library, is mostly a few places off. A section for each chunk that differs:

    a bit for each block (keys, values of each layer), whether it differs
    for each of these, i16: where the coder's contexts start
    a group of the differing blocks' distances, see entropy_coding
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seqkv.engine.arrays import from_bfloat16_bits
from seqkv.engine.cache import KVCache
from seqkv.engine.container import Container, Section
from seqkv.engine.digests import bits_of
from seqkv.engine.errors import CacheError, StreamError, reading
from seqkv.engine.form import NAMES, REPAIR, Form, chunk_bounds, chunks
from seqkv.engine.quantiser import scale_units
from seqkv.entropy_coding import decode_group, encode_group

_LARGEST = (1 << 31) - 1  # symbol of a group


def sections(kv: KVCache, recomputed: KVCache) -> list[Section]:
    """What is needed to make `kv` of `recomputed`, of the same shape and dtype, both in host memory."""
    out = []
    for chunk in range(chunks(kv.tokens)):
        part = slice(*chunk_bounds(chunk, kv.tokens))
        ordered = ([_order(block, kv.dtype) for block in _blocks(one, part)] for one in (kv, recomputed))
        distances = [_distance(own, other) for own, other in zip(*ordered, strict=True)]
        flags = np.array([distance.any() for distance in distances])
        some = [distance for distance in distances if distance.any()]
        if not some:
            continue
        units = scale_units(np.array([np.abs(distance).mean() for distance in some]))
        widths = np.array([distance.shape[1] for distance in some])
        symbols = np.concatenate(some, 1)
        if symbols.min() < -_LARGEST:
            raise CacheError("the recomputed cache has nothing in common with this one: store it in another tier")
        group = encode_group(symbols.astype(np.int32), *_contexts(units, widths, len(symbols)))
        head = np.packbits(flags).tobytes() + units.astype("<i2").tobytes()
        out.append(Section(REPAIR, chunk, head + group))
    return out


def apply(parsed: Container, form: Form, recomputed: KVCache) -> KVCache:
    """The cache that was stored. StreamError on damage."""
    keys, values = ([np.array(array) for array in side] for side in (recomputed.keys, recomputed.values))
    there = set(parsed.sections)
    for chunk in range(chunks(form.tokens)):
        if (REPAIR, chunk) not in there:
            continue
        part = slice(*chunk_bounds(chunk, form.tokens))
        tokens = part.stop - part.start
        with reading(f"chunk {chunk}: {NAMES[REPAIR]}"):
            blocks, widths, symbols = _read(parsed.section(REPAIR, chunk), form, tokens)
        starts = np.concatenate([[0], np.cumsum(widths)])
        for i, block in enumerate(blocks):
            array = (values if block % 2 else keys)[block // 2]
            here = symbols[:, starts[i] : starts[i + 1]].astype(np.int64)
            own = _order(_block(array[:, part]), form.dtype) + here
            numbers = _numbers(own, form.dtype)
            array[:, part] = numbers.reshape(tokens, len(array), -1).transpose(1, 0, 2)
    try:
        return KVCache.of_parts(keys, values, form.dtype, recomputed.positions, recomputed.rope)
    except CacheError as error:  # numbers that no cache led to
        raise StreamError(f"altered: {error}") from error


def _read(data: memoryview, form: Form, tokens: int) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.int32]]:
    """Blocks that a section repairs, their widths, and symbols [tokens, sum of widths]. StreamError on damage."""
    size = -(-2 * len(form.shape) // 8)
    if len(data) < size:
        raise StreamError("altered: it is too short")
    flags = np.unpackbits(np.frombuffer(data[:size], np.uint8), count=2 * len(form.shape)).astype(bool)
    blocks = np.flatnonzero(flags)
    head = size + 2 * len(blocks)
    if len(blocks) == 0 or len(data) < head:
        raise StreamError("altered: it is too short")
    units = np.frombuffer(data[size:head], "<i2").astype(np.int16)
    shapes = [(form.shape[b // 2][0], form.shape[b // 2][1 + b % 2]) for b in blocks]
    widths = np.array([heads * width for heads, width in shapes])
    return blocks, widths, decode_group(data[head:], tokens, *_contexts(units, widths, tokens))


def _contexts(
    units: NDArray[np.int16], widths: NDArray[np.int64], tokens: int
) -> tuple[NDArray[np.int16], NDArray[np.int16], NDArray[np.int32]]:
    starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
    return np.repeat(units, widths), np.zeros((tokens, len(widths)), np.int16), starts


def _blocks(kv: KVCache, part: slice) -> list[NDArray[np.generic]]:
    return [_block(side[:, part]) for sides in zip(kv.keys, kv.values, strict=True) for side in sides]


def _block(heads: NDArray[np.generic]) -> NDArray[np.generic]:
    """[heads, tokens, width] as [tokens, channels]."""
    return np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(heads.shape[1], -1)


def _order(block: NDArray[np.generic], dtype: str) -> NDArray[np.int64]:
    """Places in the integer order; those of 0 and -0 are 0 and -1."""
    raw = bits_of(block, dtype)
    half = 1 << (8 * raw.dtype.itemsize - 1)
    places = raw.astype(np.int64)
    return np.where(places < half, places, half - 1 - places)


def _distance(own: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """own - other, modulo 2**32 into 32 bits: of float32 it may not fit."""
    return ((own - other + (1 << 31)) & ((1 << 32) - 1)) - (1 << 31)


def _numbers(places: NDArray[np.int64], dtype: str) -> NDArray[np.generic]:
    """The inverse of `_order`, modulo the number of places."""
    width = 32 if dtype == "float32" else 16
    half = 1 << (width - 1)
    places = ((places + half) & ((1 << width) - 1)) - half
    raw = np.where(places >= 0, places, half - 1 - places)
    if dtype == "float32":
        return raw.astype(np.uint32).view(np.float32)
    small = raw.astype(np.uint16)
    return small.view(np.float16) if dtype == "float16" else from_bfloat16_bits(small)
