from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from seqkv.adapters.chunks import OVERHEAD, ChunkCodec  # noqa: E402
from seqkv.engine import CacheError, KVCache, Profile, ProfileError, Rope, StreamError  # noqa: E402

WIDTH = 8


def planes(kv: KVCache, dtype: Any = torch.bfloat16) -> Any:
    """[2, layers, tokens, heads * width], as LMCache keeps it."""
    sides = [torch.stack([torch.tensor(x).transpose(0, 1).flatten(1) for x in side]) for side in (kv.keys, kv.values)]
    return torch.stack(sides).to(dtype)


def fused(kv: KVCache, dtype: Any = torch.bfloat16) -> Any:
    """[layers, tokens, heads * (key width + value width)]."""
    layers = [np.concatenate([k, v], axis=-1) for k, v in zip(kv.keys, kv.values, strict=True)]
    return torch.stack([torch.tensor(x).transpose(0, 1).flatten(1) for x in layers]).to(dtype)


def smooth(layers: int = 3, heads: int = 2, tokens: int = 40, key: int = WIDTH, value: int = WIDTH) -> KVCache:
    """A cache that is easy to code."""
    rng = np.random.default_rng(0)
    sides = [np.cumsum(rng.standard_normal((layers, heads, tokens, w)), axis=2) for w in (key, value)]
    return KVCache(*(side.astype(np.float32) for side in sides))


def there_and_back(codec: ChunkCodec, chunk: Any) -> tuple[bytes, Any]:
    data, back = codec.encode(chunk), torch.full_like(chunk, 7)
    codec.decode(data + b"what follows it in the buffer", back)
    return data, back


def error(a: Any, b: Any) -> float:
    return float((a.float() - b.float()).square().mean() / a.float().square().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", [planes, fused])
def test_near_loses_little_and_saves_much(layout: Callable[..., Any], dtype: Any) -> None:
    chunk = layout(smooth(tokens=300), dtype)
    data, back = there_and_back(ChunkCodec(head=(WIDTH, WIDTH), kl=1e-3), chunk)
    assert len(data) < 0.5 * chunk.nbytes
    assert 0 < error(chunk, back) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head", [(WIDTH, WIDTH), None])
@pytest.mark.parametrize("layout", [planes, fused])
def test_lossless_keeps_every_bit(layout: Callable[..., Any], head: Any, dtype: Any) -> None:
    chunk = layout(smooth(), dtype)
    chunk[..., 3, 1], chunk[..., 4, 2] = float("nan"), float("-inf")
    data, back = there_and_back(ChunkCodec(head=head, tier="lossless"), chunk)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(chunk.view(bits), back.view(bits))
    assert len(data) < chunk.nbytes


def test_tokens_and_place_are_recognised(model: Any, profile: Profile, sample: Callable[..., Any]) -> None:
    """What a profile saves on parts of a cache is not lost when ids and positions are."""
    rope = model.rope[0]
    kv = sample(64, positions=np.arange(64) + 640).kv
    chunk = fused(kv, torch.float32)
    data, back = there_and_back(ChunkCodec(profile, rope=rope, step=2.0**-9), chunk)
    assert 0 < error(chunk, back) < 0.01
    assert len(data) < 0.9 * len(ChunkCodec(profile, step=2.0**-9).encode(chunk))  # keys turned by nobody knows what


def test_latent_attention_is_one_head(profile: Profile) -> None:
    """K and V of different widths, one plane."""
    chunk = fused(smooth(heads=1, tokens=300, key=32, value=8))
    codec = ChunkCodec(head=(32, 8))
    data, back = there_and_back(codec, chunk)
    assert len(data) < 0.5 * chunk.nbytes and error(chunk, back) < 0.05
    one, other = codec.encode(chunk[None]), torch.empty_like(chunk)  # with the plane's own axis, too
    codec.decode(one, other)
    assert torch.equal(other, back)


def test_any_strides_and_the_graph_is_left_alone() -> None:
    chunk = planes(smooth(), torch.float32)
    wide = torch.zeros(*chunk.shape[:3], 2 * chunk.shape[3])
    wide[..., ::2] = chunk
    strided = wide[..., ::2].requires_grad_(True)
    codec = ChunkCodec(head=(WIDTH, WIDTH))
    assert codec.encode(strided) == codec.encode(chunk)
    into = torch.zeros_like(wide)[..., ::2]
    codec.decode(codec.encode(chunk), into)
    back = torch.empty_like(chunk)
    codec.decode(codec.encode(chunk), back)
    assert torch.equal(into, back) and not back.requires_grad


@pytest.mark.parametrize("trouble", ["noise", "not finite"])
def test_what_does_not_become_smaller_is_kept(trouble: str, caplog: Any) -> None:
    chunk = torch.randint(-(2**15), 2**15, (2, 1, 3, 4), dtype=torch.int16).view(torch.bfloat16)
    if trouble == "not finite":
        chunk = planes(smooth())
        chunk[0, 1, 2, 3] = float("inf")
    with caplog.at_level(logging.WARNING):
        data, back = there_and_back(ChunkCodec(), chunk)
    assert len(data) == chunk.nbytes + OVERHEAD
    assert torch.equal(chunk.view(torch.int16), back.view(torch.int16))
    if trouble == "not finite":
        assert "keys of layer 1, token 2" in caplog.text


def test_damage_is_refused() -> None:
    chunk = planes(smooth())
    codec = ChunkCodec(head=(WIDTH, WIDTH))
    data, into = codec.encode(chunk), torch.empty_like(chunk)
    for at in (0, 4, 9, 20, OVERHEAD, len(data) - 1):
        with pytest.raises(StreamError):
            codec.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], into)
    for length in (0, OVERHEAD - 1, OVERHEAD, len(data) - 1):
        with pytest.raises(StreamError):
            codec.decode(data[:length], into)


