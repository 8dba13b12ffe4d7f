"""What of a transformers model the adapters look into."""

from __future__ import annotations

import json
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel

from seqkv.engine import CacheError

_FORM = (  # what of a configuration tells models of equal weights apart
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"),
)
_SAMPLE = 64  # values that the fingerprint takes of each parameter


def decoder_of(model: PreTrainedModel) -> Any:
    """The stack of layers that owns the cache."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of that stack."""
    return model.config.get_text_config(decoder=True)


def fingerprint(model: PreTrainedModel) -> str:
    """32 hexadecimal digits, the same for the same model in every process, on every device and in every dtype.

    xxh3_128 of the shape of the model and of a few values of each parameter, rounded to bfloat16. CacheError if some
    parameters are not in memory, as with disk offloading.
    """
    config = text_config(model).to_dict()
    form = {name: config[name] for name in _FORM if config.get(name) is not None}
    state = xxhash.xxh3_128(json.dumps(form, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise CacheError(f"{name} is offloaded: what cannot be read cannot tell the model from others")
        flat = parameter.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].float().bfloat16().view(torch.int16)
        state.update(json.dumps([list(parameter.shape), values.tolist()]).encode())
    return state.hexdigest()
