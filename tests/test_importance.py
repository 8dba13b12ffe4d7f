from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqkv.engine import CacheError, importance
from seqkv.engine.importance import CLASSES, LARGEST_GAIN, LARGEST_SINK_GAIN, LEVELS, SINKS, SMALLEST_GAIN, EnergyTable

MIDDLE = LEVELS // 2


def test_classes_are_octaves_around_the_mean() -> None:
    received = np.array([[1.0] * SINKS + [2, 1, 0.5, 0.25, 0, 0.5 * (SINKS + 3)]], np.float32)
    received *= 8 / received.sum() * received.size / 8  # mean 1, whatever the unit
    expected = np.rint(np.log2(np.maximum(received[0, SINKS:] / received.mean(), 2.0**-20))) + MIDDLE
    classes = importance.classes(received)
    assert classes.dtype == np.uint8
    assert classes[0, :SINKS].tolist() == list(range(LEVELS, CLASSES))
    np.testing.assert_array_equal(classes[0, SINKS:], np.clip(expected, 0, LEVELS - 1))
    assert classes[0, SINKS + 4] == 0  # nothing received


def test_a_token_of_the_mean_is_in_the_middle_class() -> None:
    assert set(importance.classes(np.full((2, 9), 3.5, np.float32))[:, SINKS:].ravel().tolist()) == {MIDDLE}


@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**32 - 1), st.sampled_from([1e-20, 1e-3, 8, 1e20]))
def test_the_unit_does_not_matter(layers: int, tokens: int, seed: int, unit: float) -> None:
    received = np.exp(3 * np.random.default_rng(seed).standard_normal((layers, tokens))).astype(np.float32)
    classes = importance.classes(received)
    assert classes.shape == (layers, tokens) and classes.max() < CLASSES
    other = importance.classes((received * 2.0 ** np.rint(np.log2(unit))).astype(np.float32))
    np.testing.assert_array_equal(classes, other)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5])
def test_fewer_tokens_than_sinks(tokens: int) -> None:
    classes = importance.classes(np.ones((2, tokens), np.float32))
    assert classes[0].tolist() == [*range(LEVELS, LEVELS + SINKS), MIDDLE][:tokens]


def test_nothing_received_at_all_is_still_a_class() -> None:
    assert importance.classes(np.zeros((1, 10), np.float32))[0, SINKS:].tolist() == [0] * 6


@pytest.mark.parametrize(
    "given_", [[[1, 2], [3, 4], [5, 6]], np.ones((3, 2), np.float16), np.arange(6).reshape(3, 2)], ids=str
)
def test_checked_takes_numbers_of_any_kind(given_: Any) -> None:
    out = importance.checked(given_, 3, 2)
    assert out.dtype == np.float32 and out.shape == (3, 2)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (np.ones((2, 3)), r"3 layers, 2 tokens.*\(2, 3\)"),
        (np.float32(1), "3 layers"),
        (np.full((3, 2), np.nan), "finite"),
        (np.full((3, 2), -np.inf), "finite"),
        (np.full((3, 2), -1e-9), "not negative"),
    ],
)
def test_checked_refuses(given_: Any, message: str) -> None:
    with pytest.raises(CacheError, match=message):
        importance.checked(given_, 3, 2)


def table(energies: dict[int, float], layers: int = 2, tokens: int = 4000) -> EnergyTable:
    """Tokens of a few classes, equally many of each."""
    out = EnergyTable(layers)
    classes = np.tile(np.array(list(energies), np.uint8), (layers, tokens))
    out.add(classes, np.array([energies[c] for c in classes.ravel().tolist()]).reshape(1, *classes.shape).repeat(2, 0))
    return out


def test_gains_are_roots_of_energy_beside_the_mean() -> None:
    gains = table({8: 1.0, 10: 4.0, 12: 16.0}).gains()
    assert gains.shape == (2, 2, CLASSES)
    np.testing.assert_allclose(gains[:, :, [8, 10, 12]] ** 2 * 7, np.tile([1.0, 4.0, 16.0], (2, 2, 1)), rtol=0.02)
    # the unit of energy does not matter
    np.testing.assert_allclose(table({8: 1e-9, 10: 4e-9, 12: 16e-9}).gains(), gains, rtol=1e-6)


def test_a_class_not_met_lies_between_its_neighbours() -> None:
    gains = table({8: 1.0, 12: 16.0}).gains()
    assert (np.diff(gains[:, :, 8:13]) > 0).all()
    np.testing.assert_allclose(gains[:, :, :8], gains[:, :, 8:9].repeat(8, 2), rtol=0.02)


def test_gains_have_limits() -> None:
    gains = table({2: 1e-9, 10: 1.0, 18: 1e9, LEVELS: 1e16}).gains()
    assert gains.min() == SMALLEST_GAIN
    assert gains[:, :, :LEVELS].max() <= LARGEST_GAIN and gains.max() <= LARGEST_SINK_GAIN
    assert (gains[:, :, LEVELS] == LARGEST_SINK_GAIN).all()


def test_sinks_do_not_move_the_mean() -> None:
    plain, sinks = table({9: 1.0, 11: 4.0}), table({9: 1.0, 11: 4.0, LEVELS: 1e6})
    np.testing.assert_allclose(plain.gains()[:, :, :LEVELS], sinks.gains()[:, :, :LEVELS], rtol=1e-6)


def test_a_layer_that_hardly_met_a_class_leans_on_the_others() -> None:
    out = table({9: 1.0, 11: 4.0}, layers=3)
    out.add(np.full((3, 1), 13, np.uint8), np.array([[16.0], [16.0], [16e6]])[None].repeat(2, 0))
    gains = out.gains()
    assert (gains[:, 2, 13] < LARGEST_GAIN).all() or gains[0, 2, 13] == LARGEST_GAIN
    assert gains[0, 0, 13] > 2 * gains[0, 0, 11]  # all layers' mean of the class, which its own one token is not


def test_no_energy_at_all() -> None:
    gains = table({9: 0.0, 11: 0.0}).gains()
    assert np.isfinite(gains).all() and (gains >= SMALLEST_GAIN).all()
    assert np.isfinite(EnergyTable(2).gains()).all()


def test_a_part_that_begins_later_has_no_sinks() -> None:
    received = np.array([[8.0, 1, 1, 1, 1, 1, 1, 1]], np.float32)
    assert importance.sinks(np.arange(3)) == 3 and importance.sinks(np.arange(9)) == SINKS
    assert importance.sinks(np.arange(256, 264)) == 0
    classes = importance.classes(received, sinks=0)
    assert classes.tolist() == [[MIDDLE + 2] + [MIDDLE - 1] * 7]  # multiples of the mean of all, 15 / 8
