"""Which tokens a part of a cache holds, and where in its sequence it begins: told from its first layer.

Servers hand out parts of caches by a hash, without token ids or positions, while a profile predicts from both. But the
values of layer 0 follow from the token alone, and its keys are those of the token, turned by the position. What is told
here goes into the stream like what is known: where it is wrong, that costs bits, and nothing is decoded wrongly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import prediction, quantiser
from seqkv.engine.cache import KVCache, Rope
from seqkv.engine.cached import cached_property
from seqkv.engine.errors import ProfileError
from seqkv.engine.layout import Turns
from seqkv.engine.probs import TokenProbs
from seqkv.engine.profile import Profile

POSITIONS = 1 << 20  # a part begins before this
_CHANNELS = 64  # of the values of layer 0, those that tell tokens apart best; 32 told 99.6 % or more of them on SmolLM2
_SURE = 0.99  # of the greatest agreement that is possible; on SmolLM2 it is 0.9999, and 0.97 one position beside
_SINK = 0.25  # squares of a sink's values, beside those of other tokens, are below this
_ROWS = 1 << 13  # of the token table or of positions, looked at together
_KEYS, _VALUES = 0, 1  # blocks


class Recogniser:
    """Tells the tokens and the beginning of parts of caches of one profile's model.

    It keeps [vocabulary, 64] float32, made for the first part. May be used by several threads.
    ProfileError for a profile that predicts from the expectation over tokens: that is not in a cache.
    """

    def __init__(self, profile: Profile) -> None:
        if profile.predictor == "expectation":
            raise ProfileError(
                "the profile needs probabilities of tokens, which a cache does not hold: calibrate another"
            )
        self.profile = profile

    def recognise(self, kv: KVCache) -> tuple[KVCache, TokenProbs]:
        """The same arrays with the positions that they have in their sequence, and their tokens.

        kv: of the profile's shape, in host memory; positions count from 0. With a profile that does not use tokens, ids
        are 0. ProfileError if the shape is another.
        """
        self.profile.check(kv)
        ids = np.zeros(kv.tokens, np.int64)
        turns = Turns(kv.positions)
        if prediction.uses_token(self.profile.predictor):
            ids = self._tokens(turns.to_block(kv.values[0], None))
        probs, rope = TokenProbs.from_tokens(ids), kv.rope[0]
        if rope is None:
            return placed(kv), probs
        start = beginning(rope, self._expected_keys(probs), turns.to_block(kv.keys[0], rope), kv.shape[0][0])
        return _moved(kv, start), probs

    def _tokens(self, values: NDArray[np.float32]) -> NDArray[np.int64]:
        """The most likely token of each row of layer 0's values: [tokens, channels] -> [tokens]."""
        bias, whiten, table, half_norms = self._table
        x = (values - bias) @ whiten
        ids, best = np.zeros(len(x), np.int64), np.full(len(x), -np.inf, np.float32)
        for start in range(0, len(table), _ROWS):
            likely = x @ table[start : start + _ROWS].T - half_norms[start : start + _ROWS]
            nearest = likely.argmax(axis=1)
            found = likely[np.arange(len(x)), nearest]
            better = found > best
            ids[better], best[better] = start + nearest[better], found[better]
        return ids

    @cached_property
    def _table(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """The mean of layer 0's values [channels]; what makes deviations from it comparable [channels, kept]; of each
        token the expected deviation, made comparable [vocabulary, kept], and half its squared norm."""
        profile, (keys, values) = self.profile, self._columns
        token_map, bias = profile.token_map[:, values], profile.bias[values]
        if len(profile.sources(_VALUES)):  # the keys of layer 0, of which the token says what it can
            from_keys = profile.maps[_VALUES][0]
            token_map = token_map + profile.token_map[:, keys] @ from_keys
            bias = bias + profile.bias[keys] @ from_keys
        spread = np.exp2(profile.scale[values] / quantiser.UNITS_PER_OCTAVE).astype(np.float32)
        whiten = profile.forward[_VALUES] / spread  # what the token does not say of a value has variance 1 now
        step = max(1, len(profile.table) // 4096)
        some = profile.table[::step].astype(np.float32) @ (token_map @ whiten)
        kept = np.sort(np.argsort(-some.var(axis=0), kind="stable")[:_CHANNELS])
        whiten = np.ascontiguousarray(whiten[:, kept])
        table = np.concatenate(
            [
                profile.table[start : start + _ROWS].astype(np.float32) @ (token_map @ whiten)
                for start in range(0, len(profile.table), _ROWS)
            ]
        )
        return bias, whiten, table, np.square(table).sum(axis=1) / 2

    def _expected_keys(self, probs: TokenProbs) -> NDArray[np.float32]:
        """Of layer 0, before the rotation: [tokens, channels]."""
        keys, _ = self._columns
        rows, index = prediction.token_rows(self.profile.table, probs, self.profile.predictor)
        return (rows @ self.profile.token_map[:, keys] + self.profile.bias[keys])[index]

    @property
    def _columns(self) -> tuple[slice, slice]:
        """The coefficients of layer 0's keys, and of its values."""
        starts = self.profile.starts
        return slice(0, int(starts[1])), slice(int(starts[1]), int(starts[2]))


def placed(kv: KVCache) -> KVCache:
    """The same arrays, positions from 0 if this is the beginning of a sequence, from elsewhere if not: all that can be
    told without a profile. Keys that were turned by a constant more are as easy to code.

    Where attention sinks into the first token, its values are small. In SmolLM2 their squares are a twentieth of the
    other tokens', and two thirds or more in parts that begin later. If they are not small, this is no sink.
    """
    parts = [np.square(values, dtype=np.float64).sum(axis=(0, 2)) for values in kv.values]
    first = np.median([part[0] / max(float(np.median(part)), 1e-30) for part in parts])
    return _moved(kv, 0 if first < _SINK else kv.tokens)


def _moved(kv: KVCache, start: int) -> KVCache:
    return KVCache.of_parts(kv.keys, kv.values, kv.dtype, kv.positions + start, kv.rope, kv.exact)


def beginning(rope: Rope, expected: NDArray[np.float32], keys: NDArray[np.float32], heads: int) -> int:
    """By how many positions keys are turned further than expected: the number from 0 to POSITIONS that agrees best.

    expected, keys: [tokens, heads * width]. Multiples of the number of tokens are tried first: servers cut caches into
    parts of equal length.
    """
    first, second = rope.pairs()
    here, there = (x.reshape(len(x), heads, -1).astype(np.float64) for x in (keys, expected))
    a, b, c, d = here[..., first], here[..., second], there[..., first], there[..., second]
    even, odd = (a * c + b * d).sum(axis=(0, 1)), (b * c - a * d).sum(axis=(0, 1))

    def best(positions: NDArray[np.int64]) -> tuple[float, int]:
        agreement = [-np.inf]
        for start in range(0, len(positions), _ROWS):
            cos, sin = rope.tables(positions[start : start + _ROWS])
            agreement.extend(cos @ even + sin @ odd)
        found = int(np.argmax(agreement)) - 1
        return agreement[found + 1], int(positions[found])

    agreement, start = best(np.arange(0, POSITIONS, len(keys)))
    if agreement >= _SURE * np.hypot(even, odd).sum():
        return start
    return best(np.arange(POSITIONS))[1]
