"""The compact form: a cache as it is held in memory while a model attends to it at every step.

A stream is small, and slow to read: each layer is predicted from those before, and symbols are coded one after the
other. Here each token of each layer stands alone. What differs from what is expected of the token (compact_basis) is
rounded along the axes of the Fisher metric, each coefficient to its own number of bits, of which an important token
gets more. That takes about two bits a value, several times a stream's, and a fraction of its time: a key is unpacking
and a product with its head's axes; values are never made, as attention wants sums of them, and a sum of coefficients
does as well. It never leaves the process: streams are what is stored and sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqkv.cuda_kernels.scalar import LARGEST_HALF
from seqkv.engine import compact_kernels, importance, near, prediction, quantiser, rate_control
from seqkv.engine.cache import KVCache, Rope
from seqkv.engine.compact_basis import Basis, BlockBasis
from seqkv.engine.compact_kernels import BEYOND
from seqkv.engine.errors import CacheError
from seqkv.engine.host import blocks_of
from seqkv.engine.layout import Turns
from seqkv.engine.modes import Calibrated
from seqkv.engine.probs import TokenProbs
from seqkv.engine.profile import Profile

LOSS = 1 / 128
"""Bits are added while one saves more than this much of the square of the step that a stream has for the same kl, so
that both lose about the same. Chosen on SmolLM2-135M, as are the next two."""

TRUST, FINER = 0.7, 0.7
"""Where importance is estimated: so many times as many octaves of gain, as the estimate is none too good; and all
tokens so many octaves finer."""

ODD, TOO_FAR = 8, 1000
"""A token whose squared error is so many times what its level makes out gets a higher level; it is refused where the
highest leaves TOO_FAR times that."""

_ERROR = np.array([1, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.00104, 3.04e-4, 8.8e-5, 2.5e-5, 7e-6, 2e-6])
"""Mean squared error of rounding a normal variable of variance 1 to 2 ** bits equidistant values, by bits; and their
best distance (Max 1960)."""
_DISTANCE = np.array([1, 1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308, 0.0166, 0.0089, 0.0047])
_USUAL = range(-3, 9)  # octaves of gain
_LEVELS = np.array([*_USUAL, 11, 14, 18, 24])  # the last ones are of odd tokens

Side = Literal["keys", "values"]

Product = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], Any]
"""product(a, b, out): matrix products of [n, m, k] and [n, k, l] float32 into [n, m, l]."""


class _Codes:
    """How the coefficients of a block are rounded, for each level: bits [levels, C], distances [levels, C] of values,
    how many of each group have bits, [levels, groups], how many bytes a token takes, [levels], and the squared error
    that it may have, [levels]."""

    def __init__(self, basis: BlockBasis, threshold: float) -> None:
        variance = np.square(basis.deviation * np.exp2(_LEVELS)[:, None])
        saved = _ERROR[:-1] - _ERROR[1:]
        self.bits = (variance[:, :, None] * saved > threshold).sum(axis=2).astype(np.uint8)
        self.distances = (basis.deviation * _DISTANCE[self.bits]).astype(np.float32)
        self.counts = (self.bits > 0).reshape(len(_LEVELS), len(basis.back), -1).sum(axis=2)
        self.sizes = -(-self.bits.sum(axis=1, dtype=np.int64) // 8)
        self.most = ODD * (np.square(basis.deviation) * _ERROR[self.bits]).sum(axis=1)


class Format:
    """How caches of one profile are held at one loss.

    kl: as `engine.encode` takes it; about what is lost. product: NumPy's, unless a caller has threads of its own.
    """

    def __init__(self, profile: Profile, kl: float, product: Product = np.matmul) -> None:
        self.profile, self.basis, self._mode = profile, Basis.of(profile), Calibrated(profile)
        self.product = product
        step = quantiser.step_size(rate_control.step_for(profile.curve, kl))
        self.codes = [_Codes(block, LOSS * step**2) for block in self.basis.blocks]

    def features(self, ids: NDArray[np.integer]) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
        """Features of the distinct tokens among these, [distinct, rank], and which is whose, [len(ids)]."""
        rows, index = prediction.token_rows(self.profile.table, TokenProbs.from_tokens(ids), self.profile.predictor)
        out = np.zeros((len(rows), self.basis.projection.shape[1]), np.float32)
        self.product(rows[None], self.basis.projection[None], out[None])
        return out, index

    def expect(self, b: int, features: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Write what is expected of tokens with these features, [distinct, rank], in a block: out [distinct, C]."""
        basis = self.basis.blocks[b]
        self.product(features[None], basis.token[None], out[None])
        out += basis.bias

    def levels(self, kv: KVCache, received: NDArray[np.float32] | None) -> NDArray[np.intp]:
        """Of the tokens of a part of a cache, [blocks, tokens]: places in _LEVELS. received: see Compact.extended."""
        sinks = importance.sinks(kv.positions)
        if received is None:  # in multiples of the mean: that of a few tokens says nothing
            classes = importance.classes_of(self._mode.attention(kv, blocks_of, near.CHUNK), sinks)
        else:
            classes = importance.classes(received, sinks)
        octaves = np.log2(quantiser.gain_value(near.gains(self.profile.gains, classes)))
        if received is None:
            octaves[:, sinks:] *= TRUST
            octaves += FINER
        return np.clip(np.rint(octaves) - _LEVELS[0], 0, len(_USUAL) - 1).astype(np.intp)


