"""The engine on a CUDA device, an emulated one: the same streams, the same caches, no copy that should not be."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba.cuda.dispatcher")

from seqkv import engine
from seqkv.cuda_kernels import device
from seqkv.cuda_kernels.errors import DeviceError
from seqkv.engine import CacheError, KVCache, Profile, ProfileError, Rope, StreamError, container, form, near
from seqkv.engine.arrays import from_bfloat16_bits
from seqkv.engine.container import Container
from tests.emulator import device_array
from tests.emulator.device import emulated_device

ROPE = Rope.from_theta(1e4, 8)
PARTIAL = Rope(np.array([1.0, 0.1], np.float32), scaling=1.5, layout="interleaved")
STEP = 0.002
GUISES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "positions": {"positions": np.cumsum(np.arange(300)) + 100_000},
    "not rotated": {"rope": None},
    "a rotation a layer": {"rope": [ROPE, None, PARTIAL]},
}


@pytest.fixture(scope="module", autouse=True)
def cupy() -> Iterator[Any]:
    with emulated_device() as emulated:
        yield emulated


def close(a: KVCache, b: KVCache, tolerance: float) -> None:
    """Equal up to `tolerance` of the spread of each layer, and to the last bit of the dtype."""
    a, b = a.to("cpu"), b.to("cpu")
    assert (a.dtype, a.rope, a.shape, a.tokens) == (b.dtype, b.rope, b.shape, b.tokens)
    np.testing.assert_array_equal(a.positions, b.positions)
    last_bit = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[a.dtype]
    for x, y in zip(a.keys + a.values, b.keys + b.values, strict=True):
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert (np.abs(x - y) <= tolerance * y.std() + last_bit * np.abs(y)).all()


def loss(a: KVCache, b: KVCache) -> float:
    """Root mean square of what differs, beside the spread of each layer."""
    a, b = a.to("cpu"), b.to("cpu")
    pairs = zip(a.keys + a.values, b.keys + b.values, strict=True)
    return float(np.sqrt(np.mean([np.square(x.astype(np.float64) - y).mean() / y.var() for x, y in pairs])))


TF32 = 0.02
"""What rounding features to TF32 may change, in spreads of a layer: 2^-11 of each, over all that is summed, and that a
few times over as layers are predicted from layers."""


@pytest.mark.parametrize("guise", GUISES)
def test_streams_go_both_ways(guise: str, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(300, **GUISES[guise])
    known = {"profile": profile, "step": STEP, "importance": s.importance}
    there = engine.encode(s.kv.to("cuda"), s.probs, **known)
    here = engine.encode(s.kv, s.probs, **known)
    assert abs(len(there) - len(here)) <= 0.01 * len(here)
    losses = []
    for stream in (there, here):
        decoded = engine.decode(stream, profile=profile)
        on_device = engine.decode(stream, profile=profile, backend="cuda")
        assert (decoded.backend, on_device.backend) == ("cpu", "cuda")
        close(on_device, decoded, TF32)
        losses.append(loss(decoded, s.kv))
    assert abs(losses[0] - losses[1]) < 0.02 * losses[1]


def test_exact_products_give_the_symbols_of_the_cpu(
    profile: Profile, sample: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for residuals at the edge between two symbols, which float32 sums of another order may move."""
    from seqkv.engine import device, matrices

    for module in (device, matrices):
        multiply = module.multiply
        monkeypatch.setattr(module, "multiply", lambda *a, exact=True, m=multiply, **k: m(*a, exact=True, **k))
    s = sample(300)
    known = {"profile": profile, "step": STEP, "importance": s.importance}
    streams = [engine.encode(kv, s.probs, **known) for kv in (s.kv, s.kv.to("cuda"))]
    symbols = [symbols_of(stream, profile, s) for stream in streams]
    assert np.mean(symbols[0] != symbols[1]) < 1e-3
    assert np.abs(symbols[0] - symbols[1]).max() <= 1


