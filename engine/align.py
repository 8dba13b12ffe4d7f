"""Alignment: where a new session holds the same tokens as stored ones, at any offset.

arXiv 2604.15356, layer 1, shares prefixes. What follows a changed word shares no prefix, but its tokens are the same,
and un-rotated their keys and values almost are. The aligner finds these runs of equal tokens.

A run is `min_run` tokens or more of the new session that a stored one holds in the same order. Going through the new
session from its start, the next run is the one that reaches farthest among those that hold the first token not yet
dealt with: no other choice needs fewer runs. Of several that reach as far, the longest is taken (what comes before a
token decides its keys and values, too), then that of the session with most in common. Where two runs overlap the first
has the tokens, and if the second keeps fewer than `min_run` it is left out.

Of each stored session every `stride`-th k-gram is indexed, where k + stride - 1 = min_run, so that every run has one of
them. All k-grams of the new session are looked up, but for those inside a run where nothing can be found that is not
inside it, too. Looking up stops after MOST stored k-grams in one place, the latest first: the result is exact unless a
k-gram is stored more often than that, and otherwise still runs that are true and cannot be extended, of the sessions
that were looked at.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from seqkv.engine.errors import SessionError
from seqkv.engine.tokens import checked

MOST = 128  # stored k-grams looked at in one place

NONE = -1
_FIRST, _LENGTH = 0, 1  # columns of a session's row: where its tokens are in the pool, and how many
_BASE = np.uint64(0x9E3779B97F4A7C15)  # of the rolling hash, odd


class Run(NamedTuple):
    """Tokens [start, start + length) of the new session are [reference_start, reference_start + length) of a stored
    one."""

    start: int
    reference: Hashable
    reference_start: int
    length: int


class Aligner:
    """An index of stored sessions: 5 bytes a token and room to grow, half as much again.

    min_run: the shortest run that is worth it, tokens. ValueError if it is not positive.

    Sessions are named by anything hashable, in one process and by one thread at a time. An aligner is made again by
    adding the same sessions.
    """

    def __init__(self, min_run: int = 32) -> None:
        if min_run < 1:
            raise ValueError(f"min_run must be positive: {min_run}")
        self.min_run = min_run
        self._k = (min_run + 1) // 2
        self._stride = min_run - self._k + 1
        self._rows: dict[Hashable, int] = {}
        self._names: list[Hashable] = []  # by row
        self._free: list[int] = []
        self._spans = np.zeros((0, 2), np.int64)
        self._tokens = np.zeros(0, np.int32)
        self._written = self._live = 0  # blocks of `stride` tokens
        self._move(1)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, session: Hashable) -> bool:
        return session in self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._tokens.nbytes + self._links.nbytes + self._heads.nbytes + self._spans.nbytes

    def add(self, session: Hashable, token_ids: Any) -> None:
        """Stores a session's token_ids, [tokens] integers in [0, 2**31), maybe none.

        SessionError if the session is there already, ProbsError for bad ids.
        """
        ids = checked(token_ids)
        if session in self._rows:
            raise SessionError(f"session {session!r} is in the aligner already")
        blocks = -(-ids.size // self._stride)
        if self._written + blocks > len(self._links):
            self._move(blocks)
        row = self._free.pop() if self._free else len(self._names)
        if row == len(self._names):
            self._names.append(session)
        if row == len(self._spans):
            self._spans = np.concatenate([self._spans, np.zeros((row // 2 + 16, 2), np.int64)])
        self._names[row] = session
        self._rows[session] = row
        first = self._written * self._stride
        self._spans[row] = first, ids.size
        self._tokens[first : first + ids.size] = ids
        self._written += blocks
        self._live += blocks
        _link(self._tokens, self._links, self._heads, self._spans, row, self._k, self._stride)

    def remove(self, session: Hashable) -> None:
        """Forgets a session. SessionError if it is not there."""
        row = self._row(session)
        _unlink(self._tokens, self._links, self._heads, self._spans, row, self._k, self._stride)
        self._live -= -(-int(self._spans[row, _LENGTH]) // self._stride)
        del self._rows[session]
        self._names[row] = None
        self._free.append(row)
        if len(self._links) > 4 * self._live + 4096:
            self._move(0)

    def align(self, token_ids: Any, among: Iterable[Hashable] | None = None) -> list[Run]:
        """The runs that a new session has in common with stored ones (of `among`, if given), by where they start.

        token_ids: [tokens] integers in [0, 2**31), maybe none.

        ProbsError for bad ids, SessionError if a session of `among` is not there.
        """
        ids = checked(token_ids)
        allowed = np.zeros(len(self._spans), np.bool_)
        allowed[[self._row(session) for session in (self._rows if among is None else among)]] = True
        stored = self._tokens, self._links, self._heads, self._spans, allowed, self._k, self._stride
        common = _count_common(ids, *stored)
        end, row, there = _farthest(ids, common, *stored)
        runs = _cover(end, row, there, self.min_run)
        return [Run(start, self._names[row], there, length) for start, row, there, length in runs.tolist()]

    def _row(self, session: Hashable) -> int:
        row = self._rows.get(session)
        if row is None:
            raise SessionError(f"session {session!r} is not in the aligner")
        return row

    def _move(self, blocks: int) -> None:
        """Moves what is stored to new arrays, with room for some blocks more."""
        capacity = (self._live + blocks) * 3 // 2 + 64
        tokens = np.zeros(capacity * self._stride, np.int32)
        self._links = np.full((capacity, 3), NONE, np.int32)  # of each block: its session's row, next, previous
        self._heads = np.full(1 << capacity.bit_length(), NONE, np.int32)
        self._written = 0
        for row in self._rows.values():
            old, length = self._spans[row].tolist()
            first = self._written * self._stride
            tokens[first : first + length] = self._tokens[old : old + length]
            self._spans[row, _FIRST] = first
            self._written += -(-length // self._stride)
            _link(tokens, self._links, self._heads, self._spans, row, self._k, self._stride)
        self._tokens = tokens


_ROW, _NEXT, _PREVIOUS = 0, 1, 2  # columns of a block's links


@njit(cache=True, nogil=True)
def _hash(tokens, start, k):
    """Of tokens [start, start + k)."""
    value = np.uint64(0)
    for i in range(start, start + k):
        value = value * _BASE + np.uint64(tokens[i] + np.int64(1))
    return value


@njit(cache=True, nogil=True)
def _rolled(value, top, old, new):
    """The hash of the next k-gram: without the token `old`, with `new`. top: _BASE ** (k - 1)."""
    return (value - top * np.uint64(old + np.int64(1))) * _BASE + np.uint64(new + np.int64(1))


@njit(cache=True, nogil=True)
def _bucket(value, buckets):
    value = (value ^ value >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
    return np.int64(value >> np.uint64(32)) & (buckets - 1)


@njit(cache=True, nogil=True)
def _top(k):
    value = np.uint64(1)
    for _ in range(k - 1):
        value *= _BASE
    return value


@njit(cache=True, nogil=True)
def _link(tokens, links, heads, spans, row, k, stride):
    """Enters a session's k-grams, each at the head of its chain."""
    first = spans[row, _FIRST]
    for start in range(first, first + spans[row, _LENGTH] - k + 1, stride):
        block = start // stride
        at = _bucket(_hash(tokens, start, k), heads.size)
        links[block, _ROW], links[block, _NEXT], links[block, _PREVIOUS] = row, heads[at], NONE
        if heads[at] != NONE:
            links[heads[at], _PREVIOUS] = block
        heads[at] = block


