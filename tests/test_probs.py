from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqkv.engine import ProbsError, TokenProbs

VOCAB = 50


def logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, vocab), dtype=np.float32) * 3


def softmax(x: Any) -> Any:
    p = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


IDS = np.random.default_rng(1).integers(0, VOCAB, 7)


def test_row_i_predicts_token_i() -> None:
    x = logits(7)
    probs = TokenProbs.from_logits(x, IDS, k=5)
    dense = softmax(x)
    assert probs.tokens == 7 and probs.k == 5
    assert probs.surprisal[0] == pytest.approx(np.log2(VOCAB))
    assert probs.topk_ids[0].tolist() == [0, 1, 2, 3, 4] and probs.topk_probs[0] == pytest.approx(1 / VOCAB)
    for i in range(1, 7):
        assert probs.surprisal[i] == pytest.approx(-np.log2(dense[i - 1, IDS[i]]), rel=1e-4)
        order = np.argsort(-dense[i - 1])[:5]
        assert probs.topk_ids[i].tolist() == order.tolist()
        np.testing.assert_allclose(probs.topk_probs[i], dense[i - 1, order], rtol=1e-4)


def test_the_last_row_of_logits_is_not_used() -> None:
    x = logits(7)
    whole, short = TokenProbs.from_logits(x, IDS), TokenProbs.from_logits(x[:-1], IDS)
    assert np.array_equal(whole.topk_ids, short.topk_ids) and np.array_equal(whole.surprisal, short.surprisal)
    x[-1] = np.nan
    TokenProbs.from_logits(x, IDS)


def test_probabilities_are_taken_as_they_are() -> None:
    dense = np.vstack([np.full(VOCAB, 1 / VOCAB), softmax(logits(6))])
    a, b = TokenProbs.from_probs(dense, IDS), TokenProbs.from_logits(logits(6), IDS)
    assert np.array_equal(a.topk_ids, b.topk_ids)
    np.testing.assert_allclose(a.topk_probs, b.topk_probs, rtol=1e-4)
    np.testing.assert_allclose(a.surprisal, b.surprisal, rtol=1e-4)


def test_tokens_alone() -> None:
    probs = TokenProbs.from_tokens(IDS)
    assert probs.tokens == 7 and probs.k == 0 and not probs.surprisal.any()
    assert probs.token_ids.dtype == np.int64 and probs.topk_ids.dtype == np.int32


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_torch_logits(name: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor(logits(7)).to(getattr(torch, name)).requires_grad_(True)
    a = TokenProbs.from_logits(x, torch.tensor(IDS))
    b = TokenProbs.from_logits(x.detach().float().numpy(), IDS)
    assert np.array_equal(a.topk_ids, b.topk_ids) and np.array_equal(a.surprisal, b.surprisal)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = logits(7)
    whole = TokenProbs.from_logits(x, IDS)
    monkeypatch.setattr("seqkv.engine.probs._CHUNK", 2 * VOCAB)
    parts = TokenProbs.from_logits(x, IDS)
    assert np.array_equal(whole.topk_ids, parts.topk_ids) and np.array_equal(whole.surprisal, parts.surprisal)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(1, 40))
def test_equal_probabilities_are_ordered_by_id(row: list[int], k: int) -> None:
    probs = TokenProbs.from_logits(np.array([row], np.float32), [0, 1], k=k)
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    assert probs.topk_ids[1].tolist() == expected


def test_a_token_without_probability_has_finite_surprisal() -> None:
    x = logits(1)
    x[0, 3] = -np.inf
    assert TokenProbs.from_logits(x, [0, 3]).surprisal[1] == 126
    certain = np.zeros((1, 4))
    certain[0, 2] = 1
    assert TokenProbs.from_probs(certain, [1]).surprisal[0] == 126
    assert TokenProbs.from_probs(certain, [2]).surprisal[0] == 0


def changed(x: Any, row: int, column: Any, value: float) -> Any:
    x = x.copy()
    x[row, column] = value
    return x


@pytest.mark.parametrize(
    ("x", "ids", "message"),
    [
        (logits(5), IDS, "expected 7 or 6 rows"),
        (logits(8), IDS, "expected 7 or 6 rows"),
        (logits(7)[None], IDS, "one sequence"),
        (logits(7), IDS[None], "one sequence"),
        (logits(0), [], "at least one token"),
        (logits(7), IDS.astype(float), "expected integers"),
        (logits(7), np.where(np.arange(7) == 4, VOCAB, IDS), "token 4 has id 50"),
        (logits(7), np.where(np.arange(7) == 4, -1, IDS), "between 0"),
        (changed(logits(7), 3, 2, np.nan), IDS, "row 3"),
        (changed(logits(7), 2, 2, np.inf), IDS, "row 2"),
        (changed(logits(7), 2, slice(None), -np.inf), IDS, "row 2"),
    ],
)
def test_bad_logits(x: Any, ids: Any, message: str) -> None:
    with pytest.raises(ProbsError, match=message):
        TokenProbs.from_logits(x, ids)


DENSE = softmax(logits(7))


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (DENSE[:-1], "expected 7 rows"),
        (DENSE * 1.01, "row 0 sums to 1.01"),
        (changed(DENSE, 5, 0, 0.9), "row 5 sums"),
        (changed(changed(DENSE, 4, 0, -0.5), 4, 1, DENSE[4, :2].sum() + 0.5), "row 4 sums to 1 with minimum -0.5"),
        (changed(DENSE, 3, 0, np.nan), "row 3 sums to nan"),
        (logits(7), "from_logits"),
    ],
)
def test_bad_probabilities(p: Any, message: str) -> None:
    with pytest.raises(ProbsError, match=message):
        TokenProbs.from_probs(p, IDS)


def test_k_must_be_positive() -> None:
    with pytest.raises(ProbsError, match="k must be"):
        TokenProbs.from_logits(logits(7), IDS, k=0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("topk_ids", [[0, 1, 2]], "expected .2, k."),
        ("topk_ids", [[0, 1], [3, 3]], "twice"),
        ("topk_ids", [[0, 1], [-3, 3]], "negative"),
        ("topk_probs", [[0.5, 0.4], [0.8, 0.3]], "at most 1"),
        ("topk_probs", [[0.5, 0.4], [0.8, np.nan]], "at most 1"),
        ("topk_probs", [[0.5, 0.4], [0.8, -0.1]], "negative"),
        ("surprisal", [1.0], "expected .2."),
        ("surprisal", [1.0, -1.0], "negative"),
        ("surprisal", [1.0, np.inf], "finite"),
    ],
)
def test_the_constructor_checks(field: str, value: Any, message: str) -> None:
    good: dict[str, Any] = {
        "token_ids": [4, 5],
        "topk_ids": [[0, 1], [2, 3]],
        "topk_probs": [[0.5, 0.4], [0.8, 0.1]],
        "surprisal": [1.0, 2.0],
    }
    assert TokenProbs(**good).topk_probs.dtype == np.float32
    with pytest.raises(ProbsError, match=message):
        TokenProbs(**(good | {field: value}))
