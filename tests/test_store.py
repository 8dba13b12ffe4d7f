"""The store in a folder: what comes back, what is shared, what stays, and what is refused."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqkv import engine
from seqkv.engine import KVCache, Profile, ProfileError
from seqkv.engine import objects as objects_module
from seqkv.engine.errors import SessionError, StoreBusy, StoreDamaged, StoreError, StoreFull
from seqkv.engine.form import MAX_DEPTH
from seqkv.engine.index import SqliteIndex
from seqkv.engine.store import SessionStore
from tests.conftest import calibrated
from tests.sessions import CausalModel

TOKENS = 300  # a chunk and a part of one


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel()


@pytest.fixture(scope="module")
def profile(model: CausalModel) -> Profile:
    return calibrated(model)


@pytest.fixture
def store(tmp_path: Path, profile: Profile) -> Iterator[SessionStore]:
    with SessionStore(tmp_path / "store", profile=profile) as opened:
        yield opened


@pytest.fixture
def put(model: CausalModel) -> Callable[..., Any]:
    """(store, name, token ids) puts a session of these tokens and returns the entry."""

    def do(store: SessionStore, name: str, ids: Any, **options: Any) -> Any:
        kv, probs, attention = model.session(ids)
        return store.put(name, kv, probs, importance=attention, **options)

    return do


def edited(ids: Any, place: int = 40) -> Any:
    return np.concatenate([ids[:place], (ids[place : place + 1] + 1) % CausalModel.vocab, ids[place + 1 :]])


def relative_error(true: KVCache, decoded: KVCache) -> float:
    lost = sum(
        ((a - b) ** 2).sum() for a, b in zip(true.keys + true.values, decoded.keys + decoded.values, strict=True)
    )
    return float(np.sqrt(lost / sum((a**2).sum() for a in true.keys + true.values)))


def same(a: KVCache, b: KVCache) -> bool:
    arrays = zip(a.keys + a.values, b.keys + b.values, strict=True)
    return all(np.array_equal(x, y) for x, y in arrays) and np.array_equal(a.positions, b.positions)


def blobs(store: SessionStore) -> set[Path]:
    return {path for path in (store_folder(store) / "blobs").rglob("*") if path.is_file()}


def store_folder(store: SessionStore) -> Path:
    return store._objects.root  # type: ignore[attr-defined]


def test_a_session_comes_back_as_from_its_own_stream(
    store: SessionStore, put: Callable[..., Any], model: CausalModel, profile: Profile
) -> None:
    ids = model.tokens(1, TOKENS)
    entry = put(store, "first", ids)
    kv, probs, attention = model.session(ids)
    alone = engine.encode(kv, probs, profile=profile, importance=attention)
    assert same(store.get("first"), engine.decode(alone, profile=profile))
    assert (entry.name, entry.tokens, entry.stream_bytes) == ("first", TOKENS, len(alone))
    assert (entry.reference, entry.depth, entry.shared_tokens, entry.shared_bytes) == (None, 0, 0, 0)
    part = store.get("first", tokens=slice(250, 280), layers=slice(1, 2))
    assert same(part, engine.decode(alone, profile=profile, tokens=slice(250, 280), layers=slice(1, 2)))


def test_what_sessions_share_is_stored_once_and_loses_no_more(
    store: SessionStore, put: Callable[..., Any], model: CausalModel, profile: Profile
) -> None:
    first = model.tokens(1, 600)
    cases = {
        "first": (first, None),
        "again": (first, "first"),
        "edited": (edited(first), "first"),
        "moved": (np.concatenate([model.tokens(2, 70), first]), "first"),
        "other": (model.tokens(3, 600), None),
    }
    for name, (ids, reference) in cases.items():
        entry = put(store, name, ids)
        kv, probs, attention = model.session(ids)
        alone = engine.encode(kv, probs, profile=profile, importance=attention)
        loss = relative_error(kv, engine.decode(alone, profile=profile))
        assert relative_error(kv, store.get(name)) < 1.1 * loss
        if name == "again":
            assert entry.own_bytes < 9 * len(ids)  # the index entry: ids, surprisal, names of blobs
            assert entry.stream_bytes == len(alone)
        elif reference is not None:
            assert entry.own_bytes < 0.8 * len(alone)
            assert (entry.depth, entry.reference) == (1, "first")
            assert entry.shared_tokens > 500
        assert (entry.reference is None) == (reference is None)
    assert [entry.name for entry in store.list()] == list(cases)
    stats = store.stats()
    assert (stats.sessions, stats.tenants, stats.limit) == (len(cases), 1, None)
    assert stats.tokens == sum(len(ids) for ids, _ in cases.values())
    assert stats.stored_bytes == sum(entry.own_bytes for entry in store.list())
    assert stats.stream_bytes == sum(entry.stream_bytes for entry in store.list())
    report = store.verify()
    assert report.clean and report.orphan_bytes == 0 and report.sessions == report.streams == len(cases)
    assert report.blobs == len(blobs(store))


def test_streams_and_tokens(store: SessionStore, put: Callable[..., Any], model: CausalModel, profile: Profile) -> None:
    ids = model.tokens(1, TOKENS)
    keys = [put(store, "first", ids).key, put(store, "second", edited(ids)).key]
    streams = store.streams("second")
    assert list(streams) == keys[::-1] and list(store.streams("first")) == keys[:1]
    decoded = engine.decode(streams[keys[1]], profile=profile, reference=streams.__getitem__)
    assert same(decoded, store.get("second"))
    np.testing.assert_array_equal(store.token_ids("second"), edited(ids))
    for ask in (store.streams, store.token_ids):
        with pytest.raises(SessionError, match="'third'"):
            ask("third")


def test_deleting_a_reference_harms_nobody(store: SessionStore, put: Callable[..., Any], model: CausalModel) -> None:
    ids = model.tokens(1, TOKENS)
    put(store, "first", ids)
    put(store, "second", edited(ids, 40))
    put(store, "third", edited(edited(ids, 40), 90))
    before = store.get("third"), store.get("second")
    entries = {entry.name: entry for entry in store.list()}
    assert entries["third"].depth > 0
    store.delete("first")
    with pytest.raises(SessionError, match="'first'"):
        store.get("first")
    with pytest.raises(SessionError, match="'first'"):
        store.delete("first")
    assert same(store.get("third"), before[0]) and same(store.get("second"), before[1])
    store.delete("second")
    assert same(store.get("third"), before[0])
    assert store.verify().clean
    store.delete("third")
    assert not blobs(store) and store.stats().stored_bytes == 0 and store.verify().streams == 0


def test_a_session_can_be_replaced(store: SessionStore, put: Callable[..., Any], model: CausalModel) -> None:
    ids = model.tokens(1, 500)
    for turn in (260, 330, 400, 450, 500):  # a chat
        put(store, "chat", ids[:turn])
    assert store.get("chat").tokens == 500
    assert max(entry.depth for entry in store.list()) <= MAX_DEPTH
    put(store, "chat", model.tokens(9, 64))
    assert store.get("chat").tokens == 64 and len(store.list()) == 1
    assert store.verify().streams == 1 and store.verify().orphan_bytes == 0  # what the chat needed is gone


def test_chains_stay_short(store: SessionStore, put: Callable[..., Any], model: CausalModel) -> None:
    ids = model.tokens(1, TOKENS)
    for turn in range(MAX_DEPTH + 3):
        put(store, str(turn), ids)
        kv = model.session(ids)[0]
        assert relative_error(kv, store.get(str(turn))) < 0.35
        ids = edited(ids, 30 + 40 * turn)
    assert max(entry.depth for entry in store.list()) <= MAX_DEPTH


def test_without_a_profile(tmp_path: Path, put: Callable[..., Any], model: CausalModel, profile: Profile) -> None:
    ids = model.tokens(1, TOKENS)
    with SessionStore(tmp_path) as store, SessionStore(tmp_path, profile=profile) as other:
        put(store, "plain", ids)
        entry = put(store, "again", ids)
        assert entry.shared_bytes > entry.own_bytes  # by content, although not coded against it
        put(other, "with", ids)
        assert same(store.get("plain"), store.get("again"))
        for opened, foreign in ((store, "with"), (other, "plain")):
            with pytest.raises(ProfileError, match=f"'{foreign}'.*profile"):
                opened.get(foreign)
        assert len(store.list()) == 3 and store.verify().clean


def test_without_loss_beside_sessions_with(store: SessionStore, put: Callable[..., Any], model: CausalModel) -> None:
    ids = model.tokens(1, 600)
    kv, probs, _ = model.session(ids)
    entry = store.put("exact", kv, probs, tier="lossless")
    assert same(store.get("exact"), kv) and entry.reference is None
    again = store.put("longer", kv, probs, tier="lossless")
    assert again.shared_bytes > again.own_bytes
    lossy = put(store, "near", ids)  # the most similar session cannot be its reference
    assert lossy.reference is None and lossy.stream_bytes < entry.stream_bytes / 2
    assert put(store, "edited", edited(ids)).reference == "near"
    assert put(store, "coarse", model.tokens(2, 600), step=1.0).stream_bytes < lossy.stream_bytes / 1.5
    assert store.verify().clean


def test_the_longest_prefix(store: SessionStore, put: Callable[..., Any], model: CausalModel, tmp_path: Path) -> None:
    ids = model.tokens(1, TOKENS)
    assert store.longest_prefix(ids) == (0, 0.0, None)
    put(store, "short", ids[:100])
    put(store, "edited", edited(ids, 200))
    assert store.longest_prefix(ids)[::2] == (200, "edited")
    assert store.longest_prefix(ids[:70]).tokens == 70
    assert store.longest_prefix(edited(ids, 0)).tokens == 0
    with SessionStore(store_folder(store)) as plain:  # could decode none of them
        assert plain.longest_prefix(ids).tokens == 0
    store.delete("edited")
    assert store.longest_prefix(ids)[::2] == (100, "short")


def test_tenants_share_nothing(tmp_path: Path, put: Callable[..., Any], model: CausalModel, profile: Profile) -> None:
    ids = model.tokens(1, TOKENS)
    with (
        SessionStore(tmp_path, profile=profile, tenant="a") as a,
        SessionStore(tmp_path, profile=profile, tenant="b") as b,
    ):
        put(a, "session", ids)
        of_a = blobs(a)
        entry = put(b, "session", ids)
        assert entry.reference is None and entry.shared_bytes == 0 and entry.depth == 0
        of_b = blobs(b) - of_a
        assert len(of_b) == len(of_a)
        assert sorted(path.read_bytes() for path in of_a) == sorted(path.read_bytes() for path in of_b)
        assert put(b, "edited", edited(ids)).reference == "session"
        assert [e.name for e in a.list()] == ["session"] and a.stats().tenants == 2
        a.delete("session")
        assert same(b.get("session"), b.get("session")) and b.verify().clean
        with pytest.raises(SessionError):
            a.get("edited")


def test_eviction_by_expected_reuse(
    tmp_path: Path, put: Callable[..., Any], model: CausalModel, profile: Profile
) -> None:
    ids = model.tokens(1, TOKENS)
    with SessionStore(tmp_path / "trial", profile=profile) as trial:
        size = put(trial, "one", ids).own_bytes
    with SessionStore(tmp_path / "store", profile=profile, limit=int(3.5 * size)) as store:
        put(store, "wanted", ids)
        put(store, "unwanted", model.tokens(2, TOKENS))
        put(store, "base", model.tokens(3, TOKENS))
        put(store, "delta", edited(model.tokens(3, TOKENS)))
        for _ in range(20):
            store.get("wanted")
        store.close()
    with SessionStore(tmp_path / "store", profile=profile, limit=int(3.5 * size)) as store:
        assert {e.name: e.uses for e in store.list()}["wanted"] == 21
        for new in range(4, 9):
            put(store, str(new), model.tokens(new, TOKENS))
            names = {entry.name for entry in store.list()}
            assert str(new) in names and "wanted" in names
            assert "base" in names or "delta" not in names  # a reference goes last
            assert store.stats().stored_bytes <= store.limit  # type: ignore[operator]
            assert store.verify().clean and store.verify().orphan_bytes == 0
            for name in names:
                assert store.get(name).tokens == TOKENS
        with pytest.raises(StoreFull, match="'large'"):
            put(store, "large", model.tokens(20, 8 * TOKENS))
        assert {"wanted", "8"} <= {entry.name for entry in store.list()}


def test_a_reference_that_leaves_no_room_is_evicted(
    tmp_path: Path, put: Callable[..., Any], model: CausalModel, profile: Profile
) -> None:
    ids = model.tokens(1, TOKENS)
    with SessionStore(tmp_path / "trial", profile=profile) as trial:
        size = put(trial, "one", ids).own_bytes
    with SessionStore(tmp_path / "store", profile=profile, limit=int(1.1 * size)) as store:
        put(store, "first", ids)
        assert put(store, "second", edited(ids)).depth == 0
        assert [entry.name for entry in store.list()] == ["second"]
        assert store.get("second").tokens == TOKENS


def test_bad_arguments(store: SessionStore, put: Callable[..., Any], model: CausalModel) -> None:
    with pytest.raises(SessionError, match="'nobody'"):
        store.get("nobody")
    with pytest.raises(SessionError, match="strings"):
        store.get(7)  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="strings"):
        store.delete("\ud800")
    put(store, "ünïcode / ../ \n name", model.tokens(1, 40))
    assert store.get("ünïcode / ../ \n name").tokens == 40
    with pytest.raises(engine.CacheError, match="nothing is left"):
        store.get("ünïcode / ../ \n name", tokens=slice(40, 50))
    with pytest.raises(engine.ProbsError):
        store.put("x", model.session(model.tokens(1, 40))[0], model.probs(model.tokens(1, 41)))
    assert len(store.list()) == 1


DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "altered": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_blobs(damage: str, store: SessionStore, put: Callable[..., Any], model: CausalModel) -> None:
    ids = model.tokens(1, TOKENS)
    put(store, "harmed", ids)
    of_it = blobs(store)
    put(store, "delta", edited(ids))
    put(store, "unharmed", model.tokens(2, TOKENS))
    victim = max(of_it, key=lambda path: path.stat().st_size)
    DAMAGE[damage](victim)
    for name in ("harmed", "delta"):
        with pytest.raises(StoreDamaged, match=f"'{name}'.*{victim.name}"):
            store.get(name)
    assert store.get("unharmed").tokens == TOKENS
    report = store.verify()
    assert not report.clean
    assert {name for problem in report.problems for name in problem.sessions} == {"harmed", "delta"}
    # nothing new rests on what is damaged, and putting a session again repairs it
    kv = model.session(ids)[0]
    put(store, "third", ids)
    assert relative_error(kv, store.get("third")) < 0.35
    put(store, "harmed", ids)
    assert relative_error(kv, store.get("harmed")) < 0.35
    assert store.verify().clean


def test_a_damaged_record(store: SessionStore, put: Callable[..., Any], model: CausalModel) -> None:
    put(store, "harmed", model.tokens(1, TOKENS))
    put(store, "unharmed", model.tokens(2, TOKENS))
    with sqlite3.connect(store_folder(store) / "index.sqlite") as index:
        index.execute("UPDATE streams SET record = substr(record, 1, 500) WHERE id = 1")
    with pytest.raises(StoreDamaged, match="'harmed'"):
        store.get("harmed")
    assert [problem.sessions for problem in store.verify().problems] == [("harmed",)]
    assert store.get("unharmed").tokens == TOKENS
    put(store, "copy", model.tokens(1, TOKENS))  # makes the same stream, and with it the record again
    assert store.get("harmed").tokens == TOKENS and store.verify().clean


def test_a_missing_reference(store: SessionStore, put: Callable[..., Any], model: CausalModel) -> None:
    ids = model.tokens(1, TOKENS)
    key = put(store, "first", ids).key
    put(store, "delta", edited(ids))
    with sqlite3.connect(store_folder(store) / "index.sqlite") as index:
        index.execute("DELETE FROM streams WHERE key = ?", [key])
    for name in ("first", "delta"):
        with pytest.raises(StoreDamaged, match=f"'{name}'.*{key}"):
            store.get(name)
    named = {name for problem in store.verify().problems for name in problem.sessions}
    assert named == {"first", "delta"}
    assert put(store, "new", edited(ids, 80)).reference in (None, "first", "delta")
    assert store.get("new").tokens == TOKENS
    store.delete("delta")
    store.delete("first")
    assert store.verify().clean


def test_a_damaged_index(tmp_path: Path, put: Callable[..., Any], model: CausalModel, profile: Profile) -> None:
    with SessionStore(tmp_path, profile=profile) as store:
        put(store, "session", model.tokens(1, TOKENS))
    whole = (tmp_path / "index.sqlite").read_bytes()
    (tmp_path / "index.sqlite").write_bytes(b"?" * len(whole))
    with pytest.raises(StoreError, match="index"):
        SessionStore(tmp_path, profile=profile)
    (tmp_path / "index.sqlite").write_bytes(whole[:4096] + b"?" * (len(whole) - 4096))
    with SessionStore(tmp_path, profile=profile) as store:
        assert not store.verify().clean
        with pytest.raises(StoreError):
            store.get("session")
    (tmp_path / "index.sqlite").write_bytes(whole)
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        index.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="version 99"):
        SessionStore(tmp_path, profile=profile)


@pytest.mark.parametrize("after", range(3))
def test_a_full_disk(
    after: int, store: SessionStore, put: Callable[..., Any], model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC at any of the system calls that make a session durable."""
    put(store, "first", model.tokens(1, TOKENS))
    before = blobs(store)
    calls = 0

    def full(path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(objects_module, "_sync", full)
        with pytest.raises(StoreFull, match="'second'"):
            put(store, "second", model.tokens(2, TOKENS))
    assert [entry.name for entry in store.list()] == ["first"]
    assert store.verify().clean and store.get("first").tokens == TOKENS
    store.compact()
    assert blobs(store) == before and not list((store_folder(store) / "tmp").iterdir())
    put(store, "second", model.tokens(2, TOKENS))
    assert store.get("second").tokens == TOKENS and store.verify().clean


def test_what_cannot_be_cleared_away_is_left_over(
    store: SessionStore, put: Callable[..., Any], model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "replaced", model.tokens(1, TOKENS))
    put(store, "deleted", model.tokens(2, TOKENS))

    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(store._objects, "delete", refuse)
        put(store, "replaced", model.tokens(3, TOKENS))
        store.delete("deleted")
    assert store.get("replaced").tokens == TOKENS and len(store.list()) == 1
    report = store.verify()
    assert report.clean and report.orphan_bytes > 0
    assert store.compact() == report.orphan_bytes
    assert store.verify().orphan_bytes == 0 and store.get("replaced").tokens == TOKENS


def test_a_disk_that_is_really_full(
    tmp_path: Path, put: Callable[..., Any], model: CausalModel, profile: Profile
) -> None:
    """A file system of 1 MB, if one can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        with SessionStore(disk, profile=profile) as store:
            kept = []
            with pytest.raises(StoreFull, match="session '"):
                for i in range(100):
                    put(store, str(i), model.tokens(100 + i, TOKENS))
                    kept.append(str(i))
            assert kept and [entry.name for entry in store.list()] == kept
            assert store.verify().clean
            for name in kept:
                assert store.get(name).tokens == TOKENS
            for name in kept[: len(kept) // 2]:
                store.delete(name)
            put(store, "another", model.tokens(500, TOKENS))
            assert store.get("another").tokens == TOKENS
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_second_writer_waits_and_gives_up(
    tmp_path: Path, put: Callable[..., Any], model: CausalModel, profile: Profile
) -> None:
    with (
        SessionStore(tmp_path, profile=profile) as first,
        SessionStore(f"file://{tmp_path}", profile=profile, timeout=0.1) as second,
    ):
        put(first, "session", model.tokens(1, 40))
        with first._index.writing():
            assert second.get("session").tokens == 40  # readers do not wait
            with pytest.raises(StoreBusy, match="'late'"):
                put(second, "late", model.tokens(2, 40))
        put(second, "late", model.tokens(2, 40))
        assert {entry.name for entry in first.list()} == {"session", "late"}


def test_a_reader_whose_session_is_replaced_meanwhile(
    store: SessionStore, put: Callable[..., Any], model: CausalModel, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "session", model.tokens(1, TOKENS))
    find, times = SqliteIndex.find, 0

    def slow(index: SqliteIndex, tenant: str, name: str) -> Any:
        nonlocal times
        found, times = find(index, tenant, name), times + 1
        if times == 1:
            with SessionStore(store_folder(store), profile=profile) as writer:
                put(writer, "session", model.tokens(2, TOKENS + 1))
        return found

    monkeypatch.setattr(SqliteIndex, "find", slow)
    assert store.get("session").tokens == TOKENS + 1


def test_a_reference_that_is_deleted_meanwhile(
    store: SessionStore, put: Callable[..., Any], model: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = model.tokens(1, TOKENS)
    put(store, "first", ids)
    plain, references = engine.encode, []

    def slow(*args: Any, **options: Any) -> bytes:
        stream = plain(*args, **options)
        references.append(engine.inspect(stream)["reference"])
        if "first" in {entry.name for entry in store.list()}:
            store.delete("first")
        return stream

    monkeypatch.setattr("seqkv.engine.store.encode", slow)
    assert put(store, "second", edited(ids)).depth == 0
    assert references[0] is not None and references[1] is None
    assert store.get("second").tokens == TOKENS
    assert store.verify().clean and store.verify().streams == 1


def test_threads_and_several_writers(
    store: SessionStore, put: Callable[..., Any], model: CausalModel, profile: Profile
) -> None:
    """Two stores in one folder, as two processes have them, and two threads for each."""
    for i in range(4):
        put(store, str(i), model.tokens(i, 80))
    failures: list[BaseException] = []

    def work(opened: SessionStore, i: int) -> None:
        try:
            for turn in range(4):
                assert opened.get(str(turn)).tokens == 80
                put(opened, f"{i} {turn}", model.tokens(turn, 80 + i))
                assert opened.get(f"{i} {turn}").tokens == 80 + i
                if turn:
                    opened.delete(f"{i} {turn - 1}")
        except BaseException as error:
            failures.append(error)

    with SessionStore(store_folder(store), profile=profile) as second:
        threads = [threading.Thread(target=work, args=((store, second)[i % 2], i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert {entry.name for entry in store.list()} == {"0", "1", "2", "3", "0 3", "1 3", "2 3", "3 3"}
    assert store.verify().clean and store.verify().orphan_bytes == 0
