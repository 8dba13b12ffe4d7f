"""The lossless tier: every bit comes back, or the stream is refused."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqkv import engine
from seqkv.engine import (
    CacheError,
    KVCache,
    Profile,
    ProfileError,
    Rope,
    StreamError,
    TokenProbs,
    container,
    exact_products,
    exact_values,
    lossless,
)
from seqkv.engine.exact_model import Model, measured
from seqkv.engine.exact_values import FORMATS
from seqkv.engine.form import TOKENS, Form, describe

DTYPES = ("bfloat16", "float16", "float32")


def encode(kv: KVCache, ids: Any = None, profile: Profile | None = None) -> bytes:
    probs = TokenProbs.from_tokens(np.arange(kv.tokens) % 40 if ids is None else ids)
    about, sections = lossless.encode(kv, probs, profile)
    header, positions = describe(kv)
    return container.write(header | about, sections + positions)


def decode(
    stream: bytes, profile: Profile | None = None, tokens: range | None = None, layers: range | None = None
) -> KVCache:
    parsed = container.Container.parse(stream)
    form = Form(parsed)
    return lossless.decode(parsed, form, profile, tokens or range(form.tokens), layers or range(len(form.shape)))


def bits(kv: KVCache) -> list[np.ndarray]:
    return [FORMATS[kv.dtype].stored(np.ascontiguousarray(x)) for x in kv.keys + kv.values]


def check(kv: KVCache, ids: Any = None, profile: Profile | None = None) -> bytes:
    stream = encode(kv, ids, profile)
    out = decode(stream, profile)
    assert out.dtype == kv.dtype and out.shape == kv.shape and out.rope == kv.rope
    assert (out.positions == kv.positions).all()
    for ours, theirs in zip(bits(out), bits(kv), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return stream


def of_bits(raw: list[np.ndarray], dtype: str, **more: Any) -> KVCache:
    """A cache of these bits: keys and values of each layer, [heads, tokens, width] uint32."""
    arrays = [FORMATS[dtype].values(x.astype(np.uint32)) for x in raw]
    return KVCache(arrays[::2], arrays[1::2], dtype=dtype, exact=True, **more)


def adversary(seed: int) -> KVCache:
    """Any cache: shapes, dtypes, ropes, gaps in positions, and numbers of every kind."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % 3]
    form = FORMATS[dtype]
    size = 1 + form.exponent + form.mantissa
    tokens = int(rng.choice([1, 2, 3, 31, 33, 64, 255, 256, 257, 300]))
    layers = int(rng.integers(1, 4))
    raw = []
    ropes: list[Rope | None] = []
    for _ in range(layers):
        heads, widths = int(rng.integers(1, 4)), rng.integers(1, 12, 2)
        turned = int(widths[0]) // 2 * 2
        layout = ("half", "interleaved")[int(rng.integers(2))]
        scaling = float(rng.choice([1.0, 1.3, 1e4]))
        frequencies = Rope.from_theta(1e4, turned).inv_freq if turned else None
        ropes.append(Rope(frequencies, scaling, layout) if turned and rng.random() < 0.7 else None)  # type: ignore[arg-type]
        for width in widths:
            shape = (heads, tokens, int(width))
            kind = rng.integers(8)
            scale = 2.0 ** rng.integers(-160, 128) if kind == 0 else 1.0
            x = rng.standard_normal(shape) * scale + rng.choice([0, 0, 100])
            with np.errstate(over="ignore", under="ignore"):
                plain = x.astype(np.float16 if dtype == "float16" else np.float32)
            bits = form.stored(plain)
            if kind == 1:  # any bits at all, NaN payloads among them
                bits = rng.integers(0, 1 << size, shape)
            elif kind == 2:
                bits = np.full(shape, rng.integers(0, 1 << size))
            elif kind == 3:  # the ends of the range
                ends = [0, 1, 1 << (size - 1), (1 << (size - 1)) - 1, (1 << size) - 1]
                ends += [form.bias << form.mantissa, ((1 << form.exponent) - 1) << form.mantissa, 1 << form.mantissa]
                bits = rng.choice(ends, shape)
            elif kind == 4:  # some of them strange
                bits = np.where(rng.random(shape) < 0.01, rng.integers(0, 1 << size, shape), bits)
            elif kind == 5:  # denormal, of either sign
                bits = rng.integers(0, 1 << form.mantissa, shape) | rng.integers(0, 2, shape) << (size - 1)
            raw.append(bits)
    positions = np.cumsum(rng.integers(1, 1 + int(rng.choice([1, 1, 1000])), tokens))
    return of_bits(raw, dtype, rope=ropes, positions=positions)


