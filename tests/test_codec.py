"""encode and decode from outside: what comes back, parts of it, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from seqkv import engine
from seqkv.engine import (
    CacheError,
    KVCache,
    ProbsError,
    Profile,
    ProfileError,
    Rope,
    SeqkvError,
    StreamError,
    TokenProbs,
    container,
    form,
    host,
    near,
    prediction,
)
from seqkv.engine.container import Container, Section
from seqkv.engine.modes import Calibrated

FINE = 2.0**-24  # a step at which nothing but float32 rounding is left
ROPE = Rope.from_theta(1e4, 8)
PARTIAL = Rope(np.array([1.0, 0.1], np.float32), scaling=1.5, layout="interleaved")


def same_shape(a: KVCache, b: KVCache) -> bool:
    return [x.shape for x in a.keys + a.values] == [x.shape for x in b.keys + b.values]


def error(a: KVCache, b: KVCache) -> float:
    """The largest error of a value, beside the spread of its layer's."""
    assert same_shape(a, b)
    pairs = zip(a.keys + a.values, b.keys + b.values, strict=True)
    return max(float(np.abs(x.astype(np.float32) - y).max() / max(x.astype(np.float32).std(), 1e-3)) for x, y in pairs)


def rms(a: KVCache, b: KVCache) -> float:
    pairs = zip(a.keys + a.values, b.keys + b.values, strict=True)
    return float(np.mean([np.square(x.astype(np.float64) - y).mean() / x.astype(np.float64).var() for x, y in pairs]))


def part_of(kv: KVCache, tokens: slice = slice(None), layers: slice = slice(None)) -> KVCache:
    keys, values = ([x[:, tokens] for x in side[layers]] for side in (kv.keys, kv.values))
    return KVCache(keys, values, positions=kv.positions[tokens], rope=kv.rope[layers], dtype=kv.dtype)


def rewritten(
    stream: bytes, header: dict[str, Any] | None = None, without: tuple[str, ...] = (), **sections: bytes | None
) -> bytes:
    """A stream with other header entries and other sections (by name, e.g. CHUNK), and checksums that are right."""
    parsed = Container.parse(stream)
    entries = {name: value for name, value in parsed.header.items() if name not in without} | (header or {})
    parts = {key: bytes(parsed.section(*key)) for key in parsed.sections}
    for name, data in sections.items():
        key = (getattr(form, name), 0)
        if data is None:
            del parts[key]
        else:
            parts[key] = data
    return container.write(entries, [Section(*key, data) for key, data in parts.items()])


@pytest.fixture(scope="module")
def small(profile: Profile, sample: Callable[..., Any]) -> bytes:
    """A stream of 12 tokens, positions included, without ropes: as few bytes as there can be."""
    s = sample(12, positions=np.arange(12) * 2 + 1, rope=None)
    return engine.encode(s.kv, s.probs, profile=profile, step=0.002, importance=s.importance)


@pytest.fixture(scope="module")
def long(profile: Profile, sample: Callable[..., Any]) -> Any:
    """(sample, stream, whole decoded) of 600 tokens: three chunks, the last one short."""
    s = sample(600, positions=np.arange(600) * 3 + 5)
    stream = engine.encode(s.kv, s.probs, profile=profile, step=0.002, importance=s.importance)
    return s, stream, engine.decode(stream, profile=profile)


GUISES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "offset": {"positions": np.arange(40) + 100_000},
    "gaps": {"positions": np.cumsum(np.arange(40)) + np.arange(40)},
    "not rotated": {"rope": None},
    "partly rotated": {"rope": PARTIAL},
    "a rotation a layer": {"rope": [ROPE, None, PARTIAL]},
}


