from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import (  # noqa: E402
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StaticCache,
)

from seqkv.adapters import huggingface as hf  # noqa: E402
from seqkv.engine import CacheError, KVCache, ProbsError  # noqa: E402

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.arange(40)[None] * 7 % 97


def make(name: str, dtype: Any = torch.float32, **kw: Any) -> Any:
    torch.manual_seed(0)
    if name == "gpt2":
        config: Any = GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=512)
        model: Any = GPT2LMHeadModel(config)
    elif name == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=16, layer_types=kinds)
        )
    else:
        config_class, model_class = {
            "mha": (LlamaConfig, LlamaForCausalLM),
            "gqa": (LlamaConfig, LlamaForCausalLM),
            "glm": (GlmConfig, GlmForCausalLM),
            "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
            "mistral": (MistralConfig, MistralForCausalLM),
        }[name]
        heads = {"num_key_value_heads": 4 if name == "mha" else 2}
        model = model_class(config_class(**SIZES, **heads, **kw))
    return model.to(dtype).eval().requires_grad_(False)


def prefill(model: Any, ids: Any = IDS, cache: Any = None) -> Any:
    cache = DynamicCache() if cache is None else cache
    return model(ids, use_cache=True, **{hf.cache_kwarg(model): cache}), cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mha", "gqa", "gpt2", "glm", "gemma3", "smollm3"])
def test_the_model_continues_as_if_nothing_had_happened(name: str, dtype: Any) -> None:
    model = make(name, dtype)
    _, cache = prefill(model)
    kv = hf.to_kv(cache, model)
    assert kv.dtype == str(dtype).removeprefix("torch.")
    assert kv.layers == 3 and kv.tokens == 40 and kv.positions.tolist() == list(range(40))
    rebuilt = hf.to_cache(kv, model)
    assert hf.to_kv(rebuilt, model).digest() == kv.digest()
    more = torch.tensor([[5, 6, 7, 8]])
    expected, actual = prefill(model, more, cache)[0], prefill(model, more, rebuilt)[0]
    assert torch.equal(expected.logits, actual.logits)


def test_the_caches_do_not_share_memory() -> None:
    model = make("gqa")
    _, cache = prefill(model)
    kv = hf.to_kv(cache, model)
    rebuilt = hf.to_cache(kv, model)
    before = kv.digest()
    rebuilt.layers[0].keys.zero_()
    assert kv.digest() == before


def test_one_sequence_of_a_batch() -> None:
    model = make("gqa")
    ids = torch.stack([IDS[0], IDS[0].flip(0)])
    _, both = prefill(model, ids)
    alone = hf.to_kv(prefill(model, ids[1:])[1], model)
    kv = hf.to_kv(both, model, batch_index=1)
    np.testing.assert_allclose(np.stack(kv.keys), np.stack(alone.keys), atol=1e-5)
    for index in (2, -1):
        with pytest.raises(CacheError, match="2 sequences"):
            hf.to_kv(both, model, batch_index=index)


@pytest.mark.parametrize(
    ("name", "layout"), [("gqa", "half"), ("glm", "interleaved"), ("gemma3", "half"), ("smollm3", "half")]
)
def test_undoing_the_rotation_takes_the_position_out_of_the_keys(name: str, layout: str) -> None:
    # without attention to others every token of the same id is the same but for its position, in the first layer
    model = make(name)
    ids = torch.full((1, 30), 11)
    kv = hf.to_kv(prefill(model, ids)[1], model)
    for layer, (key, rope) in enumerate(zip(kv.keys, kv.rope, strict=True)):
        if rope is None:
            assert name == "smollm3" and not model.config.no_rope_layers[layer]
            continue
        assert rope.layout == layout
        # all tokens being equal, what attention mixes is equal too, in every layer
        plain = rope.undo(key, kv.positions)
        np.testing.assert_allclose(plain, plain[:, :1].repeat(30, 1), atol=2e-4)
        assert np.abs(key - key[:, :1]).max() > 0.01


def test_gemma_has_two_rotations() -> None:
    model = make("gemma3")
    sliding, full, again = hf.to_kv(prefill(model)[1], model).rope
    assert sliding == again and sliding != full


