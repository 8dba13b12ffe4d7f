"""The stored sessions of one tenant and profile, in memory: which of them a new session is best coded against, and what
each is worth keeping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import near
from seqkv.engine.align import Aligner
from seqkv.engine.form import MAX_DEPTH
from seqkv.engine.records import Entry, Stream
from seqkv.engine.trie import Prefix, Trie

_COMPARED = 4  # sessions that are looked at closely
_DEPTH_COST = 1 / 64  # of the tokens shared, for each stream that has to be decoded before


class Match(NamedTuple):
    """A stored session to code a new one against, and how many of the new one's tokens it holds."""

    entry: Entry
    tokens: int


class Neighbours:
    """A language trie and an aligner of sessions, by name. For one thread at a time."""

    def __init__(self) -> None:
        self._trie, self._aligner = Trie(), Aligner()
        self._entries: dict[str, Entry] = {}
        self._ids: dict[str, NDArray[np.int32]] = {}

    def sync(self, entries: Mapping[str, Entry], load: Callable[[str], Stream | None]) -> None:
        """Makes these the sessions that are known. load: a stream by its key, None if it is gone."""
        for name, old in list(self._entries.items()):
            new = entries.get(name)
            if new is None or new.key != old.key:
                self._forget(name)
            else:
                self._trie.used(name, max(new.uses - old.uses, 0))
                self._entries[name] = new
        for name, entry in entries.items():
            if name not in self._entries:
                stream = load(entry.key)
                if stream is not None:
                    self._trie.insert(name, stream.token_ids, stream.surprisal, entry.uses)
                    self._aligner.add(name, stream.token_ids)
                    self._ids[name], self._entries[name] = stream.token_ids, entry

    def matches(self, token_ids: Any) -> list[Match]:
        """Sessions that hold runs of the new session's tokens, the best first: that with most of them, but of those
        whose chain of references is as long as it may get only what they begin with counts, in whole chunks; and of
        two that are nearly as good the one with the shorter chain."""
        held: Counter[Any] = Counter()
        for run in self._aligner.align(token_ids):
            held[run.reference] += run.length
        prefix = self._trie.longest_prefix(token_ids)
        if prefix.tokens >= self._aligner.min_run:
            held[prefix.session] = max(held[prefix.session], prefix.tokens)
        matches = [self._match(name, token_ids) for name, _ in held.most_common(_COMPARED)]
        return sorted((m for m in matches if m.tokens), key=lambda m: -m.tokens * (1 - _DEPTH_COST * m.entry.depth))

    def longest_prefix(self, token_ids: Any) -> Prefix:
        """See Trie.longest_prefix."""
        return self._trie.longest_prefix(token_ids)

    def expected_reuse(self) -> dict[str, float]:
        """See Trie.expected_reuse; times how often these sessions were used."""
        uses = sum(entry.uses for entry in self._entries.values())
        return {str(name): uses * reuse for name, reuse in self._trie.expected_reuse().items()}

    def _match(self, name: str, token_ids: Any) -> Match:
        entry, ids = self._entries[name], self._ids[name]
        if entry.depth < MAX_DEPTH:
            return Match(entry, sum(run.length for run in self._aligner.align(token_ids, [name])))
        count = min(len(ids), len(token_ids))
        same = int(np.argmin(np.append(ids[:count] == token_ids[:count], False)))
        return Match(entry, same // near.CHUNK * near.CHUNK)

    def _forget(self, name: str) -> None:
        self._trie.remove(name)
        self._aligner.remove(name)
        del self._ids[name], self._entries[name]
