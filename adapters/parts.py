"""What of a transformers model the adapters look into."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> Any:
    """The stack of layers that owns the cache."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of that stack."""
    return model.config.get_text_config(decoder=True)
