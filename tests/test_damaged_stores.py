"""Records of a store that are right by their checksums and cannot be: reading them ends, and says so."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqkv import engine
from seqkv.engine import KVCache, TokenProbs
from seqkv.engine.blobs import Blobs
from seqkv.engine.errors import StoreDamaged
from seqkv.engine.index import Index, SqliteIndex
from seqkv.engine.object_index import ObjectIndex
from seqkv.engine.objects import Bucket, Files, Objects
from seqkv.engine.records import Entry, Stream
from seqkv.engine.upkeep import verify

TENANT, KEYS = "0" * 32, ("a" * 32, "b" * 32)


def opened(kind: str, path: Path) -> tuple[Index, Objects]:
    if kind == "folder":
        return SqliteIndex(path / "index.sqlite", 1.0), Files(path)
    objects = Bucket(f"memory://{uuid.uuid4().hex}")
    return ObjectIndex(objects), objects


@pytest.mark.parametrize("depths", [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_references_that_go_round_end(kind: str, depths: tuple[int, int], tmp_path: Path) -> None:
    index, objects = opened(kind, tmp_path)
    for place, key in enumerate(KEYS):
        ids, surprisal = np.zeros(3, np.int32), np.zeros(3, np.float32)
        stream = Stream(key, KEYS[1 - place], depths[place], None, {}, (), ids, surprisal)
        entry = Entry(f"session {place}", key, None, 3, 300, None, depths[place], 0, 300, 0, 1, 1.5, 2.5)
        with index.writing():
            index.set(TENANT, entry, stream)
    for place in range(2):
        with pytest.raises(StoreDamaged, match="which needs as many others"):
            index.find(TENANT, f"session {place}")
    assert verify(index, Blobs(objects), TENANT).sessions == 2
    index.close()


def split() -> Stream:
    keys = np.zeros((1, 1, 3, 2), np.float16)
    probs = TokenProbs.from_tokens([1, 2, 3])
    return Stream.split(engine.encode(KVCache(keys, keys), probs, tier="lossless"), probs, TENANT)[0]


def test_the_stream_that_others_are_made_of_joins() -> None:
    stream = split()
    assert engine.stream_key(stream.join({})) == stream.key


CHANGES: dict[str, Any] = {
    "a lone surrogate": {"header": {"tier": "\ud83d"}},
    "a kind beyond a byte": {"kind": 256},
    "a negative index": {"index": -1},
    "an index beyond 64 bits": {"index": 1 << 64},
    "a kind that is no number": {"kind": "near"},
    "two parts in one place": {"kind": 1, "index": 0},
    "a blob that is not there": {"blob": "blobs/00/00"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_parts_and_headers_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    stream = split()
    if "header" in change:
        wrong = dataclasses.replace(stream, header=stream.header | change["header"])
    else:
        parts = tuple(p for p in stream.parts if (p.kind, p.index) != (1, 0))
        kept = tuple(p for p in stream.parts if (p.kind, p.index) == (1, 0))
        wrong = dataclasses.replace(stream, parts=(*kept, dataclasses.replace(parts[0], **change), *parts[1:]))
    with pytest.raises(StoreDamaged, match=stream.key):
        wrong.join({})


def test_an_index_that_leads_to_another_session_is_refused(tmp_path: Path) -> None:
    """A byte of SQLite's own index of names, whose order is then another: asked for "one", it gives "exact"."""
    index = SqliteIndex(tmp_path / "index.sqlite", 1.0)
    for place, name in enumerate(("one", "two", "exact")):
        stream = Stream(f"{place}" * 32, None, 0, None, {}, (), np.zeros(3, np.int32), np.zeros(3, np.float32))
        with index.writing():
            index.set(TENANT, Entry(name, stream.key, None, 3, 300, None, 0, 0, 300, 0, 1, 1.5, 2.5), stream)
    index.compact()
    index.close()
    path = tmp_path / "index.sqlite"
    whole = bytearray(path.read_bytes())
    at = whole.index(f"{TENANT}exact\x03".encode())  # ends in the number of its row, as the table's own rows do not
    whole[at + 27] = 173
    path.write_bytes(whole)
    index = SqliteIndex(path, 1.0)
    led = [name for name in ("one", "two", "exact") if refused(index, name)]
    with index.writing(), pytest.raises(StoreDamaged, match="which is kept"):
        index.remove(TENANT, led[0])
    assert led and index.problems() and len(index.entries()) == 3
    index.close()


def refused(index: SqliteIndex, name: str) -> bool:
    try:
        found = index.find(TENANT, name)
    except StoreDamaged as error:
        return "the index leads to session" in str(error)
    assert found is None or found.entry.name == name
    return False


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_stream_in_anothers_place_is_refused(kind: str, tmp_path: Path) -> None:
    index, objects = opened(kind, tmp_path)
    ids, surprisal = np.zeros(3, np.int32), np.zeros(3, np.float32)
    with index.writing():
        for key in KEYS:
            entry = Entry(f"session {key[0]}", key, None, 3, 300, None, 0, 0, 300, 0, 1, 1.5, 2.5)
            index.set(TENANT, entry, Stream(key, None, 0, None, {}, (), ids, surprisal))
    if isinstance(index, SqliteIndex):
        with index.writing():
            index._run("UPDATE streams SET record = (SELECT record FROM streams WHERE key = ?)", KEYS[0])
    else:
        names = [f"streams/{TENANT}/{key}" for key in KEYS]
        objects.write({names[1]: objects.read(names)[names[0]]})
    with pytest.raises(StoreDamaged, match=f"it is of stream {KEYS[0]}"):
        index.find(TENANT, "session b")
    index.close()
