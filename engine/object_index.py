"""The index of a store that is all objects (engine.objects): a small object for each session and each stream.

    names/TENANT/HASH OF THE NAME   an Entry
    streams/TENANT/KEY              a Stream's record; never changed while it is there
    state                           other bytes after each write, and not there during one: as long as it is the same,
                                    what was read before is still true

Each object changes as a whole, and a session is there when its entry is, which is written last and deleted first: what
a writer that died leaves behind is not seen by anybody, and `SessionStore.compact` removes it. There must be one writer
at a time. Another may take over, but two at once harm each other's sessions: nothing here can lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from seqkv.engine.errors import StoreDamaged
from seqkv.engine.index import Found
from seqkv.engine.objects import Objects
from seqkv.engine.records import Entry, Stream

_STATE = "state"


@dataclass
class _Snapshot:
    """All of the index. Streams and entries by tenant and key or name; records' sizes by tenant and key."""

    state: bytes | None
    entries: dict[tuple[str, str], Entry]
    streams: dict[tuple[str, str], Stream]
    sizes: dict[tuple[str, str], int]


class ObjectIndex:
    """See engine.index.Index."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._lock = threading.RLock()
        self._known: _Snapshot | None = None
        self._mine: bytes | None = None  # the state that was written last here
        self._writing = False

    def find(self, tenant: str, name: str) -> Found | None:
        data = self._read(_name(tenant, name))
        return None if data is None else Found.of(name, Entry.from_bytes(data), lambda key: self.stream(tenant, key))

    def entries(self, tenant: str | None = None) -> dict[tuple[str, str], Entry]:
        entries = self._snapshot().entries
        some = {place: entry for place, entry in entries.items() if tenant in (None, place[0])}
        return dict(sorted(some.items(), key=lambda item: item[1].created))

    def stream(self, tenant: str, key: str) -> Stream | None:
        data = self._read(_stream(tenant, key))
        return None if data is None else Stream.from_bytes(data, key)

    def keys(self) -> list[tuple[str, str]]:
        return [_place(name) for name in self._objects.under("streams")]

    def needed(self, blobs: Iterable[str] | None = None) -> set[str]:
        all_of_them = {blob for stream in self._snapshot().streams.values() for blob in stream.blobs}
        return all_of_them if blobs is None else all_of_them.intersection(blobs)

    def total(self) -> int:
        known = self._snapshot()
        blobs = {blob: size for stream in known.streams.values() for blob, size in stream.blobs.items()}
        return sum(blobs.values()) + sum(known.sizes.values())

    def own(self) -> dict[tuple[str, str], int]:
        known = self._snapshot()
        users = Counter(blob for stream in known.streams.values() for blob in stream.blobs)
        needed = {(tenant, stream.reference) for (tenant, _), stream in known.streams.items()}
        return {
            place: known.sizes[place] + sum(size for blob, size in stream.blobs.items() if users[blob] == 1)
            for place, stream in known.streams.items()
            if place not in needed
        }

    def touch(self, tenant: str, uses: Mapping[str, int], now: float) -> bool:
        """Nothing is written if this process is not the writer: an entry could come back that was deleted meanwhile."""
        with self._lock:
            if self._mine is None or self._read(_STATE) != self._mine:
                return True
            for name, times in uses.items():
                entry = self._snapshot().entries.get((tenant, name))
                if entry is not None:
                    self._enter(tenant, replace(entry, uses=entry.uses + times, used=max(entry.used, now)))
        return True

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self._lock:
            known = self._snapshot()
            self._writing = True
            try:
                self._objects.delete([_STATE])
                yield
                known.state = self._mine = uuid.uuid4().bytes
                with contextlib.suppress(OSError):  # without it everything is read every time
                    self._objects.write({_STATE: known.state})
            except BaseException:
                self._known = None
                raise
            finally:
                self._writing = False

    def set(self, tenant: str, entry: Entry, stream: Stream) -> list[str]:
        known = self._snapshot()
        old, place = known.entries.get((tenant, entry.name)), (tenant, stream.key)
        if place not in known.streams:
            self._objects.write({_stream(*place): stream.record})
            known.streams[place], known.sizes[place] = stream, len(stream.record)
        self._enter(tenant, entry)
        return [] if old is None else self._release(tenant, old.key)

    def remove(self, tenant: str, name: str) -> list[str] | None:
        if self._read(_name(tenant, name)) is None:
            return None
        self._objects.delete([_name(tenant, name)])
        entry = self._snapshot().entries.pop((tenant, name), None)
        return [] if entry is None else self._release(tenant, entry.key)

    def spare(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def problems(self) -> list[str]:
        found = []
        for name, data in self._objects.read(list(self._objects.under("names"))).items():
            try:
                Entry.from_bytes(data)
            except StoreDamaged as error:
                found.append(f"{name}: {error}")
        return found

    def compact(self) -> None:
        with self.writing():
            for tenant, key in self.keys():
                self._release(tenant, key)

    def close(self) -> None:
        self._objects.close()

    def _enter(self, tenant: str, entry: Entry) -> None:
        self._objects.write({_name(tenant, entry.name): entry.to_bytes()})
        self._snapshot().entries[tenant, entry.name] = entry

    def _release(self, tenant: str, key: str | None) -> list[str]:
        """Removes a stream, and those that only it needed, if nobody needs it. Returns their blobs."""
        known, blobs = self._snapshot(), list[str]()
        while key is not None:
            if any(owner == tenant and entry.key == key for (owner, _), entry in known.entries.items()) or any(
                owner == tenant and stream.reference == key for (owner, _), stream in known.streams.items()
            ):
                break
            self._objects.delete([_stream(tenant, key)])
            known.sizes.pop((tenant, key), None)
            stream = known.streams.pop((tenant, key), None)
            blobs += [] if stream is None else stream.blobs
            key = None if stream is None else stream.reference
        return blobs

    def _read(self, name: str) -> bytes | None:
        return self._objects.read([name]).get(name)

    def _snapshot(self) -> _Snapshot:
        """What is there, read again if somebody else wrote. Damaged entries and streams are left out."""
        with self._lock:
            if self._known is not None and self._writing:
                return self._known
            state = self._read(_STATE)
            if self._known is not None and state is not None and state == self._known.state:
                return self._known
            known = _Snapshot(state, {}, {}, {})
            for name, data in self._objects.read(list(self._objects.under("names"))).items():
                with contextlib.suppress(StoreDamaged):
                    entry = Entry.from_bytes(data)
                    known.entries[_place(name)[0], entry.name] = entry
            for name, data in self._objects.read(list(self._objects.under("streams"))).items():
                place = _place(name)
                with contextlib.suppress(StoreDamaged):
                    known.streams[place] = Stream.from_bytes(data, place[1])
                    known.sizes[place] = len(data)
            self._known = known
            return known


def _name(tenant: str, name: str) -> str:
    return f"names/{tenant}/{hashlib.blake2b(name.encode(), digest_size=20).hexdigest()}"


def _stream(tenant: str, key: str) -> str:
    return f"streams/{tenant}/{key}"


def _place(name: str) -> tuple[str, str]:
    """Tenant and key of a stream's object (or hash, of an entry's)."""
    _, tenant, key = name.split("/")
    return tenant, key
