from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import seqkv
from seqkv.engine import CacheError, KVCache, Rope


def arrays(layers: int = 2, heads: int = 3, tokens: int = 5, dim: int = 8, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((layers, heads, tokens, dim), dtype=np.float32)


def test_stacked_and_listed_arrays_make_the_same_cache_without_a_copy() -> None:
    k, v = arrays(), arrays(seed=1)
    stacked, listed = KVCache(k, v), KVCache(list(k), list(v))
    assert stacked.layers == 2 and stacked.tokens == 5
    assert stacked.values_count == 2 * k.size and stacked.nbytes == 2 * k.nbytes
    assert np.shares_memory(stacked.keys[1], k) and np.shares_memory(listed.values[0], v)
    assert stacked.digest() == listed.digest()
    assert stacked.positions.dtype == np.int64 and stacked.positions.tolist() == [0, 1, 2, 3, 4]
    assert stacked.rope == [None, None]


def test_layers_may_differ_in_heads_and_widths() -> None:
    kv = KVCache([arrays(1, 2, 5, 8)[0], arrays(1, 3, 5, 4)[0]], [arrays(1, 2, 5, 6)[0], arrays(1, 3, 5, 4)[0]])
    assert kv.values_count == 2 * 5 * 14 + 3 * 5 * 8


def test_one_token_is_a_cache() -> None:
    assert KVCache(arrays(tokens=1), arrays(tokens=1)).tokens == 1


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_torch_tensors_of_every_dtype(name: str) -> None:
    torch = pytest.importorskip("torch")
    k = torch.randn(2, 3, 5, 8).to(getattr(torch, name)).requires_grad_(True)
    v = torch.randn(2, 3, 5, 8).to(getattr(torch, name))
    kv = KVCache(k, list(v))
    assert kv.dtype == name
    assert kv.nbytes == k.nbytes + v.nbytes
    assert kv.keys[0].dtype == (np.float16 if name == "float16" else np.float32)
    assert np.array_equal(np.stack(kv.keys).astype(np.float32), k.detach().float().numpy())


def test_rounding_to_a_dtype_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2**32, 40_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) < 1e38)][: 4 * 1000].reshape(1, 1, 1000, 4)
    assert np.array_equal(KVCache(x, x, dtype="bfloat16").keys[0], torch.tensor(x[0]).bfloat16().float().numpy())
    small = x % 1.0
    assert np.array_equal(KVCache(small, small, dtype="float16").keys[0], torch.tensor(small[0]).half().numpy())


def test_other_libraries_come_through_dlpack_alone() -> None:
    class Tensor:
        """As little as an array of an unknown library offers."""

        def __init__(self, array: Any) -> None:
            self.array, self.shape = array, array.shape

        def __dlpack__(self, **kw: Any) -> Any:
            return self.array.__dlpack__(**kw)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    k = arrays()
    assert KVCache(Tensor(k), Tensor(k)).digest() == KVCache(k, k).digest()


def test_digest_sees_every_part() -> None:
    k, v = arrays(), arrays(seed=1)
    one = KVCache(k, v)
    changed = k.copy()
    changed[1, 2, 4, 7] = np.nextafter(changed[1, 2, 4, 7], np.float32(9))
    digests = {
        one.digest(),
        KVCache(v, k).digest(),
        KVCache(changed, v).digest(),
        KVCache(k, v, positions=np.arange(5) + 1).digest(),
        KVCache(k, v, dtype="bfloat16").digest(),
        KVCache(k.reshape(2, 3, 5, 8)[:, :, :, :4], v).digest(),
        KVCache(k.reshape(2, 6, 5, 4), v.reshape(2, 6, 5, 4)).digest(),
    }
    assert len(digests) == 7
    assert KVCache(np.asfortranarray(k), v.astype(">f4")).digest() == one.digest()


def bad(change: Any) -> Any:
    x = arrays()
    change(x)
    return x


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (arrays(), arrays(tokens=4), "values of layer 0 hold 4 tokens"),
        (arrays(layers=3), arrays(), "keys have 3 layers, values 2"),
        (arrays(), arrays(heads=1), "keys have 3 heads, values 1"),
        ([arrays()[0], arrays(tokens=6)[0]], arrays(), "keys of layer 1 hold 6 tokens"),
        (arrays()[0], arrays(), "expected .layers, kv_heads"),
        ([arrays()], arrays(), "keys of layer 0: expected"),
        (arrays(tokens=0), arrays(tokens=0), "empty"),
        (arrays(layers=0), arrays(layers=0), "empty"),
        ([], [], "empty"),
        (arrays(dim=0), arrays(), "empty"),
        (arrays().astype(np.float64), arrays(), "float32, float64"),
        (arrays().astype(np.float16), arrays(), "float16, float32"),
        (arrays().astype(np.int32), arrays().astype(np.int32), "int32"),
        (arrays(), bad(lambda x: x.__setitem__((1, 2, 3, 4), np.nan)), "values of layer 1, token 3: nan in head 2"),
        (bad(lambda x: x.__setitem__((0, 0, 4, 0), -np.inf)), arrays(), "keys of layer 0, token 4: -inf"),
    ],
)
def test_bad_caches_are_refused_by_name(keys: Any, values: Any, message: str) -> None:
    with pytest.raises(CacheError, match=message):
        KVCache(keys, values)


