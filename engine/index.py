"""The index of a store on a local disk: SQLite with a write-ahead log, for many readers and a writer in any processes.

A session is a row that names a stream; a stream is a row with a record of it (engine.records), and links to the blobs
that it needs. How often something is needed is counted when it matters and stored nowhere, so that no count can be
wrong. A stream is kept while a session names it or another stream was coded against it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from seqkv.engine.errors import StoreBusy, StoreDamaged, StoreError, StoreFull
from seqkv.engine.records import Entry, Stream

VERSION = 1  # of the tables
RESERVE = 1 << 18  # bytes that a file keeps back: on a full disk, deleting too must write before anything is free

_FIELDS = tuple(field.name for field in dataclasses.fields(Entry))
_COLUMNS = ", ".join(_FIELDS)
_SCHEMA = f"""
CREATE TABLE sessions (tenant TEXT, {_COLUMNS}, PRIMARY KEY (tenant, name));
CREATE INDEX sessions_by_stream ON sessions (tenant, key);
CREATE TABLE streams (id INTEGER PRIMARY KEY, tenant TEXT, key TEXT, reference TEXT, record BLOB, UNIQUE (tenant, key));
CREATE INDEX streams_by_reference ON streams (tenant, reference);
CREATE TABLE links (blob TEXT, stream INTEGER, bytes INTEGER, PRIMARY KEY (blob, stream)) WITHOUT ROWID;
CREATE INDEX links_by_stream ON links (stream);
PRAGMA user_version = {VERSION};
"""


class Found(NamedTuple):
    """A session, its stream, and the streams that it needs to be decoded, the nearest first; all as they were at one
    time. `missing`: key of a stream that is needed and not there, in a damaged index."""

    entry: Entry
    chain: list[Stream]
    missing: str | None

    @classmethod
    def of(cls, name: str, entry: Entry, stream_of: Callable[[str], Stream | None]) -> Found:
        """Of a session, by its name; stream_of: the stream of a key, if it is there. StoreDamaged if the entry is
        another session's, or the streams have no end."""
        if entry.name != name:
            raise StoreDamaged(f"the index leads to session {entry.name!r}: put the session again")
        chain: list[Stream] = []
        key: str | None = entry.key
        while key is not None:
            stream = stream_of(key)
            if stream is None:
                return cls(entry, chain, key)
            if chain and stream.depth >= chain[-1].depth:
                raise StoreDamaged(f"stream {chain[-1].key} needs {key}, which needs as many others")
            chain.append(stream)
            key = stream.reference
        return cls(entry, chain, None)