@njit(cache=True, nogil=True)
def _unlink(tokens, links, heads, spans, row, k, stride):
    first = spans[row, _FIRST]
    for start in range(first, first + spans[row, _LENGTH] - k + 1, stride):
        block = start // stride
        after, before = links[block, _NEXT], links[block, _PREVIOUS]
        if after != NONE:
            links[after, _PREVIOUS] = before
        if before != NONE:
            links[before, _NEXT] = after
        else:
            heads[_bucket(_hash(tokens, start, k), heads.size)] = after


@njit(cache=True, nogil=True)
def _equal(ids, i, tokens, j, k):
    n = 0
    while n < k and ids[i + n] == tokens[j + n]:
        n += 1
    return n == k


@njit(cache=True, nogil=True)
def _count_common(ids, tokens, links, heads, spans, allowed, k, stride):
    """How many k-grams each session has in common with ids, as far as they are looked at."""
    common = np.zeros(len(spans), np.int64)
    top, value = _top(k), np.uint64(0)
    for i in range(ids.size - k + 1):
        value = _hash(ids, 0, k) if i == 0 else _rolled(value, top, ids[i - 1], ids[i + k - 1])
        block = heads[_bucket(value, heads.size)]
        looked_at = 0
        while block != NONE and looked_at < MOST:
            if allowed[links[block, _ROW]] and _equal(ids, i, tokens, block * stride, k):
                common[links[block, _ROW]] += 1
            block = links[block, _NEXT]
            looked_at += 1
    return common


