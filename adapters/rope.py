"""How a transformers model turns its keys: read from the model, or from its configuration alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import AutoModel

from seqkv.engine import Rope


def of_decoder(decoder: Any, config: Any, widths: Sequence[int]) -> list[Rope | None]:
    """A Rope for each layer, None where keys are not turned or it is not understood how.

    decoder: the stack of layers, a transformers module. config: its text configuration.
    widths: [layers] numbers in a key.
    """
    rotary = getattr(decoder, "rotary_emb", None)
    rotate = getattr(sys.modules[type(decoder).__module__], "rotate_half", None)
    # the cache of multi-head latent attention holds something else than turned keys
    if rotary is None or rotate is None or getattr(config, "kv_lora_rank", None):
        return [None] * len(widths)
    # models call it rotate_half whichever pairs they turn, so ask where it puts channel 0: behind 1, or behind 2
    layout: Literal["half", "interleaved"] = (
        "half" if rotate(torch.arange(4.0)).tolist() == [-2, -3, 0, 1] else "interleaved"
    )
    types = getattr(config, "layer_types", None) or [None] * len(widths)
    turned = getattr(config, "no_rope_layers", None) or [True] * len(widths)  # the name says no, 1 means yes
    ropes: list[Rope | None] = []
    for layer, width in enumerate(widths):
        prefix = f"{types[layer]}_" if hasattr(rotary, f"{types[layer]}_inv_freq") else ""  # Gemma 3: one a layer type
        freq = getattr(rotary, f"{prefix}inv_freq", None)
        if freq is None or not turned[layer] or 2 * freq.numel() > width:
            ropes.append(None)
        else:
            ropes.append(Rope(freq.float().cpu().numpy(), getattr(rotary, f"{prefix}attention_scaling", 1.0), layout))
    return ropes


def of_config(config: Any, widths: Sequence[int]) -> list[Rope | None]:
    """The same from a transformers configuration, for servers that hold the model in another library.

    The model is built without memory for its weights, and only its rotation with numbers. Raises what transformers
    raises for a configuration that it does not know.
    """
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        decoder = AutoModel.from_config(text)
    if hasattr(decoder, "rotary_emb"):
        decoder.rotary_emb = type(decoder.rotary_emb)(text)
    return of_decoder(decoder, text, widths)
