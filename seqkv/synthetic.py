"""A profile and a cache that no model made, of any size, with the statistics of real ones: to measure with.

What is copied from a real profile (SmolLM2-135M) is in the tables below. With them a stream at STEP has about 0.3 bits
a value, and three coefficients in ten are live, as in the middle of a
real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.cuda_kernels import device, elementwise
from seqkv.cuda_kernels.linear import multiply
from seqkv.engine import KVCache, Profile, Rope, TokenProbs, importance, prediction, quantiser
from seqkv.engine.matrices import Batch, Decoded, matrices
from seqkv.engine.modes import Calibrated
from seqkv.entropy_coding.contexts import LOWEST_OCTAVE, UNITS

STEP_INDEX = 119
STEP = quantiser.step_size(STEP_INDEX)
ROPE_THETA = 500000.0

_KEYS = "-17 -15.5 -14.9 -14.5 -14.1 -13.9 -13.6 -13.4 -13.2 -12.9 -12.7 -12.4 -12.1 -11.8 -11.4 -10.7 -7.5"
_VALUES = "-17 -14.9 -14.4 -14.1 -13.8 -13.6 -13.3 -13.1 -12.9 -12.7 -12.5 -12.3 -12.0 -11.7 -11.3 -10.8 -8.3"
_SCALES = np.array([_KEYS.split(), _VALUES.split()], float)
"""log2 of the mean magnitude of coefficients of keys, of values: 17 quantiles."""
_BLOCK_OCTAVES = 2.5  # standard deviation between blocks, with what importance differs by in the mean of a layer
_GAINS = np.array([-8] * 6 + [-7, -6, -4, -3, -2, 1, 3, 5, 7, 10, 13, 16, 20, 20, 20, 27, 3, -4, -2], np.int8)
"""Gain indices by class of importance: medians over layers."""
_ATTENTION_OCTAVES = (0.8, 0.5)  # of attention received, standard deviation between tokens, and between layers
_EXPLAINED = 0.5  # of a channel's standard deviation by the blocks before
_VALUE_OCTAVES = -1.0  # of a residual's root mean square, in all blocks, for channels near 1


@dataclass(frozen=True)
class Sizes:
    """Of a cache (layers, heads, the width of keys and of values, tokens) and of its profile."""

    layers: int
    heads: int
    width: int
    tokens: int
    vocab: int
    rank: int
    depth: int = 2

    @property
    def channels(self) -> int:
        """Of a block."""
        return self.heads * self.width

    @property
    def values(self) -> int:
        """Of the cache."""
        return 2 * self.layers * self.tokens * self.channels

    @property
    def rope(self) -> Rope:
        return Rope.from_theta(ROPE_THETA, self.width)


def profile(sizes: Sizes) -> Profile:
    """A profile for caches of these sizes.

    Weights of all blocks are parts of one random vector, views that take no memory. Transforms are one orthogonal
    matrix, its rows and columns permuted, and their signs changed: so a single matrix has to be inverted.
    """
    rng, width, blocks = np.random.default_rng(0), sizes.channels, 2 * sizes.layers
    shape = ((sizes.heads, sizes.width, sizes.width),) * sizes.layers
    inputs = [sizes.rank + width * len(prediction.sources(b, "all", sizes.depth)) for b in range(blocks)]
    pool = (rng.standard_normal(max(inputs) * width + blocks, np.float32) * _EXPLAINED / np.sqrt(max(inputs))).astype(
        np.float16
    )
    octaves = _scale_octaves(blocks, width, rng)
    transforms = [np.sqrt(np.mean(np.exp2(2 * o))) for o in octaves]  # root mean squares of coefficients
    exponent = np.rint(_VALUE_OCTAVES - np.log2(transforms)).astype(np.int8)
    inverse, forward = _transforms(width, exponent, rng)
    made = Profile(
        model="synthetic",
        shape=shape,
        predictor="all",
        depth=sizes.depth,
        table=rng.standard_normal((sizes.vocab, sizes.rank), np.float32).astype(np.float16),
        weights=tuple(pool[b : b + n * width].reshape(n, width) for b, n in enumerate(inputs)),
        bias=rng.standard_normal(blocks * width, np.float32),
        sink_bias=rng.standard_normal((importance.SINKS, blocks * width), np.float32),
        inverse=inverse,
        exponent=exponent,
        scale=quantiser.scale_units(np.exp2(octaves.reshape(-1))),
        gains=np.tile(_GAINS, (2, sizes.layers, 1)),
        attention=tuple(
            (rng.standard_normal(2 * width + 1) / np.sqrt(2 * width)).astype(np.float32) for _ in range(sizes.layers)
        ),
        curve=np.array([[133.0, -4.6], [158.0, -6.56]]),
        info={},
    )
    vars(made)["forward"] = forward  # the cached property, which would invert each of them
    return made


def _scale_octaves(blocks: int, width: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """log2 of the mean magnitude of each coefficient, [blocks, width], falling in each block."""
    spread = [NormalDist(0, _BLOCK_OCTAVES).inv_cdf((b + 0.5) / blocks) for b in range(blocks)]
    at = np.linspace(_SCALES.shape[1] - 1, 0, width)
    within = [np.interp(at, np.arange(_SCALES.shape[1]), side) for side in _SCALES]
    return np.array([within[b % 2] for b in range(blocks)]) + rng.permutation(spread)[:, None]


def _transforms(
    width: int, exponent: NDArray[np.int8], rng: np.random.Generator
) -> tuple[tuple[NDArray[np.float16], ...], list[NDArray[np.float32]]]:
    """Inverse transforms of blocks, without 2 ** exponent, and transforms."""
    one = np.linalg.qr(rng.standard_normal((width, width)))[0].astype(np.float16)
    other = np.linalg.inv(one.astype(np.float64)).astype(np.float32)
    inverse, forward = [], []
    for power in exponent:
        rows, columns = rng.permutation(width), rng.permutation(width)
        signs = rng.choice(np.array([-1, 1], np.float16), (2, width))
        inverse.append(one[np.ix_(rows, columns)] * signs[0, :, None] * signs[1])
        back = other[np.ix_(columns, rows)] * signs[1, :, None].astype(np.float32) * signs[0].astype(np.float32)
        forward.append(back * np.float32(2.0 ** -int(power)))
    return tuple(inverse), forward


def token_probs(sizes: Sizes) -> TokenProbs:
    """Token ids, as frequent as words are: the n-th in proportion to 1 / n."""
    rng = np.random.default_rng(1)
    return TokenProbs.from_tokens(np.floor(sizes.vocab ** rng.random(sizes.tokens)).astype(np.int64) - 1)


def attention(sizes: Sizes) -> NDArray[np.float32]:
    """Attention received, [layers, tokens], for the importance of tokens."""
    rng, (by_token, by_layer) = np.random.default_rng(2), _ATTENTION_OCTAVES
    octaves = by_token * rng.standard_normal(sizes.tokens) + by_layer * rng.standard_normal(
        (sizes.layers, sizes.tokens)
    )
    return np.exp2(octaves).astype(np.float32)


def cache(sizes: Sizes, of: Profile, probs: TokenProbs, span: int) -> KVCache:
    """A cache on the current device, bfloat16, made `span` tokens at a time: what the profile expects of the tokens and
    of the blocks before, and normal residuals of the coefficients' scales."""
    xp, model, rope = device.cupy(), matrices(of), sizes.rope
    sides = [[xp.empty((sizes.heads, sizes.tokens, sizes.width), np.uint16) for _ in of.shape] for _ in "kv"]
    for start in range(0, sizes.tokens, span):
        stop = min(start + span, sizes.tokens)
        positions = np.arange(start, stop)
        turn = elementwise.Turn.of(*rope.tables(positions), *rope.pairs())
        alike = np.zeros((sizes.layers, sizes.tokens), np.uint8)
        batch = Batch(np.array([[start, stop]]), Calibrated(of), probs, alike, [0])
        decoded = Decoded()
        for block in range(len(of.widths)):
            layer, is_value = divmod(block, 2)
            out = batch.predicted(model, block, decoded)
            coefs = residuals(of, block, stop - start, start * len(of.widths) + block)
            multiply(coefs.T, model.maps[block][1], out, accumulate=True)
            elementwise.to_heads(out, None if is_value else turn, None, sides[is_value][layer][None, :, start:stop])
            decoded.put(block, out)
            if is_value:
                decoded.forget(model.sources, layer)
    return KVCache.of_parts(sides[0], sides[1], "bfloat16", np.arange(sizes.tokens), [rope] * sizes.layers)


