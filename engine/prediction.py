"""Prediction: what a block of a cache is expected to hold, from what the decoder already has.

A block is the keys or the values of one layer, K_0, V_0, K_1, V_1, ... in this order, [tokens, channels]: all heads
side by side, keys before rotation. Its features are the token (a row of the token table), the decoded keys and values
of the layers before, and for values the decoded keys of their own layer. The map is linear, fitted on what is decoded.

arXiv 2604.15356, layer 2, predicts with the expectation over the model's next-token distribution; the token itself is
known when its cache is stored and predicts better. Both are one operation, `accumulate`: sum over k of p_k * row_k.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqkv.cuda_kernels.scalar import plus_product
from seqkv.engine.errors import ProbsError
from seqkv.engine.probs import TokenProbs

PREDICTORS = ("mean", "expectation", "token", "layers", "all")
"""The ladder: nothing; the paper's expectation over top-k; the token; layers before; the token and layers before."""


def uses_token(predictor: str) -> bool:
    """Whether a row of the token table is a feature."""
    return predictor in ("expectation", "token", "all")


def sources(block: int, predictor: str, depth: int) -> range:
    """The decoded blocks that predict `block`: those of `depth` layers before, and for values their layer's keys."""
    if predictor not in ("layers", "all"):
        return range(block, block)
    return range(2 * max(0, block // 2 - depth), block)


def token_features(
    table: NDArray[np.float16], probs: TokenProbs, predictor: str
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """What tokens contribute: the sum over k of weights[:, k] * rows[index[:, k]].

    Returns the distinct rows of the table [rows, rank], index [tokens, k] and weights [tokens, k]; k is 1 where the
    token itself is known, rank 0 for a predictor without tokens. ProbsError if an id is outside the table, or the
    expectation is asked for and no probabilities are known.
    """
    if not uses_token(predictor):
        return (
            np.zeros((1, 0), np.float32),
            np.zeros((probs.tokens, 1), np.int32),
            np.ones((probs.tokens, 1), np.float32),
        )
    if predictor == "expectation" and probs.k == 0:
        raise ProbsError("the expectation needs top-k probabilities: use TokenProbs.from_logits or from_probs")
    ids = probs.topk_ids if predictor == "expectation" else probs.token_ids[:, None]
    if int(ids.max()) >= len(table):
        raise ProbsError(f"token id {int(ids.max())} is outside the profile's vocabulary of {len(table)}")
    distinct, index = np.unique(ids, return_inverse=True)
    weights = probs.topk_probs if predictor == "expectation" else np.ones(ids.shape, np.float32)
    return table[distinct].astype(np.float32), index.reshape(ids.shape).astype(np.int32), weights


def token_rows(
    table: NDArray[np.float16], probs: TokenProbs, predictor: str
) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    """`token_features` summed up: distinct rows [rows, rank] float32, and the row of each token [tokens]."""
    rows, index, weights = token_features(table, probs, predictor)
    if predictor == "expectation":
        return accumulate(rows, index, weights), np.arange(probs.tokens)
    return rows, index[:, 0].astype(np.intp)


@njit(cache=True, nogil=True)
def accumulate(
    rows: NDArray[np.float32], index: NDArray[np.integer], weights: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Predicted-KV accumulation: out[t] = sum over k of weights[t, k] * rows[index[t, k]].

    rows [rows, width] float32, index [tokens, k], weights [tokens, k] float32 -> [tokens, width] float32, summed in the
    order of k, in float64.
    """
    out = np.empty((index.shape[0], rows.shape[1]), np.float32)
    total = np.empty(rows.shape[1])
    for t in range(index.shape[0]):
        total[:] = 0
        for k in range(index.shape[1]):
            weight = weights[t, k]
            row = index[t, k]
            for c in range(total.size):
                total[c] = plus_product(total[c], weight, rows[row, c])
        for c in range(total.size):
            out[t, c] = total[c]
    return out