@pytest.mark.parametrize("seed", range(100))
def test_every_bit_of_any_cache_comes_back(seed: int) -> None:
    check(adversary(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 256, 300])
def test_every_bit_comes_back_with_a_profile(
    dtype: str, tokens: int, sample: Callable[..., Any], profile: Profile
) -> None:
    some = sample(tokens, dtype=dtype)
    check(some.kv, some.ids, profile)


@pytest.mark.parametrize("predictor", ["mean", "expectation", "token", "layers"])
def test_any_predictor_will_do(predictor: str, sample: Callable[..., Any], profiles: Callable[[str], Profile]) -> None:
    some = sample(70, dtype="bfloat16")
    check(some.kv, some.ids, profiles(predictor))


def test_a_cache_unlike_the_profiles_comes_back(sample: Callable[..., Any], profile: Profile) -> None:
    some = sample(300, dtype="float32")
    rng = np.random.default_rng(0)
    kinds = [lambda x: x * np.float32(1e30), lambda x: x * np.float32(1e-38), lambda x: 0 * x]
    for change in kinds:
        kv = KVCache([change(x) for x in some.kv.keys], [change(x) for x in some.kv.values], rope=some.kv.rope)
        check(kv, some.ids, profile)
    raw = [rng.integers(0, 1 << 16, x.shape) for pair in zip(some.kv.keys, some.kv.values, strict=True) for x in pair]
    check(of_bits(raw, "bfloat16", rope=some.kv.rope), some.ids, profile)


