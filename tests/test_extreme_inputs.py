"""Caches at the edges: they come back within the loss that the stream states, bit for bit, or are refused, with why."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from seqkv import engine
from seqkv.engine import CacheError, KVCache, Profile, Rope, TokenProbs
from tests.conftest import LinearModel, calibrated

TOKENS = 40
SHAPES = {  # layers, heads, width
    "1 layer": (1, 2, 8),
    "heads of 40": (2, 2, 40),
    "heads of 80": (2, 2, 80),
    "heads of 96": (2, 2, 96),
    "heads of 256": (2, 1, 256),
    "3 heads": (2, 3, 16),
    "5 heads": (2, 5, 16),
    "7 heads": (2, 7, 16),
}
CALIBRATED = ("1 layer", "heads of 40", "heads of 80", "3 heads", "5 heads", "7 heads")
VALUES = ("of 1e4", "constant channels", "one head of zeros", "nothing but zeros", "denormals", "far from 0")


@functools.cache
def model(shape: str) -> LinearModel:
    layers, heads, width = SHAPES[shape]
    return LinearModel(layers, heads, width, width)


@functools.cache
def profile_of(shape: str) -> Profile:
    return calibrated(model(shape))


def cache(shape: str, values: str = "", tokens: int = TOKENS, dtype: str = "float32") -> tuple[KVCache, TokenProbs]:
    of = model(shape)
    ids = of.tokenize(of.text(99, tokens))
    kv, _ = of.cache(ids)
    keys, given = (extreme([np.array(array) for array in side], values) for side in (kv.keys, kv.values))
    return KVCache(keys, given, rope=kv.rope, dtype=dtype), TokenProbs.from_tokens(ids)


def extreme(side: list[NDArray[Any]], values: str) -> list[NDArray[Any]]:
    """All layers of a cache's keys or values, made so."""
    out: list[NDArray[Any]] = []
    for array in side:
        if values == "of 1e4":
            array *= 1e4 / np.abs(array).max()
        elif values == "constant channels":
            array[..., ::2] = 3.0
        elif values == "one head of zeros":
            array[-1] = 0
        elif values == "nothing but zeros":
            array[...] = 0
        elif values == "denormals":
            array *= np.float32(1e-40)
        elif values == "far from 0":
            array += 1e4
        out.append(array)
    return out


def sums(true: KVCache, decoded: KVCache) -> dict[str, tuple[float, float, float]]:
    """Of keys (before rotation) and values: squared error, squares around each channel's mean, and squares."""
    out = {}
    for name in ("keys", "values"):
        total = np.zeros(3)
        for layer, rope in enumerate(true.rope):
            pair = [getattr(kv, name)[layer] for kv in (true, decoded)]
            if rope is not None and name == "keys":
                pair = [rope.undo(one, true.positions) for one in pair]
            one, other = (array.astype(np.float64) for array in pair)
            around = one - one.mean(axis=1, keepdims=True)
            total += [np.square(x).sum() for x in (one - other, around, one)]
        out[name] = (float(total[0]), float(total[1]), float(total[2]))
    return out


def comes_back(kv: KVCache, probs: TokenProbs, profile: Profile | None) -> None:
    """With the loss that the stream states, small beside the numbers, and the same bytes every time.

    A step is beside what a profile was calibrated on, spread 1 here; without one beside the channel's own spread.
    """
    step = 2.0**-14 if profile is not None else 2.0**-6
    stream = engine.encode(kv, probs, profile=profile, step=step)
    assert stream == engine.encode(kv, probs, profile=profile, step=step)
    decoded = engine.decode(stream, profile=profile)
    assert (decoded.shape, decoded.dtype, decoded.rope) == (kv.shape, kv.dtype, kv.rope)
    stated = engine.inspect(stream)["loss"]
    for name, (error, energy, square) in sums(kv, decoded).items():
        # of float32: keys are turned, products are summed; squares of less than 1e-22 are 0
        rounding = 1e-6 * np.sqrt(square) + 1e-20
        assert np.sqrt(error) <= 1.01 * stated[name] * np.sqrt(max(energy, 1e-30)) + rounding
        count = sum(array.size for array in kv.keys)
        least = count if profile is not None else 1e-18
        assert np.sqrt(error) <= 0.1 * np.sqrt(max(square, least))


@pytest.mark.parametrize("tokens", [1, 2, 3, TOKENS])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_without_a_profile(shape: str, tokens: int) -> None:
    kv, probs = cache(shape, tokens=tokens)
    comes_back(kv, probs, None)


@pytest.mark.parametrize("tokens", [1, 2, 3, TOKENS])
@pytest.mark.parametrize("shape", CALIBRATED)
def test_shapes_with_a_profile(shape: str, tokens: int) -> None:
    kv, probs = cache(shape, tokens=tokens)
    comes_back(kv, probs, profile_of(shape))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("shape", ["1 layer", "3 heads"])
@pytest.mark.parametrize("with_profile", [False, True])
def test_numbers(values: str, shape: str, with_profile: bool) -> None:
    kv, probs = cache(shape, values)
    comes_back(kv, probs, profile_of(shape) if with_profile else None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_without_loss(shape: str, dtype: str) -> None:
    for tokens in (1, 2, 3, TOKENS):
        exactly(*cache(shape, tokens=tokens, dtype=dtype), profile_of(shape) if shape in CALIBRATED else None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("values", VALUES)
def test_numbers_without_loss(values: str, dtype: str) -> None:
    for shape in ("1 layer", "3 heads"):
        for profile in (None, profile_of(shape)):
            exactly(*cache(shape, values, dtype=dtype), profile)


def exactly(kv: KVCache, probs: TokenProbs, profile: Profile | None) -> None:
    stream = engine.encode(kv, probs, profile=profile, tier="lossless")
    decoded = engine.decode(stream, profile=profile)
    assert decoded.digest() == kv.digest() and decoded.rope == kv.rope


def test_what_is_too_large_for_the_format_is_refused() -> None:
    kv, _ = cache("1 layer")
    with pytest.raises(CacheError, match=r"keys of layer 0, token \d+: inf in head \d, channel \d"):
        KVCache([1e6 * array for array in kv.keys], kv.values, dtype="float16")


def test_a_width_that_cannot_be_turned_is_refused() -> None:
    with pytest.raises(CacheError, match="even, positive number of channels, not 7"):
        Rope.from_theta(1e4, 7)


@pytest.mark.parametrize("scaling", [0, -1, 9e-7, 1.1e6, 1e18, 3e38, 1e300, float("inf"), float("nan")])
def test_a_scaling_that_leaves_no_room_for_keys_is_refused(scaling: float) -> None:
    with pytest.raises(CacheError, match="scaling must be a number from 1e-6 to 1e6"):
        Rope(np.ones(4, np.float32), scaling)


@pytest.mark.parametrize("scaling", [1e-6, 1e6])
def test_keys_of_the_extreme_scalings_come_back(scaling: float) -> None:
    kv, probs = cache("1 layer")
    rope = Rope(np.ones(4, np.float32), scaling)
    scaled = KVCache([np.float32(scaling) * array for array in kv.keys], kv.values, rope=rope)
    comes_back(scaled, probs, None)
    exactly(scaled, probs, None)
