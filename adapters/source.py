"""What calibration and evaluation ask of a model: its caches, its predictions, and how these depend on the cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from seqkv.adapters import huggingface as hf
from seqkv.adapters import parts
from seqkv.engine import KVCache, Rope, TokenProbs
from seqkv.engine.cached import cached_property

_ROWS = 64  # rows of [tokens, vocab] that are worked on at a time


class ModelSource:
    """A transformers model as `engine.calibrate` sees it.

    model, tokenizer: as `huggingface.load_model` gives them: eval mode, parameters without gradient.
    context: tokens whose cache is observed.
    continuation: tokens after these, from whose predictions the cache's worth is measured.

    Attributes:
        layers: number of layers.
        rope: a list with a Rope or None for each layer.
        vocab: rows of the embedding table.

    Token ids are NumPy or torch vectors of integers. Some layers of the model may attend to a window, as Gemma's: their
    cache holds every token all the same. CacheError if the model keeps a kind of cache that is not understood.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, context: int = 1024, continuation: int = 512) -> None:
        self.model: Any = model  # transformers' own types promise less than its models keep
        self.tokenizer, self.context, self.continuation = tokenizer, context, continuation
        self._cache_kwarg = hf.cache_kwarg(model)
        kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
        self._sliding = kinds == {"full_attention", "sliding_attention"}
        with torch.inference_mode():
            probe = hf.to_kv(self._forward([0], use_cache=True)[self._cache_kwarg], model)
        self.layers: int = probe.layers
        self.rope: list[Rope | None] = probe.rope
        self.vocab: int = self.embedding().shape[0]

    @cached_property
    def fingerprint(self) -> str:
        """Of the model, see `parts.fingerprint`."""
        return parts.fingerprint(self.model)

    @cached_property
    def tokenizer_fingerprint(self) -> str | None:
        """16 hexadecimal digits, the same for the same vocabulary; None if there is no tokenizer."""
        if self.tokenizer is None:
            return None
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return xxhash.xxh3_64_hexdigest(vocabulary.encode())

    @property
    def environment(self) -> dict[str, Any]:
        """What the last bits of a recomputed cache depend on."""
        where = self.model.device
        return {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }

    def embedding(self) -> NDArray[np.float32]:
        """The embedding table, [vocab, width] float32: the model's own memory if it is float32 on the CPU."""
        return self.model.get_input_embeddings().weight.detach().float().cpu().numpy()

    def tokenize(self, text: str) -> NDArray[np.int64]:
        """The token ids of a text, [tokens], without special tokens."""
        return np.array(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)

    @cached_property
    def bos(self) -> NDArray[np.int64]:
        """The ids that the tokenizer begins every text with, as Gemma's <bos>, [0 or more]."""
        if self.tokenizer is None:
            return np.zeros(0, np.int64)
        ids, plain = (list(self.tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (True, False))
        places = [i for i in range(len(ids)) if plain and ids[i : i + len(plain)] == plain]
        return np.array(ids[: max(places, default=0)], np.int64)

    def begin(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """`bos` and then these ids, unless they begin with it already: without it, some models predict badly."""
        count = len(self.bos)
        return ids if np.array_equal(ids[:count], self.bos) else np.concatenate([self.bos, ids])

    def prefill(self, ids: Any) -> tuple[KVCache, TokenProbs, NDArray[np.float32]]:
        """The cache of the first `context` ids, what the model expected of them, and attention received.

        The last is [layers, tokens] float32, see `huggingface.AttentionObserver.importance`.
        """
        ids = ids[: self.context]
        with torch.inference_mode(), hf.observe_attention(self.model) as attention:
            out = self._forward(ids, use_cache=True)
            probs = TokenProbs.from_logits(out.logits[0], ids)
        return hf.to_kv(out[self._cache_kwarg], self.model), probs, attention.importance()

    def recompute(self, ids: Any) -> KVCache:
        """The cache of all ids, from one forward."""
        with torch.inference_mode():
            return hf.to_kv(self._forward(ids, use_cache=True, logits_to_keep=1)[self._cache_kwarg], self.model)

    def stepper(self) -> Callable[[int], NDArray[np.float32]]:
        """A function that takes one id after the other, and returns the logits [vocab] of what follows.

        A forward for each id: nothing else can be done where an id follows from the logits before it.
        """
        cache: dict[str, Any] = {}

        def step(token: int) -> NDArray[np.float32]:
            with torch.inference_mode():
                out = self._forward([token], use_cache=True, **cache)
            cache[self._cache_kwarg] = out[self._cache_kwarg]
            return out.logits[0, -1].float().cpu().numpy()

        return step

    def fisher(self, ids: Any, kv: KVCache) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
        """A sample of how the predictions of the continuation depend on the cache of the tokens before.

        ids: the tokens of the cache, then the continuation, of which at most `continuation` count.

        Gradients of sum_i log p(y_i), y_i drawn from the model's own prediction at place i of the continuation, with
        respect to the keys before rotation and the values: for each layer [kv_heads, tokens, head_dim]. The mean of
        their outer products over many texts is the Fisher information of the cache. The draw depends on ids alone.
        """
        cache: Any = hf.to_cache(kv, self.model)
        sides = [[layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]]
        leaves = [tensor.requires_grad_(True) for side in sides for tensor in side]
        logits = self._continue(ids, kv, cache)
        direction = torch.empty_like(logits)  # the gradient of log p(y) with respect to the logits: 1[y] - p
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(np.asarray(ids, "<i8").tobytes()) >> 1)
        for start in range(0, len(logits), _ROWS):
            probs = torch.softmax(logits.detach()[start : start + _ROWS].float(), -1)
            y = _draw(probs, generator)
            direction[start : start + _ROWS] = probs.neg_().scatter_add_(1, y, torch.ones_like(probs[:, :1]))
        gradients = [g[0].float().cpu().numpy() for g in torch.autograd.grad(logits, leaves, direction)]
        keys = [
            g if rope is None else rope.undo(g, kv.positions) * np.float32(rope.scaling**2)  # the transposed rotation
            for g, rope in zip(gradients[: kv.layers], kv.rope, strict=True)
        ]
        return keys, gradients[kv.layers :]

    def logprobs(self, ids: Any, kv: KVCache) -> torch.Tensor:
        """log p of every token at every place of the continuation, [continuation, vocab] float32, nats.

        ids: as in `fisher`. kv: the cache to continue from, which stands for the first kv.tokens ids.
        """
        with torch.inference_mode():
            return torch.log_softmax(self._continue(ids, kv, hf.to_cache(kv, self.model)).float(), -1)

    def divergence(self, ids: Any, kv: KVCache, reference: torch.Tensor) -> tuple[float, float]:
        """KL(reference || predictions from `kv`), nats, and how often both hold the same token for most probable.

        Means over the continuation. reference: what `logprobs` gave for the same ids and the true cache.
        """
        with torch.inference_mode():
            logits = self._continue(ids, kv, hf.to_cache(kv, self.model))
            kl = same = 0.0
            for start in range(0, len(logits), _ROWS):
                true, other = reference[start : start + _ROWS], logits[start : start + _ROWS].float()
                kl += torch.nn.functional.kl_div(
                    torch.log_softmax(other, -1), true, reduction="sum", log_target=True
                ).item()
                same += (true.argmax(-1) == other.argmax(-1)).sum().item()
        return kl / len(logits), same / len(logits)

    def greedy(self, first: int, kv: KVCache, count: int) -> list[int]:
        """The `count` ids that follow the id `first`, which follows the cache: each the most probable one."""
        cache, ids = hf.to_cache(kv, self.model), [first]
        with torch.inference_mode():
            for _ in range(count):
                out = self._forward(ids[-1:], **{self._cache_kwarg: cache})
                cache = out[self._cache_kwarg]
                ids.append(int(out.logits[0, -1].argmax()))
        return ids[1:]

    def _continue(self, ids: Any, kv: KVCache, cache: Any) -> torch.Tensor:
        """The logits of the continuation, [continuation, vocab]."""
        ids = ids[kv.tokens : kv.tokens + self.continuation]
        if len(ids) == 0:
            raise ValueError(f"no ids follow the {kv.tokens} tokens of the cache")
        return self._forward(ids, **{self._cache_kwarg: cache}).logits[0]

    def _forward(self, ids: Any, **kwargs: Any) -> Any:
        if self._sliding and kwargs.get("use_cache"):  # an empty one keeps every token, the model's own a window
            kwargs.setdefault(self._cache_kwarg, DynamicCache())
        return self.model(torch.as_tensor(ids, device=self.model.device)[None], **kwargs)


def _draw(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A token for each row of probs [rows, vocab], as [rows, 1]. torch.multinomial takes vocab random numbers a row."""
    reached = probs.cumsum(-1)
    drawn = torch.rand((len(probs), 1), generator=generator).to(probs) * reached[:, -1:]
    return torch.searchsorted(reached, drawn, right=True).clamp_(max=probs.shape[1] - 1)
