"""The composition that the paper proposes (arXiv 2604.15356): predict, then TurboQuant on what is left.

The prediction is seqkv's, in the closed loop; what is left of each head's vector is coded as bench/peers.py codes whole
vectors. This is all of seqkv but its transform, importance and entropy coder. The first tokens take 16 bits a number.
"""

from __future__ import annotations

import numpy as np

from bench.peers import HALF, Coded, by_direction, half
from bench.peers_fitted import SINKS, blocks, cache
from seqkv.engine import KVCache, Profile, TokenProbs, near, prediction

NAME = "TurboQuant behind seqkv's prediction"
BITS = (4, 3, 2, 1)


def code(kv: KVCache, probs: TokenProbs, profile: Profile, bits: int) -> Coded:
    """Token ids, which the prediction needs, take 32 bits."""
    rows, index = prediction.token_rows(profile.table, probs, profile.predictor)
    gain = np.zeros((2 * kv.layers, kv.tokens), np.int8)
    side = near.Side(rows, index, gain, step=0, first=True)
    from_tokens = near.from_tokens(profile, side)
    decoded = np.zeros((kv.tokens, profile.starts[-1]), np.float32)
    total = 4 * kv.tokens
    for b, y in enumerate(blocks(kv)):
        expected = near.predicted(profile, b, side, from_tokens, decoded)
        plain = (y - expected)[SINKS:]
        left, size = by_direction(plain.reshape(len(plain), kv.shape[b // 2][0], -1), bits)
        span = slice(profile.starts[b], profile.starts[b + 1])
        decoded[:SINKS, span] = half(y[:SINKS])
        decoded[SINKS:, span] = expected[SINKS:] + left.reshape(plain.shape)
        total += size + HALF * y[:SINKS].size
    return Coded(cache(np.split(decoded, profile.starts[1:-1], axis=1), kv), total)
