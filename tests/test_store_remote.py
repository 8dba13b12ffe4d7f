"""The store in an object store and in Redis: the same as in a folder, but for one writer at a time."""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqkv import engine
from seqkv.engine import Profile
from seqkv.engine.errors import SessionError, StoreDamaged, StoreError, StoreFull
from seqkv.engine.objects import Bucket, Files, Objects
from seqkv.engine.store import SessionStore
from tests.conftest import calibrated
from tests.sessions import CausalModel

TOKENS = 300


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel()


@pytest.fixture(scope="module")
def profile(model: CausalModel) -> Profile:
    return calibrated(model)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with an empty database, on a socket of its own."""
    client = pytest.importorskip("redis")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "socket"
    command = [program, "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", "", "--appendonly"]
    with subprocess.Popen([*command, "no"], stdout=subprocess.DEVNULL) as server:
        url = f"unix://{socket}"
        try:
            for _ in range(200):
                if socket.exists():
                    break
                time.sleep(0.05)
            client.Redis.from_url(url).ping()
            yield url
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """The address of a local server."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


@pytest.fixture
def memory() -> str:
    pytest.importorskip("fsspec")
    return f"memory://{uuid.uuid4().hex}/sessions"


@pytest.fixture
def redis(redis_server: str) -> Iterator[str]:
    yield redis_server
    from redis import Redis

    Redis.from_url(redis_server).flushall()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    import s3fs

    settings = {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "DEFAULT_REGION": "us-east-1"}
    for name, value in (settings | {"ENDPOINT_URL": s3_server}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"test-{uuid.uuid4().hex}"
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}/sessions"


