from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import DynamicCache  # noqa: E402

from seqkv.adapters import huggingface as hf  # noqa: E402
from seqkv.engine import CacheError  # noqa: E402
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
    name, cache, plain = hf.cache_kwarg(model), cache_of(model, keep_decoded=True), DynamicCache()
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