@pytest.mark.parametrize("other", [{"tokens": 39}, {"layers": 2}, {"heads": 4}])
@pytest.mark.parametrize("tier", ["near", "lossless", "as it is"])
def test_another_buffer_is_refused(tier: Any, other: dict[str, int]) -> None:
    codec = ChunkCodec(head=(WIDTH, WIDTH), tier="near" if tier == "as it is" else tier)
    chunk = planes(smooth())
    if tier == "as it is":
        chunk[0, 0, 0, 0] = float("nan")
    data = codec.encode(chunk)
    with pytest.raises(StreamError, match="buffer"):
        codec.decode(data, planes(smooth(**other)))
    with pytest.raises(StreamError, match="buffer"):
        codec.decode(data, torch.empty_like(chunk, dtype=torch.float32))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 2, 6, 16), torch.float16),
        ((2, 2, 6, 8), torch.float32),
        ((2, 6, 2, 16), torch.bfloat16),
        ((1, 2, 6, 32), torch.bfloat16),
        ((2, 12, 16), torch.bfloat16),
        ((2, 2, 6, 16), torch.int16),
    ],
)
def test_a_buffer_of_as_many_bytes_is_refused(shape: tuple[int, ...], dtype: Any) -> None:
    noise = torch.randint(-(2**15), 2**15, (2, 2, 6, 16), dtype=torch.int16).view(torch.bfloat16)
    codec = ChunkCodec(head=(WIDTH, WIDTH), tier="lossless")
    data = codec.encode(noise)
    assert len(data) == noise.nbytes + OVERHEAD  # kept as it is
    with pytest.raises(StreamError, match=r"bfloat16 \(2, 2, 6, 16\), the buffer"):
        codec.decode(data, torch.zeros(shape, dtype=dtype))
    with pytest.raises(CacheError, match="do not fit"):
        ChunkCodec(head=(5, 5)).decode(data, torch.zeros_like(noise))


