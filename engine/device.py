"""The near tier on a CUDA device: many chunks at a time, layer by layer. `near` and `host` are the same, plain.

Blocks are [tokens, channels] as on the CPU; residuals and symbols are [coefs, columns], a column a token, as kernels
like them. Everything runs on CuPy's current stream. No key and no value leaves the device: what does is coded bytes,
maps of live coefficients, and sums.

Workspace, beside the cache, the matrices of the profile and the coded bytes, for a batch of T tokens (at most SPAN) of
layers of C channels, keys and values together: 4 T C (depth + 3) bytes; to encode, 4 bytes more for each symbol of a
coefficient that is not zero throughout its chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.cuda_kernels import coder, device, elementwise
from seqkv.cuda_kernels.linear import multiply
from seqkv.engine import layout, near, quantiser
from seqkv.engine.cache import KVCache, Rope
from seqkv.engine.container import Container, Section
from seqkv.engine.errors import StreamError, reading
from seqkv.engine.form import CHUNK, MEANS, NAMES, SCALES, TOKENS, Form, chunk_bounds, chunks
from seqkv.engine.host import needed
from seqkv.engine.matrices import Batch, Decoded, forward_matrices, matrices
from seqkv.engine.modes import Mode
from seqkv.engine.probs import TokenProbs
from seqkv.engine.target import Target
from seqkv.entropy_coding import CorruptGroup

BATCH = 128  # chunks coded together: as many warps, about one for each multiprocessor
SPAN = BATCH * near.CHUNK  # tokens looked at together

_STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def blocks_of(kv: KVCache, tokens: slice) -> Callable[[int], Any]:
    """The blocks of some tokens of a cache on a device: block -> [tokens, channels] float32, keys before rotation."""
    return layout.blocks_of(kv, tokens, _Turns(kv.positions[tokens]))


def encode_chunks(
    kv: KVCache, mode: Mode, probs: TokenProbs, classes: NDArray[np.uint8], step: int
) -> tuple[list[Section], near.Loss]:
    """As host.encode_chunks."""
    sections: list[Section] = []
    loss = near.Loss.none()
    for some in _batches(mode, range(chunks(kv.tokens))):
        batch = Batch(_bounds(some, kv.tokens), mode, probs, classes, [step] * len(some))
        encoding = _Encoding(mode, batch, step)
        encoding.add_layers(blocks_of(kv, slice(batch.start, batch.stop)))
        sections += encoding.sections(some)
        loss += encoding.loss()
    return sections, loss


def decode_chunks(
    parsed: Container,
    form: Form,
    mode: Mode,
    probs: TokenProbs,
    classes: NDArray[np.uint8],
    wanted: range,
    depth: range,
    target: Target,
    aligned: None = None,
) -> None:
    """As host.decode_chunks, but for streams that were coded against a reference."""
    xp = device.cupy()
    layers = len(form.shape) if mode.sequential else depth.stop  # that must be decoded
    for some in _batches(mode, needed(mode, wanted)):
        steps = [form.steps[chunk] for chunk in some]
        those = f"chunks {some.start} to {some.stop - 1}"
        with reading(f"{those}: {NAMES[TOKENS]}: altered"):
            batch = Batch(_bounds(some, form.tokens), mode, probs, classes, steps)
        scales = [mode.stored_scale(parsed, chunk, step) for chunk, step in zip(some, steps, strict=True)]
        alike = 1 if not mode.sequential and len(set(steps)) == 1 else len(some)  # rows of base that differ
        base = xp.asarray(np.stack([s.at_step(step) for s, step in zip(scales[:alike], steps[:alike], strict=True)]))
        store = _Store(form, batch, wanted, depth, target)
        try:
            decoders = [_decoder(parsed, CHUNK, some, scales, batch.first, batch.tokens)]
            if mode.means:
                decoders.append(_decoder(parsed, MEANS, some, scales, batch.mean_first, batch.mean_tokens))
            decoded = _decode_layers(mode, batch, decoders, base, layers, store)
            for decoder in decoders:
                decoder.check(partial=layers < len(form.shape))
        except CorruptGroup as error:
            raise StreamError(f"{those}, counted from 0: altered: {error}") from error
        if mode.sequential:
            mode.learn(decoded.whole())


def mean_offset(batch: Batch) -> Any:
    """Where the coder's contexts of means start, [2, windows], beside their base."""
    offset = quantiser.gain_units(np.full((2, len(batch.mean_steps)), near.MEAN_GAIN)) + np.int16(near.MEAN_SHIFT)
    return device.cupy().asarray(offset)