def test_a_value_too_large_for_the_dtype_is_refused() -> None:
    big = arrays()
    big[1, 0, 2, 0] = 1e6
    with pytest.raises(CacheError, match="keys of layer 1, token 2: inf"):
        KVCache(big, arrays(), dtype="float16")
    big[1, 0, 2, 0] = np.finfo(np.float32).max
    with pytest.raises(CacheError, match="keys of layer 1, token 2: inf"):
        KVCache(big, arrays(), dtype="bfloat16")
    with pytest.raises(CacheError, match="int8"):
        KVCache(arrays(), arrays(), dtype="int8")


@pytest.mark.parametrize(
    "positions", [[0, 1, 2], [0, 1, 2, 2, 3], [-1, 0, 1, 2, 3], [0.0, 1, 2, 3, 4], [4, 3, 2, 1, 0]]
)
def test_bad_positions(positions: Any) -> None:
    with pytest.raises(CacheError, match="positions"):
        KVCache(arrays(), arrays(), positions=positions)


def test_rope_of_each_layer() -> None:
    ropes = [Rope.from_theta(1e4, 8), None]
    assert KVCache(arrays(), arrays(), rope=ropes).rope == ropes
    assert KVCache(arrays(), arrays(), rope=ropes[0]).rope == [ropes[0], ropes[0]]
    with pytest.raises(CacheError, match="1 layers, the cache has 2"):
        KVCache(arrays(), arrays(), rope=ropes[:1])
    with pytest.raises(CacheError, match="turns 10 channels"):
        KVCache(arrays(), arrays(), rope=Rope.from_theta(1e4, 10))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary", [4, 8])
def test_rope_is_a_rotation_of_pairs(layout: Any, rotary: int) -> None:
    freq = np.array([1.0, 0.1, 0.01, 0.001])[: rotary // 2]
    positions = np.array([0, 3, 10_007])
    keys = arrays(2, 3, 3, 8)
    rope = Rope(freq, scaling=1.5, layout=layout)
    turned = rope.apply(keys, positions)
    for i, f in enumerate(freq):
        pair = [i, i + rotary // 2] if layout == "half" else [2 * i, 2 * i + 1]
        expected = (keys[..., pair[0]] + 1j * keys[..., pair[1]]) * np.exp(1j * positions * f) * 1.5
        np.testing.assert_allclose(turned[..., pair[0]] + 1j * turned[..., pair[1]], expected, rtol=1e-4, atol=1e-5)
    assert np.array_equal(turned[..., rotary:], keys[..., rotary:])
    np.testing.assert_allclose(rope.undo(turned, positions), keys, rtol=1e-5, atol=1e-6)
    assert rope.apply(keys.astype(np.float16), positions).dtype == np.float32


def test_rope_is_llamas() -> None:
    pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    import torch

    config = llama.LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=16)
    keys, positions = torch.randn(1, 2, 50, 16), torch.arange(50)[None]
    cos, sin = llama.LlamaRotaryEmbedding(config)(keys, positions)
    turned = llama.apply_rotary_pos_emb(keys, keys, cos, sin)[1]
    theta = config.rope_parameters["rope_theta"]
    mine = Rope.from_theta(theta, 16).apply(keys.numpy(), positions[0].numpy())
    np.testing.assert_allclose(mine, turned.numpy(), atol=2e-5)


def test_rope_through_json() -> None:
    for rope in (Rope.from_theta(5e5, 64), Rope(np.array([0.5, 0.25]), 1.2, "interleaved")):
        assert Rope.from_dict(json.loads(json.dumps(rope.to_dict()))) == rope
    assert Rope.from_theta(1e4, 8) != Rope.from_theta(1e4, 6)
    assert len({Rope.from_theta(1e4, 8), Rope.from_theta(1e4, 8)}) == 1


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"inv_freq": "!", "dtype": "float32", "scaling": 1, "layout": "half"},
        {"inv_freq": "AAAAAA==", "dtype": "float64", "scaling": 1, "layout": "half"},
        {"inv_freq": "AAAAAA==", "dtype": "float32", "scaling": 1, "layout": "spiral"},
        {"inv_freq": "AAAAAA==", "dtype": "float32", "scaling": 0, "layout": "half"},
        {"inv_freq": "AADAfw==", "dtype": "float32", "scaling": 1, "layout": "half"},
        {"inv_freq": "", "dtype": "float32", "scaling": 1, "layout": "half"},
    ],
)
def test_bad_rope_descriptions(state: Any) -> None:
    with pytest.raises(CacheError):
        Rope.from_dict(state)


def test_importing_seqkv_needs_neither_torch_nor_cupy() -> None:
    code = "import sys, seqkv; sys.exit(any(m in sys.modules for m in ('torch', 'cupy', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(seqkv.__file__).parents[1]).returncode == 0