class Index(Protocol):
    """What the store needs of an index. Tenants are `records.tenant_id`s. Every method may raise StoreError."""

    def find(self, tenant: str, name: str) -> Found | None:
        """A session, if it is there."""

    def entries(self, tenant: str | None = None) -> dict[tuple[str, str], Entry]:
        """Sessions by tenant and name, the oldest first."""

    def stream(self, tenant: str, key: str) -> Stream | None:
        """A stream, if it is there."""

    def keys(self) -> list[tuple[str, str]]:
        """Tenant and key of all streams."""

    def needed(self, blobs: Iterable[str] | None = None) -> set[str]:
        """Those of some blobs (of all) that a stream needs."""

    def total(self) -> int:
        """Bytes of all blobs that are needed and of all records."""

    def own(self) -> dict[tuple[str, str], int]:
        """Of each stream, by tenant and key, that no stream needs: bytes that it alone needs."""

    def touch(self, tenant: str, uses: Mapping[str, int], now: float) -> bool:
        """Counts uses of sessions. False, and nothing is done, if somebody else is writing."""

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Nobody else writes meanwhile, and what is written is there, all of it, when this ends without an error."""

    def set(self, tenant: str, entry: Entry, stream: Stream) -> list[str]:
        """Makes or replaces a session; only while `writing`. Returns blobs that may not be needed any more."""

    def remove(self, tenant: str, name: str) -> list[str] | None:
        """Removes a session; only while `writing`. Returns blobs that may not be needed any more, or None if the
        session is not there."""

    def spare(self) -> contextlib.AbstractContextManager[None]:
        """Meanwhile there is some room to write what deleting takes, although the disk is full."""

    def problems(self) -> list[str]:
        """What is wrong with the index as such."""

    def compact(self) -> None:
        """Removes streams that nobody needs, and gives back room."""

    def close(self) -> None:
        """Gives back connections."""


class SqliteIndex:
    """See Index.

    path: of the database, which is made if it is not there; timeout: how long to wait for another writer, seconds.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._path, self._timeout, self._process = path, timeout, os.getpid()
        self._lock = threading.RLock()
        with self._translated():
            self._database = sqlite3.connect(path, timeout, isolation_level=None, check_same_thread=False)
            self._run("PRAGMA journal_mode = WAL")
            self._run("PRAGMA synchronous = FULL")
            if self._number("PRAGMA user_version") == 0:
                with self.writing():
                    if self._number("PRAGMA user_version") == 0:  # nobody else was faster
                        for statement in _SCHEMA.strip().split(";\n"):
                            self._run(statement)
            version = self._number("PRAGMA user_version")
        if version != VERSION:
            raise StoreError(
                f"{path} is an index of version {version}, this release reads version {VERSION} only: use the one that "
                "wrote it, or another folder"
            )
        self._reserve = path.with_name("reserve")
        self._keep_back()

    def find(self, tenant: str, name: str) -> Found | None:
        with self._translated(), self._reading():
            rows = self._rows(f"SELECT {_COLUMNS} FROM sessions WHERE tenant = ? AND name = ?", tenant, name)
            return Found.of(name, Entry(*rows[0]), lambda key: self.stream(tenant, key)) if rows else None

    def entries(self, tenant: str | None = None) -> dict[tuple[str, str], Entry]:
        where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
        with self._translated():
            rows = self._rows(f"SELECT tenant, {_COLUMNS} FROM sessions{where} ORDER BY created", *values)
            return {(owner, fields[0]): Entry(*fields) for owner, *fields in rows}

    def stream(self, tenant: str, key: str) -> Stream | None:
        with self._translated():
            rows = self._rows("SELECT record FROM streams WHERE tenant = ? AND key = ?", tenant, key)
        return Stream.from_bytes(rows[0][0], key) if rows else None

    def keys(self) -> list[tuple[str, str]]:
        with self._translated():
            return self._rows("SELECT tenant, key FROM streams")

    def needed(self, blobs: Iterable[str] | None = None) -> set[str]:
        with self._translated():
            if blobs is None:
                return {name for (name,) in self._rows("SELECT DISTINCT blob FROM links")}
            one = "SELECT EXISTS (SELECT 1 FROM links WHERE blob = ?)"
            return {name for name in blobs if self._number(one, name)}

    def total(self) -> int:
        with self._translated():
            blobs = "SELECT COALESCE(SUM(bytes), 0) FROM (SELECT MAX(bytes) AS bytes FROM links GROUP BY blob)"
            records = "SELECT COALESCE(SUM(LENGTH(record)), 0) FROM streams"
            return self._number(f"SELECT ({blobs}) + ({records})")

    def own(self) -> dict[tuple[str, str], int]:
        with self._translated():
            rows = self._rows("""
                WITH single AS (SELECT MAX(stream) AS stream, MAX(bytes) AS bytes FROM links GROUP BY blob
                                HAVING COUNT(*) = 1),
                     own AS (SELECT stream, SUM(bytes) AS bytes FROM single GROUP BY stream)
                SELECT tenant, key, COALESCE(own.bytes, 0) + LENGTH(record) FROM streams
                LEFT JOIN own ON own.stream = streams.id
                WHERE NOT EXISTS (SELECT 1 FROM streams AS other
                                  WHERE other.tenant = streams.tenant AND other.reference = streams.key)""")
            return {(tenant, key): size for tenant, key, size in rows}

    def touch(self, tenant: str, uses: Mapping[str, int], now: float) -> bool:
        rows = [(times, now, tenant, name) for name, times in uses.items()]
        with self._translated(), self._lock:
            self._run("PRAGMA busy_timeout = 0")
            try:
                with self.writing():
                    update = "UPDATE sessions SET uses = uses + ?, used = MAX(used, ?) WHERE tenant = ? AND name = ?"
                    self._database.executemany(update, rows)
            except StoreBusy:
                return False
            finally:
                self._run(f"PRAGMA busy_timeout = {int(1000 * self._timeout)}")
        return True

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self._translated(), self._lock:
            self._run("BEGIN IMMEDIATE")
            try:
                yield
                self._run("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._run("ROLLBACK")
                raise

    def set(self, tenant: str, entry: Entry, stream: Stream) -> list[str]:
        with self._translated():
            old = self._rows("SELECT key FROM sessions WHERE tenant = ? AND name = ?", tenant, entry.name)
            row = tenant, stream.key, stream.reference, stream.record
            add = "INSERT INTO streams (tenant, key, reference, record) VALUES (?, ?, ?, ?)"
            self._run(add + " ON CONFLICT (tenant, key) DO UPDATE SET record = excluded.record", *row)  # if damaged
            number = self._number("SELECT id FROM streams WHERE tenant = ? AND key = ?", tenant, stream.key)
            links = [(blob, number, size) for blob, size in stream.blobs.items()]
            self._database.executemany("INSERT OR IGNORE INTO links VALUES (?, ?, ?)", links)
            fields = dataclasses.astuple(entry)
            places = ", ".join("?" * (1 + len(fields)))
            self._run(f"INSERT OR REPLACE INTO sessions VALUES ({places})", tenant, *fields)
            return self._release(tenant, old[0][0]) if old else []

    def remove(self, tenant: str, name: str) -> list[str] | None:
        with self._translated():
            rows = self._rows("SELECT rowid, name, key FROM sessions WHERE tenant = ? AND name = ?", tenant, name)
            if not rows:
                return None
            number, found, key = rows[0]
            if found != name:
                raise StoreDamaged(f"the index leads to session {found!r}, which is kept")
            self._run("DELETE FROM sessions WHERE rowid = ?", number)
            return self._release(tenant, key)

    @contextlib.contextmanager
    def spare(self) -> Iterator[None]:
        self._reserve.unlink(missing_ok=True)
        try:
            with self._translated():
                self._run("PRAGMA wal_checkpoint(TRUNCATE)")  # the log may hold megabytes
            yield
        finally:
            self._keep_back()

    def problems(self) -> list[str]:
        with self._translated():
            found = [text for (text,) in self._rows("PRAGMA integrity_check") if text != "ok"]
        return [f"the index is damaged: {text}" for text in found]

    def compact(self) -> None:
        with self._translated():
            self._run("VACUUM")
            self._run("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _release(self, tenant: str, key: str | None) -> list[str]:
        """Removes a stream, and those that only it needed, if nobody needs it. Returns their blobs."""
        blobs: list[str] = []
        while key is not None:
            users = "SELECT EXISTS (SELECT 1 FROM sessions WHERE tenant = ?1 AND key = ?2) + EXISTS (SELECT 1 FROM "
            if self._number(users + "streams WHERE tenant = ?1 AND reference = ?2)", tenant, key):
                break
            rows = self._rows("SELECT id, reference FROM streams WHERE tenant = ? AND key = ?", tenant, key)
            if not rows:
                break
            number, key = rows[0]
            blobs += [blob for (blob,) in self._rows("SELECT blob FROM links WHERE stream = ?", number)]
            self._run("DELETE FROM links WHERE stream = ?", number)
            self._run("DELETE FROM streams WHERE id = ?", number)
        return blobs

    def _keep_back(self) -> None:
        with contextlib.suppress(OSError):
            if not self._reserve.exists():
                self._reserve.write_bytes(os.urandom(RESERVE))  # which no file system stores in less

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """All that is read is of one time."""
        with self._lock:
            if self._database.in_transaction:
                yield
                return
            self._run("BEGIN")
            try:
                yield
            finally:
                self._run("ROLLBACK")

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if os.getpid() != self._process:
            raise StoreError(f"{self._path} was opened by another process: open the store anew after a fork")
        with self._lock:
            return self._database.execute(statement, values)

    def _rows(self, statement: str, *values: Any) -> list[Any]:
        with self._lock:  # to the last row, before another thread writes
            return self._run(statement, *values).fetchall()

    def _number(self, statement: str, *values: Any) -> int:
        return self._rows(statement, *values)[0][0]

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """SQLite's errors as the store's."""
        try:
            yield
        except sqlite3.Error as error:
            text = f"{self._path}: {error}"
            if "locked" in str(error) or "busy" in str(error):
                raise StoreBusy(f"{text}, for {self._timeout:g} seconds") from error
            if "full" in str(error):
                raise StoreFull(text) from error
            if isinstance(error, (sqlite3.OperationalError, sqlite3.ProgrammingError)):
                raise StoreError(text) from error
            raise StoreDamaged(text) from error
        except UnicodeDecodeError as error:  # what Python makes of SQLite's answer if names in the file are altered
            raise StoreDamaged(f"{self._path}: {error}") from error
