"""A store of sessions that share almost everything: on a local disk, in an object store or in Redis.

arXiv 2604.15356, layer 1. A session that is put is coded against the stored one it has most in common with, at any
offset (engine.neighbours), and of the resulting stream what is stored already is not stored again (engine.records).
What is stored of a session stays as long as another needs it.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import objects, upkeep
from seqkv.engine.blobs import BlobMissing, Blobs
from seqkv.engine.cache import KVCache
from seqkv.engine.codec import Backend, Measure, decode, encode
from seqkv.engine.container import Buffer
from seqkv.engine.errors import ProfileError, SeqkvError, SessionError, StoreDamaged, StoreError, StoreFull, StreamError
from seqkv.engine.index import Found, Index, SqliteIndex
from seqkv.engine.neighbours import Match, Neighbours
from seqkv.engine.object_index import ObjectIndex
from seqkv.engine.probs import TokenProbs
from seqkv.engine.profile import Profile
from seqkv.engine.records import Entry, Stream, tenant_id
from seqkv.engine.reference import Reference
from seqkv.engine.trie import Prefix
from seqkv.engine.upkeep import Report, Stats

_TRIES = 5  # until a reader, or a writer's reference, is believed to be damaged and not just deleted
_TOUCH = 1.0  # seconds between two writes of how often sessions were used


class SessionStore:
    """KV caches of sessions, by name.

    path: a folder, which is made if it is not there; or the URL of a Redis server, redis://host:port/database (needs
        redis), or of anything that fsspec knows, such as s3://bucket/prefix (needs s3fs).
    profile: of the model; sessions that were put with another one cannot be got with this. Without a profile, or with
        one of predictor "expectation", sessions are not coded against others.
    tenant: whose sessions these are. Other tenants' are neither seen nor used, not even where they are the same.
    limit: bytes, for all tenants together. Before a session is put that would exceed it, others are evicted: those
        first of which the next session is expected to share the fewest tokens for a byte (Trie.expected_reuse), of
        equals the one not used for longest; never one that others need before they are gone.
    timeout: how long to wait for another writer, seconds.

    In a folder, any number of processes may read and write at the same time: writers wait for each other, readers for
    nobody. Once `put` or `delete` has returned, its effect outlasts a crash, and a crash before leaves at most bytes
    that nobody needs (`compact`). Elsewhere there must be only one writer at a time, and how long things last is up to
    the server. One store can be used by several threads, but not after a fork.

    Errors name the session: StoreDamaged, StoreBusy, StoreFull and otherwise StoreError, SessionError if it is not
    there, ProfileError if it was put with another profile.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        profile: Profile | None = None,
        tenant: str = "",
        limit: int | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.profile, self.limit = profile, limit
        self.fingerprint = None if profile is None else profile.fingerprint
        self._tenant = tenant_id(tenant)
        with _naming(f"store {path}"):
            self._objects: objects.Objects
            self._index: Index
            local = str(path).removeprefix("file://")
            if "://" not in local:
                self._objects = objects.Files(Path(local))
                self._index = SqliteIndex(Path(local) / "index.sqlite", timeout)
            else:
                redis = str(path).startswith(("redis://", "rediss://", "unix://"))
                self._objects = objects.Redis(str(path)) if redis else objects.Bucket(str(path))
                self._index = ObjectIndex(self._objects)
        self._blobs = Blobs(self._objects)
        self._lock = threading.RLock()  # for the two below; taken before the index's own
        self._neighbours: dict[tuple[str, str | None], Neighbours] = {}  # by tenant and profile
        self._uses: dict[str, int] = {}
        self._touched = time.monotonic()

    def put(
        self,
        session: str,
        kv: KVCache,
        probs: TokenProbs,
        *,
        tier: Literal["near", "lossless"] = "near",
        kl: float = 0.01,
        step: float | None = None,
        measure: Measure | None = None,
        importance: Any = None,
    ) -> Entry:
        """Stores a session, in place of the one of that name if there is one, and says what that took.

        kv, probs, tier, kl, step, measure, importance: as `engine.encode` takes them; each session has a kl of its own.
        Without loss a session is not coded against another, but chunks that are the same in both are stored once.

        Raises what `encode` raises, StoreFull, StoreBusy, StoreError.
        """
        with _naming(f"session {_checked(session)!r}"):
            match, reference = self._reference(probs) if tier == "near" else (None, None)
            options: Any = {"tier": tier, "profile": self.profile, "kl": kl, "step": step}
            options |= {"measure": measure, "importance": importance}
            entry = self._commit(session, encode(kv, probs, reference=reference, **options), probs, match)
            if entry is None:
                entry = self._commit(session, encode(kv, probs, **options), probs, None)
            assert entry is not None  # without a reference
            return entry

    def get(
        self, session: str, *, tokens: slice | None = None, layers: slice | None = None, backend: Backend = "cpu"
    ) -> KVCache:
        """A session's cache, or a part of it; arguments as `engine.decode` takes them.

        Raises SessionError, ProfileError, StoreDamaged, StoreError; CacheError if nothing is left of the slices.
        """
        with _naming(f"session {_checked(session)!r}"):
            found, streams = self._read(session)
            if found.entry.profile != self.fingerprint:
                raise ProfileError(
                    f"needs profile {found.entry.profile}: open the store with it, not {self.fingerprint}"
                )
            cache = decode(
                streams[found.entry.key],
                profile=self.profile,
                reference=streams.__getitem__ if len(streams) > 1 else None,
                tokens=tokens,
                layers=layers,
                backend=backend,
            )
            self._touch(session)
            return cache

    def streams(self, session: str) -> dict[str, Buffer]:
        """A session's stream, and then those that it needs to be decoded, by key: for `engine.decode_into` and the
        like, with `reference=streams.__getitem__`. Raises what `get` raises."""
        with _naming(f"session {_checked(session)!r}"):
            return self._read(session)[1]

    def token_ids(self, session: str) -> NDArray[np.int32]:
        """A session's tokens. SessionError, StoreDamaged, StoreError."""
        with _naming(f"session {_checked(session)!r}"):
            return self._read(session)[0].chain[0].token_ids

    def longest_prefix(self, token_ids: Any) -> Prefix:
        """The longest prefix that token_ids [tokens] share with a session, of this profile, and one that has it: what
        of a prompt need not be computed again. No session if there is none. ProbsError, StoreError."""
        with _naming("the store"), self._lock:
            return self._synced(self._tenant, self.fingerprint).longest_prefix(token_ids)

    def list(self) -> Sequence[Entry]:
        """All sessions, the oldest first."""
        self._flush()
        with _naming("the store"):
            return list(self._index.entries(self._tenant).values())

    def delete(self, session: str) -> None:
        """Removes a session. Sessions that were coded against it keep what they need. SessionError, StoreError."""
        with _naming(f"session {_checked(session)!r}"):
            try:
                self._delete(session)
            except StoreFull:
                with self._index.spare():
                    self._delete(session)

    def verify(self) -> Report:
        """Checks every byte and every dependency, of all tenants. Never raises for damage, reports it."""
        return upkeep.verify(self._index, self._blobs, self._tenant)

    def compact(self) -> int:
        """Removes what crashes left behind and gives back room. Returns bytes of blobs removed. StoreError."""
        with _naming("the store"):
            return upkeep.compact(self._index, self._blobs, self._objects)

    def stats(self) -> Stats:
        """Sizes. StoreError."""
        with _naming("the store"):
            return upkeep.stats(self._index, self._tenant, self.limit)

    def close(self) -> None:
        """Ends the use of the store. It is not needed for what was put to be safe."""
        self._flush()
        self._index.close()
        self._objects.close()

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _delete(self, session: str) -> None:
        with self._index.writing():
            dropped = self._index.remove(self._tenant, session)
        if dropped is None:
            raise SessionError("is not in the store (list() says what is)")
        self._clear(dropped)

    def _reference(self, probs: TokenProbs) -> tuple[Match | None, Reference | None]:
        """The best of the stored sessions that can be read, to code one with these tokens against."""
        if self.profile is None or self.profile.predictor == "expectation":
            return None, None
        with self._lock:
            matches = self._synced(self._tenant, self.fingerprint).matches(probs.token_ids)
        for match in matches:
            with contextlib.suppress(SessionError, StoreDamaged, StreamError):
                _, streams = self._read(match.entry.name)
                if match.entry.key in streams:
                    return match, Reference(streams[match.entry.key], self.profile, streams.__getitem__)
        return None, None

    def _synced(self, tenant: str, fingerprint: str | None) -> Neighbours:
        """What is known of one tenant's sessions, up to date. Needs the lock."""

        def load(key: str) -> Stream | None:
            with contextlib.suppress(StoreDamaged):
                return self._index.stream(tenant, key)
            return None

        known = self._neighbours.setdefault((tenant, fingerprint), Neighbours())
        entries = self._index.entries(tenant)
        known.sync({name: e for (_, name), e in entries.items() if e.profile == fingerprint}, load)
        return known

    def _commit(self, session: str, data: bytes, probs: TokenProbs, match: Match | None) -> Entry | None:
        """Stores a stream. None, and nothing is done, if its reference is gone, or leaves no room for it."""
        stream, blobs = Stream.split(data, probs, self._tenant)
        dropped: Collection[str]
        while True:
            with self._lock, self._index.writing():
                if stream.reference is not None and self._index.stream(self._tenant, stream.reference) is None:
                    return None
                if self.limit is not None and self._size_with_references(stream) > self.limit:
                    if stream.reference is not None:
                        return None
                    raise StoreFull(f"its {len(data)} bytes do not fit in the limit of {self.limit}: raise that")
                missing = self._blobs.missing(blobs, self._index.needed(blobs))
                added = len(stream.record) + sum(stream.blobs[name] for name in missing)
                if self.limit is None or self._index.total() + added <= self.limit:
                    entry = self._entry(session, stream, len(data), added, match)
                    self._blobs.write(missing)
                    dropped = self._index.set(self._tenant, entry, stream)
                    break
                dropped = self._evict(stream)
            self._clear(dropped)
        self._clear(dropped)
        return entry

    def _entry(self, session: str, stream: Stream, size: int, added: int, match: Match | None) -> Entry:
        now, shared = time.time(), len(stream.record) + sum(stream.blobs.values()) - added
        if not shared and stream.reference is None:  # the codec made no use of it
            match = None
        return Entry(
            name=session,
            key=stream.key,
            profile=stream.profile,
            tokens=len(stream.token_ids),
            stream_bytes=size,
            reference=None if match is None else match.entry.name,
            depth=stream.depth,
            shared_tokens=0 if match is None else match.tokens,
            own_bytes=added,
            shared_bytes=shared,
            uses=1,
            created=now,
            used=now,
        )

    def _size_with_references(self, stream: Stream) -> int:
        """Bytes of a stream's blobs and record, and of those of the streams that it needs."""
        blobs, records = dict(stream.blobs), len(stream.record)
        while stream.reference is not None:
            reference = self._index.stream(self._tenant, stream.reference)
            if reference is None:
                raise StoreDamaged(f"stream {stream.reference} is missing")
            stream = reference
            blobs |= stream.blobs
            records += len(stream.record)
        return records + sum(blobs.values())

    def _evict(self, stream: Stream) -> Collection[str]:
        """Removes the session that is worth least for its bytes, but none that a stream needs. Returns its blobs."""
        entries, own = self._index.entries(), self._index.own()
        with self._lock:
            groups = {(tenant, entry.profile) for (tenant, _), entry in entries.items()}
            worth = {group: self._synced(*group).expected_reuse() for group in groups}
        candidates = [
            (worth[tenant, entry.profile].get(name, 0.0) / own[tenant, entry.key], entry.used, tenant, name)
            for (tenant, name), entry in entries.items()
            if (tenant, entry.key) in own and (tenant, entry.key) != (self._tenant, stream.reference)
        ]
        if not candidates:
            raise StoreFull(f"no room is left for it within the limit of {self.limit} bytes: delete sessions")
        *_, tenant, name = min(candidates)
        return self._index.remove(tenant, name) or []

    def _clear(self, blobs: Collection[str]) -> None:
        """Deletes those of some blobs that nobody needs; only after what needed them is gone for good. What was asked
        for is done by then: where this fails, the blobs are left to `compact`."""
        if blobs:
            with contextlib.suppress(StoreError, OSError), self._index.writing():
                self._blobs.delete(set(blobs) - self._index.needed(blobs))

    def _read(self, session: str) -> tuple[Found, dict[str, Buffer]]:
        """A session and the streams that it needs, by key; once more if they were deleted while they were read."""
        for attempt in range(_TRIES):
            found = self._index.find(self._tenant, session)
            if found is None:
                raise SessionError("is not in the store (list() says what is)")
            try:
                if found.missing is not None:
                    raise BlobMissing(f"stream {found.missing}, which it needs, is missing")
                blobs = self._blobs.read(self._tenant, (name for stream in found.chain for name in stream.blobs))
                return found, {stream.key: stream.join(blobs) for stream in found.chain}
            except BlobMissing:
                if attempt == _TRIES - 1:
                    raise
                time.sleep(0.01 * attempt)
        raise AssertionError("the last try returns or raises")

    def _touch(self, session: str) -> None:
        with self._lock:
            self._uses[session] = self._uses.get(session, 0) + 1
        if time.monotonic() - self._touched > _TOUCH:
            self._flush()

    def _flush(self) -> None:
        """Writes how often sessions were used, unless somebody else is writing: next time, then."""
        with self._lock:
            self._touched = time.monotonic()
            uses, self._uses = self._uses, {}
        with contextlib.suppress(StoreError, OSError):
            if not uses or self._index.touch(self._tenant, uses, time.time()):
                return
        with self._lock:
            for name, times in uses.items():
                self._uses[name] = self._uses.get(name, 0) + times


def _checked(session: str) -> str:
    try:
        session.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise SessionError(f"sessions are named by strings, not {session!r}") from error
    return session


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Lets errors say what they are about."""
    try:
        yield
    except SeqkvError as error:
        kind = StoreDamaged if isinstance(error, BlobMissing) else type(error)
        raise kind(f"{what}: {error}") from error
    except OSError as error:
        kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        raise kind(f"{what}: {error}") from error
