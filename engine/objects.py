"""Where a store keeps its objects: bytes under a name, in a folder, an object store or Redis.

Names are relative paths, "blobs/4f/4f0c..."; an object is there whole or not at all, and durable once `write` returned
(for a server: as durable as it is configured to be). What goes wrong is an OSError, ENOSPC if there is no room.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from seqkv.engine.container import Buffer

_TEMPORARY = "tmp"
_BATCH = 256  # keys in one command to Redis

T = TypeVar("T")


class Objects(Protocol):
    """What the store needs of them. Absent objects are no error."""

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        """Those of the objects that are there."""

    def write(self, objects: Mapping[str, Buffer]) -> None:
        """Replaces or makes each."""

    def delete(self, names: Sequence[str]) -> None:
        """Removes each."""

    def lengths(self, names: Sequence[str]) -> dict[str, int]:
        """Bytes of those of the objects that are there."""

    def under(self, prefix: str) -> dict[str, int]:
        """Names and bytes of all objects below "prefix/"."""

    def tidy(self) -> None:
        """Removes what writers that did not come to an end left behind. Nobody may be writing meanwhile."""

    def close(self) -> None:
        """Gives back connections."""


class Files:
    """Files in a folder of a local file system, which is made if it is not there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / _TEMPORARY).mkdir(parents=True, exist_ok=True)
        _sync(root)

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        out = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                out[name] = (self.root / name).read_bytes()
        return out

    def write(self, objects: Mapping[str, Buffer]) -> None:
        made: dict[str, Path] = {}
        try:
            for name, data in objects.items():
                made[name] = self.root / _TEMPORARY / uuid.uuid4().hex
                made[name].write_bytes(data)
            for path in made.values():
                _sync(path)
            folders = {(self.root / name).parent for name in made}
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            for name, path in made.items():
                path.replace(self.root / name)
            for folder in folders | {folder.parent for folder in folders}:
                _sync(folder)
        except BaseException:
            for path in made.values():
                path.unlink(missing_ok=True)
            raise

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)

    def lengths(self, names: Sequence[str]) -> dict[str, int]:
        out = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                out[name] = (self.root / name).stat().st_size
        return out

    def under(self, prefix: str) -> dict[str, int]:
        out = {}
        for folder, _, files in os.walk(self.root / prefix):
            names = [(Path(folder) / file).relative_to(self.root).as_posix() for file in files]
            out.update(self.lengths(names))
        return out

    def tidy(self) -> None:
        for path in (self.root / _TEMPORARY).iterdir():
            path.unlink()

    def close(self) -> None:
        pass


class Bucket:
    """Objects of anything that fsspec opens, such as "s3://bucket/prefix" (with s3fs) or "memory://name".

    Its configuration, such as credentials, is fsspec's.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        with _as_oserror():
            self._fs, root = url_to_fs(url, use_listings_cache=False)
        self._root = root.rstrip("/") + "/"

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        with _as_oserror():
            paths = [self._root + name for name in names]
            found = zip(names, self._fs.cat_ranges(paths, None, None, on_error="return"), strict=True)
            return dict(self._there(found))

    def write(self, objects: Mapping[str, Buffer]) -> None:
        with _as_oserror():
            self._fs.pipe({self._root + name: bytes(data) for name, data in objects.items()})

    def delete(self, names: Sequence[str]) -> None:
        with _as_oserror():
            _all_or_each(lambda some: self._fs.rm([self._root + name for name in some]), names)

    def lengths(self, names: Sequence[str]) -> dict[str, int]:
        def ask(some: Sequence[str]) -> None:
            out.update(zip(some, self._fs.sizes([self._root + name for name in some]), strict=True))

        out: dict[str, int] = {}
        with _as_oserror():
            _all_or_each(ask, names)
        return out

    def under(self, prefix: str) -> dict[str, int]:
        with _as_oserror():
            self._fs.invalidate_cache()
            found = self._fs.find(self._root + prefix, detail=True)
        return {path[len(self._root) :]: about["size"] for path, about in found.items()}

    def tidy(self) -> None:
        pass  # nothing is there before it is whole

    def close(self) -> None:
        pass

    def _there(self, found: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, bytes]]:
        for name, data in found:
            if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
                raise data
            if not isinstance(data, FileNotFoundError):
                yield name, data


class Redis:
    """Values of a Redis server, "redis://host:port/database", under keys that begin with "seqkv:"."""

    def __init__(self, url: str) -> None:
        from redis import Redis as Client

        self._client = Client.from_url(url)
        with _as_oserror():
            self._client.ping()

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        with _as_oserror():
            found: list[Any] = [value for some in _batches(names) for value in self._client.mget(_keys(some))]
        return {name: value for name, value in zip(names, found, strict=True) if value is not None}

    def write(self, objects: Mapping[str, Buffer]) -> None:
        with _as_oserror(), self._client.pipeline() as transaction:
            for name, data in objects.items():
                transaction.set(_key(name), bytes(data))
            transaction.execute()

    def delete(self, names: Sequence[str]) -> None:
        with _as_oserror():
            for some in _batches(names):
                self._client.delete(*_keys(some))

    def lengths(self, names: Sequence[str]) -> dict[str, int]:
        with _as_oserror(), self._client.pipeline(transaction=False) as together:
            for name in names:
                together.strlen(_key(name))
            return {name: length for name, length in zip(names, together.execute(), strict=True) if length}

    def under(self, prefix: str) -> dict[str, int]:
        with _as_oserror():
            keys = list(self._client.scan_iter(match=_key(prefix) + "/*", count=_BATCH))
        return self.lengths(sorted({key.decode().removeprefix(_key("")) for key in keys}))

    def tidy(self) -> None:
        pass  # nothing is there before it is whole

    def close(self) -> None:
        self._client.close()


def _key(name: str) -> str:
    return f"seqkv:{name}"


def _keys(names: Iterable[str]) -> list[str]:
    return [_key(name) for name in names]


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _BATCH):
        yield names[start : start + _BATCH]


def _all_or_each(do: Callable[[Sequence[str]], None], names: Sequence[str]) -> None:
    """All at once, which is faster; one by one if some of them are not there."""
    try:
        if names:
            do(names)
    except FileNotFoundError:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                do([name])


def _sync(path: Path) -> None:
    """Waits until a file's content, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _as_oserror() -> Iterator[None]:
    """Clients of servers have errors of their own, which have no base in common."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        full = "OOM" in str(error)  # Redis has no memory left
        raise OSError(errno.ENOSPC if full else errno.EIO, f"{type(error).__name__}: {error}") from error