@njit(cache=True, nogil=True)
def _farthest(ids, common, tokens, links, heads, spans, allowed, k, stride):
    """For each token the best run that starts there: its end (0 if there is none), its session's row, and its start in
    that session.

    Inside a run [start, end) that is known, k-grams from start + stride to end - min_run are not looked up. A run with
    all its indexed k-grams among these starts and ends inside. As look-ups resume for `stride` places at least, no run
    has its k-grams in two such stretches and none between.
    """
    min_run = k + stride - 1
    end = np.zeros(ids.size, np.int64)
    row = np.zeros(ids.size, np.int64)
    there = np.zeros(ids.size, np.int64)
    known = known_end = np.int64(0)  # the run that reaches farthest so far
    looked_up = 0  # places, since some were left out
    top, value = _top(k), np.uint64(0)
    for i in range(ids.size - k + 1):
        value = _hash(ids, 0, k) if i == 0 else _rolled(value, top, ids[i - 1], ids[i + k - 1])
        if known + stride <= i < known_end - min_run and (looked_up == 0 or looked_up >= stride):
            looked_up = 0
            continue
        looked_up += 1
        block = heads[_bucket(value, heads.size)]
        looked_at = 0
        while block != NONE and looked_at < MOST:
            looked_at += 1
            session, j = links[block, _ROW], block * stride
            block = links[block, _NEXT]
            if not (allowed[session] and _equal(ids, i, tokens, j, k)):
                continue
            first = spans[session, _FIRST]
            length, most = k, min(ids.size - i, first + spans[session, _LENGTH] - j)
            while length < most and ids[i + length] == tokens[j + length]:
                length += 1
            stop = i + length
            begin = j - (i - known)  # where in the pool it would have to be the same to start where `known` does
            if stop < known_end and (known == 0 or begin <= first or ids[known - 1] != tokens[begin - 1]):
                continue  # it starts and ends inside
            back = 0
            while back < min(i, j - first) and ids[i - back - 1] == tokens[j - back - 1]:
                back += 1
            start = i - back
            if stop - start < min_run or stop < end[start]:
                continue
            other = row[start]
            if (
                stop > end[start]
                or common[session] > common[other]
                or (common[session] == common[other] and session < other)
            ):
                end[start], row[start], there[start] = stop, session, j - back - first
            if stop > known_end or (stop == known_end and start < known):
                known, known_end = start, stop
    return end, row, there


@njit(cache=True, nogil=True)
def _cover(end, row, there, min_run):
    """The runs that are taken, [runs, 4]: start, row of the session, start in it, length."""
    out = np.empty((end.size // min_run, 4), np.int64)
    count = 0
    token = 0  # the first not yet dealt with
    begun = best = 0  # runs that start before `begun`, and which of them reaches farthest
    while token < end.size:
        while begun <= token:
            if end[begun] > end[best]:
                best = begun
            begun += 1
        length = end[best] - token
        if length >= min_run:
            out[count, 0], out[count, 1], out[count, 2], out[count, 3] = token, row[best], there[best], length
            out[count, 2] += token - best
            count += 1
            token = end[best]
        else:
            token += 1
    return out[:count]