class _Block(NamedTuple):
    """Codes of all tokens one after the other, and BEYOND bytes; of each token its level and stretch; sinks as they
    were."""

    codes: NDArray[np.uint8]
    heads: NDArray[np.uint8]
    sinks: NDArray[np.float16]

    def and_then(self, other: _Block) -> _Block:
        codes = np.concatenate([self.codes[:-BEYOND], other.codes])
        heads, sinks = (np.concatenate([mine, its]) for mine, its in zip(self[1:], other[1:], strict=True))
        return _Block(codes, heads, sinks)


class Compact:
    """A sequence's cache in the compact form. Never changed: `extended` gives another.

    Attributes: ids, positions [tokens] int32; nbytes, of all that it holds, but for the profile's basis.
    """

    def __init__(
        self, form: Format, ids: NDArray[np.int32], positions: NDArray[np.int32], blocks: Sequence[_Block]
    ) -> None:
        self.form, self.ids, self.positions, self.blocks = form, ids, positions, blocks

    @classmethod
    def empty(cls, form: Format) -> Compact:
        """Of no tokens."""
        none, codes, heads = np.zeros(0, np.int32), np.zeros(BEYOND, np.uint8), np.zeros(0, np.uint8)
        blocks = [_Block(codes, heads, np.zeros((0, len(b.bias)), np.float16)) for b in form.basis.blocks]
        return cls(form, none, none, blocks)

    @property
    def nbytes(self) -> int:
        blocks = sum(array.nbytes for block in self.blocks for array in block)
        return blocks + self.ids.nbytes + self.positions.nbytes

    def extended(
        self, kv: KVCache, token_ids: NDArray[np.integer], received: NDArray[np.float32] | None = None
    ) -> Compact:
        """With the tokens that follow, whose keys and values must be finite. CacheError if they are of another kind.

        received: attention that they received, [layers, tokens], as `importance` of engine.encode; estimated if not
            given.
        """
        form, values, sinks = self.form, blocks_of(kv, slice(None)), importance.sinks(kv.positions)
        levels = form.levels(kv, received)
        features, index = form.features(token_ids)
        blocks = []
        for b, (before, basis, codes) in enumerate(zip(self.blocks, form.basis.blocks, form.codes, strict=True)):
            x = values(b)
            expected, z = np.empty((len(features), x.shape[1]), np.float32), np.empty_like(x)
            form.expect(b, features, expected)
            form.product((x - expected[index])[None], basis.forward[None], z[None])
            heads, packed = np.empty(len(z), np.uint8), np.zeros(len(z) * codes.sizes[-1] + BEYOND, np.uint8)
            worst = compact_kernels.pack(
                *(z, levels[b], codes.bits, codes.distances, codes.sizes, codes.most, heads, packed)
            )
            if not worst <= TOO_FAR:
                raise CacheError(
                    f"{('keys', 'values')[b % 2]} of layer {b // 2} differ from what is expected by too much for the "
                    'compact form: use keep="streams", or a profile of this model'
                )
            packed = packed[: codes.sizes[heads >> 4].sum() + BEYOND].copy()
            exact = np.clip(x[:sinks], -LARGEST_HALF, LARGEST_HALF).astype(np.float16)
            blocks.append(before.and_then(_Block(packed, heads, exact)))
        ids = np.concatenate([self.ids, token_ids.astype(np.int32)])
        return Compact(form, ids, np.concatenate([self.positions, kv.positions.astype(np.int32)]), blocks)


