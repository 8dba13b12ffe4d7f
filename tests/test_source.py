from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from transformers import (  # noqa: E402
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
)
from transformers import MistralForCausalLM as MistralModel  # noqa: E402

from seqkv.adapters import source  # noqa: E402
from seqkv.adapters.source import ModelSource  # noqa: E402
from seqkv.engine import CacheError, KVCache  # noqa: E402

CONTEXT, CONTINUATION = 24, 12
IDS = np.arange(CONTEXT + CONTINUATION) * 7 % 97


def llama(**kw: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=97, num_key_value_heads=2, max_position_embeddings=64, **sizes | kw)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter *= 4  # a fresh model's attention is flat, and its gradients drown in rounding
    return model


def make(model: Any, tokenizer: Any = None) -> ModelSource:
    return ModelSource(model, tokenizer, CONTEXT, CONTINUATION)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


def test_describes_the_model() -> None:
    model = llama()
    s = make(model)
    assert (s.layers, s.vocab) == (3, 97)
    assert [rope is not None and rope.rotary_dim for rope in s.rope] == [8, 8, 8]
    table = s.embedding()
    assert table.shape == (97, 32) and table.dtype == np.float32
    assert table.ctypes.data == model.get_input_embeddings().weight.data_ptr()  # not a copy


def test_tokenize_adds_no_special_tokens() -> None:
    def tokenizer(text: str, **kw: Any) -> dict[str, list[int]]:
        return {"input_ids": [1] * kw.get("add_special_tokens", True) + [ord(c) for c in text]}

    ids = make(llama(), tokenizer).tokenize("abc")
    assert ids.tolist() == [97, 98, 99] and ids.dtype == np.int64


@pytest.mark.parametrize("before, after", [([], []), ([1], []), ([1], [2]), ([1, 5], [])])
def test_texts_begin_as_the_tokenizer_has_it(before: list[int], after: list[int]) -> None:
    def tokenizer(text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        ids = [ord(c) - 32 for c in text]
        return {"input_ids": before + ids + after if add_special_tokens else ids}

    source = make(llama(), tokenizer)
    assert source.bos.tolist() == before and source.bos.dtype == np.int64
    ids = source.begin(source.tokenize("abc"))
    assert ids.tolist() == [*before, 65, 66, 67] and ids.dtype == np.int64
    np.testing.assert_array_equal(source.begin(ids), ids)  # a chat's template may have it


@pytest.mark.parametrize("bos", [[0], [97], [97, 5]])
def test_a_beginning_that_looks_like_the_text(bos: list[int]) -> None:
    def tokenizer(text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        plain = [0 if bos == [0] else ord(c) for c in text]
        return {"input_ids": np.array(bos * add_special_tokens + plain)}

    assert make(llama(), tokenizer).bos.tolist() == bos


def test_without_a_tokenizer_nothing_is_put_before_ids() -> None:
    assert make(llama()).begin(IDS) is IDS


def test_prefill_is_what_the_model_computes() -> None:
    model = llama()
    kv, probs, importance = make(model).prefill(IDS)
    assert (kv.tokens, probs.tokens, importance.shape) == (CONTEXT, CONTEXT, (3, CONTEXT))
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.from_numpy(IDS[None])).logits[0], -1)
    own = expected[np.arange(CONTEXT - 1), IDS[1:CONTEXT]].numpy() / -np.log(2)
    np.testing.assert_allclose(probs.surprisal[1:], own, rtol=1e-4)
    # continuing from the cache predicts what one forward over everything predicts
    np.testing.assert_allclose(make(model).logprobs(IDS, kv).numpy(), expected[CONTEXT:].numpy(), atol=1e-4)


def test_recompute_and_steps() -> None:
    s = make(llama())
    ids = IDS[:CONTEXT]
    assert s.recompute(ids).digest() == s.recompute(torch.from_numpy(ids)).digest() == s.prefill(ids)[0].digest()
    step = s.stepper()
    steps = np.stack([step(int(i)) for i in ids])
    assert steps.dtype == np.float32 and steps.shape == (CONTEXT, 97)
    with torch.inference_mode():
        np.testing.assert_allclose(steps, s.model(torch.from_numpy(ids)[None]).logits[0].numpy(), atol=1e-4)
    np.testing.assert_array_equal(s.stepper()(int(ids[0])), steps[0])  # a new one knows nothing


def test_says_what_it_computes_on() -> None:
    class Tokenizer:
        def __init__(self, *words: str) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: i for i, word in enumerate(self.words)}

    assert make(llama()).tokenizer_fingerprint is None
    fingerprints = [make(llama(), Tokenizer(*words)).tokenizer_fingerprint for words in ("ab", "ba", "ab")]
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]
    found = make(llama().bfloat16()).environment
    assert (found["device"], found["dtype"]) == ("cpu", "bfloat16")
    assert (found["torch"], found["threads"]) == (torch.__version__, torch.get_num_threads())