def _decoder(
    parsed: Container,
    kind: int,
    some: range,
    scales: list[near.Scale],
    first: NDArray[np.int64],
    tokens: NDArray[np.int32],
) -> coder.Decoder:
    """Of the sections of one kind of some chunks."""
    parts = []
    for chunk, scale in zip(some, scales, strict=True):
        with reading(f"chunk {chunk}: {NAMES[kind]}"):
            parts.append(near.split(scale, parsed.section(kind, chunk)))
    live = np.stack([live for live, _ in parts]).astype(np.uint8)
    return coder.Decoder([group for _, group in parts], live, first, tokens, int(tokens.sum()))


def empty(form: Form) -> Callable[[tuple[int, ...]], Any]:
    """Makes arrays of a stream's dtype."""
    return lambda shape: device.cupy().empty(shape, _STORAGE[form.dtype])


class _Encoding:
    """One batch on its way to bytes."""

    def __init__(self, mode: Mode, batch: Batch, step: int) -> None:
        self.mode, self.batch, self.step = mode, batch, step
        model = mode.model()
        self.model, self.forward = matrices(model), forward_matrices(model)
        self.encoder = coder.Encoder(batch.first, batch.tokens, batch.columns)
        self.mean_encoder = coder.Encoder(batch.mean_first, batch.mean_tokens, len(batch.mean_steps))
        self.errors: list[Any] = []  # of each block: partial sums of (error in steps)^2
        self.energies: tuple[list[Any], list[Any]] = ([], [])  # of keys, of values: error and energy, partial sums

    def add_layers(self, values: Callable[[int], Any]) -> None:
        """Predict, transform, quantise and code all layers. values(block) -> [tokens, channels]."""
        starts, xp = self.model.starts, device.cupy()
        layers, decoded, waiting = len(starts) // 2, Decoded(), []
        if not self.mode.sequential:
            self._know_scale(np.zeros(0, np.int64))
        for layer in range(layers):
            first, middle, last = starts[2 * layer : 2 * layer + 3]
            symbols = xp.empty((last - first, self.batch.columns), np.int32)
            means = xp.zeros((last - first, len(self.batch.mean_steps)), np.int32)
            for block, part in ((2 * layer, slice(middle - first)), (2 * layer + 1, slice(middle - first, None))):
                decoded.put(block, self._code(block, values, decoded, symbols[part], means[part]))
            if self.mode.means:
                self._add_means(layer, means)
            waiting.append((layer, symbols, coder.statistics(symbols, self.batch.first, self.batch.tokens)))
            if not self.mode.sequential:
                self._add(*waiting.pop())
                decoded.forget(self.model.sources, layer)
        if self.mode.sequential:
            self._know_scale(np.concatenate([statistics.magnitude.get()[0] for _, _, statistics in waiting]))
            for one in waiting:
                self._add(*one)
            self.mode.learn(decoded.whole())

    def _code(self, block: int, values: Callable[[int], Any], decoded: Decoded, symbols: Any, means: Any) -> Any:
        """Writes the symbols [coefs, columns] of a block, and those of means [coefs, windows] if it is one of values;
        returns what a decoder makes of them."""
        xp, batch = device.cupy(), self.batch
        out, true = batch.predicted(self.model, block, decoded), values(block)
        residual = xp.empty(symbols.shape, np.float32)
        # not in TF32: the symbols of a fine step would feel it
        multiply(true - out, self.forward[block], residual.T, exact=True)
        lost = xp.empty((elementwise.slabs(len(symbols)), batch.columns), np.float32)
        elementwise.quantise(residual, batch.fineness[block], symbols, lost)
        self.errors.append(lost.sum(dtype=np.float64))
        coded = xp.empty(symbols.shape, np.float32)
        elementwise.dequantise(symbols, batch.steps[block], coded)
        if self.mode.means and block % 2:
            coded += self._code_means(block, residual - coded, means)[:, batch.window]
        multiply(coded.T, self.model.maps[block][1], out, accumulate=True)
        sums = xp.empty((2, len(batch.tokens), out.shape[1]), np.float64)
        elementwise.energies(true, out, near.CHUNK, sums)
        self.energies[block % 2].append(sums.sum(axis=(1, 2)))
        return out

    def _code_means(self, block: int, error: Any, symbols: Any) -> Any:
        """Writes the symbols [coefs, windows] of the means of an error; returns what a decoder makes of them."""
        xp, batch = device.cupy(), self.batch
        mean, weight = batch.means(error, block)
        unused = xp.empty((elementwise.slabs(len(symbols)), symbols.shape[1]), np.float32)
        elementwise.quantise(mean, np.float32(1) / batch.mean_steps, symbols, unused)
        shared = xp.empty(symbols.shape, np.float32)
        elementwise.dequantise(symbols, batch.mean_steps, shared)
        wide = shared.astype(np.float64)
        self.errors[block] -= (weight * (2 * mean - wide) * wide).sum()
        return shared

    def _add_means(self, layer: int, symbols: Any) -> None:
        first, middle, last = self.model.starts[2 * layer : 2 * layer + 3]
        statistics = coder.statistics(symbols, self.batch.mean_first, self.batch.mean_tokens)
        starts = [0, middle - first, last - first]
        self.mean_encoder.add(symbols, statistics, self.base[:, first:last], mean_offset(self.batch), starts)

    def _add(self, layer: int, symbols: Any, statistics: Any) -> None:
        first, middle, last = self.model.starts[2 * layer : 2 * layer + 3]
        base, offset = self.base[:, first:last], self.batch.offset[2 * layer : 2 * layer + 2]
        self.encoder.add(symbols, statistics, base, offset, [0, middle - first, last - first])

    def _know_scale(self, magnitude: NDArray[np.int64]) -> None:
        self.scale, self.stored = self.mode.scale(magnitude, self.batch.columns, self.step)
        self.base = device.cupy().asarray(self.scale.at_step(self.step)[None])

    def sections(self, some: range) -> list[Section]:
        out = self._coded(CHUNK, some, self.encoder)
        if self.stored:
            out += [Section(SCALES, chunk, self.stored) for chunk in some]
        return out + (self._coded(MEANS, some, self.mean_encoder) if self.mode.means else [])

    def _coded(self, kind: int, some: range, encoder: coder.Encoder) -> list[Section]:
        groups, live = encoder.finish()
        parts = zip(some, groups, live, strict=True)
        return [Section(kind, chunk, near.join(self.scale, flags.astype(bool), group)) for chunk, group, flags in parts]

    def loss(self) -> near.Loss:
        """CacheError if something was too far from what was expected to be coded."""
        xp = device.cupy()
        errors = xp.stack(self.errors).get()
        for block in np.flatnonzero(~np.isfinite(errors)):
            raise near.too_far(int(block), self.step)
        sums = np.stack([xp.stack(side).sum(axis=0).get() for side in self.energies])
        fisher = float(errors.sum()) * quantiser.step_size(self.step) ** 2
        return near.Loss(fisher, sums[:, 0], sums[:, 1], self.batch.columns)


