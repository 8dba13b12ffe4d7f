"""The probabilistic language trie: which sessions begin alike, and how surprising what they share is.

arXiv 2604.15356, layer 1 (probabilistic prefix deduplication). A path from the root is a token sequence s, its edges
carry the model's log2 P of their tokens, so that a node knows the surprisal -log2 P(s) of its prefix. For two sessions
s and s', s ^ s' is the longest prefix that they share, and the paper's measure is

    d_T(s, s') = -log2 P(s ^ s')

The paper calls it a metric. It is a similarity: it grows with what is shared, d_T(s, s) is -log2 P(s) and not 0, and
sessions without a common token have 0. Instead of the triangle inequality it meets
d_T(a, c) >= min(d_T(a, b), d_T(b, c)), so "share at least x bits" parts sessions into clusters without ambiguity. The
distance in bits that belongs to it is the tree metric, the length of the path from s to s':

    D(s, s') = -log2 P(s | s ^ s') - log2 P(s' | s ^ s') = d_T(s, s) + d_T(s', s') - 2 d_T(s, s')

D is a metric on sessions each of whose tokens has some surprisal. A token of probability 1 has none, and D does not see
it. If no probabilities are known, a surprisal of 1 for each token counts tokens instead of bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import radix
from seqkv.engine.arrays import to_numpy
from seqkv.engine.errors import ProbsError, SessionError
from seqkv.engine.probs import MAX_SURPRISAL
from seqkv.engine.tokens import checked

_RESOLUTION = 2.0**24  # surprisal is kept in multiples of 2**-24 bits, so that float64 adds it exactly, in any order


class Prefix(NamedTuple):
    """The first `tokens` tokens of a stored session, and their surprisal in bits. No session if there are no tokens."""

    tokens: int
    bits: float
    session: Hashable


class Trie:
    """Sessions in memory, edges compressed: 8 bytes a token that no other session has, and room to grow, half as much
    again; some 250 bytes a session.

    Sessions are named by anything hashable that compares equal to itself, in one process and by one thread at a time.
    A trie is made again by inserting the same sessions. Two sessions with the same tokens are two sessions. Surprisal
    of a prefix is what the first session that had it said.
    """

    def __init__(self) -> None:
        self._nodes: NDArray[Any] = np.empty(0, radix.NODE)
        self._table = np.empty(0, np.int32)
        self._tokens = np.empty(0, np.int32)
        self._bits = np.empty(0, np.float32)
        self._size = np.array([0, 0, 1, radix.NONE])  # the root has a row
        self._leaves: dict[Hashable, int] = {}
        self._sessions: dict[int, Hashable] = {}
        self._make_room(0)
        self._nodes[radix.ROOT] = (0, 0, 0, 0, radix.NONE, radix.NONE, radix.NONE, radix.NONE)

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, session: Hashable) -> bool:
        return session in self._leaves

    def __iter__(self) -> Iterator[Hashable]:
        """Sessions, the one inserted first first."""
        return iter(self._leaves)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._nodes.nbytes + self._table.nbytes + self._tokens.nbytes + self._bits.nbytes

    def insert(self, session: Hashable, token_ids: Any, surprisal: Any, uses: int = 1) -> None:
        """Adds a session.

        token_ids: [tokens] integers in [0, 2**31), maybe none.
        surprisal: [tokens], bits, as TokenProbs.surprisal has it: finite, not negative, at most MAX_SURPRISAL.
        uses: how often it has been wanted so far, this time included (see `expected_reuse`).

        SessionError if the session is there already, ProbsError for bad ids or surprisal, ValueError if uses < 0.
        """
        ids = checked(token_ids)
        bits = _checked_surprisal(surprisal, ids.size)
        if session in self._leaves:
            raise SessionError(f"session {session!r} is in the trie already")
        if uses < 0:
            raise ValueError(f"uses must not be negative: {uses}")
        self._make_room(ids.size)
        leaf = int(radix.add(ids, bits, uses, *self._arrays))
        self._leaves[session] = leaf
        self._sessions[leaf] = session

    def remove(self, session: Hashable) -> None:
        """Forgets a session; what others share with it stays. SessionError if it is not there."""
        leaf = self._leaf(session)
        only = radix.cut(self._nodes, self._tokens, self._table, self._size, leaf)
        if only != radix.NONE:
            self._make_room(int(self._nodes[only]["depth"]))
            radix.merge(only, *self._arrays)
        del self._leaves[session], self._sessions[leaf]
        self._make_room(0)  # and give back what is not needed any more

    def used(self, session: Hashable, times: int = 1) -> None:
        """Counts that a session was wanted again. SessionError if it is not there, ValueError if times < 0."""
        if times < 0:
            raise ValueError(f"times must not be negative: {times}")
        radix.count(self._nodes, self._leaf(session), times)

    def longest_prefix(self, token_ids: Any) -> Prefix:
        """The longest prefix that token_ids [tokens] share with a stored session, and one that has it. ProbsError."""
        node, matched = radix.descend(self._nodes, self._tokens, self._table, checked(token_ids))
        return self._prefix(node, matched, radix.some_leaf(self._nodes, node))

    def shared_prefix(self, a: Hashable, b: Hashable) -> Prefix:
        """a ^ b, of two stored sessions. SessionError."""
        node = radix.meet(self._nodes, self._leaf(a), self._leaf(b))
        return self._prefix(node, int(self._nodes[node]["depth"]), self._leaf(a))

    def d_T(self, a: Hashable, b: Hashable) -> float:
        """The paper's -log2 P(a ^ b), bits: a similarity, see the module. SessionError."""
        return self.shared_prefix(a, b).bits

    def D(self, a: Hashable, b: Hashable) -> float:
        """The tree metric -log2 P(a | a ^ b) - log2 P(b | a ^ b), bits. SessionError."""
        own_a, own_b = (float(self._nodes[self._leaf(session)]["bits"]) for session in (a, b))
        return own_a + own_b - 2 * self.shared_prefix(a, b).bits

    def clusters_sharing(self, bits: float) -> list[list[Hashable]]:
        """Clusters of all sessions: d_T of any two in one is at least `bits`, of two in different ones less.

        A session of fewer bits is alone. In the order of insertion, as for `clusters_within`.
        """
        return self._grouped(radix.label_sharing(self._nodes, self._order(), float(bits)))

    def clusters_within(self, bits: float) -> list[list[Hashable]]:
        """Clusters of all sessions: D of any two in one is at most `bits`, and no fewer clusters would do.

        ValueError if bits < 0.
        """
        if not bits >= 0:
            raise ValueError(f"a distance must not be negative: {bits}")
        return self._grouped(radix.label_within(self._nodes, self._order(), float(bits)))

    def centroid(self, sessions: Iterable[Hashable]) -> Prefix:
        """A cluster's most probable prefix: the longest that a session of it has with a probability above 1/2.

        It is as long as what all of them share or longer, and no prefix has a smaller sum of D to them: it is what is
        stored whole and the others as deltas from. `session` is one of them that has it. SessionError if one is not in
        the trie, ValueError if there are none.
        """
        leaves = [self._leaf(session) for session in sessions]
        if not leaves:
            raise ValueError("no sessions, no centroid")
        rank = self._rank()
        shared = np.flatnonzero(2 * radix.leaves_below(self._nodes, self._order(), np.array(leaves)) > len(leaves))
        node = int(shared[np.argmax(rank[shared])])  # they are a path from the root
        leaf = next(leaf for leaf in leaves if radix.meet(self._nodes, leaf, node) == node)
        return self._prefix(node, int(self._nodes[node]["depth"]), leaf)

    def expected_reuse(self) -> dict[Hashable, float]:
        """For each session, how many tokens the next one is expected to share with it and with no other stored one.

        This is what would be lost with the session: evict the smallest, for its bytes, first. Admission is the same
        question: insert the session, and see whether it is itself the one to go.

        The next session follows the trie from the root: from a node that sessions used n times it goes by an edge that
        they used m times with probability (m + P) / (n + 1), where P is the model's probability of the edge. So a trie
        that has seen little goes by the model (the prior of the paper's language tries), later by what was used.
        """
        reached = radix.reach_probability(self._nodes, self._order())
        leaves = np.fromiter(self._leaves.values(), np.int64, len(self))
        depth = self._nodes["depth"]
        own = depth[leaves] - depth[self._nodes["parent"][leaves]]
        return dict(zip(self._leaves, (reached[leaves] * own).tolist(), strict=True))

    @property
    def _arrays(self) -> Any:
        return self._nodes, self._tokens, self._bits, self._table, self._size

    def _leaf(self, session: Hashable) -> int:
        leaf = self._leaves.get(session)
        if leaf is None:
            raise SessionError(f"session {session!r} is not in the trie")
        return leaf

    def _prefix(self, node: int, tokens: int, leaf: int) -> Prefix:
        """The first `tokens` tokens on the way to a node, on its edge or at its end, which a leaf has too."""
        if tokens == 0:
            return Prefix(0, 0.0, None)
        row = self._nodes[node]
        above = self._nodes[row["parent"]]
        on_edge = self._bits[row["start"] : row["start"] + tokens - above["depth"]]
        return Prefix(tokens, float(above["bits"] + on_edge.sum(dtype=np.float64)), self._sessions[leaf])

    def _rank(self) -> NDArray[np.int64]:
        """Larger for a node than for its parent, negative for a free row."""
        return 2 * self._nodes["depth"].astype(np.int64) + (self._nodes["child"] == radix.NONE)

    def _order(self) -> NDArray[np.int64]:
        """All nodes, parents before children."""
        rank = self._rank()
        return np.argsort(rank, kind="stable")[np.count_nonzero(rank < 0) :]

    def _grouped(self, label: NDArray[np.int32]) -> list[list[Hashable]]:
        groups: dict[int, list[Hashable]] = {}
        for session, leaf in self._leaves.items():
            groups.setdefault(int(label[leaf]), []).append(session)
        return list(groups.values())

    def _make_room(self, tokens: int) -> None:
        """For two nodes and some tokens more. Makes the pool smaller if little of it is needed."""
        if self._size[radix.ROWS] + 2 > self._nodes.size:
            nodes = np.zeros(self._nodes.size * 3 // 2 + 16, radix.NODE)
            nodes["depth"] = -1
            nodes[: self._nodes.size] = self._nodes
            self._nodes = nodes
            self._table = np.full(1 << (2 * nodes.size).bit_length(), radix.NONE, np.int32)
            radix.rehash(nodes, self._tokens, self._size, self._table)
        needed = int(self._size[radix.LIVE]) + tokens
        if self._size[radix.WRITTEN] + tokens > self._tokens.size or self._tokens.size > 4 * needed + (1 << 16):
            capacity = needed * 3 // 2 + 1024
            pools = np.empty(capacity, np.int32), np.empty(capacity, np.float32)
            radix.repack(self._nodes, self._tokens, self._bits, self._size, *pools)
            self._tokens, self._bits = pools


def _checked_surprisal(surprisal: Any, tokens: int) -> NDArray[np.float32]:
    bits = np.asarray(to_numpy(surprisal)[0], np.float64)
    if bits.shape != (tokens,):
        raise ProbsError(f"surprisal: expected [{tokens}], got shape {bits.shape}")
    if not ((bits >= 0) & (bits <= MAX_SURPRISAL)).all():  # written so that NaN fails
        raise ProbsError(f"surprisal must be between 0 and {MAX_SURPRISAL} bits")
    return (np.rint(bits * _RESOLUTION) / _RESOLUTION).astype(np.float32)