@pytest.mark.parametrize("rope", [None, YARN])
def test_fisher_is_the_gradient(monkeypatch: pytest.MonkeyPatch, rope: dict[str, Any] | None) -> None:
    """Against finite differences along random directions, each layer's keys and values on their own."""
    s = make(llama(**({} if rope is None else {"rope_parameters": rope})))
    assert s.rope[0] is not None and (s.rope[0].scaling != 1) == (rope is not None)
    kv = s.prefill(IDS)[0]
    y = torch.arange(CONTINUATION)[:, None] * 5 % 97
    monkeypatch.setattr(source, "_draw", lambda probs, generator: y)
    gradients = s.fisher(IDS, kv)

    def value(side: int, layer: int, move: Any) -> float:
        sides = [list(kv.keys), list(kv.values)]
        here = kv.rope[layer] if side == 0 else None
        if here is not None:
            moved = here.apply(here.undo(kv.keys[layer], kv.positions) + move, kv.positions)
        else:
            moved = sides[side][layer] + move
        sides[side][layer] = moved
        return float(s.logprobs(IDS, KVCache(*sides, rope=kv.rope)).gather(1, y).double().sum())

    rng = np.random.default_rng(0)
    for side in (0, 1):
        for layer in range(3):
            gradient = gradients[side][layer]
            assert gradient.dtype == np.float32 and gradient.shape == kv.keys[layer].shape
            move = (gradient / np.linalg.norm(gradient) + 0.1 * rng.standard_normal(gradient.shape)).astype(np.float32)
            measured = (value(side, layer, 0.01 * move) - value(side, layer, -0.01 * move)) / 0.02
            assert measured == pytest.approx(float((gradient * move).sum()), rel=0.02, abs=1e-3)


def test_of_windows_every_token_is_kept() -> None:
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = Gemma3TextConfig(
        vocab_size=97, num_key_value_heads=1, head_dim=8, sliding_window=8, layer_types=kinds, **sizes
    )
    s = make(Gemma3ForCausalLM(config).eval().requires_grad_(False))
    kv = s.prefill(IDS)[0]
    assert kv.shape == ((1, 8, 8),) * 3 and kv.tokens == CONTEXT
    with torch.inference_mode():
        expected = torch.log_softmax(s.model(torch.from_numpy(IDS[None])).logits[0], -1)[CONTEXT:]
    np.testing.assert_allclose(s.logprobs(IDS, kv).numpy(), expected.numpy(), atol=1e-4)
    step = s.stepper()
    steps = np.stack([step(int(i)) for i in IDS])
    np.testing.assert_allclose(torch.log_softmax(torch.from_numpy(steps), -1)[CONTEXT:], expected.numpy(), atol=1e-4)


def test_fisher_without_rotation() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    s = make(GPT2LMHeadModel(config).eval().requires_grad_(False))
    assert s.rope == [None] * 3
    kv = s.prefill(IDS)[0]
    keys, values = s.fisher(IDS, kv)
    assert all(np.abs(g).max() > 0 for g in keys + values)


def test_fisher_depends_on_the_text_alone() -> None:
    s, other = make(llama()), IDS[::-1].copy()
    kv, kv_other = s.prefill(IDS)[0], s.prefill(other)[0]
    first = s.fisher(IDS, kv)
    s.fisher(other, kv_other)
    for a, b in zip(first, s.fisher(IDS, kv), strict=True):
        np.testing.assert_array_equal(a, b)


def test_draw_follows_the_distribution() -> None:
    probs = torch.tensor([[0.5, 0.0, 0.25, 0.25]]).expand(4000, 4)
    share = torch.bincount(source._draw(probs, torch.Generator().manual_seed(0))[:, 0], minlength=4) / 4000
    np.testing.assert_allclose(share.numpy(), [0.5, 0, 0.25, 0.25], atol=0.03)
    assert share[1] == 0


def test_divergence() -> None:
    s = make(llama())
    kv = s.prefill(IDS)[0]
    reference = s.logprobs(IDS, kv)
    assert s.divergence(IDS, kv, reference) == (0.0, 1.0)
    other = KVCache(kv.keys, [value + np.float32(0.5) for value in kv.values], rope=kv.rope)
    kl, top1 = s.divergence(IDS, other, reference)
    logprobs = s.logprobs(IDS, other)
    assert kl == pytest.approx((reference.exp() * (reference - logprobs)).sum(-1).mean().item(), rel=1e-4) and kl > 0
    assert top1 == pytest.approx((reference.argmax(-1) == logprobs.argmax(-1)).float().mean().item())


def test_fingerprint_tells_models_apart() -> None:
    model = llama()
    fingerprint = make(model).fingerprint
    assert len(fingerprint) == 32 and make(llama()).fingerprint == fingerprint
    assert make(llama().bfloat16()).fingerprint == fingerprint
    assert make(llama(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})).fingerprint != fingerprint
    model.model.layers[1].mlp.up_proj.weight *= 1.1
    assert make(model).fingerprint != fingerprint


def test_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        f"import importlib.util as u; s = u.spec_from_file_location('t', {__file__!r}); t = u.module_from_spec(s); "
        "s.loader.exec_module(t); print(t.make(t.llama()).fingerprint)"
    )
    root = Path(__file__).parents[1]  # a plain checkout is found from there
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert out.stdout.split()[-1] == make(llama()).fingerprint


def test_refuses_what_it_cannot_use() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(CacheError, match="Sliding"):
        make(MistralModel(MistralConfig(vocab_size=97, num_key_value_heads=2, sliding_window=16, **sizes)).eval())
    s = make(llama())
    with pytest.raises(ValueError, match="no ids follow"):
        s.logprobs(IDS[:CONTEXT], s.prefill(IDS)[0])
