from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import DynamicCache  # noqa: E402

from seqkv.adapters import huggingface as hf  # noqa: E402
from seqkv.adapters import rope  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "yarn": transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "glm": transformers.GlmConfig(**SIZES),
    "smollm3": transformers.SmolLM3Config(**SIZES),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES, sliding_window=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=512),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configuration_says_of_keys_what_the_model_says(name: str) -> None:
    config = CONFIGS[name]
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.inference_mode():
        cache = model(torch.arange(5)[None], **{hf.cache_kwarg(model): DynamicCache()})[hf.cache_kwarg(model)]
    kv = hf.to_kv(cache, model)
    assert rope.of_config(config, [8] * 3) == kv.rope
    assert (kv.rope[0] is None) == (name == "gpt2")
    if name == "yarn":
        assert kv.rope[0] is not None and kv.rope[0].scaling > 1.1


def test_a_rotation_wider_than_the_keys_is_not_understood() -> None:
    assert rope.of_config(CONFIGS["llama"], [6, 8, 8])[0] is None
