"""Attention that a CompressedCache observes by itself, in passes of many tokens, and what goes on meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import DynamicCache  # noqa: E402

from seqkv import engine  # noqa: E402
from seqkv.adapters import huggingface as hf  # noqa: E402
from seqkv.engine import CacheError  # noqa: E402
from tests.test_compressed_cache import IDS, SIZES, cache_of, make  # noqa: E402


@pytest.fixture(scope="module")
def llama() -> Any:
    return make("full attention")


def coded(kv: Any, ids: Any, columns: slice, received: Any = None) -> bytes:
    """Some columns of a cache as a CompressedCache codes them; received: attention, [layers, all columns]."""
    keys, values = ([x[:, columns] for x in side] for side in (kv.keys, kv.values))
    part, probs = engine.KVCache(keys, values, rope=kv.rope), engine.TokenProbs.from_tokens(ids[columns])
    return engine.encode(part, probs, kl=0.01, importance=None if received is None else received[:, columns])


def observed(model: Any, ids: Any, columns: slice, **given: Any) -> bytes:
    """Some columns of the last sequence, with what `observe_attention` says of a pass over all."""
    name, cache, last = hf.cache_kwarg(model), DynamicCache(), len(ids) - 1
    with torch.no_grad(), hf.observe_attention(model) as seen:
        model(ids, use_cache=True, **{name: cache}, **given)
    return coded(hf.to_kv(cache, model, last), ids[last], columns, seen.importance(last))


@pytest.fixture(scope="module")
def expected(llama: Any) -> tuple[bytes]:
    """The streams of a cache after a pass over IDS."""
    return (observed(llama, IDS, slice(128)),)


def test_a_long_pass_is_coded_with_what_its_tokens_received(llama: Any, expected: tuple[bytes]) -> None:
    name, cache = hf.cache_kwarg(llama), cache_of(llama, tier="near")
    plain = llama(IDS, use_cache=True, **{name: DynamicCache()}).logits
    out = llama(IDS, use_cache=True, **{name: cache}).logits
    assert torch.equal(out, plain)
    [piece] = cache.past.pieces
    assert piece.stop == 128 and piece.streams == expected
    assert llama.config._attn_implementation == "sdpa"


def test_what_is_hidden_received_nothing(llama: Any) -> None:
    cache, mask = cache_of(llama, tier="near"), torch.ones((2, 170), dtype=torch.long)
    mask[1, :20] = 0
    ids = IDS.repeat(2, 1)
    llama(ids, attention_mask=mask, use_cache=True, **{hf.cache_kwarg(llama): cache})
    assert cache.past.pieces[0].streams[1] == observed(llama, ids, slice(20, 128), attention_mask=mask)


def test_a_later_long_pass_counts_for_what_came_before(llama: Any) -> None:
    name, cache = hf.cache_kwarg(llama), cache_of(llama, tier="near")
    llama(IDS[:, :40], use_cache=True, **{name: cache})  # short: estimated, and nothing is due
    llama(IDS[:, 40:110], use_cache=True, **{name: cache})
    [piece] = cache.past.pieces
    plain = DynamicCache()
    llama(IDS[:, :40], use_cache=True, **{name: plain})
    with hf.observe_attention(llama) as attended:
        llama(IDS[:, 40:110], use_cache=True, **{name: plain})
    assert piece.streams == (coded(hf.to_kv(plain, llama), IDS[0], slice(64), attended.importance()),)


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
        assert cache.past.pieces[0].streams == (coded(hf.to_kv(plain, model), IDS[0], slice(128)),)


def within(model: Any, call: Any) -> Any:
    """A hook that makes a call, once, while the second layer of a model runs."""
    made: list[int] = []

    def hook(*_: Any) -> None:
        if not made:
            made.append(1)
            call()

    return model.model.layers[1].register_forward_hook(hook)


def in_a_thread(call: Any) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


OTHERS: dict[str, Any] = {
    "the same model": lambda model, name: model(IDS[:, :70], use_cache=False),
    "the same model in a thread": lambda model, name: in_a_thread(lambda: model(IDS[:, :70], use_cache=False)),
    "another cache": lambda model, name: model(IDS, **{name: cache_of(model, tier="near")}),
    "another cache in a thread": lambda model, name: in_a_thread(
        lambda: model(IDS, **{name: cache_of(model, tier="near")})
    ),
    "another model": lambda model, name: (other := make("full attention"))(IDS, **{name: cache_of(other, tier="near")}),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=list(OTHERS))
def test_other_calls_meanwhile_change_nothing(other: Any, llama: Any, expected: tuple[bytes]) -> None:
    name, cache = hf.cache_kwarg(llama), cache_of(llama, tier="near")
    hook = within(llama, lambda: other(llama, name))
    with torch.no_grad():
        llama(IDS, **{name: cache})
    hook.remove()
    assert cache.past.pieces[0].streams == expected


def test_within_observe_attention(llama: Any, expected: tuple[bytes]) -> None:
    name, cache = hf.cache_kwarg(llama), cache_of(llama, tier="near")
    with hf.observe_attention(llama) as seen:
        llama(IDS, **{name: cache})
    assert cache.past.pieces[0].streams == expected
    assert seen.importance().shape == (3, 170)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_after_a_pass_that_failed_on_its_way(error: type[BaseException], llama: Any, expected: tuple[bytes]) -> None:
    def fail() -> None:
        raise error

    name, cache = hf.cache_kwarg(llama), cache_of(llama, tier="near")
    hook = within(llama, fail)
    with pytest.raises(error):
        llama(IDS, **{name: cache})
    hook.remove()
    llama(IDS, use_cache=False)
    assert not cache.past.pieces
    with pytest.raises(CacheError, match="reset the cache"):
        llama(IDS, **{name: cache})
    cache.reset()
    llama(IDS, **{name: cache})
    assert cache.past.pieces[0].streams == expected
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


def test_after_keys_that_cannot_be_coded(llama: Any, expected: tuple[bytes]) -> None:
    name, cache = hf.cache_kwarg(llama), cache_of(llama, tier="near")
    weight = llama.model.layers[0].self_attn.v_proj.weight
    before = weight.data.clone()
    weight.data[0, 0] = float("nan")
    with pytest.raises(CacheError, match="nan"):
        llama(IDS, **{name: cache})
    weight.data.copy_(before)
    llama(IDS, use_cache=False)
    cache.reset()
    llama(IDS, **{name: cache})
    assert cache.past.pieces[0].streams == expected


def test_cross_attention_is_not_taken_for_it() -> None:
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, add_cross_attention=True)).eval()
    name, streams = hf.cache_kwarg(model), []
    for encoded in (9, 170):
        cache = cache_of(model, tier="near")
        with torch.no_grad():
            model(IDS, **{name: cache}, encoder_hidden_states=torch.zeros(1, encoded, 32))
        streams.append(cache.past.pieces[0].streams)
    assert streams[0] == streams[1]  # what is encoded is all zeros: only how long it is differs


def test_a_model_that_asks_for_sdpa_by_name() -> None:
    """Gemma 4 whose layers share keys drops queries under sdpa; with another name for it the mask would be wrong."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this release has no Gemma4")
    more = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 1}
    kinds = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "sliding_window": 16, "global_head_dim": 8}
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**SIZES | more | kinds)).eval()
    name, given = hf.cache_kwarg(model), {"use_cache": True, "logits_to_keep": 2}
    with torch.no_grad():
        plain = model(IDS, **given, **{name: DynamicCache(config=model.config)}).logits
        assert torch.equal(model(IDS, **given, **{name: cache_of(model, tier="near")}).logits, plain)
