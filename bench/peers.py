"""Other codecs of KV caches that need no calibration, for comparison: what comes back of a cache, and its bytes.

Each is a short implementation of our own of what its authors describe, so each figure is ours, not theirs; only quanto,
ZipNN and pcodec are the packages themselves. `code(kv)` gives a Coded. All side information counts: scales, norms,
tables, lengths. What does not, for any codec here and for seqkv alike: what is the same for every cache of a model (a
profile, a rotation, a codebook), and a container's header. Numbers of a fixed width count as if packed without gaps.

Windows of recent tokens that a method keeps in 16 bits are left out: the last 128 of 1,024 would add 2 bits a value.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import KVCache
from seqkv.engine.arrays import bfloat16_bits

Array = NDArray[np.float32]
HALF = 2  # bytes


@dataclass(frozen=True)
class Coded:
    """kv: what comes back. bytes: what it was coded in."""

    kv: KVCache
    bytes: int


@dataclass(frozen=True)
class Peer:
    """A codec at one setting."""

    name: str
    setting: str
    code: Callable[[KVCache], Coded]


def mapped(kv: KVCache, key: Callable[..., tuple[Array, int]], value: Callable[..., tuple[Array, int]]) -> Coded:
    """Each layer's keys and values [kv_heads, tokens, width] through functions (array, layer) -> (array, bytes)."""
    keys = [key(np.asarray(x, np.float32), layer) for layer, x in enumerate(kv.keys)]
    values = [value(np.asarray(x, np.float32), layer) for layer, x in enumerate(kv.values)]
    back = KVCache([x for x, _ in keys], [x for x, _ in values], positions=kv.positions, rope=kv.rope)
    return Coded(back, sum(size for _, size in keys + values))


def fixed_width(count: int, bits: int) -> int:
    """Bytes of `count` numbers of `bits` bits."""
    return (count * bits + 7) // 8


def half(x: Array) -> Array:
    """As float16 keeps it."""
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)


# KIVI, arXiv 2402.02750: keys by channel, values by token, asymmetric, groups of 32, as attention uses them (turned).


def kivi(kv: KVCache, bits: int, group: int = 32) -> Coded:
    def by_channel(x: Array, layer: int) -> tuple[Array, int]:
        out, size = min_max(x.transpose(0, 2, 1), bits, group)
        return out.transpose(0, 2, 1), size

    return mapped(kv, by_channel, lambda x, layer: min_max(x, bits, group))


def min_max(x: Array, bits: int, group: int) -> tuple[Array, int]:
    """Groups of neighbours on the last axis, as even levels from their least to their greatest, which take 16 bits
    each."""
    missing = -x.shape[-1] % group
    groups = np.pad(x, ((0, 0), (0, 0), (0, missing)), mode="edge").reshape(*x.shape[:2], -1, group)
    low = half(groups.min(-1, keepdims=True))
    unit = half((groups.max(-1, keepdims=True) - low) / (2**bits - 1))
    level = np.rint((groups - low) / np.maximum(unit, 1e-30)).clip(0, 2**bits - 1)
    out = (level * unit + low).reshape(*x.shape[:2], -1)[..., : x.shape[-1]]
    return out, fixed_width(x.size, bits) + 2 * HALF * low.size


# TurboQuant, arXiv 2504.19874, the variant for mean squared error: a random rotation of each head's vector, whose
# coordinates are then quantised with the best scalar quantiser of their known distribution; the norm takes 16 bits.


def turboquant(kv: KVCache, bits: int) -> Coded:
    def vectors(x: Array, layer: int) -> tuple[Array, int]:
        return by_direction(x, bits)

    return mapped(kv, vectors, vectors)


def by_direction(x: Array, bits: int) -> tuple[Array, int]:
    """Vectors on the last axis: what comes back, and their bytes."""
    turn, levels = rotation(x.shape[-1]), sphere_levels(x.shape[-1], bits)
    norm = half(np.linalg.norm(x, axis=-1, keepdims=True))
    turned = (x / np.maximum(norm, 1e-30)) @ turn
    nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, turned)
    return norm * (levels[nearest] @ turn.T), fixed_width(x.size, bits) + HALF * norm.size


@functools.cache
def rotation(width: int) -> Array:
    """A random orthogonal matrix, always the same."""
    q, r = np.linalg.qr(np.random.default_rng(width).standard_normal((width, width)))
    return (q * np.sign(np.diag(r))).astype(np.float32)


@functools.cache
def sphere_levels(width: int, bits: int) -> Array:
    """The 2^bits levels of least squared error for a coordinate of a random unit vector (Lloyd, on its density)."""
    x = np.linspace(-1, 1, 200_001)[1:-1]
    density = (1 - x * x) ** ((width - 3) / 2)
    mass, moment = np.cumsum(density), np.cumsum(density * x)
    levels = np.interp((np.arange(2**bits) + 0.5) / 2**bits, mass / mass[-1], x)
    for _ in range(500):
        ends = np.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        m, first = (np.diff(total[np.r_[0, ends, len(x) - 1]]) for total in (mass, moment))
        levels = first / m
    return levels.astype(np.float32)


