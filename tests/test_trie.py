from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqkv.engine import ProbsError, TokenProbs, radix
from seqkv.engine.errors import SessionError
from seqkv.engine.probs import MAX_SURPRISAL
from seqkv.engine.trie import Prefix, Trie

Sequence = tuple[int, ...]
HUGE = 2**31 - 1

# few tokens, so that much is shared; as long as a token follows from those before, its surprisal does
mixed = st.lists(st.sampled_from([0, 1, 2, HUGE]), max_size=9).map(tuple)
sequences = mixed | st.integers(0, 20).map(lambda n: (7,) * n)


def surprisal(sequence: Sequence) -> list[float]:
    """Of each token, as a model would have it: from the tokens up to it alone. Some multiple of 1/8, 0 excluded."""
    return [(hash(sequence[: i + 1]) % 40 + 1) / 8 for i in range(len(sequence))]


def common(a: Sequence, b: Sequence) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in pairs)


def bits(sequence: Sequence) -> float:
    return sum(surprisal(sequence))


def shared_bits(a: Sequence, b: Sequence) -> float:
    return bits(a[: common(a, b)])


def distance(a: Sequence, b: Sequence) -> float:
    return bits(a) + bits(b) - 2 * shared_bits(a, b)


def trie_of(stored: dict[Any, Sequence]) -> Trie:
    trie = Trie()
    for session, sequence in stored.items():
        trie.insert(session, list(sequence), surprisal(sequence))
    return trie


def check(trie: Trie, stored: dict[Any, Sequence]) -> None:
    """All that is asked about sessions, one by one and in pairs, and that edges are compressed."""
    assert len(trie) == len(stored) and list(trie) == list(stored)
    for session, sequence in stored.items():
        assert session in trie
        found = trie.longest_prefix(list(sequence))
        assert found.tokens == len(sequence) and found.bits == bits(sequence)
    for a, b in itertools.product(stored, repeat=2):
        n = common(stored[a], stored[b])
        assert trie.shared_prefix(a, b) == Prefix(n, bits(stored[a][:n]), a if n else None)
        assert trie.d_T(a, b) == shared_bits(stored[a], stored[b]) and trie.D(a, b) == distance(stored[a], stored[b])
    nodes = trie._nodes[trie._nodes["depth"] >= 0]
    assert len(nodes) <= max(1, 2 * len(stored))
    prefixes = {sequence[: i + 1] for sequence in stored.values() for i in range(len(sequence))}
    assert trie._size[radix.LIVE] == len(prefixes) and nodes["uses"][0] == len(stored)


@given(st.lists(sequences, max_size=8), st.lists(sequences, max_size=4), st.randoms())
def test_prefixes_are_those_of_plain_comparison(inserted: list[Sequence], asked: list[Sequence], random: Any) -> None:
    stored = dict(enumerate(inserted))
    trie = trie_of(stored)
    check(trie, stored)
    while stored:
        for sequence in asked:
            longest = max(common(sequence, other) for other in stored.values())
            found = trie.longest_prefix(np.array(sequence, np.int64))
            assert (found.tokens, found.bits) == (longest, bits(sequence[:longest]))
            if longest:
                assert common(sequence, stored[found.session]) == longest
            else:
                assert found.session is None
        gone = random.choice(list(stored))
        trie.remove(gone)
        del stored[gone]
        check(trie, stored)
    assert trie.longest_prefix([1, 2]) == Prefix(0, 0.0, None)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), sequences), max_size=40))
def test_sessions_come_and_go(steps: list[tuple[bool, int, Sequence]]) -> None:
    """Without looking meanwhile; rows, tokens and places of the table are used again."""
    trie, stored = Trie(), {}
    for coming, session, sequence in steps:
        if session in stored:
            trie.remove(session)
            del stored[session]
        elif coming:
            trie.insert(session, list(sequence), surprisal(sequence))
            stored[session] = sequence
    check(trie, stored)


@given(sequences, sequences, sequences)
def test_d_is_a_metric(a: Sequence, b: Sequence, c: Sequence) -> None:
    trie = trie_of({"a": a, "b": b, "c": c})
    assert trie.D("a", "b") == trie.D("b", "a") and trie.D("a", "a") == 0
    assert (trie.D("a", "b") == 0) == (a == b)
    assert trie.D("a", "c") <= trie.D("a", "b") + trie.D("b", "c")


