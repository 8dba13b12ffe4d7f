from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from seqkv import engine
from seqkv.engine import CacheError, KVCache, Profile, ProfileError, TokenProbs
from seqkv.engine.layerwise import LayerDecoder


def parts_of(sample: Any, bounds: list[int], profile: Profile) -> list[bytes]:
    """The cache in pieces that begin and end at these tokens, each a stream."""
    streams = []
    for start, stop in itertools.pairwise(bounds):
        kv = KVCache(
            [k[:, start:stop] for k in sample.kv.keys],
            [v[:, start:stop] for v in sample.kv.values],
            positions=np.arange(start, stop),
            rope=sample.kv.rope,
            dtype=sample.kv.dtype,
        )
        probs = TokenProbs.from_tokens(sample.ids[start:stop])
        streams.append(engine.encode(kv, probs, profile=profile, kl=0.003, importance=sample.importance[:, start:stop]))
    return streams


@pytest.mark.parametrize("predictor", ["all", "layers", "token"])
def test_it_gives_what_decode_gives(
    sample: Callable[..., Any], profiles: Callable[[str], Profile], predictor: str
) -> None:
    profile = profiles(predictor)
    streams = parts_of(sample(300), [0, 2, 40, 300], profile)
    expected = [engine.decode(stream, profile=profile) for stream in streams]
    decoder = LayerDecoder(streams, profile)
    assert decoder.tokens == 300
    for layer, (heads, key, value) in enumerate(profile.shape):
        keys, values = np.empty((1, heads, 300, key), np.float32), np.empty((1, heads, 300, value), np.float32)
        decoder.into(keys, values)
        for got, side in ((keys, "keys"), (values, "values")):
            true = np.concatenate([getattr(kv, side)[layer] for kv in expected], axis=1)
            np.testing.assert_allclose(got[0], true, atol=1e-4)


def test_tokens_go_to_their_slots_in_the_dtype_of_the_array(sample: Callable[..., Any], profile: Profile) -> None:
    streams = parts_of(sample(60), [0, 30, 60], profile)
    heads, key, value = profile.shape[0]
    slots = np.random.default_rng(0).permutation(2 * 40)[:60]
    keys, values = np.zeros((2, heads, 40, key), np.float16), np.zeros((2, heads, 40, value), np.float16)
    LayerDecoder(streams, profile).into(keys, values, slots)
    plain = engine.decode(streams[1], profile=profile)
    there = keys[slots[30:] // 40, :, slots[30:] % 40].transpose(1, 0, 2)
    np.testing.assert_allclose(there, plain.keys[0], atol=5e-3, rtol=1e-3)
    unused = np.setdiff1d(np.arange(80), slots)
    assert not values[unused // 40, :, unused % 40].any()


def test_few_layers_are_in_memory(sample: Callable[..., Any], profile: Profile) -> None:
    streams = parts_of(sample(256), [0, 256], profile)
    decoder, before = LayerDecoder(streams, profile), []
    for heads, key, value in profile.shape:
        before.append(decoder.nbytes)
        decoder.into(np.empty((1, heads, 256, key), np.float32), np.empty((1, heads, 256, value), np.float32))
    layer = 256 * 2 * (8 + 6) * 4
    assert before[0] < before[1] <= before[0] + layer and before[2] <= before[0] + 2 * layer
    assert decoder.nbytes == before[0]  # nothing follows the last layer


def test_what_it_does_not_take_is_refused(
    sample: Callable[..., Any], profiles: Callable[[str], Profile], profile: Profile
) -> None:
    some = sample(40)
    free = engine.encode(some.kv, some.probs)
    exact = engine.encode(some.kv, some.probs, tier="lossless", profile=profile)
    for stream in (free, exact):
        with pytest.raises(CacheError, match="layer by layer"):
            LayerDecoder([stream], profile)
    (near,) = parts_of(some, [0, 40], profile)
    with pytest.raises(ProfileError, match="encoded with profile"):
        LayerDecoder([near], profiles("token"))
    with pytest.raises(CacheError, match="expectation"):
        LayerDecoder([near], profiles("expectation"))
    (other,) = parts_of(sample(40, dtype="float16"), [0, 40], profile)
    with pytest.raises(CacheError, match="not of one sequence"):
        LayerDecoder([near, other], profile)


@pytest.mark.parametrize(
    ("shapes", "slots", "message"),
    [
        (((1, 4, 40, 4), (1, 2, 40, 6)), None, r"keys of layer 0: expected \[blocks, 2, block, 8\]"),
        (((1, 2, 40, 8), (1, 2, 40, 7)), None, "values of layer 0"),
        (((2, 40, 8), (2, 40, 6)), None, "keys of layer 0"),
        (((1, 2, 39, 8), (1, 2, 40, 6)), None, "from 0 to 38"),
        (((1, 2, 40, 8), (1, 2, 39, 6)), None, "values of layer 0: a slot from 0 to 38"),
        (((1, 2, 40, 8), (1, 2, 40, 6)), np.arange(40) // 2, "different integers"),
        (((1, 2, 40, 8), (1, 2, 40, 6)), np.arange(40) - 1, "from 0 to 39"),
        (((1, 2, 40, 8), (1, 2, 40, 6)), np.arange(39), "expected 40 integers"),
        (((1, 2, 40, 8), (1, 2, 40, 6)), np.arange(40.0), "got float64"),
        (((1, 2, 40, 8), (1, 2, 40, 6)), np.ones(40, bool), "got bool"),
    ],
)
def test_arrays_and_slots_that_do_not_fit_are_refused(
    sample: Callable[..., Any], profile: Profile, shapes: Any, slots: Any, message: str
) -> None:
    decoder = LayerDecoder(parts_of(sample(40), [0, 40], profile), profile)
    keys, values = (np.zeros(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        decoder.into(keys, values, slots)
    assert decoder.layer == 0 and not keys.any() and not values.any()


def test_no_layer_follows_the_last(sample: Callable[..., Any], profile: Profile) -> None:
    decoder = LayerDecoder(parts_of(sample(40), [0, 40], profile), profile)
    for heads, key, value in profile.shape:
        arrays = np.empty((1, heads, 40, key), np.float32), np.empty((1, heads, 40, value), np.float32)
        decoder.into(*arrays)
    with pytest.raises(ValueError, match="all 3 layers have been read"):
        decoder.into(*arrays)
