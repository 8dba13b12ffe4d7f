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
from seqkv.engine.errors import StreamError
from seqkv.engine.form import chunk_bounds, chunks
from seqkv.entropy_coding.intervals import Adaptive, Decoder, Encoder


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
    """ids [tokens] under the model's predictions, where it repeats them: a bit for each chunk that says so, then the
    coder's bytes.

    The second run is what a decoder does, a step of the model an id. It decodes an id if and only if its interval is
    the one that was coded; equal intervals are the proof that a chunk can be decoded.
    """
    first, second = _intervals(ids, model), _intervals(ids, model)
    bounds = [chunk_bounds(chunk, ids.size) for chunk in range(chunks(ids.size))]
    flags = [np.array_equal(first[start:stop], second[start:stop]) for start, stop in bounds]
    encoder, distribution = Encoder(), Adaptive(model.vocab)
    for flagged, (start, stop) in zip(flags, bounds, strict=True):
        own = max(start, 1) if flagged else stop  # nothing predicts the first id
        encoder.put_adaptive(ids[start:own], distribution)
        for interval in first[own:stop]:
            encoder.put(*map(int, interval))
        distribution.learn(ids[own:stop])
    return np.packbits(flags).tobytes() + encoder.finish()


def _intervals(ids: NDArray[np.int64], model: Model) -> NDArray[np.int64]:
    """(start, size, total) of each id after those before it, [tokens, 3]; of the first, zeros."""
    out, step = np.zeros((ids.size, 3), np.int64), model.stepper()
    for i in range(1, ids.size):
        out[i] = surprisal.interval(step(int(ids[i - 1])), int(ids[i]))
    return out


def read(data: memoryview, tokens: int, vocab: int, model: Model | None) -> Iterator[tuple[NDArray[np.int64], bool]]:
    """The ids of each chunk in turn, and whether the model's predictions have had a part in them.

    model: None if `packed` wrote data, else the one that `at_surprisal` had. StreamError if data end early; ids that
    come out after predictions which are not those of the encoder are others, which is for the caller to find.
    """
    flags = np.zeros(chunks(tokens), bool)
    if model is not None:
        size = -(-flags.size // 8)
        if len(data) < size:
            raise StreamError("altered: the token ids end within their flags")
        flags = np.unpackbits(np.frombuffer(data[:size], np.uint8), count=flags.size).astype(bool)
        data = data[size:]
    decoder, distribution = Decoder(data), Adaptive(vocab)
    predicted = None if model is None or not flags.any() else _Predicted(model)
    for chunk, flagged in enumerate(flags):
        start, stop = chunk_bounds(chunk, tokens)
        if flagged and predicted is not None:
            ids = predicted.read(stop - start, decoder, distribution)
        else:
            ids = decoder.take_adaptive(stop - start, distribution)
            if predicted is not None and flags[chunk:].any():
                predicted.pass_over(ids)
        doubtful = bool(flags[: chunk + 1].any())
        if decoder.exhausted and not doubtful:
            raise StreamError(f"altered: the token ids end within chunk {chunk}")
        yield ids, doubtful


class _Predicted:
    """Ids under the model's predictions, one step of the model an id."""

    def __init__(self, model: Model) -> None:
        self._step = model.stepper()
        self._last: int | None = None  # the id whose successor comes next; the model has not seen it yet

    def read(self, count: int, decoder: Decoder, distribution: Adaptive) -> NDArray[np.int64]:
        """The next ids."""
        out = np.empty(count, np.int64)
        for i in range(count):
            if self._last is None:  # nothing predicts the first id
                out[i] = decoder.take_adaptive(1, distribution)[0]
            else:
                logits = self._step(self._last)
                total = surprisal.total(logits)
                out[i], start, size = surprisal.token_at(logits, decoder.target(total))
                decoder.take(start, size, total)
                distribution.learn(out[i : i + 1])
            self._last = int(out[i])
        return out

    def pass_over(self, ids: NDArray[np.int64]) -> None:
        """Ids that were read in another way."""
        for token in ids:
            if self._last is not None:
                self._step(self._last)
            self._last = int(token)
