"""Hugging Face transformers (5.0 and later) <-> `seqkv.engine`.

    name = cache_kwarg(model)  # "cache", or "past_key_values" in older releases
    with observe_attention(model) as attention:
        out = model(input_ids, use_cache=True)
    importance = attention.importance()
    stream = encode_cache(model, out[name], input_ids, out.logits, importance=importance)
    model(next_ids, **{name: decode_cache(stream, model)})

Caches whose layers are all plain `DynamicLayer`s are understood: what a decoder with full attention makes. Any other
kind of layer (sliding window, linear attention, static, quantized, ...) is refused by name.

`CompressedCache` is a cache that is compressed while the model generates:

    model.generate(input_ids, **{name: CompressedCache(model, profile=profile)})
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from seqkv import engine
from seqkv.adapters import rope
from seqkv.adapters.compressed_cache import CompressedCache as CompressedCache
from seqkv.adapters.parts import decoder_of, text_config
from seqkv.cuda_kernels.device import available
from seqkv.engine import CacheError, KVCache, TokenProbs
from seqkv.engine.arrays import on_device

_OBSERVED = "seqkv_observed_sdpa"  # the attention implementation that observe_attention registers


def to_kv(cache: Any, model: PreTrainedModel, batch_index: int = 0) -> KVCache:
    """One sequence of a transformers cache as a `KVCache`, with the rotation of its keys.

    cache: a cache with a `DynamicLayer` for each layer. The sequence must not be padded: every column of the cache
        counts as a token, at positions 0, 1, 2, ...
    batch_index: which sequence of the batch.

    The arrays share memory with the cache where they can; a cache on a CUDA device stays there (that needs CuPy). A
    model without rotary embedding (GPT-2), or with one that is not understood, gives rope None.
    CacheError if the cache holds another kind of layer, or nothing.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise CacheError(f"{type(cache).__name__} is not a cache with layers; pass a transformers DynamicCache")
    for index, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:  # a subclass keeps more than keys and values, or not all of them
            raise CacheError(
                f"layer {index} of the cache is a {type(layer).__name__}; only DynamicLayer is understood (for a model "
                "with sliding windows, start from an empty DynamicCache(), whose layers keep every token)"
            )
        if layer.keys is None or layer.keys.numel() == 0:
            raise CacheError(f"the cache is empty: nothing is in layer {index}")
        if not 0 <= batch_index < layer.keys.shape[0]:
            raise CacheError(f"the cache holds {layer.keys.shape[0]} sequences, there is no number {batch_index}")
    keys = [layer.keys[batch_index] for layer in layers]
    ropes = rope.of_decoder(decoder_of(model), text_config(model), [key.shape[-1] for key in keys])
    return KVCache(keys, [layer.values[batch_index] for layer in layers], rope=ropes)


