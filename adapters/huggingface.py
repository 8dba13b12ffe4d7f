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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils import logging

from seqkv import engine
from seqkv.adapters import rope
from seqkv.adapters.attention import AttentionObserver as AttentionObserver
from seqkv.adapters.attention import observe_attention as observe_attention
from seqkv.adapters.compressed_cache import CompressedCache as CompressedCache
from seqkv.adapters.parts import decoder_of, text_config
from seqkv.cuda_kernels.device import available
from seqkv.engine import CacheError, KVCache, TokenProbs
from seqkv.engine.arrays import on_device


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
