"""Attention that a CompressedCache observes by itself, in passes of many tokens."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import DynamicCache  # noqa: E402

from seqkv import engine  # noqa: E402
from seqkv.adapters import attention, compressed_cache  # noqa: E402
from seqkv.adapters import huggingface as hf  # noqa: E402
from seqkv.adapters.parts import decoder_of  # noqa: E402
from tests.test_compressed_cache import IDS, cache_of, make  # noqa: E402


@pytest.fixture(scope="module")
def llama() -> Any:
    return make("full attention")


def stream_of(model: Any, ids: Any, columns: slice, tokens: int, **observed: Any) -> bytes:
    """The first tokens of the columns as a stream, importance from `observe_attention` if asked for."""
    name, cache = hf.cache_kwarg(model), DynamicCache()
    with torch.no_grad(), hf.observe_attention(model) as seen:
        model(ids, use_cache=True, **{name: cache}, **observed)
    kv, probs = hf.to_kv(cache, model, len(ids) - 1), engine.TokenProbs.from_tokens(ids[-1, columns][:tokens])
    keys, values = ([x[:, columns][:, :tokens] for x in side] for side in (kv.keys, kv.values))
    part = engine.KVCache(keys, values, rope=kv.rope)
    return engine.encode(part, probs, kl=0.01, importance=seen.importance(len(ids) - 1)[:, columns][:, :tokens])


def test_a_long_pass_is_coded_with_what_its_tokens_received(llama: Any) -> None:
    name, cache = hf.cache_kwarg(llama), cache_of(llama, tier="near")
    plain = llama(IDS, use_cache=True, **{name: DynamicCache()}).logits
    out = llama(IDS, use_cache=True, **{name: cache}).logits
    assert torch.equal(out, plain)
    [piece] = cache.past.pieces
    assert piece.stop == 128 and piece.streams == (stream_of(llama, IDS, slice(None), 128),)
    assert llama.config._attn_implementation == "sdpa" and not cache.observing


def test_what_is_hidden_received_nothing(llama: Any) -> None:
    cache, mask = cache_of(llama, tier="near"), torch.ones((2, 170), dtype=torch.long)
    mask[1, :20] = 0
    ids = IDS.repeat(2, 1)
    llama(ids, attention_mask=mask, use_cache=True, **{hf.cache_kwarg(llama): cache})
    expected = stream_of(llama, ids, slice(20, None), 108, attention_mask=mask)
    assert cache.past.pieces[0].streams[1] == expected


def test_a_later_long_pass_counts_for_what_came_before(llama: Any) -> None:
    name, cache = hf.cache_kwarg(llama), cache_of(llama, tier="near")
    llama(IDS[:, :40], use_cache=True, **{name: cache})  # short: estimated, and nothing is due
    llama(IDS[:, 40:110], use_cache=True, **{name: cache})
    [piece] = cache.past.pieces
    attended = attention.AttentionObserver(compressed_cache.QUERIES)
    calls, plain = attention.Calls(decoder_of(llama)), DynamicCache()
    llama(IDS[:, :40], use_cache=True, **{name: plain})
    calls.begin(attended)
    llama(IDS[:, 40:110], use_cache=True, **{name: plain})
    calls.end()
    kv, probs = hf.to_kv(plain, llama), engine.TokenProbs.from_tokens(IDS[0, :64])
    part = engine.KVCache([x[:, :64] for x in kv.keys], [x[:, :64] for x in kv.values], rope=kv.rope)
    assert piece.streams == (engine.encode(part, probs, kl=0.01, importance=attended.importance()[:, :64]),)


@pytest.mark.parametrize("tier, implementation", [("lossless", "sdpa"), ("near", "eager")])
def test_other_passes_are_not_observed(tier: Any, implementation: str) -> None:
    model = make("full attention")
    model.set_attn_implementation(implementation)
    name, cache, plain = hf.cache_kwarg(model), cache_of(model, tier=tier), DynamicCache()
    assert torch.equal(
        model(IDS, use_cache=True, **{name: cache}).logits, model(IDS, use_cache=True, **{name: plain}).logits
    )
    assert model.config._attn_implementation == implementation and cache.past.stop == 128
    if tier == "near":
        kv, probs = hf.to_kv(plain, model), engine.TokenProbs.from_tokens(IDS[0, :128])
        part = engine.KVCache([x[:, :128] for x in kv.keys], [x[:, :128] for x in kv.values], rope=kv.rope)
        assert cache.past.pieces[0].streams == (engine.encode(part, probs, kl=0.01),)


def test_a_pass_that_fails_ends_the_observation(llama: Any) -> None:
    name, cache = hf.cache_kwarg(llama), cache_of(llama, tier="near")
    with pytest.raises(IndexError):
        llama(IDS + 90, use_cache=True, **{name: cache})  # beyond the vocabulary
    assert llama.config._attn_implementation == "sdpa" and not cache.observing and not cache.past.pieces
    llama(IDS, use_cache=True, **{name: cache})
    assert cache.past.stop == 128


def test_calls_of_one_model_in_several_threads(llama: Any) -> None:
    """Each records its own, and the model attends as before when the last one has ended."""
    seen: dict[int, set[int]] = {}
    inside = threading.Barrier(2)

    def call(number: int) -> None:
        class Recorder:
            def record(self, layer: int, query: Any, *_: Any) -> None:
                seen.setdefault(number, set()).add(query.shape[2])

        calls = attention.Calls(decoder_of(llama))
        calls.begin(Recorder())
        inside.wait(30)
        with torch.no_grad():
            llama(IDS[:, : 10 + number], use_cache=False)
        calls.end()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {0: {10}, 1: {11}} and llama.config._attn_implementation == "sdpa"
    assert not any("seqkv" in name for name in vars(llama.config) if name != "_attn_implementation_internal")
