"""A model that is small enough to calibrate in a second, and caches of it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from numpy.typing import NDArray

from seqkv.engine import KVCache, Profile, Rope, TokenProbs, calibrate, mixture

# no test depends on how fast the machine is; otherwise as configured (derandomized when CI is set)
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

FIRST_CHARACTER = 0x4E00  # a token is a character from here on


class LinearModel:
    """A linear-Gaussian stand-in for a transformer, as `engine.calibrate` sees a model.

    Keys and values are linear in the token's embedding and in a state that goes from layer to layer, with noise; values
    also in the keys of their layer. Predictions are linear in keys before rotation and values, weighted by attention,
    so that gradients are exact. Everything follows from the ids.
    """

    context, continuation, vocab, width = 64, 32, 50, 6

    def __init__(self, layers: int = 3, heads: int = 2, key: int = 8, value: int = 6) -> None:
        rng = np.random.default_rng(0)
        self.layers, self.heads, self.key, self.value = layers, heads, key, value
        self.rope: list[Rope | None] = [Rope.from_theta(1e4, key - key % 2)] * layers
        self.table = rng.standard_normal((self.vocab, self.width), np.float32)
        self.bigrams = 2 * rng.standard_normal((self.vocab, self.vocab))
        self.maps = [
            {
                "token to keys": rng.standard_normal((self.width, heads * key)),
                "state to keys": rng.standard_normal((4, heads * key)),
                "token to values": rng.standard_normal((self.width, heads * value)) / 4,
                "state to values": rng.standard_normal((4, heads * value)) / 2,
                "keys to values": rng.standard_normal((heads * key, heads * value)) / 20,
                "keys to attention": rng.standard_normal(heads * key) / 6,
                "keys to logits": rng.standard_normal((heads * key, self.vocab)) / 16,
                "values to logits": rng.standard_normal((heads * value, self.vocab)) / 4,
            }
            for _ in range(layers)
        ]

    @property
    def fingerprint(self) -> str:
        return "linear"

    @property
    def bos(self) -> NDArray[np.int64]:
        return np.zeros(0, np.int64)

    def begin(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ids

    def embedding(self) -> NDArray[np.float32]:
        return self.table

    def tokenize(self, text: str) -> NDArray[np.int64]:
        return np.array([max(ord(c) - FIRST_CHARACTER, 0) for c in text], np.int64)

    def text(self, seed: int, tokens: int) -> str:
        """As the bigrams have it."""
        rng = np.random.default_rng([1, seed])
        ids = [int(rng.integers(self.vocab))]
        while len(ids) < tokens:
            ids.append(int((self.bigrams[ids[-1]] + rng.gumbel(size=self.vocab)).argmax()))
        return "".join(chr(FIRST_CHARACTER + i) for i in ids)

    def plain(self, ids: Any) -> tuple[list[NDArray[Any]], list[NDArray[Any]], NDArray[np.float32]]:
        """Keys before rotation and values, [tokens, channels] a layer, and attention received, [layers, tokens]."""
        rng, embedded = _rng(ids), self.table[ids]
        state = rng.standard_normal((len(ids), 4))
        keys, values, attention = [], [], []
        for maps in self.maps:
            state = 0.8 * state + 0.6 * rng.standard_normal(state.shape)
            key = embedded @ maps["token to keys"] + state @ maps["state to keys"]
            key += 0.3 * rng.standard_normal(key.shape)
            received = np.exp(key @ maps["keys to attention"] + 0.3 * rng.standard_normal(len(ids)))
            received[:4] *= 10  # sinks
            key[:4] += 5
            value = embedded @ maps["token to values"] + state @ maps["state to values"] + key @ maps["keys to values"]
            keys.append(key)
            values.append(value + 0.2 * rng.standard_normal(value.shape))
            attention.append(received / received.mean())
        return keys, values, np.array(attention, np.float32)

    def cache(
        self, ids: Any, positions: Any = None, rope: Any = "own", dtype: str = "float32"
    ) -> tuple[KVCache, NDArray[np.float32]]:
        """The cache of ids in any guise, and attention received."""
        keys, values, attention = self.plain(ids)
        rope = self.rope if rope == "own" else rope
        ropes = [rope] * self.layers if rope is None or isinstance(rope, Rope) else rope
        places = np.arange(len(ids)) if positions is None else positions
        split = [_heads(k, self.heads) for k in keys]
        turned = [k if r is None else r.apply(k, places) for k, r in zip(split, ropes, strict=True)]
        kv = KVCache(turned, [_heads(v, self.heads) for v in values], positions=positions, rope=rope, dtype=dtype)
        return kv, attention

    def probs(self, ids: Any) -> TokenProbs:
        return TokenProbs.from_logits(self.bigrams[ids], ids)

    def prefill(self, ids: Any) -> tuple[KVCache, TokenProbs, NDArray[np.float32]]:
        ids = ids[: self.context]
        kv, attention = self.cache(ids)
        return kv, self.probs(ids), attention

    def fisher(self, ids: Any, kv: KVCache) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
        p = np.exp(self.logprobs(ids, kv))
        drawn = (self.logprobs(ids, kv) + np.random.default_rng(len(ids)).gumbel(size=p.shape)).argmax(1)
        direction = (np.eye(self.vocab)[drawn] - p).T @ self._query(ids, kv.tokens)  # [vocab, tokens]
        attention = self.plain(ids[: kv.tokens])[2]
        sides: tuple[list[Any], list[Any]] = ([], [])
        for layer, maps in enumerate(self.maps):
            for side, name in zip(sides, ("keys to logits", "values to logits"), strict=True):
                gradient = (maps[name] @ direction).T * attention[layer][:, None]
                side.append(_heads(gradient, self.heads).astype(np.float32))
        return sides

    def logprobs(self, ids: Any, kv: KVCache) -> NDArray[np.float64]:
        attention = self.plain(ids[: kv.tokens])[2]
        seen = np.zeros((kv.tokens, self.vocab))
        for layer, maps in enumerate(self.maps):
            rope = kv.rope[layer]
            key = kv.keys[layer] if rope is None else rope.undo(kv.keys[layer], kv.positions)
            read = _flat(key) @ maps["keys to logits"] + _flat(kv.values[layer]) @ maps["values to logits"]
            seen += attention[layer][:, None] * read
        last = ids[kv.tokens - 1 : -1][: self.continuation]
        logits = self.bigrams[last] + self._query(ids, kv.tokens) @ seen
        top = logits.max(axis=1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))

    def divergence(self, ids: Any, kv: KVCache, reference: Any) -> tuple[float, float]:
        other = self.logprobs(ids, kv)
        same = (other.argmax(1) == reference.argmax(1)).mean()
        return float((np.exp(reference) * (reference - other)).sum(1).mean()), float(same)

    def _query(self, ids: Any, tokens: int) -> NDArray[np.float64]:
        """How each place of the continuation reads each token, [continuation, tokens]."""
        rows = min(len(ids) - tokens, self.continuation)
        return np.random.default_rng([2, len(ids)]).standard_normal((rows, tokens)) / np.sqrt(tokens)


def _rng(ids: Any) -> np.random.Generator:
    return np.random.default_rng(xxhash.xxh3_64_intdigest(np.asarray(ids, "<i8").tobytes()))


def _heads(flat: NDArray[Any], heads: int) -> NDArray[Any]:
    return flat.reshape(len(flat), heads, -1).transpose(1, 0, 2).astype(np.float32)


def _flat(heads: NDArray[Any]) -> NDArray[Any]:
    return heads.transpose(1, 0, 2).reshape(heads.shape[1], -1).astype(np.float64)


def calibrated(model: LinearModel, predictor: str = "all") -> Profile:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("ignore", message="the calibration text will not do")
        patch.setattr(mixture, "SHORT", 0)  # there is too little text to check with twice as much
        texts = {f"kind {k}": [model.text(10 * k + seed, 120) for seed in range(5)] for k in range(5)}
        return calibrate(model, texts, predictor=predictor)


@dataclass(frozen=True)
class Sample:
    """A cache that was not calibrated on, with all that `encode` takes."""

    ids: NDArray[np.int64]
    kv: KVCache
    probs: TokenProbs
    importance: NDArray[np.float32]


@pytest.fixture(scope="session")
def model() -> LinearModel:
    return LinearModel()


@pytest.fixture(scope="session")
def profiles(model: LinearModel) -> Callable[[str], Profile]:
    """predictor -> the model's profile, made once."""
    return functools.cache(lambda predictor: calibrated(model, predictor))


@pytest.fixture(scope="session")
def profile(profiles: Callable[[str], Profile]) -> Profile:
    """3 layers of 2 heads, keys 8 wide, values 6."""
    return profiles("all")


@pytest.fixture(scope="session")
def sample(model: LinearModel) -> Callable[..., Sample]:
    """(tokens, positions=, rope=, dtype=) -> Sample."""

    def make(tokens: int, **guise: Any) -> Sample:
        ids = model.tokenize(model.text(1000 + tokens, tokens))
        kv, attention = model.cache(ids, **guise)
        return Sample(ids, kv, model.probs(ids), attention)

    return make
