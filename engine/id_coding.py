"""Token ids as bytes: under what the stream has shown of them so far, or at their surprisal under a model.

Probabilities that are recomputed need not be equal bit for bit. So a chunk is coded under the model's predictions only
if a second run gave the same integers as the first, and else in the way that needs no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import surprisal
from seqkv.engine.cache import KVCache
from seqkv.engine.errors import RecomputeError, StreamError
from seqkv.engine.form import chunk_bounds, chunks
from seqkv.entropy_coding.intervals import Adaptive, Decoder, Encoder

# (start, size, total) of a chunk that is coded under the model's predictions, as good as always, and of another one
_REPEATED, _OTHER = (0, 255, 256), (255, 1, 256)


class Model(Protocol):
    """What runs a model again, as `adapters.source.ModelSource` does."""

    @property
    def fingerprint(self) -> str:
        """The same for the same weights."""

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """The same for the same vocabulary; None if there is no tokenizer."""

    @property
    def environment(self) -> dict[str, Any]:
        """What the arithmetic depends on, JSON-able."""

    @property
    def vocab(self) -> int:
        """Ids are below it."""

    def recompute(self, ids: NDArray[np.int64]) -> KVCache:
        """The cache of ids [tokens], from one forward over all."""

    def stepper(self) -> Callable[[int], NDArray[np.float32]]:
        """A function that takes one id after the other, and returns the logits [vocab] of what follows."""


def packed(ids: NDArray[np.int64], vocab: int) -> bytes:
    """ids [tokens] without a model."""
    encoder = Encoder()
    encoder.put_adaptive(ids, Adaptive(vocab))
    return encoder.finish()


def at_surprisal(ids: NDArray[np.int64], model: Model) -> bytes:
    """ids [tokens] under the model's predictions, where it repeats them: for each chunk whether it does, and its ids.

    The second run is what a decoder does, a step of the model an id. It decodes an id if and only if its interval is
    the one that was coded; equal intervals are the proof that a chunk can be decoded.
    """
    first, second = _intervals(ids, model), _intervals(ids, model)
    encoder, distribution = Encoder(), Adaptive(model.vocab)
    for chunk in range(chunks(ids.size)):
        start, stop = chunk_bounds(chunk, ids.size)
        repeated = np.array_equal(first[start:stop], second[start:stop])
        encoder.put(*_REPEATED if repeated else _OTHER)
        own = max(start, 1) if repeated else stop  # nothing predicts the first id
        encoder.put_adaptive(ids[start:own], distribution)
        for interval in first[own:stop]:
            encoder.put(*map(int, interval))
        distribution.learn(ids[own:stop])
    return encoder.finish()


def _intervals(ids: NDArray[np.int64], model: Model) -> NDArray[np.int64]:
    """(start, size, total) of each id after those before it, [tokens, 3]; of the first, zeros."""
    out, step = np.zeros((ids.size, 3), np.int64), model.stepper()
    for i in range(1, ids.size):
        out[i] = surprisal.interval(step(int(ids[i - 1])), int(ids[i]))
    return out


def read(data: memoryview, tokens: int, vocab: int, model: Model | None) -> Iterator[tuple[NDArray[np.int64], bool]]:
    """The ids of each chunk in turn, and whether the model's predictions have had a part in them.

    model: None if `packed` wrote data, else the one that `at_surprisal` had; it takes no step before it has to predict.
    StreamError if data end early; ids that come out after predictions which are not those of the encoder are others,
    which is for the caller to find.
    """
    decoder, distribution = Decoder(data), Adaptive(vocab)
    predicted = None if model is None else _Predicted(model)
    doubtful = False
    for chunk in range(chunks(tokens)):
        start, stop = chunk_bounds(chunk, tokens)
        repeated = False
        if predicted is not None:
            repeated = decoder.target(_REPEATED[2]) < _REPEATED[1]
            decoder.take(*_REPEATED if repeated else _OTHER)
        if repeated and predicted is not None:
            ids, doubtful = predicted.read(stop - start, decoder, distribution), True
        else:
            ids = decoder.take_adaptive(stop - start, distribution)
            if predicted is not None:
                predicted.unseen.extend(ids.tolist())
        if decoder.exhausted and not doubtful:
            raise StreamError(f"chunk {chunk}: token ids: altered: they end within it")
        yield ids, doubtful


class _Predicted:
    """Ids under the model's predictions, one step of the model an id. RecomputeError if one is beyond the vocabulary.

    unseen: ids that were read, and that the model has not seen yet; it sees them once it has to predict.
    """

    def __init__(self, model: Model) -> None:
        self.unseen: list[int] = []
        self._model = model
        self._step: Callable[[int], NDArray[np.float32]] | None = None

    def read(self, count: int, decoder: Decoder, distribution: Adaptive) -> NDArray[np.int64]:
        """The next ids."""
        out = np.empty(count, np.int64)
        for i in range(count):
            if not self.unseen:  # nothing predicts the first id
                out[i] = decoder.take_adaptive(1, distribution)[0]
            else:
                logits = self._logits()
                total = surprisal.total(logits)
                out[i], start, size = surprisal.token_at(logits, decoder.target(total))
                if out[i] >= distribution.count:
                    raise RecomputeError(
                        f"the model predicts token id {out[i]}, the stream's vocabulary has {distribution.count}: give "
                        "the model that it was made with"
                    )
                decoder.take(start, size, total)
                distribution.learn(out[i : i + 1])
            self.unseen.append(int(out[i]))
        return out

    def _logits(self) -> NDArray[np.float32]:
        """What follows the ids so far."""
        self._step = self._step or self._model.stepper()
        for token in self.unseen:
            logits = self._step(token)
        self.unseen.clear()
        return logits
