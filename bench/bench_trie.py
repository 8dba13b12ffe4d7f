"""Tokens a second and bytes a token of the trie and the aligner, one thread, with plain Python beside them.

    pytest bench/bench_trie.py

The trie holds a million tokens in 10,000 sessions: a hundred system prompts of 60 tokens, each continued by a hundred
sessions for 40 more. Beside it, a trie of a dict a token. The aligner finds what a session of 32,768 tokens shares with
100 stored ones of as many; beside it difflib, on the session and one of them, a sixteenth of each.
"""

from __future__ import annotations

import tracemalloc
from difflib import SequenceMatcher
from functools import cache

import numpy as np
import pytest

from seqkv.engine.align import Aligner
from seqkv.engine.trie import Trie

PROMPTS, EACH, SHARED, OWN = 100, 100, 60, 40
STORED, LENGTH = 100, 32_768
VOCAB = 50_000


def text(rng, count):
    """Tokens as frequent as words are."""
    return np.minimum(rng.zipf(1.3, count) - 1, VOCAB - 1).astype(np.int64)


@cache
def sessions():
    rng = np.random.default_rng(0)
    prompts = [text(rng, SHARED) for _ in range(PROMPTS)]
    ids = [np.concatenate([prompts[i % PROMPTS], text(rng, OWN)]) for i in range(PROMPTS * EACH)]
    surprisal = [rng.exponential(3, SHARED + OWN).astype(np.float32) for _ in ids]
    return ids, surprisal


def filled():
    trie = Trie()
    for session, (ids, surprisal) in enumerate(zip(*sessions(), strict=True)):
        trie.insert(session, ids, surprisal)
    return trie


def dict_trie():
    root: dict = {}
    for ids, surprisal in zip(*sessions(), strict=True):
        node = root
        for token, bits in zip(ids.tolist(), surprisal.tolist(), strict=True):
            node = node.setdefault(token, (bits, {}))[1]
    return root


def look_up_in_dicts(root):
    found = 0
    for ids in sessions()[0]:
        node = root
        for token in ids.tolist():
            if token not in node:
                break
            node = node[token][1]
            found += 1
    return found


def bytes_a_token(make):
    """Of all that is held when it is made, and at most meanwhile."""
    sessions()
    tracemalloc.start()
    kept = make()
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return [round(size / (PROMPTS * EACH * (SHARED + OWN)), 1) for size in (held, most)]


def report(benchmark, tokens):
    benchmark.extra_info["million tokens a second"] = round(tokens / benchmark.stats["min"] / 1e6, 3)


TOKENS = PROMPTS * EACH * (SHARED + OWN)


@pytest.mark.parametrize("make", [filled, dict_trie])
def test_insert(benchmark, make):
    make()  # compiles
    benchmark.pedantic(make, rounds=3)
    report(benchmark, TOKENS)
    benchmark.extra_info["bytes a token, held and at most"] = bytes_a_token(make)


def test_look_up(benchmark):
    trie = filled()
    found = benchmark(lambda: sum(trie.longest_prefix(ids).tokens for ids in sessions()[0]))
    assert found == TOKENS
    report(benchmark, TOKENS)


def test_look_up_in_dicts(benchmark):
    root = dict_trie()
    assert benchmark.pedantic(look_up_in_dicts, (root,), rounds=3) == TOKENS
    report(benchmark, TOKENS)


def test_remove(benchmark):
    def setup():
        return (filled(),), {}

    def remove_all(trie):
        for session in list(trie):
            trie.remove(session)

    benchmark.pedantic(remove_all, setup=setup, rounds=3)
    report(benchmark, TOKENS)


def test_unshared_memory(benchmark):
    """Sessions that have nothing in common: what a token of its own costs."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCAB, 100) for _ in range(10_000)]

    def make():
        trie = Trie()
        for session, own in enumerate(ids):
            trie.insert(session, own, np.ones(100, np.float32))
        return trie

    benchmark.pedantic(make, rounds=3)
    report(benchmark, TOKENS)
    benchmark.extra_info["bytes a token, held and at most"] = bytes_a_token(make)


@pytest.mark.parametrize("what", ["clusters_within", "clusters_sharing", "expected_reuse"])
def test_all_sessions(benchmark, what):
    ask = getattr(filled(), what)
    benchmark(ask) if what == "expected_reuse" else benchmark(ask, 100.0)


@cache
def stored():
    rng = np.random.default_rng(1)
    return [text(rng, LENGTH) for _ in range(STORED)]


def edited():
    """Four pages of different sessions, each with a changed token in it, under a prefix of its own."""
    rng = np.random.default_rng(2)
    parts = [text(rng, 768)]
    for session in (3, 17, 50, 99):
        page = stored()[session][1000:9000].copy()
        page[4000] += 1
        parts.append(page)
    return np.concatenate(parts)


def alike():
    """100 sessions that differ from the first in 20 tokens each."""
    rng = np.random.default_rng(3)
    out = []
    for _ in range(STORED):
        session = stored()[0].copy()
        session[rng.integers(0, LENGTH, 20)] = VOCAB + len(out)
        out.append(session)
    return out


CASES = {
    "edited": lambda: (stored(), edited()),
    "unrelated": lambda: (stored(), text(np.random.default_rng(4), LENGTH)),
    "all alike": lambda: (alike(), stored()[0]),
    "one token": lambda: ([np.zeros(LENGTH, np.int64)] * STORED, np.zeros(LENGTH, np.int64)),
}


def index(sessions):
    aligner = Aligner()
    for name, ids in enumerate(sessions):
        aligner.add(name, ids)
    return aligner


@pytest.mark.parametrize("case", CASES)
def test_align(benchmark, case):
    sessions, new = CASES[case]()
    runs = benchmark(index(sessions).align, new)
    report(benchmark, LENGTH)
    benchmark.extra_info["runs"] = len(runs)
    benchmark.extra_info["aligned"] = round(sum(run.length for run in runs) / len(new), 3)


def test_add_to_aligner(benchmark):
    aligner = benchmark.pedantic(index, (stored(),), rounds=3, warmup_rounds=1)
    report(benchmark, STORED * LENGTH)
    benchmark.extra_info["bytes a token"] = round(aligner.nbytes / (STORED * LENGTH), 1)


@pytest.mark.parametrize("find", ["aligner", "difflib"])
def test_one_session(benchmark, find):
    """A sixteenth of the edited session, one stored session."""
    old = stored()[17][1000 : 1000 + LENGTH // 16]
    new = np.concatenate([edited()[:300], old[:1000], [VOCAB], old[1001:]])[: LENGTH // 16]
    if find == "aligner":
        benchmark(index([old]).align, new)
    else:
        matcher = (None, old.tolist(), new.tolist(), False)
        benchmark.pedantic(lambda: SequenceMatcher(*matcher).get_matching_blocks(), rounds=3)
    report(benchmark, new.size)
