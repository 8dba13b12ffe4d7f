from __future__ import annotations

import numpy as np
import pytest

from seqkv.engine import ProbsError, surprisal


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 30.0])
def test_intervals_tile_and_hold_their_tokens(spread: float) -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal(200) * spread).astype(np.float32)
    logits[3] = -np.inf
    end = 0
    for token in range(200):
        start, size, total = surprisal.interval(logits, token)
        assert start == end and size >= 1 and total == surprisal.total(logits)
        for place in (start, start + size - 1):
            assert surprisal.token_at(logits, place) == (token, start, size)
        end = start + size
    assert end == total


def test_costs_next_to_nothing() -> None:
    """KL from the model's distribution to the integers', at the vocabulary of a large model."""
    rng = np.random.default_rng(1)
    for scale in (1.0, 2.0, 4.0):
        logits = (rng.standard_normal(128_000) * scale).astype(np.float32)
        p = np.exp(logits.astype(np.float64) - logits.max())
        p /= p.sum()
        q = np.array([surprisal._size(x, logits.max(), surprisal._SIZES) for x in logits], np.float64)
        assert 0 <= (p * np.log2(p / (q / q.sum()))).sum() < 0.005


def test_an_added_constant_changes_nothing() -> None:
    logits = np.round(np.random.default_rng(2).standard_normal(50) * 64).astype(np.float32) / 64
    assert surprisal.interval(logits, 7) == surprisal.interval(logits + 32, 7)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_refuses_what_is_no_distribution(bad: float) -> None:
    logits = np.zeros(10, np.float32)
    logits[4] = bad
    for call in (surprisal.interval, surprisal.token_at):
        with pytest.raises(ProbsError, match="NaN or \\+inf"):
            call(logits, 0)
    with pytest.raises(ProbsError, match="nothing but"):
        surprisal.total(np.full(10, -np.inf, np.float32))


@pytest.mark.parametrize("token", [-1, 10])
def test_refuses_what_is_no_token(token: int) -> None:
    with pytest.raises(ProbsError, match="outside the 10"):
        surprisal.interval(np.zeros(10, np.float32), token)
