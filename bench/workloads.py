"""A piece of work for every kernel, as encode and decode give it, with what the CPU does for the same beside it.

Of a batch of chunks of 256 tokens: a block of 8 heads of 128 channels, which are 1024 coefficients, in segments of 64.
Symbols are residuals as a predictor leaves them: Laplacian, about 3 bits each, their scales drifting about what base
and offset say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from seqkv.cuda_kernels import coder, elementwise
from seqkv.engine import prediction, quantiser
from seqkv.engine.cache import Rope
from seqkv.engine.layout import Turns
from seqkv.entropy_coding import decode_group, encode_group
from seqkv.entropy_coding.make_tables import class_scale

TOKENS, SEGMENT, WIDTH, K = 256, 64, 128, 8  # of a chunk; of a head; rows a token is predicted from
SCALE_CLASS = 26


@dataclass(frozen=True)
class Work:
    """run(*prepare()) launches kernels on `values` symbols, values, or products, for which at least `bytes` of the
    device's memory must be read and written; cpu() does the same on the CPU."""

    values: int
    bytes: int
    run: Callable[..., Any]
    cpu: Callable[[], Any]
    prepare: Callable[[], tuple[Any, ...]] = tuple


def workloads(cupy: Any, chunks: int, heads: int) -> dict[str, Work]:
    """By name of the kernel, or of the call that launches some."""
    return coding(cupy, chunks, heads * WIDTH) | elementwise_work(cupy, chunks * TOKENS, heads)


def coding(cupy: Any, chunks: int, coefs: int) -> dict[str, Work]:
    rng = np.random.default_rng(0)
    columns = chunks * TOKENS
    first, tokens = np.arange(chunks) * TOKENS, np.full(chunks, TOKENS)
    segment_starts = list(range(0, coefs + 1, SEGMENT))
    base = np.rint(64 * rng.uniform(SCALE_CLASS - 7, SCALE_CLASS + 7, (1, coefs))).astype(np.int16)
    offset = rng.integers(-64, 64, (len(segment_starts) - 1, columns)).astype(np.int16)
    place = (base.T + np.repeat(offset, SEGMENT, axis=0)) / 64
    place += rng.normal(0, 2, columns) + rng.normal(0, 1, (coefs, 1))
    symbols = np.rint(rng.laplace(scale=class_scale(place))).astype(np.int32)
    on_device = cupy.asarray(symbols)
    context = cupy.asarray(base), cupy.asarray(offset), segment_starts

    def added() -> coder.Encoder:
        encoder = coder.Encoder(first, tokens, columns)
        encoder.add(on_device, statistics, *context)
        return encoder

    def on_cpu(group: int) -> tuple[Any, ...]:
        part = slice(group * TOKENS, (group + 1) * TOKENS)
        is_live = live[group] != 0
        starts = np.concatenate([[0], np.cumsum(is_live)])[segment_starts].astype(np.int32)
        context = base[0, is_live], np.ascontiguousarray(offset[:, part].T), starts
        return np.ascontiguousarray(symbols[is_live][:, part].T), *context

    statistics = coder.statistics(on_device, first, tokens)
    streams, live = added().finish()
    groups = [on_cpu(group) for group in range(chunks)]

    def encoded() -> list[bytes]:
        return [encode_group(*group) for group in groups]

    def decoded() -> list[Any]:
        return [decode_group(stream, TOKENS, *group[1:]) for stream, group in zip(streams, groups, strict=True)]

    stream_bytes, out = sum(map(len, streams)), cupy.empty(symbols.shape, np.int32)
    entries = 2 * symbols.size
    return {
        "statistics": Work(
            symbols.size,
            symbols.nbytes,
            lambda: coder.statistics(on_device, first, tokens),
            lambda: [np.abs(symbols).sum(axis=1, dtype=np.int64)],
        ),
        "Encoder.add": Work(
            symbols.size,
            symbols.nbytes + entries,
            lambda encoder: encoder.add(on_device, statistics, *context),
            encoded,
            lambda: (coder.Encoder(first, tokens, columns),),
        ),
        "Encoder.finish": Work(
            symbols.size, entries + 3 * stream_bytes, lambda encoder: encoder.finish(), encoded, lambda: (added(),)
        ),
        "Decoder.next": Work(
            symbols.size,
            2 * symbols.nbytes + stream_bytes,
            lambda decoder: decoder.next(*context, out),
            decoded,
            lambda: (coder.Decoder(streams, live, first, tokens, columns),),
        ),
    }


