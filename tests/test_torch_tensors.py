from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from seqkv import engine  # noqa: E402
from seqkv.adapters.torch_tensors import on_current_stream, to_tensors  # noqa: E402
from seqkv.cuda_kernels import device as cuda  # noqa: E402
from seqkv.engine import CacheError, DeviceError, KVCache, ProbsError, Rope, TokenProbs  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "pytorch.md"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPE = (2, 3, 40, 8)


def normal(shape: tuple[int, ...] = SHAPE, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back_every_bit(dtype: Any) -> None:
    """NaN of every kind, infinity, -0."""
    keys, values = normal(dtype=dtype), normal(dtype=dtype, seed=1)
    bits(keys).view(-1)[:6] = bits(torch.tensor([float("nan"), -float("nan"), float("inf"), -0.0, 0, 1], dtype=dtype))
    bits(keys).view(-1)[6] = bits(keys).view(-1)[0] + 1  # another NaN
    back = to_tensors(KVCache(keys, values, exact=True))
    for given, side in zip((keys, values), back, strict=True):
        assert torch.equal(bits(given), bits(torch.stack(side)))
        assert all(x.dtype == dtype and not x.requires_grad for x in side)


@pytest.mark.parametrize("dtype", DTYPES)
def test_coded_and_decoded_tensors_have_the_dtype(dtype: Any) -> None:
    keys, values = normal(dtype=dtype), normal(dtype=dtype, seed=1)
    rope, probs = Rope.from_theta(1e4, 8), TokenProbs.from_tokens(torch.arange(40))
    stream = engine.encode(KVCache(keys, values, rope=rope), probs, step=0.05)
    decoded = to_tensors(engine.decode(stream))
    for given, side in zip((keys, values), decoded, strict=True):
        assert [x.dtype for x in side] == [dtype, dtype]
        torch.testing.assert_close(torch.stack(side), given, atol=0.2, rtol=0)
    wide = to_tensors(engine.decode(stream), dtype=torch.float64, device="cpu")
    assert wide[0][0].dtype == torch.float64 and torch.equal(wide[0][0], decoded[0][0].double())


def test_graph_and_tensors_are_left_alone() -> None:
    leaf = normal().requires_grad_(True)
    product = leaf * 2
    kv = KVCache(product, [x for x in product])
    probs = TokenProbs.from_logits(normal((40, 9)).requires_grad_(True), torch.arange(40) % 9)
    keys, values = to_tensors(engine.decode(engine.encode(kv, probs)))
    assert not any(x.requires_grad or x.grad_fn for x in keys + values)
    assert product.requires_grad and leaf.grad is None
    product.sum().backward()
    assert torch.equal(leaf.grad, torch.full(SHAPE, 2.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], -1)[..., :8],
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: x.flip(2).contiguous().flip(2),
        lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        lambda x: torch._neg_view(-x),
    ],
    ids=["tokens first", "half of a row", "every second", "flipped", "backwards", "negative"],
)
def test_strides_do_not_matter(view: Any, dtype: Any) -> None:
    plain = normal(dtype=dtype)
    strided = view(plain)
    assert torch.equal(strided, plain)
    assert KVCache(strided, list(strided)).digest() == KVCache(plain, plain).digest()


def test_expanded_tensors_are_caches() -> None:
    one = normal((1, 3, 40, 8))
    assert KVCache(one.expand(SHAPE), one.expand(SHAPE)).digest() == KVCache(*2 * [one.repeat(2, 1, 1, 1)]).digest()


def test_memory_is_shared_where_it_can_be() -> None:
    keys = normal()
    kv = KVCache(keys, keys)
    assert np.shares_memory(kv.keys[1], keys.numpy())
    assert to_tensors(kv)[0][1].data_ptr() == keys[1].data_ptr()
    frozen = np.ones(SHAPE, np.float32)
    frozen.flags.writeable = False
    tensor = to_tensors(KVCache(frozen, frozen))[0][0]
    tensor += 1
    assert frozen.max() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dlpack_both_ways(dtype: Any) -> None:
    class Exported:
        """Nothing but DLPack."""

        def __init__(self, tensor: Any) -> None:
            self.tensor, self.shape = tensor, tensor.shape

        def __dlpack__(self, **kw: Any) -> Any:
            return self.tensor.__dlpack__(**kw)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    given = normal(dtype=dtype)
    kv = KVCache(Exported(given), [Exported(x) for x in given])
    assert kv.digest() == KVCache(given, given).digest()
    decoded = engine.decode(engine.encode(kv, TokenProbs.from_tokens(Exported(torch.arange(40)))))
    for array in decoded.keys + decoded.values:
        assert torch.equal(torch.from_dlpack(array), torch.from_numpy(array))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_into_tensors(dtype: Any) -> None:
    kv = KVCache(normal(), normal(seed=1))
    stream = engine.encode(kv, TokenProbs.from_tokens(torch.arange(40)))
    wide = torch.zeros(2, 3, 40, 20, dtype=dtype, requires_grad=True)
    into = wide.detach()[..., 3:19:2]
    engine.decode_into(stream, list(into), list(into.flip(0).clone()))
    expected = torch.stack(to_tensors(engine.decode(stream), dtype=dtype)[0])
    assert torch.equal(into, expected)
    assert not wide.detach()[..., 4:19:2].any() and wide.grad_fn is None


