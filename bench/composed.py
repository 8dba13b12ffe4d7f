"""The composition that the paper proposes (arXiv 2604.15356): predict, then TurboQuant on what is left.

The prediction is as seqkv's, linear in the token and in the decoded blocks of two layers before, fitted to the same
texts on blocks as this quantiser leaves them; what is left of each head's vector is coded as bench/peers.py codes whole
vectors. The first tokens take 16 bits a number, token ids 32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.peers import HALF, Array, Coded, by_direction, half
from bench.peers_fitted import SINKS, Observed, blocks, cache, regression
from seqkv.engine import KVCache, prediction

NAME = "prediction, then TurboQuant"
BITS = (4, 3, 2, 1)
_DEPTH = 2  # layers before
_FIT_BITS = 2
_EACH = 2  # one of so many tokens is fitted to


class Composed:
    def __init__(self, observed: Observed, ids: NDArray[np.int64], table: Array) -> None:
        """ids: of the tokens observed. table: the model's embedding, [vocab, width]."""
        self.table = table
        self.maps: list[tuple[Array, Array]] = []
        token, decoded = table[ids[::_EACH]], dict[int, Array]()
        for b, stored in enumerate(observed.blocks):
            true = stored[::_EACH].astype(np.float32)
            x = self._features(b, token, decoded)
            self.maps.append(regression(x, true))
            decoded[b] = self._decoded(b, true, x, observed.heads[b // 2], _FIT_BITS)[0]
            decoded.pop(b - 2 * _DEPTH - 1, None)  # never read again

    def code(self, kv: KVCache, ids: NDArray[np.int64], bits: int) -> Coded:
        token, decoded, total = self.table[ids], dict[int, Array](), 4 * kv.tokens
        for b, y in enumerate(blocks(kv)):
            x = self._features(b, token, decoded)
            out, size = self._decoded(b, y[SINKS:], x[SINKS:], kv.shape[b // 2][0], bits)
            decoded[b] = np.concatenate([half(y[:SINKS]), out])
            total += size + HALF * y[:SINKS].size
        return Coded(cache(list(decoded.values()), kv), total)

    @staticmethod
    def _features(b: int, token: Array, decoded: dict[int, Array]) -> Array:
        return np.concatenate([token, *(decoded[i] for i in prediction.sources(b, "all", _DEPTH))], axis=1)

    def _decoded(self, b: int, y: Array, x: Array, heads: int, bits: int) -> tuple[Array, int]:
        weights, bias = self.maps[b]
        expected = x @ weights + bias
        left, size = by_direction((y - expected).reshape(len(y), heads, -1), bits)
        return expected + left.reshape(y.shape), size
