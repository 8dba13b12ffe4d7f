from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqkv.engine import quantiser
from seqkv.engine.quantiser import (
    LARGEST_SYMBOL,
    UNITS_PER_OCTAVE,
    gain_index,
    gain_units,
    gain_value,
    quantise,
    scale_units,
    step_index,
    step_size,
    step_units,
)
from seqkv.entropy_coding import contexts


@given(st.integers(-640, 640))
def test_steps_have_indices(index: int) -> None:
    assert step_index(step_size(index)) == index
    assert step_size(index + 16) == pytest.approx(step_size(index) / 2)


@given(st.floats(1e-9, 1e9))
def test_the_step_taken_is_the_largest_that_is_not_above(step: float) -> None:
    index = step_index(step)
    assert step_size(index) <= step * (1 + 1e-9) < step_size(index - 1) * (1 + 2e-9)


def test_gains_have_indices() -> None:
    index = np.arange(-128, 128, dtype=np.int8)
    np.testing.assert_array_equal(gain_index(gain_value(index)), index)
    np.testing.assert_array_equal(gain_index(np.array([0.25, 1, 1.05, 32, 128])), [-8, 0, 0, 20, 28])
    np.testing.assert_allclose(gain_value(np.array([0, 4, -4], np.int8)), [1, 2, 0.5])


def test_an_octave_is_an_octave_for_all_three() -> None:
    """Halving the step, doubling the gain and doubling the residual move a symbol equally on the scale axis."""
    assert step_units(116) - step_units(100) == UNITS_PER_OCTAVE
    assert gain_units(np.array([9]))[0] - gain_units(np.array([5]))[0] == UNITS_PER_OCTAVE
    assert np.diff(scale_units(np.array([0.3, 0.6])))[0] == UNITS_PER_OCTAVE
    for index in (-640, 640):
        assert step_units(index) == index / 16 * UNITS_PER_OCTAVE
    assert gain_units(np.array([-128, 127], np.int8)).tolist() == [-32 * UNITS_PER_OCTAVE, 127 * UNITS_PER_OCTAVE // 4]


def test_a_scale_is_in_the_middle_of_its_class() -> None:
    places = 2.0 ** (contexts.LOWEST_OCTAVE + np.arange(contexts.CLASSES) / contexts.CLASSES_PER_OCTAVE)
    units = scale_units(places)
    classes = [contexts.scale_class(contexts.in_subunits(int(u))) for u in units]
    assert classes == list(range(contexts.CLASSES))
    assert set((units % contexts.UNITS).tolist()) == {contexts.UNITS // 2}
    assert scale_units(np.array([0.0, 1e-300, 1e300])).dtype == np.int16


@given(st.integers(1, 30), st.integers(1, 20), st.integers(0, 2**32 - 1), st.floats(-3, 20))
def test_symbols_are_the_nearest_integers(tokens: int, coefs: int, seed: int, octave: float) -> None:
    rng = np.random.default_rng(seed)
    residual = (2.0**octave * rng.standard_normal((tokens, coefs))).astype(np.float32)
    fineness = np.exp(rng.standard_normal(tokens)).astype(np.float32)
    symbols = np.zeros((tokens, coefs + 3), np.int32)
    part = symbols[:, 1:-2]  # rows that are apart in memory
    total = quantise(residual, fineness, part)
    scaled = residual.astype(np.float64) * fineness[:, None]
    assert (np.abs(scaled - part) <= 0.5 + 1e-6 * np.abs(scaled)).all()
    assert not symbols[:, [0, -2, -1]].any()
    assert total == pytest.approx(
        np.square(scaled - part).sum(), rel=1e-3, abs=1e-2 * tokens * coefs * 2.0 ** (octave - 20)
    )


def test_quantising_is_symmetric() -> None:
    residual = np.array([[0.0, 0.49, 0.51, 1.5, 2.6, 7.0]], np.float32)
    up, down = np.zeros((2, 1, 6), np.int32)
    quantise(residual, np.ones(1, np.float32), up)
    quantise(-residual, np.ones(1, np.float32), down)
    assert up[0, [0, 1, 2, 4, 5]].tolist() == [0, 0, 1, 3, 7]
    np.testing.assert_array_equal(up, -down)


def test_what_is_too_large_stays_an_integer() -> None:
    """A symbol never wraps around; that one was cut short shows in the error."""
    residual = np.array([[1e9, -1e9, 1e12, -1e12, 1e20, -1e20, 3e38, -3e38]], np.float32)
    symbols = np.zeros((1, 8), np.int32)
    total = quantise(residual, np.ones(1, np.float32), symbols)
    assert symbols[0, :2].tolist() == [10**9, -(10**9)]
    assert symbols[0, 2:].tolist() == [LARGEST_SYMBOL, -LARGEST_SYMBOL] * 3
    assert total > 1e30


def test_dequantise() -> None:
    symbols = np.array([[3, -2], [0, 2**30]], np.int32)
    out = quantiser.dequantise(symbols, np.array([0.5, 0.25], np.float32))
    assert out.dtype == np.float32 and out.tolist() == [[1.5, -1], [0, 2.0**28]]