@pytest.fixture(params=["memory", "redis", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    """Of an empty store."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["memory", "redis"])
def fast_url(request: pytest.FixtureRequest) -> str:
    """As url, for what does not differ between object stores."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def put(model: CausalModel) -> Callable[..., Any]:
    def do(store: SessionStore, name: str, ids: Any) -> Any:
        kv, probs, attention = model.session(ids)
        return store.put(name, kv, probs, importance=attention)

    return do


def edited(ids: Any, place: int = 40) -> Any:
    return np.concatenate([ids[:place], (ids[place : place + 1] + 1) % CausalModel.vocab, ids[place + 1 :]])


def test_sessions(url: str, put: Callable[..., Any], model: CausalModel, profile: Profile) -> None:
    ids = model.tokens(1, 600)
    with SessionStore(url, profile=profile) as store, SessionStore(url, profile=profile) as reader:
        assert not reader.list()
        put(store, "first", ids)
        again, other = put(store, "again", ids), put(store, "other", model.tokens(2, 600))
        assert again.own_bytes < 0.4 * other.own_bytes
        entry = put(store, "edited", edited(ids))
        assert (entry.reference, entry.depth) == ("first", 1) and entry.own_bytes < 0.8 * other.own_bytes
        kv, probs, attention = model.session(ids)
        alone = engine.decode(engine.encode(kv, probs, profile=profile, importance=attention), profile=profile)
        for name in ("first", "again"):
            np.testing.assert_array_equal(reader.get(name).keys[1], alone.keys[1])
        for gone in ("first", "again"):
            store.delete(gone)
            with pytest.raises(SessionError, match=f"'{gone}'"):
                reader.get(gone)
        assert reader.get("edited").tokens == 600
        assert [entry.name for entry in reader.list()] == ["other", "edited"]
        report = reader.verify()
        assert report.clean and (report.sessions, report.streams, report.orphan_bytes) == (2, 3, 0)
        assert reader.stats().stored_bytes == store.stats().stored_bytes > 0
        assert store.stats().tokens == 1200
        put(store, "edited", model.tokens(3, 40))
        store.delete("other")
        assert reader.get("edited").tokens == 40
        store.delete("edited")
        assert (store.verify().streams, store.verify().orphan_bytes, store.stats().stored_bytes) == (0, 0, 0)
        assert not store._objects.under("blobs")


def test_tenants_and_writers_in_turn(
    fast_url: str, put: Callable[..., Any], model: CausalModel, profile: Profile
) -> None:
    ids = model.tokens(1, TOKENS)
    with (
        SessionStore(fast_url, profile=profile, tenant="a") as a,
        SessionStore(fast_url, profile=profile, tenant="b") as b,
        SessionStore(fast_url, profile=profile, tenant="a") as next_of_a,
    ):
        put(a, "session", ids)
        entry = put(b, "session", ids)
        assert (entry.reference, entry.shared_bytes) == (None, 0)
        assert put(next_of_a, "edited", edited(ids)).reference == "session"
        assert put(a, "third", edited(ids, 90)).depth > 0
        b.delete("session")
        assert a.get("third").tokens == a.get("edited").tokens == TOKENS
        assert a.stats().tenants == 1 and a.verify().clean


def test_eviction(fast_url: str, put: Callable[..., Any], model: CausalModel, profile: Profile) -> None:
    with SessionStore(fast_url, profile=profile) as store:
        size = put(store, "0", model.tokens(0, TOKENS)).own_bytes
        store.limit = int(3.5 * size)
        for _ in range(5):
            store.get("0")
        store.list()  # counts them
        for new in range(1, 6):
            put(store, str(new), model.tokens(new, TOKENS))
        names = {entry.name: entry.uses for entry in store.list()}
        assert {"0", "5"} <= set(names) and len(names) == 3 and names["0"] == 6
        assert store.stats().stored_bytes <= store.limit
        assert store.verify().clean and store.verify().orphan_bytes == 0
        with pytest.raises(StoreFull, match="'large'"):
            put(store, "large", model.tokens(9, 8 * TOKENS))


def test_damage(url: str, put: Callable[..., Any], model: CausalModel, profile: Profile) -> None:
    ids = model.tokens(1, TOKENS)
    with SessionStore(url, profile=profile) as store:
        put(store, "harmed", ids)
        victim = max(store._objects.under("blobs"))
        put(store, "unharmed", model.tokens(2, TOKENS))
        put(store, "lost", model.tokens(3, TOKENS))
        for do in (
            lambda: store._objects.write({victim: b"?" * 2000}),
            lambda: store._objects.delete([victim]),
        ):
            do()
            with pytest.raises(StoreDamaged, match="'harmed'"):
                store.get("harmed")
            assert [problem.sessions for problem in store.verify().problems] == [("harmed",)]
            put(store, "harmed", ids)
            assert store.get("harmed").tokens == TOKENS and store.verify().clean
        (stream,) = (name for name in store._objects.under("streams") if name.endswith(store.list()[1].key))
        store._objects.delete([stream])
        with pytest.raises(StoreDamaged, match="'lost'"):
            store.get("lost")
        assert not store.verify().clean
        store.delete("lost")
        for name in store._objects.under("names"):
            if store._objects.read([name])[name].find(b'"harmed"') > 0:
                store._objects.write({name: b"?"})
        with pytest.raises(StoreDamaged, match="'harmed'"):
            store.get("harmed")
        assert not store.verify().clean
        store.delete("harmed")
        assert store.get("unharmed").tokens == TOKENS
        store.compact()
        assert store.verify().clean and store.verify().streams == 1


class Crash(Exception):
    pass


class Fragile:
    """Objects whose writer dies before it changes anything more than `left` times."""

    def __init__(self, objects: Objects, left: int) -> None:
        self._objects, self.left = objects, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def write(self, objects: Any) -> None:
        for name, data in objects.items():
            self._count()
            self._objects.write({name: data})

    def delete(self, names: Any) -> None:
        for name in names:
            self._count()
            self._objects.delete([name])

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crash


@pytest.mark.parametrize("action", ["put", "replace", "delete"])
def test_a_writer_that_dies_between_any_two_objects(
    action: str, put: Callable[..., Any], model: CausalModel, profile: Profile
) -> None:
    pytest.importorskip("fsspec")
    ids = model.tokens(1, 100)
    for left in range(20):
        url = f"memory://{uuid.uuid4().hex}"
        with SessionStore(url, profile=profile) as store:
            put(store, "kept", ids)
            put(store, "changed", edited(ids))
        with SessionStore(url, profile=profile) as store:
            fragile = Fragile(store._objects, left)
            for user in (store, store._index, store._blobs):
                user._objects = fragile  # type: ignore[union-attr, assignment]
            finished = True
            try:
                if action == "delete":
                    store.delete("changed")
                else:
                    put(store, "changed" if action == "replace" else "new", edited(ids, 70)[:90])
            except Crash:
                finished = False
        with SessionStore(url, profile=profile) as store:
            assert store.get("kept").tokens == 100
            names = {entry.name: store.get(entry.name).tokens for entry in store.list()}
            old = {"kept": 100, "changed": 100}
            new = {"put": old | {"new": 90}, "replace": old | {"changed": 90}, "delete": {"kept": 100}}[action]
            assert names == new if finished else names in (old, new)
            assert store.verify().clean
            store.compact()
            assert store.verify().clean and store.verify().orphan_bytes == 0
            assert store.stats().sessions == len(names)
            put(store, "another", edited(ids, 20))
            assert store.get("another").tokens == 100
        if finished:
            return
    raise AssertionError("it never came to an end")


def test_a_server_that_cannot_be_reached(profile: Profile) -> None:
    pytest.importorskip("redis")
    with pytest.raises(StoreError, match="127"):
        SessionStore("redis://127.0.0.1:1/0", profile=profile)
    pytest.importorskip("fsspec")
    with pytest.raises(StoreError, match="nonsense://"):
        SessionStore("nonsense://x", profile=profile)


@pytest.mark.parametrize("kind", ["files", "bucket"])
def test_objects(kind: str, tmp_path: Path) -> None:
    if kind == "bucket":
        pytest.importorskip("fsspec")
    objects: Objects = Files(tmp_path) if kind == "files" else Bucket(f"memory://{uuid.uuid4().hex}")
    assert objects.read([]) == objects.lengths([]) == objects.under("a") == {}
    objects.write({"a/b/1": b"one", "a/2": b"", "c": memoryview(b"three")})
    objects.write({"c": b"four"})
    assert objects.read(["a/b/1", "none", "c"]) == {"a/b/1": b"one", "c": b"four"}
    assert objects.lengths(["a/b/1", "none", "a/2"]) == {"a/b/1": 3, "a/2": 0}
    assert objects.under("a") == {"a/b/1": 3, "a/2": 0}
    objects.delete(["a/b/1", "none", "a/2"])
    objects.delete(["a/b/1"])
    objects.tidy()
    assert objects.under("a") == {} and objects.read(["c"]) == {"c": b"four"}
    objects.close()
