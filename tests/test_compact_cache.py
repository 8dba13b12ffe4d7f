"""A CompressedCache that holds the compact form: what a model makes of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from seqkv import engine  # noqa: E402
from seqkv.adapters import compact_tensors  # noqa: E402
from seqkv.adapters import huggingface as hf  # noqa: E402
from seqkv.adapters.compact_past import CompactPast  # noqa: E402
from seqkv.adapters.compact_tensors import CompactTensor  # noqa: E402
from seqkv.engine import StreamError  # noqa: E402
from tests.test_compressed_cache import IDS, cache_of, generate, make  # noqa: E402

KINDS = ["full attention", "no rotation", "latent attention", "hybrid"]


@pytest.fixture(scope="module")
def profile_of(model: Any) -> Callable[[Any], Any]:
    """model -> a profile of its shape; what it predicts is of no use, and does no harm."""

    @functools.cache
    def made(shape: tuple[int, int, int]) -> Any:
        heads, key, value = shape
        like = type("Like", (type(model),), {"vocab": 97})(layers=3, heads=heads, key=key, value=value)
        texts = {f"kind {k}": [like.text(10 * k + seed, 120) for seed in range(4)] for k in range(4)}
        with pytest.warns(UserWarning, match="will not do for a good profile"):
            return engine.calibrate(like, texts, predictor="all")

    def shaped(model: Any) -> Any:
        cache_of(model)  # which skips where this release keeps a cache of the model's own
        plain = DynamicCache(config=model.config)
        step(model, IDS[:, :2], plain)
        layer = next(layer for layer in plain.layers if getattr(layer, "keys", None) is not None)
        return made((layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))

    return shaped


@pytest.fixture(scope="module")
def llama() -> Any:
    return make("full attention")


def compact(model: Any, profile: Any, kl: float = 1e-7, chunk: int = 8, **kwargs: Any) -> hf.CompressedCache:
    cache = cache_of(model, tier="near", profile=profile, kl=kl, chunk=chunk, **kwargs)
    assert isinstance(cache.past, CompactPast)
    return cache


def step(model: Any, ids: Any, cache: Any, **kwargs: Any) -> Any:
    return model(ids, use_cache=True, **{hf.cache_kwarg(model): cache}, **kwargs).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_takes_what_is_held_as_what_it_stands_for(
    kind: str, dtype: Any, profile_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, attended = make(kind, dtype), compact_tensors._attended
    found: list[Any] = []
    monkeypatch.setattr(compact_tensors, "_attended", lambda *a, **k: found.append(attended(*a, **k)) or found[-1])
    caches = [compact(model, profile_of(model), kl=0.01) for _ in range(2)]
    for cache in caches:
        step(model, IDS, cache)
    assert caches[0].past.stop == 152
    made_of, making = CompactTensor.made, []
    monkeypatch.setattr(CompactTensor, "made", lambda self: making.append(self) or made_of(self))
    held = step(model, IDS[:, :1], caches[0])
    assert kind == "latent attention" or not making
    # of latents, in some releases, something else is made before attention
    assert len(found) == 3 or kind == "latent attention"
    assert all(one is not None for one in found)
    monkeypatch.setattr(compact_tensors, "_attended", lambda *a, **k: None)
    made = step(model, IDS[:, :1], caches[1])
    spread = made.float().std()
    assert (held - made).abs().max() < (1e-4 if dtype == torch.float32 else 0.1) * spread
    assert held.dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_finely_goes_on_as_if_it_were_not_coded(kind: str, profile_of: Any, tmp_path: Path) -> None:
    model = make(kind)
    cache, plain = compact(model, profile_of(model)), DynamicCache(config=model.config)
    sequence, expected = generate(model, IDS, 12, plain)
    _, logits = generate(model, IDS, 12, cache)
    assert cache.past.stop == 160
    assert 0 < (logits - expected).abs().max() < 0.02 * expected.std()
    cache.save_session(tmp_path / "session")
    for keep in ("compact", "streams", "decoded"):
        loaded = hf.CompressedCache.load_session(tmp_path / "session", model, profile=profile_of(model), keep=keep)
        assert isinstance(loaded.past, CompactPast) == (keep == "compact")
        assert loaded.get_seq_length() == cache.get_seq_length() == 181
        assert (
            step(model, sequence[:, -1:], loaded) - step(model, sequence[:, -1:], copy.deepcopy(cache))
        ).abs().max() < (0.05 * expected.std())


def test_other_attention_gets_tensors(profile_of: Any) -> None:
    model = make("full attention")
    cache = compact(model, profile_of(model), kl=0.01)
    step(model, IDS, cache)
    expected = step(model, IDS[:, :1], copy.deepcopy(cache))
    given: list[Any] = []
    update = cache.layers[0].update
    cache.layers[0].update = lambda *a, **k: given.append(update(*a, **k)) or given[-1]
    model.set_attn_implementation("eager")
    torch.testing.assert_close(step(model, IDS[:, :1], cache), expected, atol=1e-4, rtol=1e-4)
    assert all(type(x) is torch.Tensor for x in given[0])  # what else there is may want their memory


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padded_batches_are_right(implementation: str, profile_of: Any) -> None:
    model = make("full attention")
    model.set_attn_implementation(implementation)
    ids = torch.cat([IDS, IDS.flip(1), IDS.roll(9)])
    mask = torch.ones_like(ids)
    mask[1, :70], mask[2, :160] = 0, 0  # of the last one, nothing is coded
    cache, plain = compact(model, profile_of(model)), DynamicCache()
    for one in (cache, plain):
        step(model, ids, one, attention_mask=mask)
    assert cache.past.stop == 152 and cache.past.readers()[2] is None
    for new in (1, 3):
        mask = torch.cat([mask, mask[:, -new:]], 1)
        found, expected = (step(model, ids[:, :new], one, attention_mask=mask) for one in (cache, plain))
        assert 0 < (found - expected).abs().max() < 0.02 * expected.std()


def test_beams_and_assistants(llama: Any, profile_of: Any) -> None:
    ids = torch.cat([IDS, IDS.flip(1)])
    for kwargs in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        some = ids[:1] if "prompt_lookup_num_tokens" in kwargs else ids
        cache = compact(llama, profile_of(llama))
        expected, found = (generate(llama, some, 10, one, **kwargs)[0] for one in (None, cache))
        assert torch.equal(found, expected)


def test_sequences_are_selected_repeated_copied_and_forgotten(llama: Any, profile_of: Any) -> None:
    ids, profile = torch.cat([IDS, IDS.flip(1)]), profile_of(llama)
    cache = compact(llama, profile)
    step(llama, ids, cache)
    alone = cache.nbytes
    other = copy.deepcopy(cache)
    other.batch_repeat_interleave(2)
    other.reorder_cache(torch.tensor([3, 0, 2, 1]))
    other.batch_select_indices(torch.tensor([0, 1, 2]))
    first, second, third = step(llama, ids[:1, :1].expand(3, 1), other)
    expected = step(llama, ids[:1, :1].expand(2, 1), cache)
    torch.testing.assert_close(torch.stack([first, second, third]), expected[[1, 0, 1]], atol=1e-5, rtol=1e-5)
    cache.reset()
    assert cache.nbytes == 0 < alone
    step(llama, IDS, cache)
    assert cache.past.stop == 152


def test_what_is_held_is_counted(llama: Any, profile_of: Any) -> None:
    cache, plain = compact(llama, profile_of(llama), kl=0.01), DynamicCache()
    for one in (cache, plain):
        step(llama, IDS, one)
    recent = 170 - 152
    held = [array for block in cache.past._held[0].blocks for array in block]
    codes = sum(array.nbytes for array in held) + 2 * 4 * 152
    assert cache.nbytes == codes + 3 * 2 * recent * 16 * 4 + recent * 8 + 170
    assert codes < 0.3 * 152 * 3 * 2 * 16 * 4
    step(llama, IDS[:, :1], cache)
    assert 0 < cache.most_decoded_nbytes < 3 * plain.layers[0].keys.nbytes
    assert cache.past.reading_nbytes == 0


def test_they_are_tensors_but_stay_as_they_are(llama: Any, profile_of: Any) -> None:
    cache = compact(llama, profile_of(llama))
    step(llama, IDS, cache)
    states = torch.ones(1, 2, 1, 8)
    keys, values = cache.layers[0].update(states, 2 * states)
    assert isinstance(keys, CompactTensor) and keys.shape == values.shape == (1, 2, 171, 8)
    assert (keys.dtype, keys.device) == (states.dtype, states.device)
    assert torch.equal(values[:, :, -1:], 2 * states) and type(values + 0) is torch.Tensor
    plain = keys.clone(), values.clone()
    query = torch.randn(1, 4, 1, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 1, 1, 171).masked_fill_(torch.arange(171) % 3 == 0, float("-inf"))
    for more in ({}, {"attn_mask": mask}, {"attn_mask": mask == 0}, {"scale": 0.7}, {"is_causal": True}):
        found = scaled_dot_product_attention(query, keys, values, enable_gqa=True, **more)
        expected = scaled_dot_product_attention(query, *plain, enable_gqa=True, **more)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for wrong in ((keys, keys), (values, keys), (keys, plain[1])):  # but not each for each
        torch.testing.assert_close(
            scaled_dot_product_attention(query, *wrong, enable_gqa=True),
            scaled_dot_product_attention(query, *(x + 0 for x in wrong), enable_gqa=True),
            atol=1e-5,
            rtol=1e-5,
        )
    assert torch.equal(torch.empty(keys.shape).copy_(keys), plain[0]) and (keys.numpy() == plain[0].numpy()).all()
    values[:, :, 0] = 7  # what was made is what counts from then on
    plain[1][:, :, 0] = 7
    found = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    torch.testing.assert_close(
        found, scaled_dot_product_attention(query, *plain, enable_gqa=True), atol=1e-5, rtol=1e-5
    )


def test_a_sequence_that_begins_late(profile_of: Any) -> None:
    model = make("full attention")
    ids, profile = torch.cat([IDS, IDS.flip(1)]), profile_of(model)
    mask = torch.ones_like(ids)
    mask[1] = 0
    cache, plain = compact(model, profile), DynamicCache()
    for one in (cache, plain):
        step(model, ids, one, attention_mask=mask)
    for new in range(30):
        mask = torch.cat([mask, torch.tensor([[1], [new > 0]])], 1)  # a query sees nothing at first
        found, expected = (step(model, ids[:, new : new + 1], one, attention_mask=mask) for one in (cache, plain))
        rows = slice(None) if new else slice(1)
        assert (found - expected)[rows].abs().max() < 0.02 * expected.std()
    assert cache.past.readers()[1] is not None


def test_before_anything_is_coded(llama: Any, profile_of: Any) -> None:
    cache = compact(llama, profile_of(llama))
    step(llama, IDS[:, :9].expand(3, 9), cache)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_select_indices([0])
    assert step(llama, IDS[:, 9:10], cache).shape == (1, 1, 97)
    found, expected = (
        generate(llama, IDS[:, :9], 5, one, num_beams=2)[0] for one in (compact(llama, profile_of(llama)), None)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("keep", ["compact", "streams", "decoded"])
def test_a_session_goes_on_in_its_own_dtype(keep: Any, profile_of: Any, tmp_path: Path) -> None:
    model = make("full attention", torch.bfloat16)
    profile = profile_of(model)
    cache = compact(model, profile, kl=0.01)
    step(model, IDS, cache)
    cache.save_session(tmp_path / "session")
    loaded = hf.CompressedCache.load_session(tmp_path / "session", model, profile=profile, keep=keep)
    for _ in range(2):
        step(model, IDS[:, :40], loaded)
        loaded.rest()
    stop = 232 if keep == "compact" else 216  # as many tokens at a time as are coded so, not as the file's were
    assert loaded.past.stop == stop and step(model, IDS[:, :1], loaded).isfinite().all()
    loaded.save_session(tmp_path / "session")
    assert hf.CompressedCache.load_session(tmp_path / "session", model, profile=profile).past.stop == stop


def test_autocast_and_default_dtypes_change_nothing(llama: Any, profile_of: Any) -> None:
    cache = compact(llama, profile_of(llama), kl=0.01)
    step(llama, IDS, cache)
    expected, other = step(llama, IDS[:, :1], copy.deepcopy(cache)), copy.deepcopy(cache)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert (step(llama, IDS[:, :1], other) - expected).abs().max() < 0.1 * expected.std()
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            found = step(llama, IDS[:, :1], copy.deepcopy(cache)), step(llama, IDS[:, :3], copy.deepcopy(cache))
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(found[0], expected)
        torch.testing.assert_close(found[1], step(llama, IDS[:, :3], copy.deepcopy(cache)))


def test_gradients_go_through(profile_of: Any) -> None:
    model = make("full attention").requires_grad_(True)
    cache = compact(model, profile_of(model))
    with torch.no_grad():
        step(model, IDS, cache)
    step(model, IDS[:, :1], cache).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0


def test_what_a_prompt_attends_to_counts(llama: Any, profile_of: Any) -> None:
    observed, apart = (compact(llama, profile_of(llama), kl=0.01) for _ in range(2))
    step(llama, IDS, observed)
    for start in range(0, 170, 10):  # nothing is observed in short passes
        step(llama, IDS[:, start : start + 10], apart)
    assert observed.past.stop == apart.past.stop == 152
    heads = [[block.heads.tolist() for block in one.past._held[0].blocks] for one in (observed, apart)]
    assert heads[0] != heads[1]


def test_where_there_is_no_compact_form(llama: Any, profile_of: Any, tmp_path: Path) -> None:
    profile = profile_of(llama)
    for kwargs in (
        {"tier": "lossless", "profile": profile},
        {"profile": None},
        {"profile": profile, "keep": "streams"},
    ):
        assert not isinstance(hf.CompressedCache(llama, **kwargs).past, CompactPast)
    with pytest.raises(ValueError, match="keep must be one of compact, streams, decoded"):
        hf.CompressedCache(llama, keep="all")  # type: ignore[arg-type]


def test_a_session_of_other_columns_is_refused(llama: Any, profile_of: Any) -> None:
    profile = profile_of(llama)
    cache = compact(llama, profile)
    step(llama, IDS, cache)
    [piece] = cache.past.pieces
    other = compact(llama, profile)
    other.past.rope, other.past.hidden = cache.past.rope, torch.zeros(1, 170, dtype=torch.bool)
    other.past.hidden[0, 3] = True
    with pytest.raises(StreamError, match="152 tokens, where 151"):
        other.past.take([piece])
