"""The near tier on the CPU: chunk after chunk, the symbols of several coded at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import delta, importance, layout, near, prediction
from seqkv.engine.arrays import round_to_bfloat16
from seqkv.engine.cache import KVCache
from seqkv.engine.container import Container, Section
from seqkv.engine.errors import reading
from seqkv.engine.form import CHUNK, DELTA, DELTA_MEANS, MEANS, NAMES, SCALES, TOKENS, Form, chunk_bounds, chunks
from seqkv.engine.layout import Turns
from seqkv.engine.modes import Mode
from seqkv.engine.probs import TokenProbs
from seqkv.engine.target import Target

if TYPE_CHECKING:
    from seqkv.engine.reference import Aligned

SPAN = near.CHUNK  # tokens looked at together
WORKERS = min(4, os.cpu_count() or 1)  # chunks whose symbols are coded at the same time


def blocks_of(kv: KVCache, tokens: slice) -> Callable[[int], NDArray[np.float32]]:
    """The blocks of some tokens of a cache: block -> [tokens, channels] float32, keys before rotation."""
    return layout.blocks_of(kv, tokens, Turns(kv.positions[tokens]))


def encode_chunks(
    kv: KVCache, mode: Mode, probs: TokenProbs, classes: NDArray[np.uint8], step: int
) -> tuple[list[Section], near.Loss]:
    """The sections of all chunks, and what quantisation lost. classes [layers, tokens]: importance; step: an index."""

    def pack(chunk: int, side: near.Side, coded: near.Coded) -> list[Section]:
        magnitude = np.abs(coded.symbols).sum(axis=0, dtype=np.int64)
        scale, stored = mode.scale(magnitude, len(coded.symbols), step)
        extra = [Section(SCALES, chunk, stored)] if stored else []
        return extra + own_sections(chunk, mode, scale, side, coded.symbols, coded.means)

    sections: list[Section] = []
    loss = near.Loss.none()
    with ThreadPoolExecutor(WORKERS) as pool:
        for some in _batches(range(chunks(kv.tokens))):
            coded = []
            for chunk in some:
                start, stop = chunk_bounds(chunk, kv.tokens)
                side = side_of(mode, probs, classes, step, start, stop)
                one = near.encode_chunk(mode.model(), side, blocks_of(kv, slice(start, stop)), mode.means)
                mode.learn(one.decoded)
                loss += one.loss
                coded.append((chunk, side, one))
            for packed in pool.map(pack, *zip(*coded, strict=True)):
                sections += packed
    return sections, loss


def own_sections(
    chunk: int,
    mode: Mode,
    scale: near.Scale,
    side: near.Side,
    symbols: NDArray[np.int32],
    means: NDArray[np.int32],
) -> list[Section]:
    """What is stored of tokens that are coded without a reference."""
    means = means if len(symbols) else means[:0]
    sections = [Section(CHUNK, chunk, near.encode_symbols(scale, mode.starts, side, symbols))]
    if mode.means:
        data = near.encode_symbols(scale, mode.starts, near.mean_side(side, len(means)), means, near.MEAN_SHIFT)
        sections.append(Section(MEANS, chunk, data))
    return sections


@dataclass(frozen=True)
class Unpacked:
    """A chunk's symbols: of its own tokens and their mean, and if some are aligned with a reference, of those and of
    the mean by which they differ."""

    chunk: int
    side: near.Side
    own: near.Symbols
    means: near.Symbols | None
    delta: near.Symbols | None
    delta_means: near.Symbols | None


@dataclass(frozen=True)
class Coding:
    """What the chunks of a stream are decoded with."""

    parsed: Container
    form: Form
    mode: Mode
    probs: TokenProbs
    classes: NDArray[np.uint8]
    aligned: Aligned | None

    def unpack(self, chunk: int, layers: int) -> Unpacked:
        """The symbols of a chunk's first layers. StreamError on damage."""
        form, mode, starts = self.form, self.mode, self.mode.starts
        with reading(f"chunk {chunk}: {NAMES[TOKENS]}: altered"):
            side = side_of(mode, self.probs, self.classes, form.steps[chunk], *chunk_bounds(chunk, form.tokens))
        scale = mode.stored_scale(self.parsed, chunk, side.step)

        def read(kind: int, some: near.Side, shift: int = 0) -> near.Symbols:
            with reading(f"chunk {chunk}: {NAMES[kind]}"):
                return near.decode_symbols(scale, starts, some, self.parsed.section(kind, chunk), layers, shift)

        held = self._held(chunk)
        own = delta.part(side, ~held) if held.any() else side
        count = near.windows(len(held)) if own.gain.size else 0
        means = read(MEANS, near.mean_side(side, count), near.MEAN_SHIFT) if mode.means else None
        if not held.any():
            return Unpacked(chunk, side, read(CHUNK, own), means, None, None)
        deltas = read(DELTA, delta.part(side, held), delta.SHIFT)
        of_deltas = read(DELTA_MEANS, near.mean_side(side, 1), near.MEAN_SHIFT)
        return Unpacked(chunk, side, read(CHUNK, own), means, deltas, of_deltas)

    def decode(self, unpacked: Unpacked, layers: int) -> NDArray[np.float32]:
        """Decoded blocks of the first layers, side by side: [tokens, coefs]."""
        model = self.mode.model()
        if unpacked.delta is None:
            return near.decode_chunk(model, unpacked.side, unpacked.own, unpacked.means, layers)
        assert self.aligned is not None and unpacked.means is not None and unpacked.delta_means is not None
        held, index = self._held(unpacked.chunk), self.aligned.index[slice(*self._bounds(unpacked.chunk))]
        width = int(self.mode.starts[2 * layers])
        counts = (len(held), near.windows(len(held)), 1)
        symbols, means, delta_means = (np.zeros((count, width), np.int32) for count in counts)
        for rows, (some, live) in ((~held, unpacked.own), (held, unpacked.delta)):
            symbols[np.ix_(rows, live)] = some
        for row, (some, live) in ((means, unpacked.means), (delta_means, unpacked.delta_means)):
            row[: len(some), live] = some
        reference = self.aligned.reference.rows(index[held])
        return delta.decode_chunk(model, unpacked.side, symbols, (means, delta_means), held, reference, layers)

    def _held(self, chunk: int) -> NDArray[np.bool_]:
        """Which tokens of a chunk are aligned."""
        start, stop = self._bounds(chunk)
        return np.zeros(stop - start, bool) if self.aligned is None else self.aligned.held(slice(start, stop))

    def _bounds(self, chunk: int) -> tuple[int, int]:
        return chunk_bounds(chunk, self.form.tokens)