def symbols_of(stream: bytes, profile: Profile, s: Any) -> Any:
    from seqkv.engine import host, importance, quantiser
    from seqkv.engine.modes import Calibrated

    parsed = Container.parse(stream)
    classes = importance.classes(s.importance)
    out = np.zeros((s.kv.tokens, profile.starts[-1]), np.int64)
    for chunk in range(2):
        start, stop = 256 * chunk, min(256 * chunk + 256, s.kv.tokens)
        side = host.side_of(Calibrated(profile), s.probs, classes, quantiser.step_index(STEP), start, stop)
        part, live = near.decode_symbols(
            near.Scale(profile.scale), profile.starts, side, parsed.section(form.CHUNK, chunk), 3
        )
        out[start:stop, live] = part
    return out


@pytest.mark.parametrize("calibrated", [True, False])
def test_what_was_lost_is_said_alike(calibrated: bool, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(600)
    known = {"profile": profile if calibrated else None, "step": 0.02, "importance": s.importance}
    here, there = (engine.inspect(engine.encode(kv, s.probs, **known))["loss"] for kv in (s.kv, s.kv.to("cuda")))
    assert here["keys"] != pytest.approx(here["values"], rel=0.03)  # so that one is not taken for the other
    assert there == pytest.approx(here, rel=0.02)


def test_steps_may_differ_from_chunk_to_chunk(profile: Profile, sample: Callable[..., Any]) -> None:
    from tests.test_codec import rewritten

    s = sample(300)
    coarse, fine = (
        engine.encode(s.kv, s.probs, profile=profile, step=step, importance=s.importance) for step in (0.1, STEP)
    )
    parsed, other = Container.parse(fine), Container.parse(coarse)
    steps = [other.header["steps"][0], parsed.header["steps"][1]]
    both = rewritten(
        fine, {"steps": steps}, **{name: bytes(other.section(getattr(form, name), 0)) for name in ("CHUNK", "MEANS")}
    )
    close(engine.decode(both, profile=profile, backend="cuda"), engine.decode(both, profile=profile), TF32)


def test_estimated_importance(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(300)
    streams = [engine.encode(kv, s.probs, profile=profile, kl=0.05) for kv in (s.kv, s.kv.to("cuda"))]
    assert abs(len(streams[0]) - len(streams[1])) <= 0.01 * len(streams[0])
    losses = [loss(engine.decode(stream, profile=profile), s.kv) for stream in streams]
    assert abs(losses[0] - losses[1]) < 0.02 * losses[1]


@pytest.mark.parametrize("predictor", ["mean", "expectation", "token", "layers"])
def test_every_predictor(predictor: str, profiles: Callable[[str], Profile], sample: Callable[..., Any]) -> None:
    s, profile = sample(300), profiles(predictor)
    streams = [engine.encode(kv, s.probs, profile=profile, step=STEP) for kv in (s.kv, s.kv.to("cuda"))]
    here, there = (engine.decode(stream, profile=profile) for stream in streams)
    close(engine.decode(streams[1], profile=profile, backend="cuda"), there, TF32)
    assert abs(loss(here, s.kv) - loss(there, s.kv)) < 0.02 * loss(here, s.kv)


def test_without_a_profile(sample: Callable[..., Any]) -> None:
    s = sample(600)
    streams = [engine.encode(kv, s.probs, step=0.1) for kv in (s.kv, s.kv.to("cuda"))]
    assert abs(len(streams[0]) - len(streams[1])) <= 0.01 * len(streams[0])
    for stream in streams:
        close(engine.decode(stream, backend="cuda"), engine.decode(stream), TF32)
        close(engine.decode(stream), s.kv, 1.0)


def test_a_part_alone(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(600)
    stream = engine.encode(s.kv.to("cuda"), s.probs, profile=profile, step=STEP)
    for part in ({"tokens": slice(250, 520)}, {"layers": slice(1, 2)}, {"tokens": slice(-1, None), "layers": slice(2)}):
        close(
            engine.decode(stream, profile=profile, backend="cuda", **part),
            engine.decode(stream, profile=profile, **part),
            TF32,
        )


def test_more_batches_than_one(profile: Profile, sample: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from seqkv.engine import device

    s = sample(600)
    known = {"profile": profile, "step": STEP, "importance": s.importance}
    whole = engine.encode(s.kv.to("cuda"), s.probs, **known)
    monkeypatch.setattr(device, "BATCH", 2)
    parts = engine.encode(s.kv.to("cuda"), s.probs, **known)
    assert abs(len(parts) - len(whole)) <= 0.01 * len(whole)
    close(engine.decode(parts, profile=profile, backend="cuda"), engine.decode(parts, profile=profile), TF32)
    close(engine.decode(whole, profile=profile, backend="cuda"), engine.decode(whole, profile=profile), TF32)


def test_keys_and_values_stay_on_the_device(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(600)
    kv = s.kv.to("cuda")
    engine.encode(kv, s.probs, profile=profile, kl=0.01)  # what is made once for a profile is there
    with device_array.counted() as copied:
        stream = engine.encode(kv, s.probs, profile=profile, kl=0.01)
    channels = int(profile.starts[-1])
    sums = 3 * channels * (8 + 1 + 8) + 3 * 600 * 4  # of chunks: magnitudes, maps; attention received
    assert copied.to_host < len(stream) + sums < kv.nbytes
    with device_array.counted() as copied:
        engine.decode(stream, profile=profile, backend="cuda")
    assert copied.to_host < 4096


def test_matrices_are_made_once_and_go_with_their_profile(profile: Profile, sample: Callable[..., Any]) -> None:
    s, own = sample(40), dataclasses.replace(profile)
    kv = s.kv.to("cuda")
    with device_array.counted() as first:
        engine.encode(kv, s.probs, profile=own, step=STEP, importance=s.importance)
    with device_array.counted() as second:
        engine.encode(kv, s.probs, profile=own, step=STEP, importance=s.importance)
    made = sum(x.nbytes for x in (own.token_map, own.bias, own.sink_bias, *own.forward, *itertools.chain(*own.maps)))
    assert first.to_device - second.to_device == made
    gone = weakref.ref(own)
    del own
    gc.collect()
    assert gone() is None


def test_blocks_that_predict_nothing_more_are_dropped(
    profile: Profile, sample: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from seqkv.engine.matrices import Decoded

    forget, kept = Decoded.forget, []

    def counting(decoded: Decoded, sources: list[range], layer: int) -> None:
        forget(decoded, sources, layer)
        kept.append(len(decoded._parts))

    monkeypatch.setattr(Decoded, "forget", counting)
    s = sample(40)
    stream = engine.encode(s.kv.to("cuda"), s.probs, profile=profile, step=STEP)
    engine.decode(stream, profile=profile, backend="cuda")
    assert kept == 2 * [min(2 * profile.depth, 2), min(2 * profile.depth, 4), 0]


def test_bfloat16_is_kept_as_its_bits(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(40, dtype="bfloat16")
    there = s.kv.to("cuda")
    assert {x.dtype for x in there.keys + there.values} == {np.dtype(np.uint16)} and there.nbytes == s.kv.nbytes
    assert there.digest() == s.kv.digest() == there.to("cpu").digest()
    stream = engine.encode(there, s.probs, profile=profile, step=2.0**-24)
    decoded = engine.decode(stream, profile=profile, backend="cuda")
    np.testing.assert_allclose(from_bfloat16_bits(decoded.keys[0].get()), s.kv.keys[0], rtol=2.0**-6, atol=0.02)


def test_the_backend_can_be_chosen(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(40)
    known = {"profile": profile, "step": STEP, "importance": s.importance}
    assert engine.encode(s.kv, s.probs, backend="cuda", **known) == engine.encode(s.kv.to("cuda"), s.probs, **known)
    assert engine.encode(s.kv.to("cuda"), s.probs, backend="cpu", **known) == engine.encode(s.kv, s.probs, **known)
    with pytest.raises(ValueError, match="backend must be"):
        engine.decode(engine.encode(s.kv, s.probs, **known), profile=profile, backend="tpu")  # type: ignore[arg-type]


def test_pages_on_the_device(cupy: Any, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(300)
    stream = engine.encode(s.kv, s.probs, profile=profile, step=STEP)
    whole = engine.decode(stream, profile=profile, backend="cuda").to("cpu")
    pages = [cupy.zeros((22, 2, 16, 14), np.float32) for _ in range(3)]
    slots = np.random.default_rng(0).permutation(22 * 16)[:300]
    halves = [p[..., :8] for p in pages], [p[..., 8:] for p in pages]
    engine.decode_into(stream, *halves, slots=cupy.asarray(slots), profile=profile)
    for layer, page in enumerate(pages):
        rows = page.get().transpose(1, 0, 2, 3).reshape(2, 22 * 16, 14)
        np.testing.assert_array_equal(rows[:, slots], np.concatenate([whole.keys[layer], whole.values[layer]], axis=2))
        assert not np.delete(rows, slots, axis=1).any()


def test_arrays_of_two_places_are_refused(cupy: Any, sample: Callable[..., Any]) -> None:
    kv = sample(40).kv
    with pytest.raises(CacheError, match="several devices"):
        KVCache([cupy.asarray(kv.keys[0]), *kv.keys[1:]], kv.values)


def test_arrays_of_two_places_are_not_written_to(cupy: Any, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(40)
    stream = engine.encode(s.kv, s.probs, profile=profile, step=STEP)
    keys, values = ([np.zeros(x.shape, np.float32) for x in side] for side in (s.kv.keys, s.kv.values))
    for sides in (([cupy.asarray(x) for x in keys], values), (keys, [*values[:2], cupy.asarray(values[2])])):
        with pytest.raises(CacheError, match="all on the same device"):
            engine.decode_into(stream, *sides, profile=profile)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_not_finite_is_refused_by_name(bad: float, dtype: str, cupy: Any, sample: Callable[..., Any]) -> None:
    kv = sample(40, dtype=dtype).kv.to("cuda")
    bits = {"float32": np.float32, "float16": np.float16, "bfloat16": np.float32}[dtype]
    value = np.array(bad, bits)
    kv.values[1][1, 7, 3] = (value.view(np.uint32) >> 16).astype(np.uint16)[()] if dtype == "bfloat16" else value[()]
    with pytest.raises(CacheError, match=r"values of layer 1, token 7: (nan|-?inf) in head 1, channel 3"):
        KVCache.of_parts(kv.keys, kv.values, dtype, kv.positions, kv.rope)


def test_what_is_too_far_off_is_refused_by_layer(profile: Profile, sample: Callable[..., Any]) -> None:
    kv = sample(40).kv
    kv.keys[1][0, 3] = 1e30
    with pytest.raises(CacheError, match="keys of layer 1"):
        engine.encode(kv.to("cuda"), sample(40).probs, profile=profile, step=STEP)


def test_damage_is_refused(profile: Profile, sample: Callable[..., Any]) -> None:
    from tests.test_codec import rewritten

    s = sample(40)
    stream = engine.encode(s.kv, s.probs, profile=profile, step=STEP, importance=s.importance)
    chunk = bytes(Container.parse(stream).section(form.CHUNK, 0))
    rng = np.random.default_rng(0)
    refused = 0  # some damage leads to a cache, and no checksum is there to tell: then to the same on both
    for _ in range(40):
        damaged = bytearray(chunk)
        damaged[rng.integers(len(chunk) // 2, len(chunk))] ^= 1 << rng.integers(8)
        outcomes = []
        for backend in ("cpu", "cuda"):
            try:
                kv = engine.decode(rewritten(stream, CHUNK=bytes(damaged)), profile=profile, backend=backend)
                outcomes.append(kv)
            except StreamError:
                outcomes.append(None)
        if None in outcomes:
            assert outcomes == [None, None]
            refused += 1
        else:
            close(outcomes[1], outcomes[0], TF32)
    assert 20 < refused < 40
    with pytest.raises(ProfileError):
        engine.decode(stream, backend="cuda")


def test_sections_that_cannot_be_are_refused(profile: Profile, sample: Callable[..., Any]) -> None:
    from tests.test_codec import rewritten

    s = sample(40)
    stream = engine.encode(s.kv, s.probs, profile=profile, step=STEP, importance=s.importance)
    chunk = bytes(Container.parse(stream).section(form.CHUNK, 0))
    unknown = container.pack(np.full(40, len(profile.table), np.uint32))
    for bad in (rewritten(stream, CHUNK=chunk + bytes(2)), rewritten(stream, TOKENS=unknown)):
        for backend in ("cpu", "cuda"):
            with pytest.raises(StreamError, match="altered"):
                engine.decode(bad, profile=profile, backend=backend)  # type: ignore[arg-type]


def test_few_elements_are_spread_over_blocks_that_numba_does_not_warn_of() -> None:
    for count in (1, 31, 4096, 4097, 100_000, 1 << 24, 1 << 30):
        blocks, threads = device.grid(count)
        assert 128 <= blocks <= device.MOST_BLOCKS and threads in (32, 64, 128, 256)
        assert blocks * threads >= count or (blocks, threads) == (device.MOST_BLOCKS, 256)
    assert device.grid(128 * 256) == (128, 256) and device.grid(128 * 128) == (128, 128)


def test_a_device_that_is_too_old_is_refused(
    cupy: Any, profile: Profile, sample: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = sample(12)
    device.raw_module.cache_clear()
    monkeypatch.setattr(cupy.cuda.Device, "compute_capability", "75")
    with pytest.raises(DeviceError, match=r"8\.0 or more, this one has 7\.5"):
        engine.encode(s.kv.to("cuda"), s.probs, profile=profile, step=STEP, importance=s.importance)


@pytest.mark.parametrize("order", [0, 1, 7])
def test_no_kernel_does_what_it_must_not(order: int, profile: Profile, sample: Callable[..., Any]) -> None:
    """All of it in the mode that checks memory, races and barriers, in several orders of lanes."""
    s = sample(45)
    with emulated_device("check", order=order, preempt=3 if order else 0):
        stream = engine.encode(s.kv.to("cuda"), s.probs, profile=profile, kl=0.05)
        decoded = engine.decode(stream, profile=profile, backend="cuda")
    close(decoded, engine.decode(stream, profile=profile), TF32)


@pytest.mark.parametrize("predictor", ["none", "mean", "expectation", "layers"])
def test_nor_with_other_predictors(
    predictor: str, profiles: Callable[[str], Profile], sample: Callable[..., Any]
) -> None:
    """Of them "none", no profile, fits a second chunk to the first."""
    s = sample(260 if predictor == "none" else 20)
    profile = None if predictor == "none" else profiles(predictor)
    with emulated_device("check", order=1, preempt=3):
        stream = engine.encode(s.kv.to("cuda"), s.probs, profile=profile, step=0.1)
        decoded = engine.decode(stream, profile=profile, backend="cuda")
    close(decoded, engine.decode(stream, profile=profile), TF32)


def test_keys_far_from_zero_are_predicted_as_well(profile: Profile, sample: Callable[..., Any]) -> None:
    """A product in TF32 rounds a number to a part of its size; what matters is a part of its spread."""
    s = sample(300, rope=None)
    far = dataclasses.replace(
        profile,
        bias=profile.bias.copy(),
        weights=tuple(w.copy() for w in profile.weights),
    )
    keys, values = [k + np.float32(500) for k in s.kv.keys], s.kv.values
    for block in range(0, 6, 2):  # the same predictions, for keys 500 higher
        here = slice(*profile.starts[block : block + 2])
        far.bias[here] += 500
    for block in range(6):
        rank, rows = profile.table.shape[1], far.weights[block].astype(np.float64)
        at = rank
        for source in profile.sources(block):
            width = profile.widths[source]
            if source % 2 == 0:
                far.bias[profile.starts[block] : profile.starts[block + 1]] -= 500 * rows[at : at + width].sum(0)
            at += width
    kv = KVCache(keys, values, rope=None)
    stream = engine.encode(kv.to("cuda"), s.probs, profile=far, step=STEP, importance=s.importance)
    close(engine.decode(stream, profile=far, backend="cuda"), engine.decode(stream, profile=far), TF32)
