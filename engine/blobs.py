"""Blobs: content-addressed objects, checked against their names whenever they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from seqkv.engine.container import Buffer
from seqkv.engine.errors import StoreDamaged
from seqkv.engine.objects import Objects
from seqkv.engine.records import blob_name


class BlobMissing(StoreDamaged):
    """A blob is not there: it is lost, or was removed with the last session that needed it."""


class Blobs:
    """Blobs of all tenants (see engine.records)."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._suspect: set[str] = set()  # found missing or altered, and not written since

    def read(self, tenant: str, names: Iterable[str]) -> dict[str, bytes]:
        """All of some blobs. BlobMissing, StoreDamaged if one is not what its name says."""
        wanted = list(dict.fromkeys(names))
        found = self._objects.read(wanted)
        for name in wanted:
            if name not in found:
                self._suspect.add(name)
                raise BlobMissing(f"{name} is missing")
            if blob_name(found[name], tenant) != name:
                self._suspect.add(name)
                raise StoreDamaged(f"{name} is damaged: its bytes are not those that it is named after")
        return found

    def missing(self, blobs: Mapping[str, Buffer], needed: set[str]) -> dict[str, Any]:
        """Those that have to be written: all but the ones that a session needs already, and that are in order as far
        as is known. One that nobody needs may be about to go, or not yet be durable."""
        lengths = self._objects.lengths([name for name in blobs if name in needed])
        sizes = {name: memoryview(data).nbytes for name, data in blobs.items()}
        return {n: data for n, data in blobs.items() if lengths.get(n) != sizes[n] or n in self._suspect}

    def write(self, blobs: Mapping[str, Buffer]) -> None:
        """Durable when it returns."""
        self._objects.write(blobs)
        self._suspect.difference_update(blobs)

    def delete(self, names: Iterable[str]) -> None:
        """Absent ones too."""
        self._objects.delete(list(names))

    def all(self) -> dict[str, int]:
        """Names and sizes."""
        return self._objects.under("blobs")
