from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqkv import engine
from seqkv.engine import CacheError, Profile, rate_control
from seqkv.engine.quantiser import step_size
from seqkv.engine.rate_control import COARSEST, ESTIMATED, FINEST, TRIES, check, kl_at, search, search_bits, step_for
from tests.conftest import Sample

CURVE = np.array([[120.0, -5.0], [136.0, -7.0], [160.0, -11.0]])  # step index, log2 KL


@pytest.mark.parametrize(("index", "log_kl"), CURVE)
def test_the_points_of_a_curve(index: float, log_kl: float) -> None:
    assert step_for(CURVE, 2.0**log_kl) == index
    assert kl_at(CURVE, int(index)) == pytest.approx(2.0**log_kl)


def test_between_and_beyond_the_points() -> None:
    assert step_for(CURVE, 2.0**-6) == 128 and step_for(CURVE, 2.0**-8) == 142
    assert step_for(CURVE, 2.0**-1) == 88 and step_for(CURVE, 2.0**-13) == 172  # along the last slopes
    assert kl_at(CURVE, 88) == pytest.approx(0.5)
    assert isinstance(step_for(CURVE, 0.01), int) and isinstance(kl_at(CURVE, 100), float)


@given(st.floats(1e-12, 1e6), st.floats(1e-12, 1e6))
def test_less_loss_is_never_a_coarser_step(a: float, b: float) -> None:
    assert (step_for(CURVE, min(a, b))) >= step_for(CURVE, max(a, b))
    assert COARSEST <= step_for(CURVE, a) <= FINEST


@given(st.floats(2.0**-60, 2.0**30))
def test_the_step_has_the_loss(kl: float) -> None:
    """As near as steps are apart."""
    assert kl_at(CURVE, step_for(CURVE, kl)) == pytest.approx(kl, rel=0.1)


@pytest.mark.parametrize("kl", [1e-300, 5e-324, 1e300, 1.7e308])
def test_any_positive_loss_has_a_step(kl: float) -> None:
    index = step_for(CURVE, kl)
    assert index in (COARSEST, FINEST) and np.isfinite(kl_at(CURVE, index))


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), -float("inf")])
def test_no_other_number_is_a_loss_or_a_step(value: float) -> None:
    with pytest.raises(ValueError, match="kl must be a positive number"):
        check(value, None)
    with pytest.raises(ValueError, match="step must be a positive number"):
        check(0.01, value)


@pytest.mark.parametrize("step", [2.0**65, 2.0**-65, 1e-300, 1e300])
def test_steps_have_a_range(step: float) -> None:
    with pytest.raises(ValueError, match="out of range"):
        check(None, step)


def test_what_makes_sense() -> None:
    accepted: list[tuple[Any, Any]] = [(0.01, None), (1e-9, None), (None, 1.0), (0.01, step_size(600)), (1, 1)]
    for kl, step in accepted:
        check(kl, step)
    assert rate_control.FINEST == -rate_control.COARSEST


class Loss:
    """A loss that falls by an octave every eight steps, a factor away from what the curve says."""

    def __init__(self, factor: float, wobble: float = 0.0) -> None:
        self.factor, self.wobble, self.asked = factor, wobble, list[int]()

    def __call__(self, index: int) -> float:
        self.asked.append(index)
        return self.at(index)

    def at(self, index: int) -> float:
        return float(kl_at(CURVE, index) * self.factor * 2.0 ** (self.wobble * np.sin(37.0 * index)))


@given(st.floats(0.05, 20.0), st.floats(0.001, 0.1), st.floats(0.0, 0.2))
def test_a_step_is_found_that_loses_what_was_asked(factor: float, kl: float, wobble: float) -> None:
    loss = Loss(factor, wobble)
    index = search(CURVE, kl, loss)
    assert kl / 1.6 <= loss.at(index) <= kl and index in loss.asked and len(loss.asked) <= TRIES


def test_a_loss_as_expected_takes_few_tries() -> None:
    loss = Loss(1.0)
    search(CURVE, 0.01, loss)
    assert len(loss.asked) <= 2


def test_a_loss_that_does_not_fall_is_an_error() -> None:
    with pytest.raises(CacheError, match=r"kl 0.01 was not reached: 0.5"):
        search(CURVE, 0.01, lambda index: 0.5)


def test_the_finest_step_may_lose_too_much() -> None:
    assert step_for(CURVE, 1e-300) == FINEST
    with pytest.raises(CacheError, match=r"was not reached: 0\.5"):
        search(CURVE, 1e-300, lambda index: 0.5)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_a_loss_that_is_none(wrong: float) -> None:
    with pytest.raises(CacheError, match="measured loss"):
        search(CURVE, 0.01, lambda index: wrong)


def test_a_cache_whose_importance_is_estimated_gets_a_finer_step(
    profile: Profile, sample: Callable[..., Sample]
) -> None:
    one = sample(64)

    def coded(importance: Any, **target: float) -> tuple[int, float]:
        about = engine.inspect(engine.encode(one.kv, one.probs, profile=profile, importance=importance, **target))
        return about["steps"][0], about["kl"]["expected"]

    observed, estimated = coded(one.importance, kl=0.01), coded(None, kl=0.01)
    assert estimated[0] < observed[0]
    assert estimated[1] == pytest.approx(observed[1], rel=0.1)
    assert coded(None, step=0.01)[1] == pytest.approx(ESTIMATED * coded(one.importance, step=0.01)[1], rel=0.01)


@given(st.floats(0.02, 20.0), st.floats(0.04, 0.08), st.floats(0.0, 0.02))
def test_a_step_is_found_that_takes_the_bits_given(bits: float, slope: float, wobble: float) -> None:
    def rate(index: int) -> float:
        return float(0.3 * 2.0 ** (slope * (index - 140) + wobble * np.sin(37.0 * index)))

    index = search_bits(CURVE, bits, rate)
    assert bits / 1.15 <= rate(index) <= bits


def test_too_few_bits_are_an_error() -> None:
    with pytest.raises(CacheError, match=r"0\.001 bits a value were not reached: 0\.02"):
        search_bits(CURVE, 0.001, lambda index: 0.02)


@pytest.mark.parametrize("known", [True, False])
def test_a_cache_in_so_many_bits(known: bool, profile: Profile, sample: Callable[..., Sample]) -> None:
    one, given = sample(600), profile if known else None
    streams = [
        engine.encode(one.kv, one.probs, profile=given, bits=bits, importance=one.importance) for bits in (4.0, 8.0)
    ]
    for stream, bits in zip(streams, (4.0, 8.0), strict=True):
        assert bits / 1.1 < 8 * len(stream) / one.kv.values_count <= bits
        assert engine.inspect(stream)["kl"]["requested"] is None
    coarse, fine = (engine.inspect(stream)["steps"][0] for stream in streams)
    assert fine < coarse


def test_bits_go_with_nothing_else(sample: Callable[..., Sample]) -> None:
    one = sample(8)
    for options, message in (
        ({"step": 0.01}, "one of step and bits"),
        ({"measure": lambda kv: 0.0}, "to reach a kl"),
        ({"tier": "lossless"}, 'bits are of tier="near"'),
    ):
        with pytest.raises(ValueError, match=message):
            engine.encode(one.kv, one.probs, bits=2.0, **options)
    with pytest.raises(ValueError, match="bits must be a positive number"):
        engine.encode(one.kv, one.probs, bits=-1.0)
