from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from seqkv import engine
from seqkv.engine import KVCache, Profile, ProfileError, Rope, prediction
from seqkv.engine.recognition import Recogniser, beginning, placed

THETA, WIDTH = 1e4, 64


def part(sample: Any, start: int, noise: float, profile: Profile, dtype: str = "float32") -> KVCache:
    """The tokens of a sample as a part from `start` on, layer 0 as the profile expects it but for some noise."""
    rng = np.random.default_rng(start)
    rows, index = prediction.token_rows(profile.table, sample.probs, profile.predictor)
    first, second, third = profile.starts[:3]
    expected = (rows @ profile.token_map + profile.bias)[index]
    from_tokens, values, rest = expected[:, first:second], expected[:, second:third], sample.kv
    values = values + from_tokens @ profile.maps[1][0] if len(profile.sources(1)) else values
    heads, key, value = profile.shape[0]
    spread = noise * values.std()
    first_key = from_tokens.reshape(-1, heads, key).transpose(1, 0, 2)
    first_value = (values + spread * rng.standard_normal(values.shape)).reshape(-1, heads, value).transpose(1, 0, 2)
    positions = np.arange(len(sample.ids)) + start
    plain = [first_key + noise * first_key.std() * rng.standard_normal(first_key.shape).astype(np.float32)]
    plain += [r.undo(k, rest.positions) for r, k in zip(rest.rope[1:], rest.keys[1:], strict=True)]
    keys = [r.apply(k, positions) for r, k in zip(rest.rope, plain, strict=True)]
    arrays = keys, [first_value.astype(np.float32), *rest.values[1:]]
    return KVCache(*arrays, rope=rest.rope, dtype=dtype)  # at positions from 0, as a server gives it


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("start", [0, 48, 48 * 1000])
def test_tokens_and_beginning_are_told(sample: Callable[..., Any], profile: Profile, start: int, dtype: str) -> None:
    told = sample(48)
    kv, probs = Recogniser(profile).recognise(part(told, start, 0.01, profile, dtype))
    assert probs.token_ids.tolist() == told.ids.tolist()
    assert kv.positions.tolist() == list(range(start, start + 48))


def test_what_is_told_saves_what_the_truth_saves(sample: Callable[..., Any], profile: Profile) -> None:
    told = sample(48)
    given = part(told, 480, 0.01, profile)
    kv, probs = Recogniser(profile).recognise(given)
    stream = engine.encode(kv, probs, profile=profile, step=0.25)
    true = KVCache(given.keys, given.values, positions=np.arange(480, 528), rope=given.rope)
    assert stream == engine.encode(true, engine.TokenProbs.from_tokens(told.ids), profile=profile, step=0.25)
    unplaced = engine.encode(given, engine.TokenProbs.from_tokens(told.ids * 0), profile=profile, step=0.25)
    assert len(stream) < 0.9 * len(unplaced)


def test_noise_is_told_something_and_decoded_rightly(profile: Profile) -> None:
    """A wrong guess costs bits, nothing else."""
    rng = np.random.default_rng(0)
    shape = [(h, 20, w) for h, *widths in profile.shape for w in widths]
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shape]
    kv, probs = Recogniser(profile).recognise(KVCache(arrays[::2], arrays[1::2], rope=Rope.from_theta(1e4, 8)))
    decoded = engine.decode(engine.encode(kv, probs, profile=profile, step=2.0**-14), profile=profile)
    for true, here in zip(kv.keys + kv.values, decoded.keys + decoded.values, strict=True):
        np.testing.assert_allclose(here, true, atol=0.05)


@pytest.mark.parametrize("predictor", ["layers", "mean", "token"])
def test_profiles_of_other_predictors(
    sample: Callable[..., Any], profiles: Callable[[str], Profile], predictor: str
) -> None:
    told, other = sample(48), profiles(predictor)
    kv, probs = Recogniser(other).recognise(part(told, 96, 0.01, other))
    assert kv.positions[0] == 96
    assert probs.token_ids.tolist() == (told.ids if predictor == "token" else 0 * told.ids).tolist()


def test_profiles_that_do_not_do(profiles: Callable[[str], Profile], profile: Profile) -> None:
    with pytest.raises(ProfileError, match="probabilities"):
        Recogniser(profiles("expectation"))
    other = np.zeros((1, 1, 4, 8), np.float32)
    with pytest.raises(ProfileError, match="3 layers"):
        Recogniser(profile).recognise(KVCache(other, other))


@pytest.mark.parametrize(("layout", "start"), [("half", 0), ("half", 255), ("interleaved", 1_000_001)])
def test_beginning_among_a_million_positions(layout: Any, start: int) -> None:
    """From keys of which a part is noise."""
    rng = np.random.default_rng(start)
    rope = Rope(Rope.from_theta(THETA, WIDTH).inv_freq, 1.5, layout)
    expected = rng.standard_normal((16, 2 * WIDTH)).astype(np.float32)
    heads = expected.reshape(16, 2, WIDTH).transpose(1, 0, 2)
    keys = rope.undo(rope.apply(heads, np.arange(16) + start), np.arange(16))
    keys += 0.5 * rng.standard_normal(keys.shape).astype(np.float32)
    assert beginning(rope, expected, keys.transpose(1, 0, 2).reshape(16, -1), 2) == start


def test_a_sink_tells_where_a_sequence_begins(model: Any) -> None:
    kv, _ = model.cache(np.arange(20))
    small = [v.copy() for v in kv.values]
    for v in small:
        v[:, 0] *= 0.2
    assert placed(KVCache(kv.keys, small, rope=kv.rope)).positions.tolist() == list(range(20))
    assert placed(kv).positions.tolist() == list(range(20, 40))
