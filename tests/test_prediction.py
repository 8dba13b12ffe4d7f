from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqkv.engine import ProbsError, TokenProbs, prediction

RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((30, 5)).astype(np.float16)
IDS = np.array([3, 29, 3, 0, 7, 3])


@given(st.integers(0, 60), st.sampled_from(prediction.PREDICTORS), st.integers(0, 4))
def test_only_what_is_decoded_predicts(block: int, predictor: str, depth: int) -> None:
    sources = list(prediction.sources(block, predictor, depth))
    assert len(set(sources)) == len(sources)
    assert all(0 <= source < block for source in sources)
    layer, is_value = divmod(block, 2)
    assert all(layer - source // 2 <= depth for source in sources)
    if predictor in ("layers", "all"):
        expected = {2 * (layer - back) + side for back in range(1, depth + 1) for side in (0, 1)}
        assert set(sources) == {b for b in expected if b >= 0} | ({block - 1} if is_value else set())
    else:
        assert not sources


def test_the_ladder_uses_tokens_where_it_says() -> None:
    used = [prediction.uses_token(predictor) for predictor in prediction.PREDICTORS]
    assert dict(zip(prediction.PREDICTORS, used, strict=True)) == {
        "mean": False,
        "expectation": True,
        "token": True,
        "layers": False,
        "all": True,
    }


@pytest.mark.parametrize("predictor", ["token", "all"])
def test_each_distinct_token_has_one_row(predictor: str) -> None:
    rows, index = prediction.token_rows(TABLE, TokenProbs.from_tokens(IDS), predictor)
    assert rows.shape == (4, 5) and rows.dtype == np.float32
    np.testing.assert_array_equal(rows[index], TABLE[IDS].astype(np.float32))


@pytest.mark.parametrize("predictor", ["mean", "layers"])
def test_predictors_without_tokens_have_rows_of_no_width(predictor: str) -> None:
    rows, index = prediction.token_rows(np.zeros((0, 0), np.float16), TokenProbs.from_tokens(IDS), predictor)
    assert rows[index].shape == (6, 0)


def test_the_expectation_is_over_the_candidates() -> None:
    probs = TokenProbs.from_logits(3 * RNG.standard_normal((6, 30)), IDS, k=8)
    rows, index = prediction.token_rows(TABLE, probs, "expectation")
    full = np.zeros((6, 30))
    np.put_along_axis(full, probs.topk_ids.astype(int), probs.topk_probs, axis=1)
    np.testing.assert_allclose(rows[index], full @ TABLE.astype(np.float64), atol=1e-5)


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 16), st.integers(0, 2**32 - 1))
def test_accumulate(tokens: int, k: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, weights = rng.standard_normal((9, width), np.float32), rng.random((tokens, k), np.float32)
    index = rng.integers(0, 9, (tokens, k))
    out = prediction.accumulate(rows, index, weights)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, np.einsum("tk,tkc->tc", weights, rows[index]), rtol=1e-4, atol=1e-4)
    # each token by itself: the same in any part of a cache, bit for bit
    np.testing.assert_array_equal(prediction.accumulate(rows, index[-1:], weights[-1:]), out[-1:])


@pytest.mark.parametrize("predictor", ["token", "all", "expectation"])
def test_ids_outside_the_table_are_refused(predictor: str) -> None:
    ids: Any = np.array([1, 30])
    probs = TokenProbs.from_probs(np.full((2, 31), 1 / 31), ids, k=31)
    with pytest.raises(ProbsError, match="id 30 is outside the profile's vocabulary of 30"):
        prediction.token_rows(TABLE, probs, predictor)


def test_the_expectation_needs_candidates() -> None:
    with pytest.raises(ProbsError, match="from_logits"):
        prediction.token_rows(TABLE, TokenProbs.from_tokens(IDS), "expectation")