@settings(max_examples=60)
@given(st.data())
def test_cells_and_bits_below_are_the_number(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    form = FORMATS[dtype]
    size = 1 + form.exponent + form.mantissa
    count = data.draw(st.integers(1, 40))
    drawn = data.draw(st.lists(st.integers(0, (1 << size) - 1), min_size=count, max_size=count))
    raw = np.array(drawn, np.uint32)[:, None]
    grid = np.array([data.draw(st.integers(1 - form.bias, 127))])
    guess = data.draw(st.integers(-(1 << 29), 1 << 29))
    predicted, to_cells = np.full((count, 1), guess, np.int32), np.array([2.0 ** data.draw(st.integers(-300, 300))])
    symbols, strange = np.empty((count, 1), np.int32), np.empty(count, np.int64)
    words = np.empty(count * form.most // 32 + 2, np.uint32)
    kind = (form.exponent, form.mantissa, form.bias)
    with np.errstate(invalid="ignore"):
        values = form.values(raw).astype(np.float32)
    scale = np.ldexp(1.0, -grid)
    used, odd = exact_values.split(raw, values, predicted, to_cells, scale, grid, kind, symbols, 0, words, strange)
    out = np.empty_like(raw)
    assert exact_values.joined(symbols, 0, predicted, to_cells, grid, kind, words[:used], out)
    kept = np.ones(count, bool)
    kept[strange[:odd]] = False
    np.testing.assert_array_equal(out[kept], raw[kept])
    assert not (np.abs(values[kept]) >= exact_values.LIMIT * np.ldexp(1.0, grid)).any()
    if used:  # a word less is noticed
        assert not exact_values.joined(symbols, 0, predicted, to_cells, grid, kind, words[: used - 1], out)


def test_products_of_the_model_are_exact(sample: Callable[..., Any], profile: Profile) -> None:
    some = sample(40, dtype="bfloat16")
    model = Model(some.kv.shape, measured(some.kv), profile)
    for one in model.of_tokens + model.of_blocks:
        assert np.abs(one.weights).astype(np.int64).sum(axis=1).max(initial=0) * exact_values.LARGEST_FEATURE < 1 << 31


@pytest.mark.parametrize(("tokens", "features", "channels", "start"), [(256, 32, 12, 5), (4, 0, 8, 0), (8, 64, 4, 1)])
def test_products_are_exact(tokens: int, features: int, channels: int, start: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-255, 256, (tokens, start + features + 3)).astype(np.int16)
    weights = rng.integers(-(1 << 15), 1 << 15, (channels, features)).astype(np.int16)
    out = np.full((tokens, channels), 7, np.int32)
    exact_products.product(x, start, weights, out)
    np.testing.assert_array_equal(out, x[:, start : start + features].astype(np.int64) @ weights.T.astype(np.int64))
    with pytest.raises(ValueError, match="do not fit"):
        exact_products.product(x, 4 + start, weights, out)
    with pytest.raises(ValueError, match="not padded"):
        exact_products.product(x[:-1].copy(), start, weights, out[:-1].copy())


def test_prediction_makes_streams_smaller(sample: Callable[..., Any], profile: Profile) -> None:
    some = sample(300, dtype="bfloat16")
    free, calibrated = len(encode(some.kv, some.ids)), len(encode(some.kv, some.ids, profile))
    assert calibrated < free < some.kv.nbytes
    noise = of_bits([np.random.default_rng(0).integers(0, 1 << 16, (2, 256, 64)) for _ in range(4)], "bfloat16")
    assert len(encode(noise)) < 1.02 * noise.nbytes
    zeros = KVCache(np.zeros((2, 2, 256, 64), np.float16), np.zeros((2, 2, 256, 64), np.float16))
    assert len(encode(zeros)) < 0.05 * zeros.nbytes


def test_parts_decode_alone(sample: Callable[..., Any], profile: Profile) -> None:
    some = sample(600, dtype="float16")
    for known in (None, profile):
        stream = encode(some.kv, some.ids, known)
        for tokens, layers in ((range(250, 270), range(1, 3)), (range(599, 600), range(1)), (range(3, 9), range(2, 3))):
            out = decode(stream, known, tokens, layers)
            for layer in layers:
                for side, whole in ((out.keys, some.kv.keys), (out.values, some.kv.values)):
                    expected = whole[layer][:, tokens.start : tokens.stop]
                    np.testing.assert_array_equal(side[layer - layers.start], expected)
            assert (out.positions == some.kv.positions[tokens.start : tokens.stop]).all()


def test_the_same_cache_gives_the_same_bytes(sample: Callable[..., Any], profile: Profile) -> None:
    some = sample(300, dtype="bfloat16")
    assert encode(some.kv, some.ids, profile) == encode(some.kv, some.ids, profile)
    assert encode(some.kv, some.ids) == encode(some.kv, some.ids)


def test_bytes_of_a_block() -> None:
    """The format of what is coded: integers in, integers out."""
    raw = (np.arange(64 * 5, dtype=np.uint32) * 40503 % 65536).reshape(64, 5)
    predicted = (np.arange(64 * 5) * 7919 % 100_003 - 50_000).reshape(64, 5).astype(np.int32)
    form, grid = FORMATS["bfloat16"], np.array([-9, -3, 0, 2, 20])
    symbols, words, strange = np.empty((64, 5), np.int32), np.zeros(400, np.uint32), np.empty(320, np.int64)
    kind, scale = (form.exponent, form.mantissa, form.bias), np.ldexp(1.0, -grid)
    with np.errstate(invalid="ignore"):
        counts = exact_values.split(
            raw, form.values(raw), predicted, scale / 1024, scale, grid, kind, symbols, 0, words, strange
        )
    assert counts == WORDS
    assert zlib.crc32(symbols.astype("<i4").tobytes() + words[: counts[0]].astype("<u4").tobytes()) == GOLDEN


WORDS, GOLDEN = (234, 121), 1_881_774_233


def test_another_profile_is_refused(
    sample: Callable[..., Any], profile: Profile, profiles: Callable[[str], Profile]
) -> None:
    some = sample(40)
    stream = encode(some.kv, some.ids, profile)
    with pytest.raises(ProfileError, match="no profile was given"):
        decode(stream)
    with pytest.raises(ProfileError, match="the profile given is"):
        decode(stream, profiles("token"))
    with pytest.raises(ProfileError, match="outside the profile's vocabulary"):
        encode(some.kv, some.ids + 1000, profile)


def test_a_flipped_bit_anywhere_is_refused(sample: Callable[..., Any], profile: Profile) -> None:
    some = sample(20, dtype="bfloat16")
    stream = encode(some.kv, some.ids, profile)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, 8 * len(stream), 150):
        altered = bytearray(stream)
        altered[place // 8] ^= 1 << place % 8
        with pytest.raises((StreamError, ProfileError)):
            decode(bytes(altered), profile)


def test_sections_that_lie_are_refused(sample: Callable[..., Any], profile: Profile) -> None:
    """Checksums right, content altered: never another cache, never anything but a StreamError."""
    some = sample(300, dtype="bfloat16")
    raw = [FORMATS["bfloat16"].stored(x) for pair in zip(some.kv.keys, some.kv.values, strict=True) for x in pair]
    raw[1][0, 3, 2] = 0x7FC1  # a strange one
    raw[2][...] = np.random.default_rng(1).integers(0, 1 << 16, raw[2].shape)  # a plain block
    kv = of_bits(raw, "bfloat16", rope=some.kv.rope)
    stream = encode(kv, some.ids, profile)
    parsed = container.Container.parse(stream)
    sections = [container.Section(k, i, bytes(parsed.section(k, i))) for k, i in parsed.sections]
    rng, refused = np.random.default_rng(2), 0
    for which, section in enumerate(sections):
        for _ in range(8):
            data = bytearray(section.data)
            place = int(rng.integers(len(data)))
            data[place] ^= 1 << int(rng.integers(8))
            if rng.random() < 0.2:
                data = data[:place]
            altered = sections.copy()
            altered[which] = container.Section(section.kind, section.index, bytes(data))
            try:
                out = decode(container.write(parsed.header, altered), profile)
            except StreamError:
                refused += 1
            else:  # what was altered did not matter
                assert all((a == b).all() for a, b in zip(bits(out), bits(kv), strict=True))
    assert refused > 6 * len(sections)


def test_an_enormous_stream_of_nothing_is_refused(sample: Callable[..., Any]) -> None:
    parsed = container.Container.parse(encode(sample(20).kv))
    rest = [container.Section(k, i, bytes(parsed.section(k, i))) for k, i in parsed.sections]
    with pytest.raises(StreamError, match="cannot hold 2147483648 tokens"):  # positions alone would be 16 GB
        decode(container.write(parsed.header | {"tokens": 1 << 31}, rest))
    last = container.Section(TOKENS, 9, b"")  # of as many chunks, which the stream could hold
    with pytest.raises(StreamError, match="no section 1/1"):
        decode(container.write(parsed.header | {"tokens": 2560}, [*rest, last]))


@pytest.mark.parametrize("kind", range(32, 39))
def test_missing_sections_are_refused(kind: int, sample: Callable[..., Any]) -> None:
    some = sample(20)
    values = [v.copy() for v in some.kv.values]
    values[0][0, 3, 2] = np.inf
    parsed = container.Container.parse(encode(KVCache(some.kv.keys, values, exact=True), some.ids))
    rest = [container.Section(k, i, bytes(parsed.section(k, i))) for k, i in parsed.sections if k != kind]
    assert len(rest) < len(parsed.sections)
    with pytest.raises(StreamError):
        decode(container.write(parsed.header, rest))


def test_only_an_exact_cache_holds_nan() -> None:
    array = np.ones((1, 1, 2, 4), np.float32)
    array[0, 0, 1, 2] = np.nan
    with pytest.raises(CacheError, match="nan in head 0, channel 2"):
        KVCache(array, array)
    kv = KVCache(array, array, exact=True)
    with pytest.raises(CacheError, match="keys of layer 0, token 1: nan"):
        kv.check_finite()
    assert kv.digest() == KVCache(array.copy(), array, exact=True).digest()
    probs = TokenProbs.from_tokens(np.arange(2))
    with pytest.raises(CacheError, match="keys of layer 0, token 1: nan"):
        engine.encode(kv, probs)
    assert engine.decode(engine.encode(kv, probs, tier="lossless")).digest() == kv.digest()


def test_torch_bfloat16_keeps_its_bits() -> None:
    torch = pytest.importorskip("torch")
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(1, 1, 256, 256)
    kv = KVCache(every, every, exact=True)
    assert kv.dtype == "bfloat16"
    np.testing.assert_array_equal(bits(kv)[0].reshape(-1), np.arange(1 << 16))
    check(kv)


def test_a_profile_that_a_stream_was_not_made_with_is_not_used(sample: Callable[..., Any], profile: Profile) -> None:
    one = sample(40)
    kv = KVCache(one.kv.keys, one.kv.values, rope=one.kv.rope, exact=True)
    stream = engine.encode(kv, one.probs, tier="lossless")
    back = engine.decode(stream, profile=profile)
    for x, y in zip(kv.keys + kv.values, back.keys + back.values, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