def _decode_layers(
    mode: Mode, batch: Batch, decoders: list[coder.Decoder], base: Any, layers: int, store: _Store
) -> Decoded:
    """Decode `layers` layers and store them; returns the last blocks, all of them for a sequential mode.

    decoders: of symbols, and of means if these are coded.
    """
    model, xp = matrices(mode.model()), device.cupy()
    decoded, mean_contexts = Decoded(), mean_offset(batch)
    for layer in range(layers):
        first, middle, last = model.starts[2 * layer : 2 * layer + 3]
        residual = xp.empty((last - first, batch.columns), np.float32)
        base_, starts = xp.ascontiguousarray(base[:, first:last]), [0, middle - first, last - first]
        parts = ((2 * layer, slice(middle - first)), (2 * layer + 1, slice(middle - first, None)))
        symbols = xp.empty(residual.shape, np.int32)
        decoders[0].next(base_, batch.offset[2 * layer : 2 * layer + 2], starts, symbols)
        for block, part in parts:
            elementwise.dequantise(symbols[part], batch.steps[block], residual[part])
        if mode.means:
            means = xp.empty((last - first, len(batch.mean_steps)), np.int32)
            decoders[1].next(base_, mean_contexts, starts, means)
            shared = xp.empty(means.shape, np.float32)
            elementwise.dequantise(means, batch.mean_steps, shared)
            residual += shared[:, batch.window]
        for block, part in parts:
            out = batch.predicted(model, block, decoded)
            multiply(residual[part].T, model.maps[block][1], out, accumulate=True)
            store(block, out)
            decoded.put(block, out)
        if not mode.sequential:
            decoded.forget(model.sources, layer)
    return decoded