def to_cache(
    kv: KVCache,
    model: PreTrainedModel,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> DynamicCache:
    """A transformers cache of one sequence that `model` continues from.

    dtype, device: the model's own if not given.

    The cache has no positions of its own: if `kv.positions` do not count from 0 (a part of a stream), give the model
    `position_ids` when it continues. CacheError if the model has another number of layers.
    """
    count = text_config(model).num_hidden_layers
    if kv.layers != count:
        raise CacheError(f"the cache has {kv.layers} layers, the model {count}")
    dtype, where = dtype or model.dtype, device or model.device
    cache = DynamicCache()
    for layer, (key, value) in enumerate(zip(kv.keys, kv.values, strict=True)):
        cache.update(_tensor(key, dtype, where), _tensor(value, dtype, where), layer)
    return cache


def cache_kwarg(model: PreTrainedModel) -> str:
    """The name under which the model's forward takes a cache: "cache", or "past_key_values" before transformers 5.24.

    Its output has the cache under the same name.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def encode_cache(
    model: PreTrainedModel,
    cache: Any,
    input_ids: Any,
    logits: Any = None,
    *,
    profile: Any = None,
    kl: float = 0.01,
    step: float | None = None,
    bits: float | None = None,
    measure: engine.codec.Measure | None = None,
    importance: Any = None,
    batch_index: int = 0,
) -> bytes:
    """A stream with one sequence of a cache: `to_kv`, then `engine.encode`.

    input_ids: [tokens] or [batch, tokens] integers, the tokens that the cache was made from, in order. More may
        follow: after `generate`, the cache holds all tokens but the last.
    logits: [tokens, vocab] or [batch, tokens, vocab], the model's output for the same tokens, or None if it is not at
        hand.
    profile, kl, step, bits, measure: as in `engine.encode`, which runs where the cache is.
    importance: [layers, tokens] attention received, as `observe_attention` gives it.
    batch_index: which sequence of the batch.

    CacheError, ProbsError and whatever `engine.encode` raises.
    """
    kv = to_kv(cache, model, batch_index)
    ids = torch.as_tensor(input_ids)
    ids = ids[batch_index] if ids.ndim == 2 else ids
    if ids.ndim != 1 or ids.numel() < kv.tokens:
        raise CacheError(f"the cache holds {kv.tokens} tokens, input_ids have shape {tuple(ids.shape)}")
    ids = ids[: kv.tokens]
    if logits is None:
        probs = TokenProbs.from_tokens(ids)
    else:
        probs = TokenProbs.from_logits((logits[batch_index] if logits.ndim == 3 else logits)[: kv.tokens], ids)
    return engine.encode(
        kv, probs, profile=profile, kl=kl, step=step, bits=bits, measure=measure, importance=importance
    )


def decode_cache(
    stream: bytes, model: PreTrainedModel, *, profile: Any = None, tokens: slice | None = None
) -> DynamicCache:
    """The cache of a stream, on the model's device and in its dtype: `engine.decode`, then `to_cache`.

    profile, tokens: as in `engine.decode`, which runs on the model's device if that is a CUDA device and CuPy is
    installed. Raises what these two raise.
    """
    if model.device.type != "cuda" or not available():
        return to_cache(engine.decode(stream, profile=profile, tokens=tokens), model)
    with torch.cuda.device(model.device):
        return to_cache(engine.decode(stream, profile=profile, tokens=tokens, backend="cuda"), model)


def load_model(path: str | Path, dtype: torch.dtype | str = torch.float32) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer from a transformers directory or a GGUF file, for inference, without using the network.

    The model comes in `dtype` on the CPU, in eval mode, its parameters without gradient.
    """
    path = Path(path)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path), "local_files_only": True}
    if path.is_file():
        where |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with _without_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
    return model.eval().requires_grad_(False), tokenizer


@contextlib.contextmanager
def observe_attention(model: PreTrainedModel, last: int = 256) -> Iterator[AttentionObserver]:
    """Within this context, forward passes of `model` also record how much attention each token receives.

        with observe_attention(model) as attention:
            out = model(input_ids, use_cache=True)
        importance = attention.importance()

    last: how many of the latest queries count. The prefill may come in one call or in chunks; a call without a past
        starts anew.

    The model attends with PyTorch's scaled dot product meanwhile, and gets its own implementation back afterwards. The
    record takes memory for [heads, last / 4, tokens] numbers while a layer runs, and keeps about [10, tokens] a layer.
    """
    if last < 1:
        raise ValueError(f"last must be at least 1, not {last}")
    decoder = decoder_of(model)
    attentions = [m for m in decoder.modules() if hasattr(m, "layer_idx") and not getattr(m, "is_cross_attention", 0)]
    if any(hasattr(m, "_seqkv_observer") for m in attentions):
        raise RuntimeError("the model is being observed already")
    AttentionInterface.register(_OBSERVED, _observed_attention)
    AttentionMaskInterface.register(_OBSERVED, sdpa_mask)
    before, observer = decoder.config._attn_implementation, AttentionObserver(last)
    decoder.set_attn_implementation(_OBSERVED)
    try:
        for module in attentions:
            module._seqkv_observer = observer
        yield observer
    finally:
        for module in attentions:
            del module._seqkv_observer
        decoder.set_attn_implementation(before)


