from __future__ import annotations

import copy
import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import save as to_bytes  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from seqkv import engine  # noqa: E402
from seqkv.adapters import huggingface as hf  # noqa: E402
from seqkv.adapters import session_file  # noqa: E402
from seqkv.engine import CacheError, ProfileError, StreamError  # noqa: E402

SIZES = {
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
IDS = torch.arange(170)[None] * 7 % 91 + 5
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full attention": ("Llama", {}),
    "no rotation": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "sliding windows too": (
        "Gemma3",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "latent attention": ("DeepseekV3", {**LATENT, "num_key_value_heads": 4, "n_routed_experts": 2, "n_group": 1}),
    "linear attention too": (
        "Qwen3Next",
        {**LINEAR, **EXPERTS, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    ),
    "hybrid": ("FalconH1", MAMBA),
    "shared keys": (
        "Gemma3n",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": 16,
            "laurel_rank": 4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "activation_sparsity_pattern": None,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def make(kind: str, dtype: Any = torch.float32) -> Any:
    """A small random model of this kind; skips if this release has none."""
    name, more = KINDS[kind]
    if name == "Gemma3n":
        config_class: Any = getattr(transformers, "Gemma3nTextConfig", None)
    else:
        config_class = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig", None)
    model_class: Any = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM", None)
    if config_class is None or model_class is None:
        pytest.skip(f"this release has no {name}")
    torch.manual_seed(0)
    model = model_class(config_class(**(SIZES | more)))
    for parameter in model.parameters():
        parameter.data *= 2  # a fresh model hardly minds what is in its cache
    return model.to(dtype).eval().requires_grad_(False)


def cache_of(
    model: Any, chunk: int = 32, window: int = 16, tier: Any = "lossless", **kwargs: Any
) -> hf.CompressedCache:
    """With small chunks, so that short texts have several."""
    try:
        cache = hf.CompressedCache(model, window=window, tier=tier, **kwargs)
    except CacheError as error:
        if "release of transformers" not in str(error):
            raise
        pytest.skip(str(error))
    cache.chunk = chunk
    return cache


def generate(model: Any, ids: Any, new: int, cache: Any = None, **kwargs: Any) -> Any:
    """Greedy generation: the sequence, and the logits of every step."""
    given = {} if cache is None else {hf.cache_kwarg(model): cache}
    kwargs = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new} | kwargs
    mask = kwargs.pop("attention_mask", torch.ones_like(ids))
    out = model.generate(
        ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, pad_token_id=0, **given, **kwargs
    )
    return out.sequences, torch.stack(out.logits)


@pytest.fixture(scope="module")
def llama() -> Any:
    return make("full attention")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_goes_on_as_if_nothing_was_coded(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    cache, plain = cache_of(model), DynamicCache(config=model.config.get_text_config(decoder=True))
    sequence, logits = generate(model, IDS, 10, plain)
    again, same = generate(model, IDS, 10, cache)
    assert len(cache.past.pieces) == 2 and cache.past.stop == 160
    assert torch.equal(again, sequence) and torch.equal(same, logits)
    assert cache.get_seq_length() == IDS.shape[1] + 9
    cache.save_session(tmp_path / "session.safetensors")
    loaded = hf.CompressedCache.load_session(tmp_path / "session.safetensors", model)
    assert loaded.nbytes <= cache.nbytes  # views are saved without what is behind them
    longer = torch.cat([sequence, IDS[:, :7]], 1)
    _, expected = generate(model, longer, 4, plain)
    _, logits = generate(model, longer, 4, loaded)
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_dtypes_are_exact_too(dtype: Any) -> None:
    model = make("full attention", dtype)
    _, logits = generate(model, IDS, 8)
    assert torch.equal(generate(model, IDS, 8, cache_of(model))[1], logits)


def test_nothing_but_streams_and_recent_tokens_is_held(llama: Any) -> None:
    cache = cache_of(llama)
    generate(llama, IDS, 10, cache)
    layer = cache.layers[0]
    assert layer.keys.shape[2] == 179 - cache.past.stop < 16 + 32
    recent = 3 * 2 * layer.keys.nbytes
    assert cache.nbytes == sum(len(p.streams[0]) for p in cache.past.pieces) + recent + layer.keys.shape[2] * 8 + 179
    before = cache.nbytes
    again = copy.deepcopy(cache)
    generate(llama, torch.cat([IDS, IDS], 1), 1, cache)
    assert again.nbytes == before and again.get_seq_length() == 179 and cache.get_seq_length() == 340


def test_what_is_kept_decoded_is_counted_and_can_be_dropped(llama: Any) -> None:
    plain, kept = cache_of(llama), cache_of(llama, keep="decoded")
    _, logits = generate(llama, IDS, 10, plain)
    _, same = generate(llama, IDS, 10, kept)
    assert torch.equal(same, logits)
    assert kept.nbytes == plain.nbytes + 3 * 2 * kept.past.stop * 16 * 4
    kept.rest()
    assert kept.nbytes == plain.nbytes
    logits, same = (llama(IDS[:, :5], **{hf.cache_kwarg(llama): cache}).logits for cache in (plain, kept))
    assert torch.equal(same, logits) and kept.nbytes > plain.nbytes


def test_what_is_coded_is_never_coded_again(llama: Any) -> None:
    cache = cache_of(llama)
    llama(IDS, **{hf.cache_kwarg(llama): cache})
    first = cache.past.pieces[0]
    for ids in (IDS, IDS):
        llama(ids, **{hf.cache_kwarg(llama): cache})
    assert cache.past.pieces[0] is first and len(cache.past.pieces) == 3


def test_padded_batches_are_right(llama: Any) -> None:
    ids = torch.cat([IDS, IDS.flip(1), IDS + 1])
    mask = torch.ones_like(ids)
    mask[0, :100], mask[1, :33], ids[0, :100], ids[1, :33] = 0, 0, 0, 0
    _, expected = generate(llama, ids, 10, attention_mask=mask)
    cache = cache_of(llama)
    _, logits = generate(llama, ids, 10, cache, attention_mask=mask)
    assert torch.equal(logits, expected)
    assert cache.past.pieces[0].streams[0] is not None and cache.past.hidden[0, :100].all()
    ids_of_row = engine.token_ids(cache.past.pieces[0].streams[0])
    assert ids_of_row.tolist() == ids[0, 100 : 100 + len(ids_of_row)].tolist()


@pytest.mark.parametrize("tier", ["lossless", "near"])
def test_beam_search_is_right(llama: Any, tier: str) -> None:
    ids = torch.cat([IDS, IDS.flip(1)])
    expected, _ = generate(llama, ids, 10, num_beams=2)
    cache = cache_of(llama, tier=tier, **({} if tier == "lossless" else {"kl": 1e-9}))
    found, _ = generate(llama, ids, 10, cache, num_beams=2)
    assert torch.equal(found, expected) and cache.past.stop > 0


def test_assisted_generation_is_right(llama: Any) -> None:
    sequence, _ = generate(llama, IDS, 12)
    cache = cache_of(llama)
    found = llama.generate(
        IDS, prompt_lookup_num_tokens=4, max_new_tokens=12, do_sample=False, **{hf.cache_kwarg(llama): cache}
    )
    assert torch.equal(found, sequence[:, : found.shape[1]]) and cache.past.stop > 0


def test_chunked_prefill_is_right(llama: Any) -> None:
    _, expected = generate(llama, IDS, 4)
    cache = cache_of(llama)
    _, logits = generate(llama, IDS, 4, cache, prefill_chunk_size=50)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_recent_tokens_can_be_cropped_and_coded_ones_cannot(llama: Any) -> None:
    name, cache = hf.cache_kwarg(llama), cache_of(llama)
    llama(IDS, **{name: cache})
    assert cache.past.stop == 128
    cache.crop(-30)
    assert cache.get_seq_length() == 140
    plain = DynamicCache()
    llama(IDS[:, :140], **{name: plain})
    expected, logits = (llama(IDS[:, :3], **{name: one}).logits for one in (plain, cache))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    cache.crop(140)  # a length
    assert cache.get_seq_length() == 140
    with pytest.raises(CacheError, match="larger window"):
        cache.crop(-13)
    assert cache.get_seq_length() == 140


def test_reset_begins_anew(llama: Any) -> None:
    cache = cache_of(llama)
    llama(IDS.repeat(2, 1), **{hf.cache_kwarg(llama): cache})
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    _, expected = generate(llama, IDS, 4)
    assert torch.equal(generate(llama, IDS, 4, cache)[1], expected)


def test_sequences_are_selected_and_repeated(llama: Any) -> None:
    name, cache = hf.cache_kwarg(llama), cache_of(llama, keep="decoded")
    ids = torch.cat([IDS, IDS.flip(1)])
    llama(ids, **{name: cache})
    llama(ids[:, :1], **{name: cache})
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    cache.reorder_cache(torch.tensor([1, 0]))
    plain = DynamicCache()
    llama(torch.cat([ids, ids[:, :1]], 1).flip(0), **{name: plain})
    expected, logits = (llama(ids[:, :3], **{name: one}).logits for one in (plain, cache))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_a_near_cache_loses_little_and_takes_little() -> None:
    model = make("full attention")
    sequence, _ = generate(model, IDS, 1)
    cache = cache_of(model, tier="near", kl=1e-4, chunk=64)
    generate(model, IDS, 1, cache)
    _, expected = generate(model, torch.cat([sequence, IDS[:, :1]], 1), 10)
    _, lossy = generate(model, torch.cat([sequence, IDS[:, :1]], 1), 10, cache)
    assert 0 < (lossy - expected).abs().max() < 0.1 * expected.std()


def test_what_goes_wrong_is_said(llama: Any, tmp_path: Path) -> None:
    name = hf.cache_kwarg(llama)
    with pytest.raises(CacheError, match="inputs_embeds"):
        llama(inputs_embeds=llama.get_input_embeddings()(IDS), **{name: cache_of(llama)})
    with pytest.raises(CacheError, match="was not told"):
        llama.model(IDS, **{name: cache_of(llama)})
    cache = cache_of(llama)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    llama(IDS, attention_mask=mask, **{name: cache})
    with pytest.raises(CacheError, match="hides other tokens"):
        llama(IDS[:, :1], **{name: cache})
    with pytest.raises(CacheError, match="sequences"):
        llama(IDS.repeat(2, 1), **{name: cache})
    with pytest.raises(CacheError, match="not offloaded"):
        cache.layers[0].offload()
    with pytest.raises(ValueError, match="window"):
        hf.CompressedCache(llama, window=0)
    with pytest.raises(ValueError, match="tier"):
        hf.CompressedCache(llama, tier="tokens")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kl"):
        hf.CompressedCache(llama, kl=-1)


def test_models_without_a_layer_that_can_be_coded_are_refused(profile: Any, llama: Any) -> None:
    sizes = SIZES | {"sliding_window": 16}
    mistral = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes))
    with pytest.raises(CacheError, match="DynamicSlidingWindowLayer"):
        hf.CompressedCache(mistral)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=97, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    )
    with pytest.raises(CacheError, match="encoder-decoder"):
        hf.CompressedCache(t5)
    with pytest.raises(ProfileError, match="other widths"):
        llama(IDS, **{hf.cache_kwarg(llama): hf.CompressedCache(llama, profile=profile)})


def test_a_cache_of_the_models_own_kind_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[type(llama.model).__module__]
    monkeypatch.setattr(module, "LlamaCache", type("LlamaCache", (), {"__module__": module.__name__}), raising=False)
    with pytest.raises(CacheError, match="LlamaCache"):
        hf.CompressedCache(llama)


def test_a_pass_that_broke_off_is_noticed(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, cache = hf.cache_kwarg(llama), cache_of(llama)
    llama(IDS, **{name: cache})
    with monkeypatch.context() as patched:
        patched.setattr(llama.model.layers[1], "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llama(IDS[:, :1], **{name: cache})
    with pytest.raises(CacheError, match="ended before the last layer"):
        llama(IDS[:, :1], **{name: cache})


def test_the_hook_goes_with_the_cache(llama: Any) -> None:
    gc.collect()
    before = len(llama._forward_pre_hooks)
    cache = cache_of(llama)
    assert len(llama._forward_pre_hooks) == before + 1
    del cache
    gc.collect()
    assert len(llama._forward_pre_hooks) == before


def test_damaged_sessions_and_those_of_other_models_are_refused(llama: Any, profile: Any, tmp_path: Path) -> None:
    cache, path = cache_of(llama), tmp_path / "session.safetensors"
    generate(llama, IDS, 5, cache)
    cache.save_session(path)
    load = hf.CompressedCache.load_session
    with pytest.raises(StreamError, match="no such file"):
        load(tmp_path / "none", llama)
    with pytest.raises(CacheError, match="another model"):
        load(path, make("sliding windows too"))
    with pytest.raises(ProfileError, match="was made with profile"):
        load(path, llama, profile=profile)
    data = bytearray(path.read_bytes())
    for place in range(0, len(data), 1009):
        data[place] ^= 4
        path.write_bytes(data)
        with pytest.raises(StreamError):
            load(path, llama)
        data[place] ^= 4
    path.write_bytes(data[:-9])
    with pytest.raises(StreamError):
        load(path, llama)


WRONG: dict[str, dict[str, Any]] = {
    "another tier": {"tier": "far"},
    "a loss below zero": {"kl": -1.0},
    "a window of no tokens": {"window": 0},
    "a window that is text": {"window": "16"},
    "a piece of three numbers": {"pieces": [[0, 32, 64]]},
    "a piece without an end": {"pieces": [[0]]},
    "more pieces than streams": {"pieces": 1},
    "a layer without a state": {"layers": [["CompressedLayer"]] * 3},
    "a state of three parts": {"layers": [["CompressedLayer", {}, {}]] * 3},
    "pairs that are none": {"layers": [["CompressedLayer", {"x": {"numbered": [[1, 2, 3]]}}]] * 3},
    "a tensor that is not there": {"layers": [["CompressedLayer", {"keys": {"tensor": "none"}}]] * 3},
    "a tensor in two layers": {"layers": [["CompressedLayer", {"keys": {"tensor": "layer.0.keys"}}]] * 3},
    "no dtype": {"layers": [["CompressedLayer", {"dtype": {"torch": "nn", "device": False}}]] * 3},
    "another format": {"format": session_file.FORMAT + 1},
}


@pytest.mark.parametrize("name", WRONG)
def test_sessions_with_right_digests_but_wrong_parts_are_refused(llama: Any, name: str, tmp_path: Path) -> None:
    cache, path = cache_of(llama), tmp_path / "session.safetensors"
    llama(IDS, **{hf.cache_kwarg(llama): cache})
    cache.save_session(path)
    with safe_open(path, framework="pt") as file:
        form = json.loads(file.metadata()["seqkv session"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    del form["digest"]

    def write(form: dict[str, Any]) -> None:
        text = json.dumps(form | {"digest": session_file._digest(form, tensors)})
        path.write_bytes(to_bytes(tensors, metadata={"seqkv session": text}))

    write(form)
    hf.CompressedCache.load_session(path, llama)
    write(form | WRONG[name])
    with pytest.raises(StreamError):
        hf.CompressedCache.load_session(path, llama)


@pytest.mark.parametrize("text", ["null", "3", '"text"', "[]", "{}", "[" * 100_000, "{"])
def test_what_is_no_session_is_refused(llama: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "session.safetensors"
    path.write_bytes(to_bytes({"ids": torch.zeros(1, 3)}, metadata={"seqkv session": text}))
    with pytest.raises(StreamError, match="not a session"):
        hf.CompressedCache.load_session(path, llama)


@pytest.fixture(scope="module")
def layers_profile(model: Any) -> Any:
    """Of caches that have the shape of the small Llama's; what it predicts is of no use, and does no harm."""
    like = type(model)(layers=3, heads=2, key=8, value=8)
    texts = {f"kind {k}": [like.text(10 * k + seed, 120) for seed in range(4)] for k in range(4)}
    return engine.calibrate(like, texts, predictor="layers")


@pytest.mark.parametrize("keep", ["streams", "decoded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_profile_decodes_layer_by_layer(layers_profile: Any, dtype: Any, keep: Any) -> None:
    model = make("full attention", dtype)
    name = hf.cache_kwarg(model)
    ids = torch.cat([IDS, IDS.flip(1)])
    mask = torch.ones_like(ids)
    mask[1, :70] = 0
    plain, cache = DynamicCache(), cache_of(model, tier="near", profile=layers_profile, kl=1e-7, keep=keep)
    for one in (plain, cache):
        model(ids, attention_mask=mask, **{name: one})
    assert cache.past.stop == 128
    decoded = engine.decode(cache.past.pieces[0].streams[1], profile=layers_profile)
    assert decoded.positions.tolist() == list(range(58))
    longer = torch.cat([mask, mask[:, -3:]], 1)
    expected, logits = (model(ids[:, :3], attention_mask=longer, **{name: one}).logits for one in (plain, cache))
    assert 0 < (logits - expected).abs().max() < (0.02 if dtype == torch.float32 else 0.1) * expected.float().std()
    if keep == "decoded":
        keys = cache.layers[2].before[0][1, :, 70:128].float()
        torch.testing.assert_close(keys, torch.from_numpy(decoded.keys[2]), atol=1e-2, rtol=1e-2)


def test_layers_are_read_in_order(layers_profile: Any, llama: Any) -> None:
    cache = cache_of(llama, tier="near", profile=layers_profile, keep="streams")
    llama(IDS, **{hf.cache_kwarg(llama): cache})
    states = torch.zeros(1, 2, 1, 8)
    with pytest.raises(CacheError, match="out of order"):
        cache.update(states, states, 1)
