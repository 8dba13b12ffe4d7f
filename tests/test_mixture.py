from __future__ import annotations

import warnings

import numpy as np
import pytest
from numpy.typing import NDArray

from seqkv.engine import CalibrationError
from seqkv.engine.mixture import COUNTS, SEQUENCES, SHORT, cut, default_pieces, split

poor_text_is_meant = pytest.mark.filterwarnings("ignore:the calibration text will not do")


def tokenize(text: str) -> NDArray[np.int64]:
    """Characters."""
    return np.array([ord(c) for c in text], np.int64)


def numbers(start: int, count: int) -> str:
    return " ".join(str(n) for n in range(start, start + count))


@pytest.fixture(scope="module")
def default() -> dict[str, list[str]]:
    return default_pieces()


def test_default_mixture_has_enough_pieces_of_each_kind(default: dict[str, list[str]]) -> None:
    assert set(default) - {"dialogue"} == set(COUNTS) - {"dialogue"}  # that one needs another package
    for kind, texts in default.items():
        assert len(set(texts)) >= 20, kind
        assert all(text.strip() for text in texts), kind


def test_default_mixture_is_the_same_each_time(default: dict[str, list[str]]) -> None:
    assert default_pieces() == default


def test_default_mixture_holds_many_scripts(default: dict[str, list[str]]) -> None:
    text = "".join(default["chinese"] + default["arabic"] + default["hindi"] + default["russian"])
    for name, low, high in (("Han", 0x4E00, 0x9FFF), ("Arabic", 0x600, 0x6FF), ("Devanagari", 0x900, 0x97F)):
        assert sum(low <= ord(c) <= high for c in text) > 1000, name


@pytest.mark.parametrize("length, times", [(1536, 1), (SHORT, 2), (768, 2)])
def test_default_mixture_gives_what_counts_ask_for(length: int, times: int, default: dict[str, list[str]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sequences = cut(default, tokenize, length)
    found = {kind: sum(k == kind for k, _ in sequences) for kind in default}
    assert found == {kind: times * COUNTS[kind] for kind in default}
    assert len({kind for kind, _ in sequences[: SEQUENCES // 2]}) > len(default) / 2  # kinds take turns


def test_default_mixture_without_the_optional_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "dialogue" not in default_pieces()


@poor_text_is_meant
def test_cut_takes_text_of_one_kind_spread_evenly() -> None:
    pieces = {
        "low": [numbers(100 * n, 100) for n in range(30)],
        "high": [numbers(100_000 + 100 * n, 100) for n in range(30)],
    }
    sequences = cut(pieces, tokenize, 3000, {"low": 3, "high": 4})
    assert [len(ids) for _, ids in sequences] == [3000] * 7
    assert sum(kind == "low" for kind, _ in sequences) == 3
    texts = {kind: "\n\n".join(p) + "\n\n" for kind, p in pieces.items()}
    starts = {"low": [], "high": []}  # type: dict[str, list[int]]
    for kind, ids in sequences:
        starts[kind].append(texts[kind].index("".join(map(chr, ids))))
    for kind, found in starts.items():
        gaps = np.diff([*found, len(texts[kind]) - 3000])
        assert found[0] == 0 and (gaps[:-1] > 3000).all() and np.ptp(gaps[:-1]) <= 1 and gaps[-1] == 0


@poor_text_is_meant
def test_cut_begins_every_sequence_as_the_tokenizer_has_it() -> None:
    pieces = {"a": [numbers(100 * n, 100) for n in range(60)], "b": ["x" * 2996]}
    sequences = cut(pieces, tokenize, 3000, {"a": 5, "b": 1}, bos=[7, 8])
    assert len(sequences) == 6 and all(len(ids) == 3000 and ids[:2].tolist() == [7, 8] for _, ids in sequences)
    (whole,) = (ids for kind, ids in sequences if kind == "b")
    assert "".join(map(chr, whole[2:])) == "x" * 2996 + "\n\n"


@poor_text_is_meant
def test_cut_does_not_begin_what_is_begun() -> None:
    """As a chat's template does, which names the token in its text."""
    plain = [numbers(100 * n, 100) for n in range(60)]
    chats = {"a": ["\x07" + text for text in plain]}
    for (_, one), (_, other) in zip(
        cut(chats, tokenize, 3000, {"a": 5}, bos=[7]), cut({"a": plain}, tokenize, 3000, {"a": 5}, bos=[7]), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@poor_text_is_meant
def test_cut_gives_fewer_where_text_is_short() -> None:
    pieces = {"a": [numbers(100 * n, 100) for n in range(60)], "b": [numbers(0, 1500)], "c": ["short"]}
    found = [kind for kind, _ in cut(pieces, tokenize, 3000, {"a": 5, "b": 5, "c": 5})]
    assert (found.count("a"), found.count("b"), found.count("c")) == (5, 2, 0)


@poor_text_is_meant
def test_cut_shares_kinds_of_ones_own_by_tokens() -> None:
    pieces = {
        "mine": [numbers(1000 * n, 1000) for n in range(60)],
        "yours": [numbers(1000 * n, 1000) for n in range(30)],
    }
    found = [kind for kind, _ in cut(pieces, tokenize, 1000)]
    assert abs(found.count("mine") - 2 * found.count("yours")) <= 2
    assert abs(len(found) - 2 * SEQUENCES) <= 2


@poor_text_is_meant
def test_cut_leaves_repeated_texts_out() -> None:
    text = numbers(0, 500)
    (_, once), *_ = cut({"a": [text] * 50 + [numbers(500, 2000)]}, tokenize, 4000, {"a": 1})
    assert "".join(map(chr, once)).count(text) == 1


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([numbers(1000 * n, 1000) for n in range(10)], "10 different texts"),
        ([numbers(1000 * n, 100) for n in range(25)], "tokens, at least 20,000"),
        (["the same again and again, " * (60 + n) for n in range(25)], "repeats itself"),
    ],
)
def test_cut_warns_of_poor_text(pieces: list[str], said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        cut({"text": pieces}, tokenize, 1000)


def test_cut_refuses_text_shorter_than_a_sequence() -> None:
    with pytest.raises(CalibrationError, match="one sequence of 1536 tokens"):
        cut({"text": ["too short"]}, tokenize, 1536)
    with pytest.raises(CalibrationError):
        cut({}, tokenize, 1536)
    with pytest.raises(CalibrationError, match="nothing but the 2"):
        cut({"text": ["long enough"]}, tokenize, 2, bos=[1, 2])


def test_split() -> None:
    text = "\n".join(f"line {n} of some text" for n in range(200))
    pieces = split(text, 1000)
    assert "\n".join(pieces) == text and all(1000 <= len(piece) < 1100 for piece in pieces[:-1])
    assert split("one\n%%\ntwo\n\nmore\n") == ["one", "two\n\nmore"]
    assert split(" \n\n") == []