class _Made(NamedTuple):
    """A block as compact_kernels.place takes it."""

    made: NDArray[np.float32]
    expected: NDArray[np.float32]
    whose: NDArray[np.intp]
    sinks: NDArray[np.float32]
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    interleaved: bool
    columns: NDArray[np.int64]


class Reader:
    """Reads a Compact of some tokens, any layer at any time.

    rope: of each layer. columns: [tokens], where the tokens are in the arrays of a caller.

    Attributes: nbytes, what is in memory now beside the Compact.
    """

    def __init__(self, compact: Compact, rope: Sequence[Rope | None], columns: NDArray[np.int64]) -> None:
        self.compact, self._rope, self._columns = compact, rope, columns
        self._features, self._index = compact.form.features(compact.ids)
        self._turns = Turns(compact.positions.astype(np.int64))
        widest, tokens = max(len(basis.bias) for basis in compact.form.basis.blocks), len(compact.ids)
        self._coefs, self._made = (np.empty(tokens * widest, np.float32) for _ in range(2))
        self._expected = np.empty(len(self._features) * widest, np.float32)

    @property
    def nbytes(self) -> int:
        arrays = self._coefs, self._made, self._expected, self._features, self._index
        return sum(x.nbytes for x in arrays)

    def write(self, layer: int, side: Side, out: NDArray[np.float32]) -> None:
        """Write a layer's keys, turned to their positions, or values to out [kv_heads, columns, width], contiguous."""
        compact_kernels.place(*self._block(2 * layer + (side == "values")), out)

    def scores(self, layer: int, query: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Write products of a query's rows, [kv_heads, rows, width], with a layer's keys to out [kv_heads, rows,
        columns]."""
        compact_kernels.score(*self._block(2 * layer), query, out)

    def add_up(self, layer: int, weights: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Add a layer's values, each times its weight, weights [kv_heads, rows, columns], to out [kv_heads, rows,
        width]."""
        b = 2 * layer + 1
        held, codes, basis = self.compact.blocks[b], self.compact.form.codes[b], self.compact.form.basis.blocks[b]
        compact_kernels.add_up(
            *(held.codes, held.heads, codes.bits, codes.distances, codes.counts, codes.sizes, basis.back[0]),
            *(self._features, self._index, basis.token, basis.bias, held.sinks.astype(np.float32)),
            *(self._columns, weights, out),
        )

    def _block(self, b: int) -> _Made:
        """A block, valid until the next one."""
        form = self.compact.form
        held, codes, basis = self.compact.blocks[b], form.codes[b], form.basis.blocks[b]
        tokens, (groups, size, _) = len(held.heads), basis.back.shape
        z, made = (room[: groups * tokens * size].reshape(groups, tokens, size) for room in (self._coefs, self._made))
        compact_kernels.unpack(held.codes, held.heads, codes.bits, codes.distances, codes.counts, codes.sizes, z)
        form.product(z, basis.back, made)
        expected = self._expected[: len(self._features) * groups * size].reshape(-1, groups * size)
        form.expect(b, self._features, expected)
        rope = None if b % 2 else self._rope[b // 2]
        cos = sin = np.zeros((tokens, 0), np.float32)
        if rope is not None:
            cos, sin = self._turns.angles(rope)
            if rope.scaling != 1:
                cos, sin = cos * np.float32(rope.scaling), sin * np.float32(rope.scaling)
        heads = form.profile.shape[b // 2][0]
        by_head = made.reshape(tokens, heads, -1) if groups == 1 else made.transpose(1, 0, 2)
        interleaved = rope is not None and rope.layout == "interleaved"
        sinks = held.sinks.astype(np.float32)
        return _Made(by_head, expected, self._index, sinks, cos, sin, interleaved, self._columns)
