"""Symbols a second and bits a symbol of the coder, one thread, with zstandard beside it.

    pytest bench/bench_entropy_coding.py

The symbols are residuals as a predictor leaves them: Laplacian, their scales drifting about what base and offset say.
zstandard (level 3) gets the same symbols as int8, clipped.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import zstandard

from seqkv.entropy_coding import cost, decode_group, encode_group
from seqkv.entropy_coding.make_tables import class_scale

TOKENS, COEFS, SEGMENTS = 256, 3000, 60
MEAN_CLASS = {"near, 0.8 bits": 15, "fine, 3 bits": 26}


@cache
def group(rate):
    rng = np.random.default_rng(0)
    base = np.rint(64 * rng.uniform(-7, 7, COEFS) + 64 * MEAN_CLASS[rate]).astype(np.int16)
    offset = rng.integers(-64, 64, (TOKENS, SEGMENTS)).astype(np.int16)
    segment_starts = np.linspace(0, COEFS, SEGMENTS + 1).astype(np.int32)
    segment = np.searchsorted(segment_starts, np.arange(COEFS), side="right") - 1
    place = (base + offset[:, segment]) / 64 + rng.normal(0, 2, (TOKENS, 1)) + rng.normal(0, 1, COEFS)
    symbols = np.rint(rng.laplace(scale=class_scale(place))).astype(np.int32)
    return symbols, base, offset, segment_starts


@cache
def as_int8(rate):
    return np.clip(group(rate)[0], -128, 127).astype(np.int8).tobytes()


def report(benchmark, rate, size):
    symbols = group(rate)[0]
    benchmark.extra_info["zeros"] = round(float((symbols == 0).mean()), 3)
    benchmark.extra_info["bits a symbol"] = round(8 * size / symbols.size, 3)
    benchmark.extra_info["million symbols a second"] = round(symbols.size / benchmark.stats["min"] / 1e6)


@pytest.mark.parametrize("rate", MEAN_CLASS)
def test_encode(benchmark, rate):
    report(benchmark, rate, len(benchmark(encode_group, *group(rate))))


@pytest.mark.parametrize("rate", MEAN_CLASS)
def test_decode(benchmark, rate):
    symbols, *context = group(rate)
    encoded = encode_group(symbols, *context)
    decoded = benchmark(decode_group, encoded, TOKENS, *context)
    np.testing.assert_array_equal(decoded, symbols)
    report(benchmark, rate, len(encoded))


@pytest.mark.parametrize("rate", MEAN_CLASS)
def test_cost(benchmark, rate):
    report(benchmark, rate, benchmark(cost, *group(rate)) / 8)


@pytest.mark.parametrize("rate", MEAN_CLASS)
def test_zstandard_encode(benchmark, rate):
    report(benchmark, rate, len(benchmark(zstandard.ZstdCompressor(level=3).compress, as_int8(rate))))


@pytest.mark.parametrize("rate", MEAN_CLASS)
def test_zstandard_decode(benchmark, rate):
    encoded = zstandard.ZstdCompressor(level=3).compress(as_int8(rate))
    benchmark(zstandard.ZstdDecompressor().decompress, encoded)
    report(benchmark, rate, len(encoded))
