"""The upkeep of a store: checks, figures, and what crashes left behind."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from seqkv.engine.blobs import Blobs
from seqkv.engine.errors import StoreDamaged, StoreError
from seqkv.engine.index import Index
from seqkv.engine.objects import Objects


@dataclass(frozen=True)
class Problem:
    """Something that is damaged. sessions: of this tenant, those that cannot be got because of it."""

    what: str
    sessions: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What `SessionStore.verify` found.

    sessions, streams, blobs: how many were checked; blob_bytes: of the blobs.
    orphan_bytes: of blobs that no stream needs. They do no harm: `SessionStore.compact` removes what a crash left.
    """

    sessions: int
    streams: int
    blobs: int
    blob_bytes: int
    orphan_bytes: int
    problems: tuple[Problem, ...]

    @property
    def clean(self) -> bool:
        """Whether every session can be got."""
        return not self.problems


@dataclass(frozen=True)
class Stats:
    """Figures of a store.

    sessions, tokens: of this tenant; stream_bytes: that its streams have together, each for itself.
    stored_bytes: blobs and records of all tenants; limit: for these, if there is one. tenants: how many.
    """

    sessions: int
    tokens: int
    stream_bytes: int
    stored_bytes: int
    limit: int | None
    tenants: int


def verify(index: Index, blobs: Blobs, tenant: str) -> Report:
    """See SessionStore.verify. Others may read and write meanwhile: what is gone by now is no problem."""
    try:
        problems = [Problem(what, ()) for what in index.problems()]
        entries, keys, there = index.entries(), index.keys(), blobs.all()
        needed = index.needed()
    except (StoreError, OSError) as error:
        return Report(0, 0, 0, 0, 0, (Problem(str(error), ()),))
    broken: dict[tuple[str, str], str] = {}  # streams, and what is wrong with them
    references: dict[tuple[str, str], str | None] = {}
    sizes: dict[str, int] = {}  # of the blobs that are as they should be
    for owner, key in keys:
        try:
            stream = index.stream(owner, key)
            if stream is None:
                continue
            references[owner, key] = stream.reference
            for name in stream.blobs.keys() - sizes.keys():
                sizes[name] = len(blobs.read(owner, [name])[name])
            if stream.reference is not None and index.stream(owner, stream.reference) is None:
                raise StoreDamaged(f"stream {stream.reference}, which it needs, is missing")
        except (StoreError, OSError) as error:
            if not _gone(index, owner, key):
                broken[owner, key] = str(error)
    users: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (owner, name), entry in entries.items():
        known = (owner, entry.key) in references or (owner, entry.key) in broken
        if not known and not _replaced(index, owner, name, entry.key):
            broken[owner, entry.key] = "it is missing"
        needs: str | None = entry.key
        while needs is not None and owner == tenant and name not in users[owner, needs]:  # a damaged chain has no end
            users[owner, needs].append(name)
            needs = references.get((owner, needs))
    problems += [Problem(f"stream {key}: {what}", tuple(users[owner, key])) for (owner, key), what in broken.items()]
    orphans = sum(size for name, size in there.items() if name not in needed)
    return Report(len(entries), len(keys), len(sizes), sum(sizes.values()), orphans, tuple(problems))


def compact(index: Index, blobs: Blobs, objects: Objects) -> int:
    """See SessionStore.compact."""
    try:
        index.compact()
    finally:  # although a full disk may have no room for that
        with index.writing():
            there, needed = blobs.all(), index.needed()
            orphans = there.keys() - needed
            blobs.delete(orphans)
            objects.tidy()
    return sum(there[name] for name in orphans)


def stats(index: Index, tenant: str, limit: int | None) -> Stats:
    """See SessionStore.stats."""
    entries = index.entries()
    own = [entry for (owner, _), entry in entries.items() if owner == tenant]
    tokens, size = sum(entry.tokens for entry in own), sum(entry.stream_bytes for entry in own)
    return Stats(len(own), tokens, size, index.total(), limit, len({owner for owner, _ in entries}))


def _gone(index: Index, tenant: str, key: str) -> bool:
    try:
        return index.stream(tenant, key) is None
    except (StoreError, OSError):
        return False


def _replaced(index: Index, tenant: str, name: str, key: str) -> bool:
    """Whether a session does not name that stream any more, or it is there after all."""
    try:
        found = index.find(tenant, name)
    except (StoreError, OSError):
        return False
    return found is None or found.entry.key != key or found.missing != key
