from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqkv.engine import ProbsError
from seqkv.engine.align import MOST, Aligner, Run
from seqkv.engine.errors import SessionError

HUGE = 2**31 - 1

# made of the same few pieces, so that there are long runs at other offsets; some of one token alone
pieces = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9], [7] * 5, [HUGE, 0], [5, 6, 7], [8]]
sessions = st.lists(st.sampled_from(pieces), max_size=5).map(lambda parts: [token for part in parts for token in part])


def maximal(new: list[int], old: list[int], min_run: int) -> list[tuple[int, int, int]]:
    """(start, end, start in old) of all runs that cannot be extended."""
    out = []
    for i in range(len(new)):
        for j in range(len(old)):
            n = 0
            while i + n < len(new) and j + n < len(old) and new[i + n] == old[j + n]:
                n += 1
            if n >= min_run and (i == 0 or j == 0 or new[i - 1] != old[j - 1]):
                out.append((i, i + n, j))
    return out


def in_common(new: list[int], old: list[int], min_run: int) -> int:
    """k-grams of new that are among the indexed ones of old."""
    k = (min_run + 1) // 2
    grams = [old[j : j + k] for j in range(0, len(old) - k + 1, min_run - k + 1)]
    return sum(new[i : i + k] == gram for i in range(len(new) - k + 1) for gram in grams)


def plain(new: list[int], stored: dict[Any, list[int]], min_run: int) -> list[tuple[int, int, set[tuple[Any, int]]]]:
    """The rule as it is described: start, length, and the places of stored sessions that will do."""
    found = {name: maximal(new, old, min_run) for name, old in stored.items()}
    common = {name: in_common(new, old, min_run) for name, old in stored.items()}
    out: list[tuple[int, int, set[tuple[Any, int]]]] = []
    token = 0
    while token < len(new):
        begun = [(end, -start, common[name], name) for name in found for start, end, _ in found[name] if start <= token]
        end, start, most = max(begun)[:3] if begun else (0, 0, 0)
        if end - token >= min_run:
            places = {
                (name, j + token + start)
                for name in found
                for i, stop, j in found[name]
                if (stop, -i, common[name]) == (end, start, most)
            }
            out.append((token, end - token, places))
            token = end
        else:
            token += 1
    return out


def check(aligner: Aligner, new: list[int], stored: dict[Any, list[int]]) -> list[Run]:
    runs, expected = aligner.align(new), plain(new, stored, aligner.min_run)
    assert [(run.start, run.length) for run in runs] == [(start, length) for start, length, _ in expected]
    for run, (_, _, places) in zip(runs, expected, strict=True):
        assert (run.reference, run.reference_start) in places
    return runs


@given(sessions, st.lists(sessions, max_size=4), st.integers(1, 9), st.data())
def test_runs_are_those_of_the_plain_rule(new: list[int], olds: list[list[int]], min_run: int, data: Any) -> None:
    stored = dict(enumerate(olds))
    aligner = Aligner(min_run)
    for name, old in stored.items():
        aligner.add(name, old)
    check(aligner, new, stored)
    among = data.draw(st.sets(st.sampled_from(sorted(stored)))) if stored else set()
    assert aligner.align(new, among) == check(without(aligner, stored, among), new, {s: stored[s] for s in among})


def without(aligner: Aligner, stored: dict[Any, list[int]], among: set[Any]) -> Aligner:
    for name in stored:
        if name not in among:
            aligner.remove(name)
    return aligner


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=60), st.integers(1, 20))
def test_two_letters(new: list[int], old: list[int], min_run: int) -> None:
    aligner = Aligner(min_run)
    aligner.add("old", old)
    check(aligner, new, {"old": old})


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), sessions), max_size=25), sessions, st.integers(1, 6))
def test_sessions_come_and_go(steps: list[tuple[bool, int, list[int]]], new: list[int], min_run: int) -> None:
    aligner, stored = Aligner(min_run), {}
    for coming, name, tokens in steps:
        if name in stored:
            aligner.remove(name)
            del stored[name]
        elif coming:
            aligner.add(name, np.array(tokens, np.int64))
            stored[name] = tokens
    assert len(aligner) == len(stored) and all(name in aligner for name in stored)
    check(aligner, new, stored)


def random_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, count).tolist()