def test_every_bit_before_the_body_is_covered() -> None:
    chunk = planes(smooth())
    chunk[0, 0, 0, 0] = float("nan")
    codec = ChunkCodec(head=(WIDTH, WIDTH))
    data = codec.encode(chunk)
    for bit in range(8 * OVERHEAD):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StreamError, match=r"checksum|this release"):
            codec.decode(altered, torch.empty_like(chunk))


def test_chunks_that_are_not_of_the_model(profile: Profile) -> None:
    with pytest.raises(CacheError, match="float8"):
        ChunkCodec().encode(torch.zeros(2, 1, 4, 8).to(torch.float8_e4m3fn))
    with pytest.raises(CacheError, match="do not fit"):
        ChunkCodec(head=(5, 5)).encode(torch.zeros(2, 1, 4, 8))
    with pytest.raises(CacheError, match="expected"):
        ChunkCodec().encode(torch.zeros(3, 1, 4, 8))
    with pytest.raises(CacheError, match="expected"):
        ChunkCodec().encode(torch.zeros(2, 1, 0, 8))
    with pytest.raises(ValueError, match="more channels"):
        ChunkCodec(head=(4, 4), rope=Rope.from_theta(1e4, 8))
    with pytest.raises(ProfileError, match="3 layers"):  # half the heads, as with tensor parallelism
        ChunkCodec(profile).encode(torch.zeros(1, 3, 4, 14))
    ropes = [Rope.from_theta(1e4, WIDTH), None, Rope.from_theta(1e6, WIDTH)]
    with pytest.raises(CacheError, match="differently"):
        ChunkCodec(head=(WIDTH, WIDTH), rope=ropes).encode(torch.zeros(2, 2, 4, 8))


@pytest.mark.parametrize("head", [(0, 0), (8, 0), (-8, -8), (8,), (8, 8.0)])
def test_heads_that_cannot_be_are_refused(head: Any) -> None:
    with pytest.raises(ValueError, match="head must be"):
        ChunkCodec(head=head)


def test_a_stage_of_a_pipeline_takes_the_rotation_that_all_have() -> None:
    chunk = planes(smooth(layers=2))
    ropes = [Rope.from_theta(1e4, WIDTH)] * 6
    head = WIDTH, WIDTH
    assert ChunkCodec(head=head, rope=ropes).encode(chunk) == ChunkCodec(head=head, rope=ropes[0]).encode(chunk)


def test_configurations(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "profile.safetensors"
    profile.save(path)
    codec = ChunkCodec.from_config({"profile": str(path), "rope": {"theta": 1e4, "dim": 8}, "kl": 0.02})
    assert codec.rope == Rope.from_theta(1e4, 8) and codec.kl == 0.02 and codec.head == (8, 6)
    assert ChunkCodec.from_config({"profile": str(path), "rope": None, "tier": "lossless"}).rope is None
    llama = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama |= {"num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(llama))
    for name in (tmp_path, tmp_path / "config.json"):
        codec = ChunkCodec.from_config({"model": str(name)})
        assert codec.head == (8, 8) and codec.rope == [Rope.from_theta(1e4, 8)] * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tier": "tokens"}, "tier"),
        ({"kl": "0.01"}, "kl"),
        ({"kl": 0}, "kl"),
        ({"step": float("nan")}, "step"),
        ({"step": 1e30}, "step 1e\\+30 is out of range"),
        ({"stpe": 1}, "stpe"),
        ({"profile": "somewhere"}, "turned"),
        ({"rope": {"theta": 1e4, "dim": 8}}, "how wide"),
        ({"rope": {"theta": 1e4}}, "rope"),
        ({"rope": {"theta": 1e4, "dim": 8, "type": "yarn"}}, "type"),
        ({"rope": 1e4}, "rope"),
    ],
    ids=str,
)
def test_configurations_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkCodec.from_config(config)