def decode_chunks(
    parsed: Container,
    form: Form,
    mode: Mode,
    probs: TokenProbs,
    classes: NDArray[np.uint8],
    wanted: range,
    depth: range,
    target: Target,
    aligned: Aligned | None = None,
) -> None:
    """Decode the tokens `wanted` of the layers `depth` into `target`, and no more than that needs."""
    layers = len(form.shape) if mode.sequential else depth.stop  # that must be decoded
    coding = Coding(parsed, form, mode, probs, classes, aligned)

    def store(chunk: int, decoded: NDArray[np.float32]) -> None:
        start, stop = chunk_bounds(chunk, form.tokens)
        first, last = max(start, wanted.start), min(stop, wanted.stop)
        if first >= last:
            return
        turns, slots = Turns(form.positions[first:last]), target.slots[first - wanted.start : last - wanted.start]
        for block in range(2 * depth.start, 2 * depth.stop):
            layer, is_value = divmod(block, 2)
            values = decoded[first - start : last - start, mode.starts[block] : mode.starts[block + 1]]
            into = target.side(layer - depth.start, is_value)
            rope = None if is_value else form.rope[layer]
            if not target.own:
                turns.to_heads(values, rope, into, slots)
                continue
            part = into[0][:, slots[0] : slots[-1] + 1]
            turns.to_heads(values, rope, part)
            if form.dtype == "bfloat16":  # float32 here, as NumPy has none
                part[...] = round_to_bfloat16(part)

    with ThreadPoolExecutor(WORKERS) as pool:
        for some in _batches(needed(mode, wanted)):
            blocks = []
            for unpacked in pool.map(lambda chunk: coding.unpack(chunk, layers), some):
                blocks.append(coding.decode(unpacked, layers))
                mode.learn(blocks[-1])
            list(pool.map(store, some, blocks))


def empty(form: Form) -> Callable[[tuple[int, ...]], NDArray[np.floating]]:
    """Makes arrays of a stream's dtype."""
    return lambda shape: np.empty(shape, form.storage)


def needed(mode: Mode, wanted: range) -> range:
    """The chunks that must be decoded for some tokens."""
    return range(0 if mode.sequential else wanted.start // near.CHUNK, chunks(wanted.stop))


def _batches(some: range) -> Iterator[range]:
    """As many chunks at a time as are coded in threads. Linear algebra, which has its own threads, is done between."""
    return (some[i : i + WORKERS] for i in range(0, len(some), WORKERS))


def side_of(mode: Mode, probs: TokenProbs, classes: NDArray[np.uint8], step: int, start: int, stop: int) -> near.Side:
    """What the tokens from start to stop are predicted and quantised with. ProbsError as prediction.token_rows."""
    rows, index = prediction.token_rows(mode.table, probs.part(start, stop), mode.predictor)
    first = classes[0, start] >= importance.LEVELS  # a sink: no other token has such a class
    return near.Side(rows, index, near.gains(mode.gains, classes[:, start:stop]), step, bool(first))