class _Store:
    """Puts the wanted tokens and layers of decoded blocks into a target."""

    def __init__(self, form: Form, batch: Batch, wanted: range, depth: range, target: Target) -> None:
        first, last = max(batch.start, wanted.start), min(batch.stop, wanted.stop)
        self.part = slice(first - batch.start, max(first, last) - batch.start)
        self.slots = device.cupy().asarray(target.slots[first - wanted.start : max(first, last) - wanted.start])
        self.turns = _Turns(form.positions[first : max(first, last)])
        self.rope, self.depth, self.target = form.rope, depth, target

    def __call__(self, block: int, values: Any) -> None:
        layer, is_value = divmod(block, 2)
        if layer in self.depth:
            into = self.target.side(layer - self.depth.start, is_value)
            self.turns.to_heads(values[self.part], None if is_value else self.rope[layer], into, self.slots)


class _Turns:
    """layout.Turns on a device."""

    def __init__(self, positions: NDArray[np.int64]) -> None:
        self.positions = device.cupy().asarray(positions)
        self._made: dict[tuple[Rope, bool], elementwise.Turn] = {}

    def to_block(self, heads: Any, rope: Rope | None) -> Any:
        """[kv_heads, tokens, width] -> [tokens, channels] float32, turned back if there is a rope."""
        count, tokens, width = heads.shape
        out = device.cupy().empty((tokens, count * width), np.float32)
        elementwise.to_block(heads, self._turn(rope, back=True), out)
        return out

    def to_heads(self, block: Any, rope: Rope | None, out: Any, slots: Any) -> None:
        """[tokens, channels] -> out [blocks, kv_heads, block, width], at `slots`, turned if there is a rope."""
        elementwise.to_heads(block, self._turn(rope, back=False), slots, out)

    def _turn(self, rope: Rope | None, back: bool) -> elementwise.Turn | None:
        if rope is None:
            return None
        if (rope, back) not in self._made:
            cos, sin = rope.tables(self.positions)
            factor = np.float32(1.0 / rope.scaling if back else rope.scaling)
            turn = elementwise.Turn.of(cos * factor, sin * (-factor if back else factor), *rope.pairs())
            self._made[rope, back] = turn
        return self._made[rope, back]


def _batches(mode: Mode, some: range) -> Iterator[range]:
    size = 1 if mode.sequential else BATCH
    return (some[i : i + size] for i in range(0, len(some), size))


def _bounds(some: range, tokens: int) -> NDArray[np.int64]:
    return np.array([chunk_bounds(chunk, tokens) for chunk in some], np.int64)