@pytest.mark.parametrize("guise", GUISES)
def test_a_cache_comes_back(guise: str, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(40, **GUISES[guise])
    kv = engine.decode(engine.encode(s.kv, s.probs, profile=profile, step=FINE), profile=profile)
    assert (kv.dtype, kv.rope) == (s.kv.dtype, s.kv.rope)
    assert [x.dtype for x in kv.keys + kv.values] == [x.dtype for x in s.kv.keys + s.kv.values]
    np.testing.assert_array_equal(kv.positions, s.kv.positions)
    # rounding of the cache's own dtype, where it was at the edge between two of its numbers
    assert error(s.kv, kv) < {"float32": 2e-3, "float16": 5e-3, "bfloat16": 4e-2}[kv.dtype]


def test_finer_steps_come_nearer_and_cost_more(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(100)
    streams = [
        engine.encode(s.kv, s.probs, profile=profile, step=2.0**-e, importance=s.importance) for e in range(4, 24, 3)
    ]
    errors = [rms(s.kv, engine.decode(stream, profile=profile)) for stream in streams]
    assert (np.diff(errors) < 0).all() and errors[-1] < 1e-6 * errors[0]
    assert (np.diff([len(stream) for stream in streams]) > 0).all()


def test_less_loss_asked_for_is_less_loss(profile: Profile, model: Any) -> None:
    measured = []
    for kl in (0.1, 0.01, 0.001):
        sum_of_logs = 0.0
        for seed in range(6):
            ids = model.tokenize(model.text(500 + seed, model.context + model.continuation))
            kv, probs, attention = model.prefill(ids)
            stream = engine.encode(kv, probs, profile=profile, kl=kl, importance=attention)
            decoded = engine.decode(stream, profile=profile)
            sum_of_logs += np.log(model.divergence(ids, decoded, model.logprobs(ids, kv))[0])
        measured.append(np.exp(sum_of_logs / 6))
        assert kl / 5 < measured[-1] < kl * 2  # the curve is a deviation above the mean
        said = engine.inspect(stream)["kl"]
        assert said["requested"] == kl and said["expected"] == pytest.approx(kl, rel=0.1)
    assert measured[0] > measured[1] > measured[2]


@pytest.mark.parametrize("predictor", prediction.PREDICTORS)
def test_every_rung_of_the_ladder_comes_back(
    predictor: str, profiles: Callable[[str], Profile], sample: Callable[..., Any]
) -> None:
    s, profile = sample(300), profiles(predictor)
    stream = engine.encode(s.kv, s.probs, profile=profile, step=FINE, importance=s.importance)
    assert error(s.kv, engine.decode(stream, profile=profile)) < 2e-3
    # and a part, which needs the probabilities of that part only
    part = slice(250, 290)
    decoded = engine.decode(stream, profile=profile, tokens=part)
    assert error(part_of(s.kv, part), decoded) < 2e-3


def test_better_predictors_make_smaller_streams(profiles: Callable[[str], Profile], sample: Callable[..., Any]) -> None:
    s = sample(300)

    def size(predictor: str) -> int:
        stream = engine.encode(s.kv, s.probs, profile=profiles(predictor), step=2.0**-14, importance=s.importance)
        return len(stream)

    assert size("all") < 0.93 * size("mean")
    assert size("all") < size("token") < size("mean") and size("all") < size("layers") < size("mean")


def test_the_expectation_needs_probabilities(profiles: Callable[[str], Profile], sample: Callable[..., Any]) -> None:
    s = sample(20)
    with pytest.raises(ProbsError, match="top-k"):
        engine.encode(s.kv, TokenProbs.from_tokens(s.ids), profile=profiles("expectation"))
    engine.encode(s.kv, TokenProbs.from_tokens(s.ids), profile=profiles("all"))


# lengths


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 255, 256, 257, 512])
def test_lengths_around_a_chunk(tokens: int, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(tokens)
    stream = engine.encode(s.kv, s.probs, profile=profile, step=FINE, importance=s.importance)
    kv = engine.decode(stream, profile=profile)
    assert kv.tokens == tokens and error(s.kv, kv) < 2e-3 * (1 if tokens > 4 else 10)  # sinks have a small spread
    last = engine.decode(stream, profile=profile, tokens=slice(-1, None))
    assert last.tokens == 1 and last.positions.tolist() == [tokens - 1]
    assert error(part_of(kv, slice(-1, None)), last) < 1e-5


@pytest.mark.parametrize(
    "tokens",
    [(0, 600), (0, 1), (0, 256), (255, 257), (256, 512), (300, 301), (100, 580), (512, 600), (599, None), (-100, -50)],
)
def test_a_range_of_tokens_is_that_part_of_the_whole(tokens: Any, long: Any, profile: Profile) -> None:
    _, stream, whole = long
    part = engine.decode(stream, profile=profile, tokens=slice(*tokens))
    assert error(part_of(whole, slice(*tokens)), part) < 1e-5
    np.testing.assert_array_equal(part.positions, whole.positions[slice(*tokens)])
    assert part.rope == whole.rope and part.dtype == whole.dtype


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (2, 3), (0, 2), (-1, None), (None, None)])
def test_a_range_of_layers_is_that_part_of_the_whole(layers: Any, long: Any, profile: Profile) -> None:
    _, stream, whole = long
    part = engine.decode(stream, profile=profile, tokens=slice(200, 300), layers=slice(*layers))
    assert error(part_of(whole, slice(200, 300), slice(*layers)), part) < 1e-5