# CacheGen, arXiv 2310.07240, as LMCache 0.5 has it: per-token scales, one table for each layer, side and channel of a
# chunk, arithmetic coding. It has no deltas between tokens, and neither has this. The coder is counted, not run: the
# ideal code length under the 16-bit tables, each stream rounded up to bytes.


def cachegen(kv: KVCache, chunk: int) -> Coded:
    def side(fine: int) -> Callable[[Array, int], tuple[Array, int]]:
        def quantise(x: Array, layer: int) -> tuple[Array, int]:
            bins = 32 if layer < fine else 16
            heads, tokens, width = x.shape
            rows = x.transpose(1, 0, 2).reshape(tokens, -1)
            largest = np.maximum(np.abs(rows).max(1, keepdims=True), 1e-30)
            middle = bins // 2 - 1
            symbols = np.rint(rows * (middle / largest)).astype(np.int64) + middle
            size = 4 * tokens + sum(static_size(symbols[i : i + chunk], bins) for i in range(0, tokens, chunk))
            out = ((symbols - middle) * (largest / middle)).astype(np.float32)
            return out.reshape(tokens, heads, width).transpose(1, 0, 2), size

        return quantise

    return mapped(kv, side(10), side(2))


def static_size(symbols: NDArray[np.int64], bins: int) -> int:
    """Bytes of symbols [tokens, channels] coded channel by channel, with their tables and lengths: as LMCache stores
    them, 33 numbers of 16 bits (for 16 bins too) and one of 32."""
    tokens, channels = symbols.shape
    counts = np.zeros((bins, channels))
    np.add.at(counts, (symbols, np.arange(channels)), 1)
    table = np.floor(counts / tokens * (2**16 - bins)) + 1  # no bin is empty
    bits = -(counts * np.log2(table / table.sum(0))).sum(0)
    return int(np.ceil(bits / 8).sum()) + channels * (33 * 2 + 4)


# The quantised cache of transformers with quanto, as it comes: groups of 64 along axis 0, on float16.


def quanto(kv: KVCache, bits: int) -> Coded:
    torch, layers = importlib.import_module("torch"), importlib.import_module("transformers.cache_utils")
    layer_of_cache = layers.QuantoQuantizedLayer(nbits=bits)

    def quantise(x: Array, layer: int) -> tuple[Array, int]:
        packed = layer_of_cache._quantize(torch.from_numpy(x)[None].half(), axis=0)
        parts = (packed._data._data, packed._scale, packed._shift)
        size = sum(part.numel() * part.element_size() for part in parts)
        return layer_of_cache._dequantize(packed)[0].float().numpy(), size

    return mapped(kv, quantise, quantise)


# Without loss, of the cache in bfloat16: what is lost is the rounding to that, once, for all of them.


def rounded(kv: KVCache) -> KVCache:
    """The cache in bfloat16."""
    return KVCache(kv.keys, kv.values, positions=kv.positions, rope=kv.rope, dtype="bfloat16")


def zipnn(kv: KVCache) -> Coded:
    coder = importlib.import_module("zipnn").ZipNN(bytearray_dtype="bfloat16")
    return Coded(rounded(kv), sum(len(coder.compress(bytes(raw.tobytes()))) for raw in _raw(kv)))


def pcodec(kv: KVCache) -> Coded:
    coder = importlib.import_module("pcodec")
    config = coder.ChunkConfig(compression_level=8)
    return Coded(rounded(kv), sum(len(coder.standalone.simple_compress(raw.reshape(-1), config)) for raw in _raw(kv)))


def plain(kv: KVCache) -> Coded:
    return Coded(rounded(kv), HALF * kv.values_count)


def _raw(kv: KVCache) -> list[NDArray[np.uint16]]:
    return [np.ascontiguousarray(bfloat16_bits(np.asarray(x, np.float32))) for x in kv.keys + kv.values]


def lossy() -> list[Peer]:
    """The codecs here that lose something. quanto is among them if it is installed."""
    found = [Peer("KIVI", f"{bits} bits, groups of 32", functools.partial(kivi, bits=bits)) for bits in (4, 2)]
    found += [Peer("TurboQuant", f"{bits} bits", functools.partial(turboquant, bits=bits)) for bits in (4, 3, 2)]
    found += [Peer("CacheGen", f"chunks of {n}", functools.partial(cachegen, chunk=n)) for n in (1024, 256)]
    if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto"):
        found += [Peer("transformers, quanto", f"{bits} bits", functools.partial(quanto, bits=bits)) for bits in (4, 2)]
    return found


def lossless() -> list[Peer]:
    """Those that lose nothing, if they are installed."""
    found = [Peer(name, "bfloat16", code) for name, code in (("zipnn", zipnn), ("pcodec", pcodec))]
    return [peer for peer in found if importlib.util.find_spec(peer.name)]