def residuals(of: Profile, block: int, tokens: int, seed: int) -> Any:
    """Random coefficients of a block on the device, [coefs, tokens] float32, of its scales at gain 1."""
    xp = device.cupy()
    scale = of.scale[of.starts[block] : of.starts[block + 1]].astype(np.float64)
    mean = np.exp2((scale - UNITS // 2) / quantiser.UNITS_PER_OCTAVE + LOWEST_OCTAVE)
    out = normal(xp, len(mean) * tokens, seed).reshape(len(mean), tokens)
    out *= xp.asarray((mean * np.sqrt(np.pi / 2)).astype(np.float32))[:, None]
    return out


def normal(xp: Any, count: int, seed: int) -> Any:
    """Normal numbers, float32, made by xp (NumPy or CuPy)."""
    radius, angle = (((hashed(xp, count, 2 * seed + i) >> np.uint32(8)) + np.float32(0.5)) * 2.0**-24 for i in (0, 1))
    return xp.sqrt(-2 * xp.log(radius.astype(np.float32))) * xp.cos((2 * np.pi) * angle.astype(np.float32))


def hashed(xp: Any, count: int, seed: int) -> Any:
    """Random bits, uint32, the same everywhere: a hash of 0, 1, 2, ... and the seed."""
    bits = xp.arange(count, dtype=np.uint32)
    bits ^= np.uint32(seed * 0x9E3779B1 & 0xFFFFFFFF)
    for multiplier in (0x7FEB352D, 0x846CA68B):
        bits ^= bits >> np.uint32(16)
        bits *= np.uint32(multiplier)
        bits ^= bits >> np.uint32(15)
    return bits
