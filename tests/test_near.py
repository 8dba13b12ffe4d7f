from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from seqkv import engine
from seqkv.engine import Profile, StreamError, importance, near, quantiser

LAYERS, BLOCKS, COEFS = 3, 6, 84  # of the tiny profile
LARGEST = 2**31 - 1


def side(gain: NDArray[np.int8], step: int = 128, first: bool = True) -> near.Side:
    tokens = gain.shape[1]
    return near.Side(np.zeros((1, 0), np.float32), np.zeros(tokens, np.intp), gain, step, first)


@st.composite
def chunks(draw: Any) -> tuple[NDArray[np.int32], near.Side]:
    """Symbols of any size, some coefficients of which are zero throughout, and what is known beside them."""
    tokens = draw(st.sampled_from([1, 2, 31, 32, 33, 255, 256]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = 2.0 ** draw(st.floats(-8, 31))
    symbols = np.clip(np.rint(rng.laplace(scale=scale, size=(tokens, COEFS))), -LARGEST, LARGEST)
    symbols *= rng.random(COEFS) < draw(st.sampled_from([0, 0.05, 0.5, 1]))
    gain = rng.integers(-128, 127, (BLOCKS, tokens), np.int8, endpoint=True)
    return symbols.astype(np.int32), side(gain, draw(st.integers(-640, 640)), draw(st.booleans()))


def pack(profile: Profile, known: near.Side, symbols: NDArray[np.int32]) -> bytes:
    return near.encode_symbols(near.Scale(profile.scale), profile.starts, known, symbols)


def unpack(profile: Profile, known: near.Side, data: bytes, layers: int) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    return near.decode_symbols(near.Scale(profile.scale), profile.starts, known, memoryview(data), layers)


def dense(symbols: NDArray[np.int32], live: NDArray[np.intp], coefs: int) -> NDArray[np.int32]:
    out = np.zeros((len(symbols), coefs), np.int32)
    out[:, live] = symbols
    return out


@pytest.fixture(scope="module", autouse=True)
def shape(profile: Profile) -> None:
    assert (len(profile.shape), len(profile.widths), profile.starts[-1]) == (LAYERS, BLOCKS, COEFS)


@given(chunk=chunks())
def test_symbols_come_back(chunk: tuple[NDArray[np.int32], near.Side], profile: Profile) -> None:
    symbols, known = chunk
    data = pack(profile, known, symbols)
    for layers in range(1, LAYERS + 1):
        coefs = int(profile.starts[2 * layers])
        decoded, live = unpack(profile, known, data, layers)
        assert (np.diff(live) > 0).all() and (live < coefs).all()
        np.testing.assert_array_equal(dense(decoded, live, coefs), symbols[:, :coefs])


def test_coefficients_that_are_zero_throughout_cost_nothing(profile: Profile) -> None:
    known = side(np.zeros((BLOCKS, 256), np.int8))
    nothing = pack(profile, known, np.zeros((256, COEFS), np.int32))
    assert len(nothing) < 170  # 128 of it are the coder's states
    one = np.zeros((256, COEFS), np.int32)
    one[:, 40] = 1
    _, live = unpack(profile, known, pack(profile, known, one), LAYERS)
    assert live.tolist() == [40]


@pytest.fixture(scope="module")
def packed(profile: Profile) -> tuple[near.Side, bytes]:
    rng = np.random.default_rng(0)
    known = side(rng.integers(-8, 8, (BLOCKS, 20), np.int8))
    return known, pack(profile, known, np.rint(rng.laplace(scale=3, size=(20, COEFS))).astype(np.int32))


def test_a_chunk_cut_short_or_made_longer_is_refused(packed: tuple[near.Side, bytes], profile: Profile) -> None:
    known, data = packed
    for size in range(len(data)):
        with pytest.raises(StreamError):
            unpack(profile, known, data[:size], LAYERS)
    with pytest.raises(StreamError):
        unpack(profile, known, data + b"\0\0", LAYERS)


@given(data=st.binary(max_size=300), where=st.integers(0, 200))
def test_any_bytes_are_a_refusal_or_symbols(
    data: bytes, where: int, packed: tuple[near.Side, bytes], profile: Profile
) -> None:
    known, right = packed
    for wrong in (data, right[:where] + data, right[:where] + data + right[where + len(data) :]):
        for layers in (1, LAYERS):
            try:
                symbols, live = unpack(profile, known, wrong, layers)
            except StreamError:
                continue
            assert symbols.shape == (20, len(live)) and (live < profile.starts[2 * layers]).all()


@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 3.0, 15.0]))
def test_classes_come_back(layers: int, tokens: int, seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    received = np.exp(spread * rng.standard_normal((layers, tokens))).astype(np.float32)
    classes = importance.classes(received)
    data = near.pack_classes(classes)
    np.testing.assert_array_equal(near.unpack_classes(memoryview(data), layers, tokens, True), classes)
    for wrong in (data[:-2], data[:100], b""):
        with pytest.raises(StreamError):
            near.unpack_classes(memoryview(wrong), layers, tokens, True)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_classes_out_of_range_are_refused(layers: int, tokens: int, seed: int) -> None:
    """Steps from class to class that leave the range, in bytes that the coder takes."""
    plain = np.random.default_rng(seed).integers(-30, 60, (layers, tokens))
    plain[0, 0] = -1 if seed % 2 else importance.LEVELS
    data = near.pack_classes(np.zeros((layers, tokens), np.uint8))  # of the right shape, to see that it is read
    near.unpack_classes(memoryview(data), layers, tokens, True)
    change = np.diff(plain, axis=0, prepend=importance.LEVELS // 2).T.astype(np.int32)
    data = near.encode_group(np.ascontiguousarray(change), *near._class_contexts(layers, tokens, None))
    with pytest.raises(StreamError, match="out of range"):
        near.unpack_classes(memoryview(data), layers, tokens, True)


def test_any_bytes_are_a_refusal_or_classes() -> None:
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        data = rng.integers(0, 256, 128 + 2 * int(rng.integers(0, 40)), np.uint8).tobytes()
        try:
            classes = near.unpack_classes(memoryview(data), 3, 50, True)
        except StreamError:
            refused += 1
        else:
            assert classes.shape == (3, 50) and classes.max() < importance.CLASSES
    assert refused


def test_gains_are_of_side_layer_and_class(profile: Profile) -> None:
    classes = np.array([[21, 22, 5], [21, 22, 20], [21, 22, 0]], np.uint8)
    gain = near.gains(profile.gains, classes)
    assert gain.shape == (BLOCKS, 3) and gain.dtype == np.int8
    for block in range(BLOCKS):
        layer, is_value = divmod(block, 2)
        np.testing.assert_array_equal(gain[block], profile.gains[is_value, layer, classes[layer]])


@pytest.mark.parametrize("index", [64, 160, 320])
def test_every_coefficient_is_within_half_its_tokens_step(
    index: int, profile: Profile, sample: Callable[..., Any]
) -> None:
    """But for the mean that values get besides, after which their errors are 0 on average. And the errors of layers do
    not add up: prediction uses what is decoded."""
    s = sample(300, rope=None)
    step = quantiser.step_size(index)
    stream = engine.encode(s.kv, s.probs, profile=profile, step=step, importance=s.importance)
    decoded = engine.decode(stream, profile=profile)
    gain = quantiser.gain_value(near.gains(profile.gains, importance.classes(s.importance)))
    for block in range(BLOCKS):
        layer, is_value = divmod(block, 2)
        true, other = ((kv.values if is_value else kv.keys)[layer] for kv in (s.kv, decoded))
        wrong = (true - other).transpose(1, 0, 2).reshape(300, -1) @ profile.forward[block]
        in_steps = np.abs(wrong) * gain[block][:, None] / step
        noise = 1e-5 * np.abs(true).max() * np.abs(profile.forward[block]).sum(0).max() * gain[block].max() / step
        assert 0.4 < in_steps.max() <= (1.0 if is_value else 0.5) + noise
        if is_value:
            for start in range(0, 300, near.WINDOW):  # 256 is a multiple of it
                here = slice(start, start + near.WINDOW)
                weight = gain[block][here] ** 2
                mean = weight @ wrong[here] / weight.sum()
                assert np.abs(mean).max() <= (0.5 + noise) * near.mean_steps(index, 1)[0]


def test_means_lower_the_loss_by_what_is_said() -> None:
    rng = np.random.default_rng(1)
    steps = np.exp2(rng.integers(-8, 3, 100) / 4).astype(np.float32)
    error = (rng.normal(0, 0.2, (100, 7)) + rng.normal(0, 0.1, 7)).astype(np.float32) * steps[:, None]
    window, symbols = np.arange(100) // 64, np.empty((2, 7), np.int32)
    mean_steps = near.mean_steps(0, 2)
    shared, saved = near.code_means(error, steps, window, mean_steps, symbols)
    np.testing.assert_array_equal(shared, symbols * mean_steps[:, None])
    before, after = (np.square(x / steps[:, None], dtype=np.float64).sum() for x in (error, error - shared[window]))
    assert saved == pytest.approx(before - after, rel=1e-4) and saved > 0.1
    assert near.code_means(error * np.float32(1e12), steps, window, mean_steps, symbols)[1] == -np.inf


def test_windows_without_tokens_have_no_mean() -> None:
    symbols = np.empty((3, 2), np.int32)
    error, steps = np.full((10, 2), 0.3, np.float32), np.ones(10, np.float32)
    shared, _ = near.code_means(error, steps, np.repeat(2, 10), near.mean_steps(0, 3), symbols)
    assert not symbols[:2].any() and shared[2] == pytest.approx(0.3, abs=0.05)