def elementwise_work(cupy: Any, tokens: int, heads: int) -> dict[str, Work]:
    rng = np.random.default_rng(0)
    channels = heads * WIDTH
    rope, turns = Rope.from_theta(1e4, WIDTH), Turns(np.arange(tokens))
    (cos, sin), pairs = rope.tables(turns.positions), rope.pairs()
    back, forth = elementwise.Turn.of(cos, -sin, *pairs), elementwise.Turn.of(cos, sin, *pairs)
    block = rng.standard_normal((tokens, channels), np.float32)
    by_coef = np.ascontiguousarray(block.T)
    symbols, fine = np.empty((tokens, channels), np.int32), np.full(tokens, 8, np.float32)
    quantiser.quantise(block, fine, symbols)
    rows, index = block[:512], rng.integers(0, min(512, tokens), (tokens, K)).astype(np.int32)
    weights = rng.random((tokens, K), np.float32)

    on_device, decoded = cupy.asarray(block), cupy.asarray(block + np.float32(0.01))
    residual, fineness, coded = cupy.asarray(by_coef), cupy.asarray(fine), cupy.asarray(symbols.T.copy())
    lost = cupy.empty((elementwise.slabs(channels), tokens), np.float32)
    out, by_column = cupy.empty(block.shape, np.float32), cupy.empty(by_coef.shape, np.float32)
    sums = cupy.empty((2, -(-tokens // TOKENS), channels), np.float64)
    summands = [cupy.asarray(x) for x in (rows, index, weights, np.zeros(channels, np.float32))]
    found, slots = cupy.zeros(1, np.int32), cupy.asarray(rng.permutation(tokens))

    size = block.size
    angles = 2 * 4 * tokens * WIDTH // 2
    work = {
        "accumulate": Work(
            size * K,
            block.nbytes + rows.nbytes + index.nbytes + weights.nbytes,
            lambda: elementwise.accumulate(*summands, out),
            lambda: prediction.accumulate(rows, index, weights),
        ),
        "quantise": Work(
            size,
            2 * block.nbytes + lost.nbytes,
            lambda: elementwise.quantise(residual, fineness, coded, lost),
            lambda: quantiser.quantise(block, fine, symbols),
        ),
        "dequantise": Work(
            size,
            2 * block.nbytes,
            lambda: elementwise.dequantise(coded, fineness, by_column),
            lambda: quantiser.dequantise(symbols, fine),
        ),
        "energies": Work(
            size,
            2 * block.nbytes + sums.nbytes,
            lambda: elementwise.energies(on_device, decoded, TOKENS, sums),
            lambda: [np.square(block - rows[0]).sum(axis=0), block.var(axis=0)],
        ),
    }
    for dtype in ("float32", "float16", "uint16"):
        stored = np.ones((heads, tokens, WIDTH), dtype)
        given, pages = cupy.asarray(stored), cupy.empty((-(-tokens // 16), heads, 16, WIDTH), dtype)
        moved = size * stored.itemsize
        work[f"to_block {dtype}"] = Work(
            size,
            moved + block.nbytes + angles,
            lambda given=given: elementwise.to_block(given, back, out),
            lambda stored=stored: turns.to_block(stored, rope),
        )
        work[f"to_heads {dtype}"] = Work(
            size,
            moved + block.nbytes + angles,
            lambda pages=pages: elementwise.to_heads(on_device, forth, slots, pages),
            lambda stored=stored: turns.to_heads(block, rope, stored),
        )
        work[f"finite {dtype}"] = Work(
            size,
            moved,
            lambda given=given: elementwise.finite(given, found),
            lambda stored=stored: np.isfinite(stored).all(),
        )
    return work