def test_attention_scaling_is_read() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    model = make("gqa", rope_parameters=yarn)
    rope = hf.to_kv(prefill(model)[1], model).rope[0]
    assert rope is not None and rope.scaling == pytest.approx(0.1 * np.log(4) + 1)


def test_gpt2_has_no_rotation() -> None:
    model = make("gpt2")
    assert hf.to_kv(prefill(model)[1], model).rope == [None] * 3


def test_other_layers_are_refused_by_name() -> None:
    model = make("mistral", sliding_window=16)
    cache = DynamicCache(config=model.config)
    prefill(model, cache=cache)
    with pytest.raises(CacheError, match="layer 0 of the cache is a DynamicSlidingWindowLayer"):
        hf.to_kv(cache, model)
    model = make("gqa")
    static = StaticCache(config=model.config, max_cache_len=64)
    prefill(model, cache=static)
    with pytest.raises(CacheError, match="StaticLayer"):
        hf.to_kv(static, model)
    with pytest.raises(CacheError, match="tuple is not a cache"):
        hf.to_kv(((1, 2),), model)
    with pytest.raises(CacheError, match="empty"):
        hf.to_kv(DynamicCache(config=model.config), model)
    with pytest.raises(CacheError, match="empty"):
        hf.to_kv(DynamicCache(), model)


def test_a_cache_of_another_model_is_refused() -> None:
    x = np.zeros((2, 2, 5, 8), np.float32)
    with pytest.raises(CacheError, match="2 layers, the model 3"):
        hf.to_cache(KVCache(x, x), make("gqa"))


def test_dtype_of_the_rebuilt_cache() -> None:
    x = np.ones((3, 2, 5, 8), np.float32)
    x.flags.writeable = False
    kv = KVCache(x, x)
    assert hf.to_cache(kv, make("gqa", torch.bfloat16)).layers[0].keys.dtype == torch.bfloat16
    assert hf.to_cache(kv, make("gqa"), dtype=torch.float16).layers[2].values.dtype == torch.float16


def eager_importance(model: Any, ids: Any, last: int, mask: Any = None) -> Any:
    """Mean over heads, and over the last queries that see the key, of eager attention: [batch, layers, tokens]."""
    model.set_attn_implementation("eager")
    attentions = model(ids, attention_mask=mask, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    tokens = ids.shape[1]
    visible = torch.ones(tokens, tokens).tril()[None].repeat(len(ids), 1, 1)
    if mask is not None:
        visible = visible * mask[:, None, :]
    rows = [a.float().mean(1) * visible for a in attentions]
    return torch.stack([r[:, -last:].sum(1) / visible[:, -last:].sum(1).clamp(min=1) for r in rows], 1).numpy()


@pytest.mark.parametrize("last", [1, 16, 256])
@pytest.mark.parametrize("name", ["mha", "gqa", "gpt2"])
def test_observed_attention_is_that_of_eager(name: str, last: int) -> None:
    model = make(name)
    plain = model(IDS).logits
    with hf.observe_attention(model, last=last) as attention:
        observed = model(IDS).logits
    assert torch.equal(plain, observed)
    importance = attention.importance()
    assert importance.dtype == np.float32 and importance.shape == (3, 40)
    np.testing.assert_allclose(importance, eager_importance(model, IDS, last)[0], atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 4, 8, 20])
def test_a_prefill_in_chunks_is_observed_the_same(chunk: int) -> None:
    model = make("gqa")
    with hf.observe_attention(model, last=16) as attention:
        cache = DynamicCache()
        for start in range(0, 40, chunk):
            prefill(model, IDS[:, start : start + chunk], cache)
    np.testing.assert_allclose(attention.importance(), eager_importance(model, IDS, 16)[0], atol=1e-6)


def test_uneven_chunks_count_at_least_the_last_queries() -> None:
    model = make("gqa")
    with hf.observe_attention(model, last=16) as attention:
        cache = DynamicCache()
        for start, stop in ((0, 3), (3, 30), (30, 37), (37, 40)):
            prefill(model, IDS[:, start:stop], cache)
    candidates = [eager_importance(model, IDS, last)[0] for last in range(16, 21)]
    assert min(np.abs(attention.importance() - c).max() for c in candidates) < 1e-6


