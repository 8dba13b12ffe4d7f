"""What the model expected of each token: the codec's side information."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.engine.arrays import to_numpy
from seqkv.engine.errors import ProbsError

MAX_SURPRISAL = 126.0
"""Bits. The surprisal of a token to which the model gave no probability: the smallest normal float32 is 2**-126."""

_CHUNK = 1 << 22  # numbers of the [tokens, vocab] matrix that are held as float32 at a time
_TOLERANCE = 1e-3  # how far a row may sum from 1


@dataclass(frozen=True, eq=False)
class TokenProbs:
    """Token ids, and for each token the model's prediction of it from the tokens before.

    token_ids: [tokens] int64.
    topk_ids, topk_probs: [tokens, k] int32 and float32: the k most probable tokens at each place and their
        probabilities, most probable first, equal ones by id. k is 0 if no probabilities are known.
    surprisal: [tokens] float32, bits: -log2 of the probability that the token itself had, at most MAX_SURPRISAL.
        All 0 if no probabilities are known.

    Row i is the prediction OF token i, made before it was seen. Nothing precedes token 0: from logits its row is
    uniform.

    Make one with `from_logits`, `from_probs` or `from_tokens`. The constructor takes arrays as they are and raises
    ProbsError for shapes that disagree, negative or repeated ids, probabilities that are negative, not finite or sum
    to more than 1, and surprisal that is negative or not finite.
    """

    token_ids: NDArray[np.int64]
    topk_ids: NDArray[np.int32]
    topk_probs: NDArray[np.float32]
    surprisal: NDArray[np.float32]

    def __post_init__(self) -> None:
        ids = _token_ids(self.token_ids)
        topk_ids = _integers(self.topk_ids, "topk_ids").astype(np.int32)
        topk_probs = np.asarray(self.topk_probs, np.float32)
        surprisal = np.asarray(self.surprisal, np.float32)
        if topk_ids.ndim != 2 or topk_ids.shape != topk_probs.shape or topk_ids.shape[0] != ids.size:
            raise ProbsError(
                f"top-k: expected [{ids.size}, k] ids and probabilities, got {topk_ids.shape} and {topk_probs.shape}"
            )
        if surprisal.shape != ids.shape:
            raise ProbsError(f"surprisal: expected [{ids.size}], got shape {surprisal.shape}")
        if (topk_ids < 0).any() or (np.diff(np.sort(topk_ids, axis=1), axis=1) == 0).any():
            raise ProbsError("top-k ids must not be negative, nor occur twice in a row")
        # written so that NaN fails
        if not ((topk_probs >= 0).all() and (topk_probs.sum(axis=1, dtype=np.float64) <= 1 + _TOLERANCE).all()):
            raise ProbsError("top-k probabilities must not be negative, and must sum to at most 1 in each row")
        if not (np.isfinite(surprisal).all() and (surprisal >= 0).all()):
            raise ProbsError("surprisal must be finite and not negative")
        for name, array in zip(self.__dataclass_fields__, (ids, topk_ids, topk_probs, surprisal), strict=True):
            object.__setattr__(self, name, array)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.token_ids.size

    @property
    def k(self) -> int:
        """Number of candidates kept for each token; 0 if no probabilities are known."""
        return self.topk_ids.shape[1]

    def part(self, start: int, stop: int) -> TokenProbs:
        """Tokens start to stop alone."""
        part = slice(start, stop)
        return TokenProbs(self.token_ids[part], self.topk_ids[part], self.topk_probs[part], self.surprisal[part])

    @classmethod
    def from_logits(cls, logits: Any, token_ids: Any, k: int = 20) -> TokenProbs:
        """From a model's logits for the same tokens.

        logits: [tokens, vocab] or [tokens - 1, vocab], natural logarithms up to a constant a row, -inf allowed: row i
            predicts token i + 1, as models give them, so that a last row for the token after the text is not used.
            NumPy, torch (any float dtype, any device) and the like; they are read a few rows at a time.
        token_ids: [tokens] integers.
        k: how many candidates to keep (at most the vocabulary).

        Raises ProbsError.
        """
        ids = _token_ids(token_ids)
        rows, vocab = _matrix(logits, "logits")
        if rows not in (ids.size, ids.size - 1):
            raise ProbsError(f"logits: expected {ids.size} or {ids.size - 1} rows for {ids.size} tokens, got {rows}")
        builder = _TopK(ids, vocab, k)
        builder.topk_ids[0] = np.arange(builder.k)
        builder.topk_probs[0] = 1 / vocab
        builder.surprisal[0] = np.log2(vocab)
        for start, chunk in _chunks(logits, ids.size - 1, vocab):
            top = chunk.max(axis=1)
            if not np.isfinite(top).all():  # NaN and +inf show in the maximum, a row of -inf too
                row = start + int(np.argmin(np.isfinite(top)))
                raise ProbsError(f"logits: row {row} holds NaN or +inf, or nothing but -inf")
            np.subtract(chunk, top[:, None], out=chunk)
            np.exp(chunk, out=chunk)
            np.divide(chunk, chunk.sum(axis=1, keepdims=True), out=chunk)
            builder.add(start + 1, chunk)
        return builder.build()

    @classmethod
    def from_probs(cls, probs: Any, token_ids: Any, k: int = 20) -> TokenProbs:
        """From the probabilities themselves.

        probs: [tokens, vocab]: row i holds p(token i is ... | tokens before i), and sums to 1 within 0.001. Row 0 is
            what is expected of the first token.
        token_ids, k: as in `from_logits`.

        Raises ProbsError.
        """
        ids = _token_ids(token_ids)
        rows, vocab = _matrix(probs, "probs")
        if rows != ids.size:
            raise ProbsError(f"probs: expected {ids.size} rows for {ids.size} tokens, got {rows}")
        builder = _TopK(ids, vocab, k)
        for start, chunk in _chunks(probs, ids.size, vocab):
            total = chunk.sum(axis=1, dtype=np.float64)
            good = (chunk >= 0).all(axis=1) & (np.abs(total - 1) <= _TOLERANCE)  # written so that NaN fails
            if not good.all():
                row = int(np.argmin(good))
                raise ProbsError(
                    f"probs: row {start + row} sums to {total[row]:.6g} with minimum {chunk[row].min():.6g}; "
                    "expected 1 and no negative entry (for logits use from_logits)"
                )
            builder.add(start, chunk)
        return builder.build()

    @classmethod
    def from_tokens(cls, token_ids: Any) -> TokenProbs:
        """Token ids alone, when no probabilities are known: k is 0 and surprisal is 0 everywhere."""
        ids = _token_ids(token_ids)
        empty = np.zeros((ids.size, 0), np.float32)
        return cls(ids, empty.astype(np.int32), empty, np.zeros(ids.size, np.float32))


class _TopK:
    """Collects the candidates and the surprisal of all rows."""

    def __init__(self, ids: NDArray[np.int64], vocab: int, k: int) -> None:
        if k < 1:
            raise ProbsError(f"k must be at least 1, not {k}")
        if (ids >= vocab).any():
            token = int(np.argmax(ids >= vocab))
            raise ProbsError(f"token {token} has id {ids[token]}, outside the vocabulary of {vocab}")
        self.ids, self.k = ids, min(k, vocab)
        self.topk_ids = np.zeros((ids.size, self.k), np.int32)
        self.topk_probs = np.zeros((ids.size, self.k), np.float32)
        self.surprisal = np.zeros(ids.size, np.float32)

    def add(self, start: int, probs: NDArray[np.float32]) -> None:
        """Rows [start, start + len(probs)) of the distribution."""
        count, vocab = probs.shape
        kth = np.partition(probs, vocab - self.k, axis=1)[:, vocab - self.k]
        for row in range(count):
            # all that reach the k-th value, ties included, in order of id; the sort is stable, so ties stay in it
            candidates = np.flatnonzero(probs[row] >= kth[row])
            chosen = candidates[np.argsort(-probs[row, candidates], kind="stable")[: self.k]]
            self.topk_ids[start + row] = chosen
            self.topk_probs[start + row] = probs[row, chosen]
        own = probs[np.arange(count), self.ids[start : start + count]]
        bits = -np.log2(np.clip(own, 2.0**-MAX_SURPRISAL, 1.0))
        self.surprisal[start : start + count] = bits

    def build(self) -> TokenProbs:
        return TokenProbs(self.ids, self.topk_ids, self.topk_probs, self.surprisal)


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(array.shape) if hasattr(array, "shape") else np.shape(array)


def _integers(array: Any, name: str) -> NDArray[Any]:
    out = to_numpy(array, ProbsError)[0]
    if out.dtype.kind not in "iu":
        raise ProbsError(f"{name}: expected integers, got {out.dtype}")
    return out


def _token_ids(token_ids: Any) -> NDArray[np.int64]:
    shape = _shape(token_ids)
    if len(shape) != 1 or shape[0] == 0:
        raise ProbsError(f"token_ids: expected one sequence of at least one token, got shape {shape}")
    ids = _integers(token_ids, "token_ids")
    if (ids < 0).any() or (ids >= 2**31).any():
        raise ProbsError("token_ids: ids must be between 0 and 2**31 - 1")
    return ids.astype(np.int64)


def _matrix(array: Any, name: str) -> tuple[int, int]:
    shape = _shape(array)
    if len(shape) != 2 or shape[1] == 0:
        raise ProbsError(f"{name}: expected [tokens, vocab] of one sequence, got shape {shape}")
    return shape[0], shape[1]


def _chunks(array: Any, rows: int, vocab: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(first row, float32 copy of some rows), together the first `rows` rows of `array`."""
    step = max(1, _CHUNK // vocab)
    for start in range(0, rows, step):
        try:
            some = array[start : min(rows, start + step)]
        except (TypeError, RuntimeError) as problem:  # a sparse tensor, say
            raise ProbsError(f"rows of a {type(array).__name__} cannot be read: give a dense array") from problem
        yield start, np.array(to_numpy(some, ProbsError)[0], np.float32)