def test_ropes_follow_the_layers(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(30, rope=[ROPE, None, PARTIAL])
    stream = engine.encode(s.kv, s.probs, profile=profile, step=FINE)
    part = engine.decode(stream, profile=profile, layers=slice(1, 3))
    assert part.rope == [None, PARTIAL]
    assert error(part_of(s.kv, layers=slice(1, 3)), part) < 2e-3


def test_chunks_that_are_not_needed_are_not_read(long: Any, profile: Profile) -> None:
    _, stream, whole = long
    parsed = Container.parse(stream)
    damaged, end = bytearray(stream), len(stream)
    for key in reversed(parsed.sections):
        if key == (form.CHUNK, 2):
            damaged[end - 1] ^= 1
        end -= parsed.length(*key)
    part = engine.decode(bytes(damaged), profile=profile, tokens=slice(0, 512))
    assert error(part_of(whole, slice(0, 512)), part) < 1e-5
    with pytest.raises(StreamError, match="checksum"):
        engine.decode(bytes(damaged), profile=profile, tokens=slice(0, 513))


def test_what_a_slice_may_be(small: bytes, profile: Profile) -> None:
    for empty in ({"tokens": slice(5, 5)}, {"tokens": slice(12, 20)}, {"layers": slice(3, None)}):
        with pytest.raises(CacheError, match="nothing is left"):
            engine.decode(small, profile=profile, **empty)
    with pytest.raises(ValueError, match="without a step"):
        engine.decode(small, profile=profile, tokens=slice(0, 10, 2))
    with pytest.raises(ValueError, match="layers: a slice without a step is needed, not 1"):
        engine.decode(small, profile=profile, layers=1)  # type: ignore[arg-type]


# without a profile


@pytest.mark.parametrize("tokens", [1, 2, 5, 256, 257, 600])
def test_without_a_profile(tokens: int, sample: Callable[..., Any]) -> None:
    s = sample(tokens)
    stream = engine.encode(s.kv, s.probs, step=2.0**-14, importance=s.importance)
    whole = engine.decode(stream)
    assert error(s.kv, whole) < 1e-2
    part = engine.decode(stream, tokens=slice(tokens // 2, None), layers=slice(1, 3))
    assert error(part_of(whole, slice(tokens // 2, None), slice(1, 3)), part) < 1e-5


def test_without_a_profile_channels_may_stand_still(sample: Callable[..., Any]) -> None:
    s = sample(300, rope=None)
    keys, values = [k.copy() for k in s.kv.keys], [v.copy() for v in s.kv.values]
    for layer, constant in enumerate((5.0, 0.0, -300.0)):
        keys[layer][1, :, 3] = constant
        values[layer][:] = constant
    kv = KVCache(keys, values)
    decoded = engine.decode(engine.encode(kv, s.probs, step=2.0**-10, importance=s.importance))
    for one, other in zip(kv.keys + kv.values, decoded.keys + decoded.values, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05, rtol=1e-3)


# sameness


def test_the_same_bytes_each_time(profile: Profile, sample: Callable[..., Any]) -> None:
    first, second = sample(300), sample(300)
    streams = [engine.encode(s.kv, s.probs, profile=profile) for s in (first, first, second)]
    assert streams[0] == streams[1] == streams[2]


def test_the_same_bytes_in_any_layout_of_memory(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(60)
    turned = [np.asfortranarray(x) for x in s.kv.keys], [x.repeat(2, 1)[:, ::2] for x in s.kv.values]
    other = KVCache(*turned, rope=s.kv.rope)
    assert engine.encode(s.kv, s.probs, profile=profile) == engine.encode(other, s.probs, profile=profile)


def test_the_same_bytes_with_any_number_of_threads(
    tmp_path: Path, profiles: Callable[[str], Profile], sample: Callable[..., Any]
) -> None:
    s, code = sample(300), "import hashlib, pickle, sys; from seqkv import engine\n"
    code += "for profile, kv, probs in pickle.load(open(sys.argv[1], 'rb')):\n"
    code += "    profile = engine.Profile.load(profile); stream = engine.encode(kv, probs, profile=profile)\n"
    code += "    print(hashlib.sha256(stream + engine.decode(stream, profile=profile).digest().encode()).hexdigest())"
    tasks = []
    for predictor in ("all", "expectation"):
        profiles(predictor).save(tmp_path / predictor)
        tasks.append((tmp_path / predictor, s.kv, s.probs))
    (tmp_path / "tasks").write_bytes(pickle.dumps(tasks))

    def run(threads: int) -> list[str]:
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
        environment = os.environ | dict.fromkeys(names, str(threads))
        command = [sys.executable, "-c", code, str(tmp_path / "tasks")]
        root = Path(__file__).parents[1]  # a plain checkout is found from there
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=root, env=environment
        ).stdout.split()

    assert run(1) == run(2)


def test_decoding_stands_the_rounding_of_another_machine(profile: Profile, long: Any) -> None:
    """Symbols do not depend on floats that both sides compute: with other rounding the cache is another by as much."""
    _, stream, whole = long
    rng = np.random.default_rng(0)
    other = copy.copy(dataclasses.replace(profile))
    assert other.fingerprint == profile.fingerprint  # computed before anything changes

    def noisy(array: Any) -> Any:
        return (array * (1 + 1e-6 * rng.standard_normal(array.shape))).astype(np.float32)

    for name in ("weights", "inverse"):
        object.__setattr__(other, name, tuple(noisy(a.astype(np.float32)) for a in getattr(other, name)))
    for name in ("bias", "sink_bias"):
        object.__setattr__(other, name, noisy(getattr(other, name)))
    decoded = engine.decode(stream, profile=other)
    assert 0 < error(whole, decoded) < 1e-4


# importance


def test_importance_moves_the_error(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(200)
    received = np.ones_like(s.importance)
    received[:, 100:] = 64
    kv = engine.decode(
        engine.encode(s.kv, s.probs, profile=profile, step=2.0**-20, importance=received), profile=profile
    )
    low, high = slice(4, 100), slice(100, 200)
    assert rms(part_of(s.kv, high), part_of(kv, high)) < rms(part_of(s.kv, low), part_of(kv, low)) / 4
    # in any unit, of any dtype, from any library
    streams = [
        engine.encode(s.kv, s.probs, profile=profile, importance=x)
        for x in (s.importance, 8 * s.importance, s.importance.astype(np.float64), s.importance.tolist())
    ]
    assert len(set(streams)) == 1


def test_importance_is_estimated_if_not_given(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(200)
    given = engine.encode(s.kv, s.probs, profile=profile, step=2.0**-12, importance=s.importance)
    estimated = engine.encode(s.kv, s.probs, profile=profile, step=2.0**-12)
    flat = engine.encode(s.kv, s.probs, profile=profile, step=2.0**-12, importance=np.ones_like(s.importance))
    assert len({given, estimated, flat}) == 3
    estimate = np.log(Calibrated(profile).attention(s.kv, host.blocks_of, host.SPAN))
    for layer in range(3):
        assert np.corrcoef(estimate[layer, 4:], np.log(s.importance[layer, 4:]))[0, 1] > 0.7


@pytest.mark.parametrize(
    "received", [np.zeros((3, 30)), np.eye(3, 30), np.full((3, 30), 1e-38), np.full((3, 30), 1e30)]
)
def test_any_importance_is_coded(received: Any, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(30)
    stream = engine.encode(s.kv, s.probs, profile=profile, step=FINE, importance=received)
    assert error(s.kv, engine.decode(stream, profile=profile)) < 2e-3


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (np.ones((3, 29)), r"3 layers, 30 tokens.*\(3, 29\)"),
        (np.ones((2, 30)), "3 layers"),
        (np.ones(30), "3 layers"),
        (np.ones((3, 2, 30)), "3 layers"),
        (-np.eye(3, 30), "not negative"),
        (np.where(np.eye(3, 30) > 0, np.nan, 1), "finite"),
        (np.where(np.eye(3, 30) > 0, np.inf, 1), "finite"),
    ],
)
def test_bad_importance_is_refused(received: Any, message: str, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(30)
    with pytest.raises(CacheError, match=message):
        engine.encode(s.kv, s.probs, profile=profile, importance=received)


# bad input to encode


def test_caches_that_cannot_be(sample: Callable[..., Any]) -> None:
    kv = sample(10).kv
    spoiled = [x.copy() for x in kv.keys]
    spoiled[1][0, 7, 3] = np.nan
    infinite = [x.copy() for x in kv.values]
    infinite[2][1, 3, 0] = -np.inf
    for keys, values, message in [
        (spoiled, kv.values, "keys of layer 1, token 7"),
        (kv.keys, infinite, "values of layer 2, token 3"),
        (kv.keys, kv.values[:2], "3 layers, values 2"),
        (kv.keys, [v[:, :9] for v in kv.values], "9 tokens"),
        (kv.keys, [v[:1] for v in kv.values], "heads"),
        ([k[:, :0] for k in kv.keys], [v[:, :0] for v in kv.values], "empty"),
    ]:
        with pytest.raises(CacheError, match=message):
            KVCache(keys, values)


def test_a_path_is_no_profile(small: bytes, sample: Callable[..., Any]) -> None:
    s = sample(20)
    for call in (
        lambda path: engine.encode(s.kv, s.probs, profile=path),
        lambda path: engine.decode(small, profile=path),
    ):
        with pytest.raises(ProfileError, match="a profile is needed, not a str"):
            call("profile.safetensors")


@pytest.mark.parametrize("tier", ["lossless", "tokens"])
def test_only_the_near_tier_takes_a_reference(tier: Any, small: bytes, sample: Callable[..., Any]) -> None:
    s = sample(20)
    with pytest.raises(ValueError, match='a reference is of tier="near"'):
        engine.encode(s.kv, s.probs, tier=tier, reference=small)


def test_the_parts_must_fit_together(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(20)
    with pytest.raises(ProbsError, match=r"20 tokens.*19"):
        engine.encode(s.kv, TokenProbs.from_tokens(s.ids[:19]), profile=profile)
    with pytest.raises(ProfileError, match="2 layers"):
        engine.encode(KVCache(s.kv.keys[:2], s.kv.values[:2]), s.probs, profile=profile)
    with pytest.raises(ProfileError, match="1, 8, 6"):
        engine.encode(KVCache([k[:1] for k in s.kv.keys], [v[:1] for v in s.kv.values]), s.probs, profile=profile)
    with pytest.raises(ProfileError, match="2, 8, 8"):
        engine.encode(KVCache(s.kv.keys, s.kv.keys), s.probs, profile=profile)


def test_ids_beyond_the_vocabulary(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(20)
    ids = s.ids.copy()
    ids[7] = 50
    with pytest.raises(ProbsError, match="50"):
        engine.encode(s.kv, TokenProbs.from_tokens(ids), profile=profile)


def test_probabilities_that_do_not_sum(sample: Callable[..., Any]) -> None:
    with pytest.raises(ProbsError, match=r"row 0 sums to 1\.5"):
        TokenProbs.from_probs(np.full((20, 50), 0.03), sample(20).ids)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_kl_and_step_must_make_sense(value: float, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(5)
    with pytest.raises(ValueError, match="kl must be"):
        engine.encode(s.kv, s.probs, profile=profile, kl=value)
    with pytest.raises(ValueError, match="step must be"):
        engine.encode(s.kv, s.probs, profile=profile, step=value)


@pytest.mark.parametrize("step", [1e-300, 1e300])
def test_a_step_out_of_range(step: float, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(5)
    with pytest.raises(ValueError, match="out of range"):
        engine.encode(s.kv, s.probs, profile=profile, step=step)


def test_numbers_of_numpy_are_numbers(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(5)
    engine.inspect(engine.encode(s.kv, s.probs, profile=profile, kl=np.float32(0.01)))
    engine.inspect(engine.encode(s.kv, s.probs, profile=profile, step=np.float32(0.01)))


@pytest.mark.parametrize("step", [2.0**-28, 2.0**-34, 2.0**-39])
def test_a_step_too_fine_for_the_cache_never_makes_a_wrong_one(
    step: float, profile: Profile, sample: Callable[..., Any]
) -> None:
    s = sample(40)
    try:
        stream = engine.encode(s.kv, s.probs, profile=profile, step=step)
    except (CacheError, ValueError):
        return
    assert error(s.kv, engine.decode(stream, profile=profile)) < 2e-3


@pytest.mark.parametrize("large", [1e4, 1e8, 1e15, 1e20, 1e30, 3e38])
def test_large_values_come_back_or_are_refused(large: float, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(40)
    values = [v.copy() for v in s.kv.values]
    values[1][0, 30, 2] = large
    kv = KVCache(s.kv.keys, values, rope=s.kv.rope)
    try:
        stream = engine.encode(kv, s.probs, profile=profile, step=2.0**-8, importance=s.importance)
    except CacheError:
        assert large > 1e6
        return
    assert engine.decode(stream, profile=profile).values[1][0, 30, 2] == pytest.approx(large, rel=1e-2)


def test_the_largest_numbers_of_half_precision(profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(40)
    values = [v.copy() for v in s.kv.values]
    values[1][0, 30, 2], values[2][1, 31, 3] = 65504, -65504
    kv = KVCache(s.kv.keys, values, rope=s.kv.rope, dtype="float16")
    stream = engine.encode(kv, s.probs, profile=profile, step=2.0**-8, importance=s.importance)
    decoded = engine.decode(stream, profile=profile).values
    assert decoded[1][0, 30, 2] == pytest.approx(65504, rel=1e-2)
    assert decoded[2][1, 31, 3] == pytest.approx(-65504, rel=1e-2)


# inspect


def test_inspect_adds_up(long: Any, profile: Profile) -> None:
    s, stream, _ = long
    said = engine.inspect(stream)
    assert (said["tokens"], said["layers"], said["dtype"]) == (600, 3, "float32")
    assert said["values"] == s.kv.values_count and said["bytes"] == len(stream)
    assert sum(said["bytes_by_part"].values()) == len(stream)
    assert said["bits_per_value"] == pytest.approx(8 * len(stream) / s.kv.values_count)
    assert said["ratio"] == pytest.approx(s.kv.nbytes / len(stream))
    assert said["profile"] == profile.fingerprint and len(said["steps"]) == 3
    assert said["steps"][0] == pytest.approx(0.002, rel=0.05) and said["steps"][0] <= 0.002
    assert said["kl"]["requested"] is None and said["kl"]["expected"] > 0


def test_the_loss_said_is_the_loss_made(long: Any) -> None:
    s, stream, decoded = long
    said = engine.inspect(stream)["loss"]
    for side in ("keys", "values"):
        # of un-rotated keys; turning changes neither error nor, on the whole, energy
        plain, other = getattr(s.kv, side), getattr(decoded, side)
        wrong = sum(float(np.square(a - b).sum()) for a, b in zip(plain, other, strict=True))
        if side == "keys":
            plain = [r.undo(k, s.kv.positions) for r, k in zip(s.kv.rope, plain, strict=True)]
        energy = sum(float(np.square(x - x.mean(axis=1, keepdims=True)).sum()) for x in plain)
        assert said[side] == pytest.approx(np.sqrt(wrong / energy), rel=0.05)


def test_inspect_needs_no_profile(small: bytes) -> None:
    assert engine.inspect(small)["tokens"] == 12
    with pytest.raises(StreamError):
        engine.inspect(b"no stream")


# profiles that do not fit


def test_the_wrong_profile(small: bytes, profile: Profile, profiles: Callable[[str], Profile]) -> None:
    with pytest.raises(ProfileError, match=f"{profile.fingerprint}.*no profile"):
        engine.decode(small)
    other = profiles("mean")
    with pytest.raises(ProfileError, match=f"{profile.fingerprint}.*{other.fingerprint}"):
        engine.decode(small, profile=other)
    # everything that decoding depends on is in the fingerprint
    for name in ("table", "bias", "sink_bias", "scale", "gains"):
        changed = getattr(profile, name).copy()
        changed.flat[3] += 1
        with pytest.raises(ProfileError):
            engine.decode(small, profile=dataclasses.replace(profile, **{name: changed}))


def test_a_profile_of_another_shape(small: bytes, profile: Profile) -> None:
    lying = rewritten(small, {"shape": [[2, 6, 8]] * 3})
    with pytest.raises(StreamError):
        engine.decode(lying, profile=profile)
    lying = rewritten(small, {"shape": [[2, 8, 6]] * 2})
    with pytest.raises(StreamError):
        engine.decode(lying, profile=profile)


# damage


def decodes_rightly(stream: bytes, right: KVCache, profile: Profile) -> bool:
    """Whether a stream gives this very cache; if not, it must be refused."""
    try:
        kv = engine.decode(stream, profile=profile)
    except (StreamError, ProfileError):
        return False
    assert kv.digest() == right.digest()
    return True


def test_a_truncated_stream_is_refused(small: bytes, profile: Profile) -> None:
    for size in range(len(small)):
        with pytest.raises(StreamError):
            engine.decode(small[:size], profile=profile)
    with pytest.raises(StreamError):
        engine.decode(small + b"\0", profile=profile)


def test_a_long_stream_truncated_at_the_edges_of_its_sections(long: Any, profile: Profile) -> None:
    _, stream, _ = long
    parsed, edge = Container.parse(stream), len(stream)
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, len(stream), 20).tolist()
    for key in reversed(parsed.sections):
        edge -= parsed.length(*key)
        sizes += [edge - 1, edge, edge + 1]
    for size in sizes:
        with pytest.raises(StreamError):
            engine.decode(stream[:size], profile=profile)


def test_every_flipped_bit_is_noticed(small: bytes, profile: Profile) -> None:
    right = engine.decode(small, profile=profile)
    assert decodes_rightly(small, right, profile)
    for bit in range(8 * len(small)):
        damaged = bytearray(small)
        damaged[bit // 8] ^= 1 << bit % 8
        assert not decodes_rightly(bytes(damaged), right, profile), f"bit {bit}"


# streams that lie, with checksums that are right

LIES: dict[str, dict[str, Any]] = {
    "more tokens": {"tokens": 13},
    "fewer tokens": {"tokens": 11},
    "another chunk": {"tokens": 300, "steps": [100, 100]},
    "no tokens": {"tokens": 0},
    "too many tokens": {"tokens": 2**31 + 1},
    "a fraction": {"tokens": 11.5},
    "tokens as text": {"tokens": "12"},
    "tokens as a list": {"tokens": [12]},
    "no steps": {"steps": []},
    "too many steps": {"steps": [100] * 2},
    "steps out of range": {"steps": [10**6]},
    "steps beyond any number": {"steps": [10**400]},
    "steps as an object": {"steps": {"a": 1}},
    "steps as words": {"steps": ["fine"]},
    "nothing for steps": {"steps": None},
    "no layers": {"shape": []},
    "layers without heads": {"shape": [[0, 8, 6]] * 3},
    "a shape beyond all memory": {"shape": [[1 << 20] * 3] * 3},
    "a shape beyond all memory, and no profile": {"shape": [[1 << 20] * 3] * 3, "profile": None},
    "a shape of pairs": {"shape": [[2, 8]] * 3},
    "a shape of words": {"shape": "abc"},
    "a negative width": {"shape": [[2, -8, 6]] * 3},
    "unknown tier": {"tier": "far"},
    "a tier that is a list": {"tier": ["near"]},
    "unknown dtype": {"dtype": "float64"},
    "a dtype that is a list": {"dtype": ["float32"]},
    "no ropes": {"ropes": []},
    "two ropes and no word which": {"ropes": [None, None]},
    "a rope that is not there": {"ropes": [None, None], "rope": [0, 1, 2]},
    "a rope before the first": {"ropes": [None, None], "rope": [0, 1, -3]},
    "ropes for other layers": {"ropes": [None, None], "rope": [0, 1]},
    "a rope that is text": {"ropes": ["rope"]},
    "a rope without frequencies": {"ropes": [{**Rope.from_theta(1e4, 8).to_dict(), "inv_freq": ""}]},
    "a rope wider than the keys": {"ropes": [Rope.from_theta(1e4, 10).to_dict()]},
    "a rope that scales beyond floats": {"ropes": [{**Rope(np.ones(2)).to_dict(), "scaling": 1e300}]},
    "a rope that scales beyond doubles": {"ropes": [{**Rope(np.ones(2)).to_dict(), "scaling": 10**400}]},
    "a rope that turns too fast": {"ropes": [Rope(np.array([1e308])).to_dict()]},
    "no profile": {"profile": None},
    "a profile that is a list": {"profile": [1]},
    "positions that are all there": {"positions": 3},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie: str, small: bytes, profile: Profile) -> None:
    if lie == "positions that are all there":  # says nothing that counts
        assert decodes_rightly(rewritten(small, LIES[lie]), engine.decode(small, profile=profile), profile)
        return
    stream = rewritten(small, LIES[lie])
    with pytest.raises((ProfileError, StreamError) if "profile" in LIES[lie] else StreamError):
        engine.decode(stream, profile=profile)


def test_a_lie_about_tokens_takes_no_memory(small: bytes, profile: Profile) -> None:
    tokens = 1 << 25
    stream = rewritten(small, {"tokens": tokens, "positions": "arange"}, POSITIONS=None)
    tracemalloc.start()
    try:
        for read in (engine.inspect, lambda stream: engine.decode(stream, profile=profile)):
            with pytest.raises(StreamError):
                read(stream)
        assert tracemalloc.get_traced_memory()[1] < tokens
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("lie", LIES)
def test_inspect_of_a_header_that_lies(lie: str, small: bytes) -> None:
    with contextlib.suppress(StreamError):
        engine.inspect(rewritten(small, LIES[lie]))


@pytest.mark.parametrize("entry", ["dtype", "profile", "ropes", "shape", "steps", "tier", "tokens"])
def test_a_header_must_be_whole(entry: str, small: bytes, profile: Profile) -> None:
    stream = rewritten(small, without=(entry,))
    with pytest.raises(StreamError):
        engine.decode(stream, profile=profile)
    with pytest.raises(StreamError):
        engine.inspect(stream)


def test_numbers_that_json_has_and_integers_have_not(small: bytes, profile: Profile) -> None:
    """1e999 is infinity to a parser of JSON that is not told otherwise."""
    parsed = Container.parse(small)
    start, end = small.index(b"{"), small.rindex(b"}", 0, small.index(b"tokens") + 20) + 1
    steps = str(parsed.header["steps"]).encode()
    for name in (b"1e999", b"-1e999"):
        text = small[start:end].replace(b'"steps":' + steps, b'"steps":[' + name + b"]")
        assert name in text
        table = small[end : len(small) - sum(parsed.length(*key) for key in parsed.sections) - 8]
        head = struct.pack("<4sHHI", b"SQKV", 0, 0, len(text)) + text + table
        stream = head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + small[len(small[:end] + table) + 8 :]
        with pytest.raises(StreamError):
            engine.decode(stream, profile=profile)
        with pytest.raises(StreamError):
            engine.inspect(stream)


SECTIONS: dict[str, dict[str, Any]] = {
    "no ids": {"TOKENS": None},
    "no classes": {"CLASSES": None},
    "no chunk": {"CHUNK": None},
    "no positions": {"POSITIONS": None},
    "an empty chunk": {"CHUNK": b""},
    "empty classes": {"CLASSES": b""},
    "empty ids": {"TOKENS": b""},
    "too few ids": {"TOKENS": container.pack(np.zeros(11, np.uint32))},
    "ids of another type": {"TOKENS": container.pack(np.zeros(12, np.int64))},
    "ids beyond the vocabulary": {"TOKENS": container.pack(np.full(12, 50, np.uint32))},
    "ids beyond every vocabulary": {"TOKENS": container.pack(np.full(12, 2**32 - 1, np.uint32))},
    "positions that fall": {"POSITIONS": container.pack(np.arange(12)[::-1].astype(np.int64))},
    "positions that stand": {"POSITIONS": container.pack(np.zeros(12, np.int64))},
    "positions below 0": {"POSITIONS": container.pack(np.arange(-3, 9, dtype=np.int64))},
    "positions that fall too far to see": {
        "POSITIONS": container.pack(np.array([2**63 - 1, *range(-(2**63), -(2**63) + 11)], np.int64))
    },
    "too few positions": {"POSITIONS": container.pack(np.arange(11, dtype=np.int64))},
}


@pytest.mark.parametrize("lie", SECTIONS)
def test_a_section_that_lies_is_refused(lie: str, small: bytes, profile: Profile) -> None:
    with pytest.raises(StreamError):
        engine.decode(rewritten(small, **SECTIONS[lie]), profile=profile)


TOP_K: dict[str, dict[str, Any]] = {
    "no ids": {"TOPK_IDS": None},
    "no probabilities": {"TOPK_PROBS": None},
    "ids in a row": {"TOPK_IDS": container.pack(np.zeros(240, np.int32))},
    "ids below 0": {"TOPK_IDS": container.pack(np.arange(-1, 239, dtype=np.int32).reshape(12, 20))},
    "ids beyond the vocabulary": {"TOPK_IDS": container.pack(np.arange(240, dtype=np.int32).reshape(12, 20))},
    "other k": {"TOPK_IDS": container.pack(np.tile(np.arange(19, dtype=np.int32), (12, 1)))},
    "no candidates": {
        "TOPK_IDS": container.pack(np.zeros((12, 0), np.int32)),
        "TOPK_PROBS": container.pack(np.zeros((12, 0), np.float16)),
    },
    "NaN": {"TOPK_PROBS": container.pack(np.full((12, 20), np.nan, np.float16))},
    "too probable": {"TOPK_PROBS": container.pack(np.full((12, 20), 0.5, np.float16))},
    "improbable": {"TOPK_PROBS": container.pack(np.full((12, 20), -0.01, np.float16))},
}


@pytest.mark.parametrize("lie", TOP_K)
def test_probabilities_that_lie_are_refused(
    lie: str, profiles: Callable[[str], Profile], sample: Callable[..., Any]
) -> None:
    s, profile = sample(12), profiles("expectation")
    stream = engine.encode(s.kv, s.probs, profile=profile, step=0.002)
    with pytest.raises(StreamError):
        engine.decode(rewritten(stream, **TOP_K[lie]), profile=profile)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["CHUNK", "CLASSES", "TOKENS", "POSITIONS"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # nonsense may be too large for a float
def test_hostile_bytes_make_no_more_than_a_cache(
    name: str, dtype: str, profile: Profile, sample: Callable[..., Any]
) -> None:
    """Whatever the bytes, with checksums that are right: a refusal, or a cache of the shape that the header says."""
    s = sample(12, positions=np.arange(12) + 7, dtype=dtype)
    stream = engine.encode(s.kv, s.probs, profile=profile, step=0.5)
    for steps in ([16], [-640], [640]):
        base = rewritten(stream, {"steps": steps})
        good = np.frombuffer(Container.parse(base).section(getattr(form, name)), np.uint8)
        refused = 0
        for seed in range(60):
            rng = np.random.default_rng(seed)
            data = good.copy()
            if seed % 4 == 0:
                data = rng.integers(0, 256, rng.integers(0, 400), np.uint8)
            elif seed % 4 == 1:
                data[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
            elif seed % 4 == 2:
                data = np.concatenate([data[: rng.integers(len(data))], rng.integers(0, 256, 40, np.uint8)])
            else:
                data = np.concatenate([data[:-128], rng.integers(0, 256, 2 * rng.integers(70, 200), np.uint8)])
            try:
                kv = engine.decode(rewritten(base, **{name: data.tobytes()}), profile=profile)
            except StreamError:
                refused += 1
            else:
                assert same_shape(kv, s.kv) and all(np.isfinite(x).all() for x in kv.keys + kv.values)
        assert refused


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_symbols_beyond_reason(profile: Profile, sample: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose every symbol is the largest there is, at the coarsest step: refused, or a cache."""
    s = sample(12)
    pack = near.encode_symbols
    monkeypatch.setattr(near, "encode_symbols", lambda *known: pack(*known[:-1], np.full_like(known[-1], 2**31 - 1)))
    stream = rewritten(engine.encode(s.kv, s.probs, profile=profile, step=0.5), {"steps": [-640]})
    monkeypatch.undo()
    for dtype in ("float32", "float16", "bfloat16"):
        try:
            kv = engine.decode(rewritten(stream, {"dtype": dtype}), profile=profile)
        except SeqkvError as refusal:
            assert isinstance(refusal, StreamError)
        else:
            assert same_shape(kv, s.kv)


def test_any_kind_of_buffer_is_a_stream(small: bytes, profile: Profile) -> None:
    right = engine.decode(small, profile=profile).digest()
    for buffer in (bytearray(small), memoryview(small), memoryview(bytearray(b"x" + small))[1:]):
        assert engine.decode(buffer, profile=profile).digest() == right


def test_a_measured_loss_is_met_and_said(model: Any, profile: Profile) -> None:
    ids = model.tokenize(model.text(77, model.context + model.continuation))
    kv, probs, importance = model.prefill(ids)
    true = model.logprobs(ids, kv)
    known: Any = {"profile": profile, "importance": importance, "kl": 0.01}
    for factor in (1.0, 5.0):  # as a text of which the curve says nothing

        def lost(decoded: KVCache, factor: float = factor) -> float:
            return factor * model.divergence(ids, decoded, true)[0]

        stream = engine.encode(kv, probs, **known, measure=lost)
        said = engine.inspect(stream)["kl"]
        assert said["measured"] == pytest.approx(lost(engine.decode(stream, profile=profile)), rel=1e-3)
        assert 0.01 / 1.5 < said["measured"] <= 0.01 and said["requested"] == 0.01
    assert "measured" not in engine.inspect(engine.encode(kv, probs, **known))["kl"]


def test_a_measured_loss_is_met_without_a_profile(sample: Callable[..., Any]) -> None:
    """Each step tried begins with nothing decoded: a chunk is predicted from those before it in the same stream."""
    s, lost = sample(300), []

    def measure(kv: KVCache) -> float:
        lost.append(rms(kv, s.kv))
        return lost[-1]

    stream = engine.encode(s.kv, s.probs, kl=0.001, measure=measure)
    assert len(lost) > 1 and 0.001 / 1.25 < rms(engine.decode(stream), s.kv) <= 0.001
    assert engine.inspect(stream)["kl"]["measured"] == pytest.approx(rms(engine.decode(stream), s.kv), rel=1e-3)
    assert stream == engine.encode(s.kv, s.probs, kl=0.001, measure=measure)


@pytest.mark.parametrize("options", [{"step": 0.1}, {"tier": "lossless"}, {"tier": "tokens"}])
def test_a_measure_needs_a_kl(options: Any, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(12)
    with pytest.raises(ValueError, match="measure is of"):
        engine.encode(s.kv, s.probs, profile=profile, measure=lambda kv: 0.0, **options)