class AttentionObserver:
    """What `observe_attention` recorded."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._block = max(1, last // 4)  # queries that are added up before they are stored
        self._layers: dict[int, list[_Received]] = {}

    def importance(self, batch_index: int = 0) -> NDArray[np.float32]:
        """Attention received: [layers, tokens] float32, between 0 and 1.

        The mean over all heads and over those of the last queries that can see the token. If the prefill came in
        chunks, up to a quarter of `last` more queries than that may count, never fewer unless the text is shorter.

        CacheError if nothing was recorded, or the layers saw different numbers of tokens.
        """
        if not self._layers:
            raise CacheError(
                "no attention was observed: run the model within observe_attention (and check its support)"
            )
        rows = [self._row(self._layers[layer], batch_index) for layer in sorted(self._layers)]
        if len({row.size for row in rows}) != 1:
            raise CacheError("layers saw different numbers of tokens: start from an empty DynamicCache()")
        return np.stack(rows)

    def record(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
    ) -> None:
        """Add a layer's call: query [batch, heads, queries, dim], key [batch, kv_heads, tokens, dim].

        mask: what may be seen, as sdpa takes it: [batch, 1 or heads, queries, tokens] booleans or summands, or None
            for a causal one.
        scaling: factor on the products, 1 / sqrt(dim) if None.
        """
        queries, tokens = query.shape[2], key.shape[2]
        received = self._layers.setdefault(layer, [])
        if queries == tokens:
            received.clear()
        for start in range(max(0, queries - self._last), queries, self._block):
            rows = slice(start, min(start + self._block, queries))
            bias = _bias(mask, rows, queries, tokens, query.device)
            new = _receive(query[:, :, rows], key, bias, query.shape[-1] ** -0.5 if scaling is None else scaling)
            if received and received[-1].queries + new.queries <= self._block:
                new = received.pop().plus(new)
            received.append(new)
        while sum(r.queries for r in received) - received[0].queries >= self._last:
            received.pop(0)

    @staticmethod
    def _row(received: list[_Received], batch_index: int) -> NDArray[np.float32]:
        total = received[0]
        for other in received[1:]:
            total = total.plus(other)
        return (total.attention[batch_index] / total.seen[batch_index].clamp(min=1)).cpu().numpy()


@dataclass
class _Received:
    """Some queries' attention, mean over heads and sum over queries, and how many saw each token: [batch, tokens]."""

    queries: int
    attention: torch.Tensor
    seen: torch.Tensor

    def plus(self, later: _Received) -> _Received:
        more = (0, later.seen.shape[1] - self.seen.shape[1])  # tokens that came after these queries
        return _Received(
            self.queries + later.queries,
            torch.nn.functional.pad(self.attention, more) + later.attention,
            torch.nn.functional.pad(self.seen, more) + later.seen,
        )


def _bias(mask: torch.Tensor | None, rows: slice, queries: int, tokens: int, device: torch.device) -> torch.Tensor:
    """What is added to the scores of some queries: [1 or batch, 1 or heads, rows, tokens] float32."""
    if mask is None:  # causal, the last query sees all tokens
        at = torch.arange(tokens - queries + rows.start, tokens - queries + rows.stop, device=device)
        mask = (torch.arange(tokens, device=device) <= at[:, None])[None, None]
    else:
        mask = mask[:, :, rows, :tokens]
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=device).masked_fill_(~mask, float("-inf"))
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return mask.float().masked_fill_(hidden, float("-inf"))


def _receive(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor, scaling: float) -> _Received:
    """The attention of these queries, recomputed: sdpa does not tell."""
    with torch.no_grad():
        batch, heads, queries, dim = query.shape
        kv_heads, tokens = key.shape[1:3]
        # the heads that share keys side by side, so that keys need no copy
        grouped = query.reshape(batch, kv_heads, heads // kv_heads * queries, dim)
        scores = (grouped @ key.transpose(2, 3)).float().mul_(scaling).view(batch, heads, queries, tokens)
        attention = scores.add_(bias).softmax(-1).nan_to_num_(0.0)  # a padding query sees nothing: 0 / 0
        seen = torch.isfinite(bias).any(1).sum(1, dtype=torch.float32).expand(batch, tokens)
        return _Received(queries, attention.mean(1).sum(1), seen)


def _observed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    observer = getattr(module, "_seqkv_observer", None)
    if observer is not None:
        observer.record(module.layer_idx, query, key, attention_mask, kwargs.get("scaling"))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _tensor(array: Any, dtype: torch.dtype, where: torch.device | str) -> torch.Tensor:
    """A layer's array as a batch of one sequence. torch warns of arrays that cannot be written: those are copied."""
    if on_device(array):
        tensor = torch.from_dlpack(array)
        tensor = tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
    else:
        tensor = torch.from_numpy(np.require(array, requirements="W"))
    return tensor[None].to(where, dtype)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's bar asks no one
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
