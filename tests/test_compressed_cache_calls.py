from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import DynamicCache  # noqa: E402

from seqkv.adapters import huggingface as hf  # noqa: E402
from seqkv.adapters import session_file  # noqa: E402
from seqkv.engine import CacheError, StreamError  # noqa: E402
from tests.test_compressed_cache import IDS, SIZES, cache_of, make  # noqa: E402

THREE = torch.cat([IDS, IDS.flip(1), IDS.roll(5, 1)])
ROPE = {"rope_type": "default", "rope_theta": 5000.0}


@pytest.mark.parametrize(
    "rows",
    [torch.tensor([True, False, True]), [True, False, True], [0, 2], torch.tensor([0, -1])],
    ids=["mask", "list of booleans", "list", "from the end"],
)
@pytest.mark.parametrize("method", ["batch_select_indices", "reorder_cache"])
def test_a_mask_and_a_list_select_as_indices_do(rows: Any, method: str) -> None:
    model = make("full attention")
    name, cache, plain = hf.cache_kwarg(model), cache_of(model, keep="decoded"), DynamicCache()
    for one, ids in ((cache, THREE), (plain, THREE[[0, 2]])):
        model(ids, **{name: one})
        model(ids[:, :1], **{name: one})
    getattr(cache, method)(rows)
    expected, logits = (model(THREE[[0, 2], :3], **{name: one}).logits for one in (plain, cache))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [[True, False], [0, 3], [[0], [1]], 1, [0.5]], ids=str)
def test_sequences_that_are_not_there_are_refused_before_anything_changes(rows: Any) -> None:
    model = make("full attention")
    name, cache, plain = hf.cache_kwarg(model), cache_of(model), DynamicCache()
    for one in (cache, plain):
        model(THREE, **{name: one})
    for select in (cache.batch_select_indices, cache.reorder_cache):
        with pytest.raises(CacheError, match="not sequences of this cache"):
            select(rows)
    expected, logits = (model(THREE[:, :3], **{name: one}).logits for one in (plain, cache))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_a_session_loads_for_its_own_model_alone(tmp_path: Path) -> None:
    model, path = make("full attention"), tmp_path / "session.safetensors"
    cache, load = cache_of(model), hf.CompressedCache.load_session
    model(IDS, **{hf.cache_kwarg(model): cache})
    cache.save_session(path)
    assert load(path, make("full attention")).get_seq_length() == IDS.shape[1]
    tuned = make("full attention")
    tuned.model.layers[1].self_attn.k_proj.weight.data *= 1.1
    turned = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, rope_parameters=ROPE))
    turned.load_state_dict(model.state_dict())
    for other in (tuned, turned, make("full attention", torch.bfloat16)):
        with pytest.raises(CacheError, match="another model"):
            load(path, other)


@pytest.mark.parametrize("kind", ["full attention", "sliding windows too"])
@pytest.mark.parametrize("before", [0, 10, 170])
def test_a_call_that_failed_before_the_first_layer_is_forgotten(kind: str, before: int, tmp_path: Path) -> None:
    model, path = make(kind), tmp_path / "session.safetensors"
    name, cache, plain = hf.cache_kwarg(model), cache_of(model), DynamicCache(config=model.config)
    if before:
        for one in (cache, plain):
            model(IDS[:, :before], **{name: one})
    for _ in range(2):
        with pytest.raises(IndexError):
            model(torch.tensor([[5, 970, 6]]), **{name: cache})
    cache.save_session(path)
    loaded = hf.CompressedCache.load_session(path, model)
    with pytest.raises(IndexError):
        model(torch.tensor([[970]]), **{name: cache})
    expected = model(IDS[:, :9], **{name: plain}).logits
    for one in (cache, loaded):
        torch.testing.assert_close(model(IDS[:, :9], **{name: one}).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_failed_first_call_does_not_settle_the_number_of_sequences() -> None:
    model = make("full attention")
    name, cache = hf.cache_kwarg(model), cache_of(model)
    with pytest.raises(IndexError):
        model(torch.tensor([[970]]), **{name: cache})
    assert torch.equal(model(THREE, **{name: cache}).logits, model(THREE).logits)


@pytest.mark.parametrize(
    ("kind", "layer"), [("full attention", 1), ("sliding windows too", 1), ("linear attention too", 1), ("hybrid", 0)]
)
def test_a_call_that_failed_on_its_way_never_replaces_a_session(
    kind: str, layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = make(kind), tmp_path / "session.safetensors"
    name, cache = hf.cache_kwarg(model), cache_of(model)
    model(IDS, **{name: cache})
    cache.save_session(path)
    good = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(model.model.layers[layer], "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(IDS[:, :1], **{name: cache})
    with pytest.raises(CacheError, match="reset the cache"):
        cache.save_session(path)
    assert path.read_bytes() == good and [one.name for one in tmp_path.iterdir()] == [path.name]
    with pytest.raises(CacheError, match="reset the cache"):
        model(IDS[:, :1], **{name: cache})


@pytest.mark.parametrize(
    ("change", "error"),
    [(lambda ids: ids[:, 1:], CacheError), (lambda ids: None, CacheError), (lambda ids: ids[0], StreamError)],
    ids=["one too few", "none", "of no sequence"],
)
def test_a_session_whose_ids_are_not_those_of_its_layers_is_refused(change: Any, error: Any, tmp_path: Path) -> None:
    model, path = make("full attention"), tmp_path / "session.safetensors"
    cache = cache_of(model)
    model(IDS, **{hf.cache_kwarg(model): cache})
    cache._ids = change(cache._ids)
    session_file.save(cache, path)
    with pytest.raises(error):
        hf.CompressedCache.load_session(path, model)


@pytest.mark.parametrize("window", ["3", None, float("nan"), float("inf"), 1.5, 2.0, True, 0, -1, [1]], ids=repr)
def test_a_window_is_an_integer_of_at_least_1(window: Any) -> None:
    with pytest.raises(ValueError, match="window must be an integer of at least 1"):
        hf.CompressedCache(make("full attention"), window=window)


def test_a_window_may_be_numpys_integer(tmp_path: Path) -> None:
    model, path = make("full attention"), tmp_path / "session.safetensors"
    hf.CompressedCache(model, window=np.int64(3)).save_session(path)  # type: ignore[arg-type]
    assert hf.CompressedCache.load_session(path, model).window == 3
