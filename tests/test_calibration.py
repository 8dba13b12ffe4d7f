"""Calibration of the tiny model of conftest.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqkv import engine
from seqkv.engine import CalibrationError, Profile, calibrate, prediction

pytestmark = pytest.mark.filterwarnings("ignore:the calibration text will not do")


def texts(model: Any, pieces: int = 4, kinds: int = 3) -> dict[str, list[str]]:
    return {f"kind {k}": [model.text(100 * k + i, 120) for i in range(pieces)] for k in range(kinds)}


def like(model: Any, **sizes: Any) -> Any:
    return type(model)(**sizes)


def test_a_profile_describes_its_model(profile: Profile, model: Any) -> None:
    assert profile.model == "linear" and profile.predictor == "all"
    assert profile.shape == ((2, 8, 6),) * 3
    np.testing.assert_array_equal(profile.table, model.table.astype(np.float16))
    assert profile.info["context"] == model.context
    assert set(profile.info["fitted"]) == set(profile.info["checked"]) == {f"kind {k}" for k in range(5)}


def test_the_ladder_explains_more_and_more(profiles: Callable[[str], Profile]) -> None:
    explained = {name: np.array(profiles(name).info["explained"]) for name in prediction.PREDICTORS}
    assert all(len(e) == 6 and (e < 1).all() and (e > -0.1).all() for e in explained.values())
    mean = {name: e.mean() for name, e in explained.items()}
    assert abs(mean["mean"]) < 0.01 < mean["expectation"] < mean["token"] < mean["layers"] < mean["all"]
    # the first block has no layers before it, and values follow from keys
    assert explained["all"][0] == pytest.approx(explained["token"][0], abs=0.02)
    assert (explained["all"] >= explained["token"] - 0.02).all() and (
        explained["all"] >= explained["layers"] - 0.02
    ).all()


def test_the_same_text_gives_the_same_profile(model: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        calibrate(model, texts(model)).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_progress_goes_from_0_to_1_and_nothing_is_left_behind(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[tuple[float, str]] = []
    calibrate(model, texts(model), progress=lambda part, message: seen.append((part, message)))
    parts = [part for part, _ in seen]
    assert parts == sorted(parts) and parts[0] == 0 and parts[-1] == 1 and len(set(parts)) > 10
    assert all(message for _, message in seen)
    assert list(tmp_path.iterdir()) == []


def test_the_transform_makes_coefficients_independent(model: Any, profile: Profile) -> None:
    """Largest first, and uncorrelated, on text that was not calibrated on."""
    for block in range(6):
        place = profile.scale[profile.starts[block] : profile.starts[block + 1]].astype(int)
        assert (np.diff(place) <= 64).all() and place[0] > place[-1]  # magnitudes, not variances: a class of slack
        np.testing.assert_allclose(profile.forward[block] @ profile.maps[block][1], np.eye(len(place)), atol=1e-3)


def test_what_is_read_most_is_quantised_finest(profile: Profile) -> None:
    gains = profile.gains[:, :, 6:15].astype(int)
    assert (np.diff(gains, axis=2) >= -1).all() and (gains[:, :, -1] > gains[:, :, 0] + 8).all()


@pytest.mark.parametrize("predictor", prediction.PREDICTORS)
@pytest.mark.parametrize("layers", [1, 2])
def test_models_of_few_layers(layers: int, predictor: str, model: Any) -> None:
    small = like(model, layers=layers)
    profile = calibrate(small, texts(small), predictor=predictor)
    ids = small.tokenize(small.text(7, 40))
    kv, attention = small.cache(ids)
    stream = engine.encode(kv, small.probs(ids), profile=profile, step=2.0**-24, importance=attention)
    decoded = engine.decode(stream, profile=profile)
    for one, other in zip(kv.keys + kv.values, decoded.keys + decoded.values, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-2)


@pytest.mark.parametrize("sizes", [{"heads": 1}, {"key": 6, "value": 8}, {"heads": 1, "key": 2, "value": 1}], ids=str)
def test_models_of_other_shapes(sizes: dict[str, int], model: Any) -> None:
    other = like(model, **sizes)
    profile = calibrate(other, texts(other))
    assert profile.shape == ((other.heads, other.key, other.value),) * 3


def test_text_of_one_kind_is_enough(model: Any) -> None:
    profile = calibrate(model, texts(model, pieces=30, kinds=1))
    assert profile.info["fitted"] and profile.info["checked"]


def test_a_context_of_one_token_is_refused(model: Any) -> None:
    other = like(model)
    other.context = 1
    with pytest.raises(CalibrationError, match="at least 2"):
        calibrate(other, texts(other))


@pytest.mark.parametrize("context, checks", [(1024, 5), (512, 10)])
def test_short_texts_are_checked_with_and_sampled_twice_as_often(
    context: int, checks: int, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = like(model)
    other.context, other.continuation = context, context // 2
    fisher, sampled = other.fisher, []
    monkeypatch.setattr(other, "fisher", lambda ids, kv: sampled.append(1) or fisher(ids, kv))
    pieces = {f"kind {k}": [other.text(100 * k + i, context * 3 // 2) for i in range(10)] for k in range(4)}
    profile = calibrate(other, pieces)
    assert len(profile.info["checked"]) == checks
    assert len(sampled) == min(14 * checks // 5, len(profile.info["fitted"]))


def test_sequences_begin_as_texts_do(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other, read = like(model), []
    monkeypatch.setattr(type(other), "bos", np.array([3, 1]))
    prefill = other.prefill
    other.prefill = lambda ids: read.append(ids[:2].tolist()) or prefill(ids)
    calibrate(other, texts(other))
    assert read and all(ids == [3, 1] for ids in read)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 30.0])
def test_how_much_predictions_depend_on_the_cache_does_not_matter(scale: float, model: Any) -> None:
    """A cache of large values that are read with small weights, or the other way round; within float16, as it is."""
    other = like(model)
    for maps in other.maps:
        for name in ("keys to logits", "values to logits"):
            maps[name] *= scale
    profile = calibrate(other, texts(other))
    ids = other.tokenize(other.text(7, 96))
    kv, probs, attention = other.prefill(ids)
    decoded = engine.decode(
        engine.encode(kv, probs, profile=profile, step=2.0**-22 * scale, importance=attention), profile=profile
    )
    for one, two in zip(kv.keys + kv.values, decoded.keys + decoded.values, strict=True):
        np.testing.assert_allclose(one, two, atol=0.05)


def test_values_that_never_change(model: Any) -> None:
    """Channels that are always 0, as a model with padded heads has them."""
    still = like(model)
    for maps in still.maps:
        maps["token to keys"][:, :2] = maps["state to keys"][:, :2] = 0
        maps["token to values"][:] = maps["state to values"][:] = maps["keys to values"][:] = 0
        maps["values to logits"][:] = 0
    plain = still.plain

    def silent(ids: Any) -> Any:
        keys, values, attention = plain(ids)
        for key in keys:
            key[:, :2] = 0
        return keys, [value * 0 for value in values], attention

    still.plain = silent
    profile = calibrate(still, texts(still))
    ids = still.tokenize(still.text(7, 40))
    kv, attention = still.cache(ids)
    decoded = engine.decode(
        engine.encode(kv, still.probs(ids), profile=profile, step=2.0**-20, importance=attention), profile=profile
    )
    for one, other in zip(kv.keys + kv.values, decoded.keys + decoded.values, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05)


class Unmoved:
    """A model whose measured losses are what they are told to be."""

    def __init__(self, model: Any, losses: Callable[[int], float]) -> None:
        self._model, self._losses, self._calls = model, losses, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def divergence(self, ids: Any, kv: Any, reference: Any) -> tuple[float, float]:
        self._calls += 1
        return self._losses(self._calls), 1.0


@pytest.mark.parametrize(
    "losses",
    [
        lambda call: 0.0,
        lambda call: 0.01,
        lambda call: 0.001 * call,
        lambda call: 10.0 ** -(call % 3),
        lambda call: -1e-9,
    ],
    ids=["none", "constant", "rising", "noise", "below zero"],
)
def test_less_loss_is_a_finer_step_whatever_was_measured(
    losses: Callable[[int], float], model: Any, sample: Callable[..., Any]
) -> None:
    """Few and short texts measure little but noise; what is asked for must still go the right way."""
    try:
        profile = calibrate(Unmoved(model, losses), texts(model))
    except CalibrationError:
        return
    s = sample(40)
    streams = [engine.encode(s.kv, s.probs, profile=profile, kl=kl) for kl in (0.1, 0.01, 0.001)]
    steps = [engine.inspect(stream)["steps"][0] for stream in streams]
    assert steps[0] > steps[1] > steps[2]


def test_too_little_text(model: Any) -> None:
    with pytest.raises(CalibrationError):
        calibrate(model, {"text": [model.text(0, 10)]})
    with pytest.raises(CalibrationError, match=r"2 sequences.*at least 3"):
        calibrate(model, {"text": [model.text(0, 200)]})
    with pytest.raises(CalibrationError):
        calibrate(model, {})


def test_a_predictor_that_is_not_there(model: Any) -> None:
    with pytest.raises(CalibrationError, match=r"mean, expectation, token, layers, all.*oracle"):
        calibrate(model, texts(model), predictor="oracle")


def test_poor_text_is_warned_of(model: Any) -> None:
    with pytest.warns(UserWarning, match="12 different texts.*tokens"):
        calibrate(model, texts(model))