@given(sequences, sequences, sequences)
def test_d_t_is_a_similarity(a: Sequence, b: Sequence, c: Sequence) -> None:
    trie = trie_of({"a": a, "b": b, "c": c})
    assert trie.d_T("a", "b") == trie.d_T("b", "a") <= trie.d_T("a", "a") == bits(a)
    assert trie.d_T("a", "c") >= min(trie.d_T("a", "b"), trie.d_T("b", "c"))


def test_d_t_is_not_a_metric() -> None:
    trie = trie_of({"a": (1, 2), "b": (1, 3), "far": (2,)})
    assert trie.d_T("a", "a") > 0  # of a session to itself
    assert trie.d_T("a", "far") == 0  # of two that share nothing
    assert trie.d_T("a", "b") > trie.d_T("a", "far") + trie.d_T("far", "b")  # no triangle


@given(st.lists(st.floats(0, MAX_SURPRISAL, width=32), max_size=30), st.integers(0, 30))
def test_sums_do_not_depend_on_where_edges_are_cut(own: list[float], cut: int) -> None:
    ids = list(range(len(own)))
    whole, parted = Trie(), Trie()
    whole.insert("s", ids, own)
    for stop in {cut, cut // 2, 0}:
        parted.insert(stop, ids[:stop], own[:stop])
    parted.insert("s", ids, own)
    assert whole.d_T("s", "s") == parted.d_T("s", "s") == pytest.approx(sum(own), abs=1e-5)


def test_certain_and_impossible_tokens() -> None:
    certain = TokenProbs.from_probs([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], [0, 0, 0])
    impossible = TokenProbs.from_probs([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], [0, 1, 1])
    trie = Trie()
    trie.insert("certain", certain.token_ids, certain.surprisal)
    trie.insert("shorter", certain.token_ids[:1], certain.surprisal[:1])
    trie.insert("impossible", impossible.token_ids, impossible.surprisal)
    assert trie.D("certain", "shorter") == 0  # the model sees no difference
    assert trie.D("certain", "impossible") == 2 * MAX_SURPRISAL
    assert trie.clusters_within(0) == [["certain", "shorter"], ["impossible"]]
    assert all(np.isfinite(list(trie.expected_reuse().values())))


@given(st.lists(sequences, max_size=8), st.floats(0, 20))
def test_clusters(inserted: list[Sequence], threshold: float) -> None:
    stored = dict(enumerate(inserted))
    trie = trie_of(stored)
    sharing, within = trie.clusters_sharing(threshold), trie.clusters_within(threshold)
    for clusters in (sharing, within):
        assert sorted(s for cluster in clusters for s in cluster) == list(stored)
    cluster_of = {session: i for i, cluster in enumerate(sharing) for session in cluster}
    for a, b in itertools.combinations(stored, 2):
        assert (cluster_of[a] == cluster_of[b]) == (trie.d_T(a, b) >= threshold)
    for cluster in within:
        assert all(trie.D(a, b) <= threshold for a, b in itertools.combinations(cluster, 2))
    # as few as can be: so many sessions are too far from each other for any two to be in one cluster
    apart = (
        group
        for size in range(len(stored), -1, -1)
        for group in itertools.combinations(stored, size)
        if all(trie.D(a, b) > threshold for a, b in itertools.combinations(group, 2))
    )
    assert len(within) == len(next(apart))


@given(st.lists(sequences, min_size=1, max_size=8), st.integers(1, 255))
def test_the_centroid_is_nearest_to_all(inserted: list[Sequence], chosen: int) -> None:
    stored = dict(enumerate(inserted))
    members = [session for session in stored if chosen >> session & 1] or [0]
    found = trie_of(stored).centroid(members)
    prefix = stored[found.session][: found.tokens] if found.tokens else ()
    assert found.tokens == 0 or found.session in members
    assert found.bits == bits(prefix)
    every = {stored[s][:n] for s in members for n in range(len(stored[s]) + 1)}
    likely = [p for p in every if 2 * sum(stored[s][: len(p)] == p for s in members) > len(members)]
    assert prefix == max(likely, key=len)
    assert sum(distance(prefix, stored[s]) for s in members) == min(
        sum(distance(p, stored[s]) for s in members) for p in every
    )


def expected(stored: dict[Any, Sequence], uses: dict[Any, int]) -> dict[Any, float]:
    """Expected reuse, by going through the trie as it is described."""
    out = {}

    def visit(group: list[Any], depth: int, probability: float) -> None:
        """All sessions that are the same up to `depth`, where some part or end."""
        n = sum(uses[s] for s in group)
        branches: dict[int, list[Any]] = {}
        for s in group:
            if len(stored[s]) == depth:
                out[s] = 0.0
            else:
                branches.setdefault(stored[s][depth], []).append(s)
        for branch in branches.values():
            first = stored[branch[0]]
            stop = min(common(first, stored[s]) for s in branch)
            prior = 2.0 ** (bits(first[:depth]) - bits(first[:stop]))
            reached = probability * (sum(uses[s] for s in branch) + prior) / (n + 1)
            if len(branch) == 1:
                out[branch[0]] = reached * (stop - depth)
            else:
                visit(branch, stop, reached)

    visit(list(stored), 0, 1.0)
    return out


@given(st.lists(st.tuples(sequences, st.integers(0, 3), st.integers(0, 3)), max_size=8))
def test_expected_reuse(inserted: list[tuple[Sequence, int, int]]) -> None:
    trie, stored, uses = Trie(), {}, {}
    for session, (sequence, before, later) in enumerate(inserted):
        trie.insert(session, list(sequence), surprisal(sequence), uses=before)
        trie.used(session, later)
        stored[session], uses[session] = sequence, before + later
    assert trie.expected_reuse() == pytest.approx(expected(stored, uses))
    for gone in list(stored)[::2]:
        trie.remove(gone)
        del stored[gone]
    assert trie.expected_reuse() == pytest.approx(expected(stored, uses))


def test_what_is_used_and_long_is_worth_keeping() -> None:
    trie = Trie()
    trie.insert("long", range(100), np.full(100, 3.0))
    trie.insert("its beginning", range(50), np.full(50, 3.0))
    trie.insert("short", [1], [3.0])
    trie.insert("short, likely", [2], [0.5])
    trie.insert("short, used", [3], [3.0], uses=5)
    reuse = trie.expected_reuse()
    assert sorted(reuse, key=reuse.__getitem__) == ["its beginning", "short", "short, likely", "short, used", "long"]


def test_the_first_session_says_how_surprising_a_prefix_is() -> None:
    trie = Trie()
    trie.insert("a", [1, 2], [1.0, 1.0])
    trie.insert("b", [1, 3], [1.25, 1.0])
    assert trie.d_T("b", "b") == 2.0
    trie.remove("a")
    assert trie.d_T("b", "b") == 2.0


def test_names_are_anything_hashable() -> None:
    trie = trie_of({10**30: (1, 2), "a": (1,), ("tenant", 5): (), None: (1, 2)})
    assert trie.D(10**30, None) == 0 and trie.D("a", ("tenant", 5)) == bits((1,))


def test_memory_is_given_back() -> None:
    trie = Trie()
    rng = np.random.default_rng(0)
    for session in range(50):
        trie.insert(session, rng.integers(0, 1000, 10_000), np.ones(10_000))
    full = trie.nbytes
    for session in range(49):
        trie.remove(session)
    assert trie.nbytes < full / 5 and trie.longest_prefix([]).tokens == 0 and trie.d_T(49, 49) == 10_000


def test_rolling_sessions_need_no_more_than_are_there() -> None:
    """A long prefix under which sessions come and go is copied when they part from it elsewhere, and copies go."""
    trie = Trie()
    prefix = list(range(5_000))
    for session in range(200):
        ids = [*prefix[: 5_000 - session % 7], 9_000 + session]
        trie.insert(session, ids, np.ones(len(ids)))
        if session > 2:
            trie.remove(session - 3)
    assert trie._size[radix.LIVE] < 5_010 and trie._tokens.size < 40_000


def test_errors() -> None:
    trie = trie_of({"a": (1, 2)})
    for ids in ([-1], [2**31], [1.5], [[1]]):
        with pytest.raises(ProbsError, match="token_ids"):
            trie.insert("b", ids, [1.0])
        with pytest.raises(ProbsError, match="token_ids"):
            trie.longest_prefix(ids)
    for own in ([np.nan], [np.inf], [-1.0], [MAX_SURPRISAL + 1], [1.0, 1.0], 1.0):
        with pytest.raises(ProbsError, match="surprisal"):
            trie.insert("b", [1], own)
    with pytest.raises(SessionError, match="'a' is in the trie already"):
        trie.insert("a", [1], [1.0])
    for ask in (trie.remove, trie.used, lambda s: trie.D("a", s), lambda s: trie.centroid([s])):
        with pytest.raises(SessionError, match="'b' is not in the trie"):
            ask("b")
    for call in (
        lambda: trie.insert("b", [1], [1.0], uses=-1),
        lambda: trie.used("a", -1),
        lambda: trie.clusters_within(-1),
        lambda: trie.centroid([]),
    ):
        with pytest.raises(ValueError):
            call()
    check(trie, {"a": (1, 2)})  # nothing has changed
