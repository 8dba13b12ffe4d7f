"""Caches of sessions that share tokens, from the small model of conftest.py, as a transformer's would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from seqkv.engine import KVCache, TokenProbs
from tests.conftest import LinearModel

_NEAR = 6  # tokens that decide most of a token's noise
_FAR = 0.05  # of the noise comes from all tokens before


class CausalModel(LinearModel):
    """A LinearModel whose noise at a token follows from the tokens before: what two sessions begin with has the same
    keys and values, and a run of equal tokens after a difference nearly the same."""

    def plain(self, ids: Any) -> tuple[list[NDArray[Any]], list[NDArray[Any]], NDArray[np.float32]]:
        ids = np.asarray(ids, "<i8")
        widths = [4, *[4, self.heads * self.key, self.heads * self.value, 1] * self.layers]
        noise = np.split(_noise(ids, sum(widths)), np.cumsum(widths)[:-1], axis=1)
        embedded, state = self.table[ids], noise[0]
        keys, values, attention = [], [], []
        for layer, maps in enumerate(self.maps):
            moved, to_key, to_value, to_attention = noise[1 + 4 * layer : 5 + 4 * layer]
            state = 0.8 * state + 0.6 * moved
            key = embedded @ maps["token to keys"] + state @ maps["state to keys"] + 0.3 * to_key
            received = np.exp(key @ maps["keys to attention"] + 0.3 * to_attention[:, 0])
            received[:4] *= 10  # sinks
            key[:4] += 5
            value = embedded @ maps["token to values"] + state @ maps["state to values"] + key @ maps["keys to values"]
            keys.append(key)
            values.append(value + 0.2 * to_value)
            attention.append(received)  # a mean over the session would not be the same for what sessions share
        return keys, values, np.array(attention, np.float32)

    def session(self, ids: Any) -> tuple[KVCache, TokenProbs, NDArray[np.float32]]:
        """What SessionStore.put takes of a session: its cache, probabilities and attention received."""
        kv, attention = self.cache(ids)
        return kv, self.probs(ids), attention

    def tokens(self, seed: int, count: int) -> NDArray[np.int64]:
        """Tokens as the bigrams have them."""
        return self.tokenize(self.text(seed, count))


def _noise(ids: NDArray[np.int64], width: int) -> NDArray[np.float64]:
    out = np.empty((len(ids), width))
    before = xxhash.xxh3_64()
    for i in range(len(ids)):
        before.update(ids[i : i + 1].tobytes())
        near = xxhash.xxh3_64_intdigest(ids[max(0, i - _NEAR) : i + 1].tobytes())
        out[i] = np.random.default_rng(near).standard_normal(width)
        out[i] += _FAR * np.random.default_rng(before.intdigest()).standard_normal(width)
    return out