def test_an_edited_document_under_another_prefix() -> None:
    document, other = random_tokens(2_000, 0), random_tokens(1_000, 1)
    aligner = Aligner()
    aligner.add("document", document)
    aligner.add("other", other)
    edited = random_tokens(300, 2) + document[:700] + [1, 2, 3] + document[705:] + other[100:200] + other[500:520]
    assert aligner.align(edited) == [
        Run(300, "document", 0, 700),
        Run(1003, "document", 705, 1295),
        Run(2298, "other", 100, 100),
    ]


def test_where_runs_overlap_the_first_has_the_tokens() -> None:
    tokens = random_tokens(300, 0)
    aligner = Aligner(32)
    aligner.add("a", tokens[:150])
    aligner.add("b", tokens[100:200])
    aligner.add("c", tokens[190:210])
    assert aligner.align(tokens) == [Run(0, "a", 0, 150), Run(150, "b", 50, 50)]
    aligner.remove("b")
    aligner.add("b", tokens[100:181])  # keeps 31
    assert aligner.align(tokens) == [Run(0, "a", 0, 150)]


def test_of_equal_runs_the_session_with_most_in_common_is_taken() -> None:
    page, more = random_tokens(100, 0), random_tokens(100, 1)
    aligner = Aligner()
    aligner.add("page", page)
    aligner.add("both", [*page, 1, *more])
    aligner.add("page too", page)
    assert [run.reference for run in aligner.align([*page, 2, *more])] == ["both", "both"]


@pytest.mark.parametrize("length", [0, 1, 15, 31, 32, 33, 1000])
def test_one_token_alone(length: int) -> None:
    aligner = Aligner(32)
    for name, stored in enumerate((0, 10, 31, 32, 500)):
        aligner.add(name, [HUGE] * stored)
    runs = aligner.align([HUGE] * length)
    covered = np.zeros(length, int)
    for run in runs:
        assert run.length >= 32 and run.reference_start + run.length <= (0, 10, 31, 32, 500)[run.reference]
        covered[run.start : run.start + run.length] += 1
    assert covered.max(initial=0) <= 1 and covered.sum() == (length if length >= 32 else 0)


def test_kgrams_that_are_everywhere_cost_no_more_than_a_constant() -> None:
    """Runs are still true, do not overlap, and cover what sessions have that were looked at."""
    aligner = Aligner()
    period = random_tokens(40, 0)
    for name in range(MOST):
        aligner.add(name, period * 50 + random_tokens(50, name))
    new = period * 60 + random_tokens(50, 3) + random_tokens(50, 4)
    runs = aligner.align(new)
    token = 0
    for run in runs:
        stored = period * 50 + random_tokens(50, run.reference)
        assert run.start >= token and run.length >= aligner.min_run
        assert new[run.start : run.start + run.length] == stored[run.reference_start :][: run.length]
        token = run.start + run.length
    assert sum(run.length for run in runs) == len(new)


def test_memory_is_given_back() -> None:
    aligner = Aligner()
    for name in range(20):
        aligner.add(name, random_tokens(20_000, name))
    full = aligner.nbytes
    assert full < 12 * 400_000
    for name in range(19):
        aligner.remove(name)
    assert aligner.nbytes < full / 5
    assert aligner.align(random_tokens(20_000, 19)) == [Run(0, 19, 0, 20_000)]
    assert aligner.align(random_tokens(20_000, 3)) == []


def test_names_are_anything_hashable() -> None:
    aligner = Aligner(2)
    aligner.add(10**30, [1, 2])
    aligner.add(("tenant", None), [3, 4])
    assert aligner.align([3, 4, 1, 2]) == [Run(0, ("tenant", None), 0, 2), Run(2, 10**30, 0, 2)]


def test_errors() -> None:
    aligner = Aligner()
    aligner.add("a", [1])
    with pytest.raises(ValueError, match="min_run"):
        Aligner(0)
    with pytest.raises(SessionError, match="'a' is in the aligner already"):
        aligner.add("a", [1])
    with pytest.raises(SessionError, match="'b' is not in the aligner"):
        aligner.remove("b")
    with pytest.raises(SessionError, match="'b' is not in the aligner"):
        aligner.align([1], among=["b"])
    for ids in ([-1], [2**31], [0.5], [[1]]):
        with pytest.raises(ProbsError, match="token_ids"):
            aligner.add("b", ids)
        with pytest.raises(ProbsError, match="token_ids"):
            aligner.align(ids)
    assert len(aligner) == 1 and aligner.align([]) == []