def test_a_new_prefill_starts_anew() -> None:
    model = make("gqa")
    with hf.observe_attention(model) as attention:
        model(IDS.flip(1))
        model(IDS[:, :25])
    np.testing.assert_allclose(attention.importance(), eager_importance(model, IDS[:, :25], 256)[0], atol=1e-6)


def test_padding_in_a_batch_receives_nothing() -> None:
    model = make("gqa")
    ids, mask = torch.cat([IDS, IDS]), torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    with hf.observe_attention(model, last=16) as attention:
        model(ids, attention_mask=mask)
    expected = eager_importance(model, ids, 16, mask)
    for row in range(2):
        np.testing.assert_allclose(attention.importance(row), expected[row], atol=1e-6)
    assert not attention.importance(1)[:, :9].any()


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_the_model_is_left_as_it_was(before: str) -> None:
    model = make("gqa")
    model.set_attn_implementation(before)
    with pytest.raises(ZeroDivisionError), hf.observe_attention(model):
        assert model.config._attn_implementation not in ("eager", "sdpa")
        with pytest.raises(RuntimeError, match="already"), hf.observe_attention(model):
            pass
        raise ZeroDivisionError
    assert model.config._attn_implementation == before
    assert not any(hasattr(m, "_seqkv_observer") for m in model.modules())


def test_nothing_observed_is_an_error() -> None:
    with hf.observe_attention(make("gqa")) as attention:
        pass
    with pytest.raises(CacheError, match="no attention was observed"):
        attention.importance()


def test_encode_and_decode_pass_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make("gqa"), []

    def encode(kv: Any, probs: Any, **kw: Any) -> bytes:
        calls.append((kv, probs, kw))
        return b"stream"

    monkeypatch.setattr(hf.engine, "encode", encode, raising=False)
    monkeypatch.setattr(
        hf.engine, "decode", lambda stream, **kw: calls.append((stream, kw)) or calls[0][0], raising=False
    )
    out, cache = prefill(model)
    ids = torch.cat([IDS, torch.tensor([[3]])], 1)  # as after generate
    given: dict[str, Any] = {"profile": "p", "kl": 0.02, "step": 0.5, "bits": 0.3, "measure": len, "importance": "i"}
    stream = hf.encode_cache(model, cache, ids, out.logits, **given)
    kv, probs, kw = calls[0]
    assert kw == given
    assert probs.token_ids.tolist() == IDS[0].tolist() and probs.k == 20
    expected = -torch.log_softmax(out.logits[0, :-1], -1).gather(1, IDS[0, 1:, None])[:, 0] / np.log(2)
    np.testing.assert_allclose(probs.surprisal[1:], expected.numpy(), rtol=1e-4)
    rebuilt = hf.decode_cache(stream, model, profile="p", tokens=slice(0, 9))
    assert calls[1] == (b"stream", {"profile": "p", "tokens": slice(0, 9)})
    assert hf.to_kv(rebuilt, model).digest() == kv.digest()

    hf.encode_cache(model, cache, IDS[0].tolist())
    assert calls[2][1].k == 0
    with pytest.raises(CacheError, match=r"holds 40 tokens, input_ids have shape \(39"):
        hf.encode_cache(model, cache, IDS[:, :-1])
    with pytest.raises(ProbsError, match="got 38"):
        hf.encode_cache(model, cache, IDS, out.logits[:, :38])


def test_load_model_from_a_directory(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(97)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    saved = make("gqa", torch.bfloat16)
    saved.save_pretrained(tmp_path)
    capfd.readouterr()
    model, loaded = hf.load_model(tmp_path)
    assert "%|" not in capfd.readouterr().err
    assert loaded("w3 w5")["input_ids"] == [3, 5]
    assert model.dtype == torch.float32 and not model.training
    assert not any(p.requires_grad for p in model.parameters())
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], p.float()) for name, p in saved.named_parameters())
    assert hf.load_model(str(tmp_path), dtype="bfloat16")[0].dtype == torch.bfloat16