REFUSED = {
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "float64": lambda x: x.double(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "complex": lambda x: x.to(torch.complex64).conj(),
    "integers": lambda x: x.int(),
    "booleans": lambda x: x > 0,
    "no tokens": lambda x: x[:, :, :0],
    "no layers": lambda x: x[:0],
    "no heads": lambda x: x[:, :0],
    "a batch": lambda x: x[None],
    "a number": lambda x: torch.tensor(1.0),
    "a capsule": lambda x: torch.utils.dlpack.to_dlpack(x),
    "nothing": lambda x: None,
    "nothing in a list": lambda x: [None, None],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_cache_is_refused(name: str) -> None:
    given = REFUSED[name](normal())
    with pytest.raises(CacheError):
        KVCache(given, given)


@pytest.mark.parametrize(
    "logits",
    [
        lambda: normal((4, 9)).to("meta"),
        lambda: normal((4, 9)).to_sparse(),
        lambda: normal((4, 9)).to(torch.float8_e5m2),
        lambda: normal((4, 0)),
        lambda: normal((0, 9)),
        lambda: normal((2, 4, 9)),
    ],
    ids=["meta", "sparse", "float8", "no vocabulary", "no rows", "a batch"],
)
def test_logits_that_are_refused(logits: Any) -> None:
    with pytest.raises(ProbsError):
        TokenProbs.from_logits(logits(), torch.arange(4))


@pytest.mark.parametrize(
    "ids",
    [lambda: torch.arange(4.0), lambda: torch.arange(0), lambda: torch.arange(4).to("meta"), lambda: torch.ones(2, 2)],
    ids=["floats", "none", "meta", "a batch"],
)
def test_ids_that_are_refused(ids: Any) -> None:
    with pytest.raises(ProbsError):
        TokenProbs.from_tokens(ids())


def test_the_example_of_the_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    keys, decoded, into = names["keys"], torch.stack(names["decoded_keys"]), names["into"]
    assert decoded.shape == keys.shape and decoded.dtype == torch.bfloat16
    error = (decoded.float() - keys.float()).square().mean() / keys.float().square().mean()
    assert 0 < error < 0.05
    assert len(names["stream"]) < keys.nbytes / 2
    torch.testing.assert_close(into[:, :, 0].transpose(1, 2).float(), decoded.float(), atol=0.2, rtol=0.02)


def test_arrays_of_a_device_without_cupy_name_what_is_missing(monkeypatch: Any) -> None:
    """A library that offers nothing but DLPack, on a CUDA device."""

    def missing() -> Any:
        raise DeviceError("install seqkv[cuda13]")

    monkeypatch.setattr(cuda, "cupy", missing)
    array = SimpleNamespace(shape=SHAPE, __dlpack__=None, __dlpack_device__=lambda: (2, 0))
    with pytest.raises(DeviceError, match="install"):
        KVCache(array, array)


def test_the_engine_works_on_torchs_stream(monkeypatch: Any) -> None:
    """On the device of the stream, and on no other afterwards."""
    entered: list[Any] = []

    class Entered:
        def __init__(self, *what: Any) -> None:
            self.what = what

        def __enter__(self) -> None:
            entered.append(self.what)

        def __exit__(self, *error: Any) -> None:
            entered.remove(self.what)

    module = SimpleNamespace(Device=lambda d: Entered("device", d), ExternalStream=lambda p, d: Entered("stream", p, d))
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(cuda=module))
    stream = SimpleNamespace(device_index=1, cuda_stream=1234)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream if device == "cuda:1" else None)
    with on_current_stream("cuda:1"):
        assert entered == [("device", 1), ("stream", 1234, 1)]
    assert entered == []
