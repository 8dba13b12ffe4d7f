"""A store under load whose processes are killed: does it lose or mix up anything?

    python bench/store_soak.py [--sessions 1000] [--kills 200] [--readers 4] [--limit BYTES]
        [--out bench/results/store_soak.json]

A writer puts, replaces and deletes sessions, which resemble each other in families so that many are coded against
others, and compacts now and then; readers get sessions all the time. One after the other, at random moments, the writer
is killed (SIGKILL), every fifth time a reader too, and started anew. Before each operation the writer notes in a
journal what it begins, and after it that it is done: what the store acknowledged.

A reader that gets a session must get what was last acknowledged when it asked, or something begun since: the same
positions (each version of each session has others), keys and values near the true ones, and exactly those that all
others get of this version. What was acknowledged must be there to the end, what was deleted must not.

The caches are those of the tests' model, 3 layers wide: this is about the store, not about bytes. Exits with 1 if
anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is measured without installing it

from bench.results_of import finished  # noqa: E402
from seqkv.engine import KVCache, Profile, SeqkvError  # noqa: E402
from seqkv.engine.errors import SessionError  # noqa: E402
from seqkv.engine.store import SessionStore  # noqa: E402
from tests.conftest import calibrated  # noqa: E402
from tests.sessions import CausalModel  # noqa: E402

FAMILIES, LENGTH = 25, 280  # sessions of a family have most tokens in common
COMPACT = 60  # operations between two compactions
ABSENT = 0  # the version of a session that is not there
LARGEST_ERROR = 0.4  # relative; what the codec loses is 0.2 to 0.3, of another family's session it is 1.4
SECONDS_TO_STOP = 60


@dataclass(frozen=True)
class Operation:
    """The session's version becomes this one; ABSENT deletes it."""

    session: int
    version: int

    @property
    def name(self) -> str:
        return f"session {self.session}"


def schedule(sessions: int) -> list[Operation]:
    """Operations after which there are as many sessions: some are replaced or deleted on the way."""
    rng = np.random.default_rng(4)
    versions: dict[int, int] = {}
    out: list[Operation] = []
    new = 0
    while len(versions) < sessions:
        chance = rng.random()
        if chance < 0.75 or not versions:
            session, version = new, 1
            new += 1
        else:
            session = int(rng.choice(list(versions)))
            version = versions[session] + 1 if chance < 0.9 else ABSENT
        out.append(Operation(session, version))
        versions[session] = version
        if version == ABSENT:
            del versions[session]
    return out


@functools.lru_cache(512)
def truth(session: int, version: int) -> tuple[KVCache, Any, Any]:
    """What is put: cache, probabilities, attention."""
    model, rng = _model(), np.random.default_rng([session, version])
    base = _base(session % FAMILIES)
    place, cut = int(rng.integers(len(base))), int(rng.integers(40))
    inserted = rng.integers(0, model.vocab, rng.integers(1, 8))
    ids = np.concatenate([base[:place], inserted, base[place : len(base) - cut]])
    positions = np.arange(len(ids)) + 1000 * session + version  # tell which session and version it is
    kv, attention = model.cache(ids, positions=positions)
    return kv, model.probs(ids), attention


@functools.cache
def _model() -> CausalModel:
    return CausalModel()


@functools.cache
def _base(family: int) -> Any:
    return _model().tokens(family, LENGTH)


class Journal:
    """What was begun and done, one line each; a reader sees all that was written before it looks."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._read, self._rest = 0, b""
        self.done = -1  # the last operation
        self.begun = -1
        self.digests: dict[Operation, int] = {}  # of what was put, as the store gave it back

    def write(self, what: str, number: int, digest: int = 0) -> None:
        os.write(self._file, f"{what} {number} {digest}\n".encode())

    def update(self, operations: list[Operation]) -> None:
        new = os.pread(self._file, os.fstat(self._file).st_size - self._read, self._read)
        self._read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            what, number, digest = line.split()
            if what == b"begin":
                self.begun = max(self.begun, int(number))
            else:
                self.done = int(number)
                self.digests[operations[self.done]] = int(digest)


def write(folder: Path, sessions: int, limit: int | None, permitted: Any) -> None:
    """The writer: goes on where the one before was killed, up to the operation that is permitted by now."""
    operations, journal = schedule(sessions), Journal(folder / "journal")
    journal.update(operations)
    with _store(folder, limit) as store:
        for number in range(journal.done + 1, len(operations)):
            while number > permitted.value:
                time.sleep(0.002)
            operation = operations[number]
            journal.write("begin", number)
            digest = 0
            if operation.version == ABSENT:
                with contextlib.suppress(SessionError):  # done, but not noted; or evicted
                    store.delete(operation.name)
            else:
                kv, probs, attention = truth(operation.session, operation.version)
                store.put(operation.name, kv, probs, importance=attention)
                digest = digest_of(store.get(operation.name))
            journal.write("done", number, digest)
            if number % COMPACT == COMPACT - 1:
                store.compact()


def read(folder: Path, sessions: int, limit: int | None, me: int, counts: Any) -> None:
    """A reader: gets sessions until it is killed, and says on a file of its own what was wrong."""
    operations, journal = schedule(sessions), Journal(folder / "journal")
    history: dict[int, list[int]] = {}  # numbers of a session's operations
    for number, operation in enumerate(operations):
        history.setdefault(operation.session, []).append(number)
    rng = np.random.default_rng()
    with _store(folder, limit) as store:
        while True:
            journal.update(operations)
            if journal.begun < 0:
                time.sleep(0.01)
                continue
            recent = journal.begun - int(rng.exponential(30)) if rng.random() < 0.5 else int(rng.integers(1 << 30))
            session = operations[recent % (journal.begun + 1)].session
            done, digests = journal.done, dict(journal.digests)
            try:
                got = store.get(f"session {session}")
            except SessionError:
                got = None
            except Exception as error:
                _report(folder, f"{session}: {type(error).__name__}: {error}")
                counts[me] += 1
                continue
            journal.update(operations)
            known = [n for n in history[session] if n <= done]
            since = [n for n in history[session] if done < n <= journal.begun]
            allowed = {operations[n].version for n in known[-1:] + since} | ({ABSENT} if not known or limit else set())
            wrong = check(session, got, allowed, digests)
            if wrong:
                _report(folder, f"{session}: {wrong}")
            counts[me] += 1
            time.sleep(0.1)


def check(session: int, got: KVCache | None, allowed: set[int], digests: dict[Operation, int]) -> str | None:
    """What is wrong with what a store returned, if any one of some versions may be there, and these digests had been
    noted when it was asked. (What was put but not acknowledged is put again, perhaps against another session.)"""
    if got is None:
        return None if ABSENT in allowed else f"it is not there, which should be version {allowed}"
    version = int(got.positions[0]) - 1000 * session
    if version not in allowed or version == ABSENT:
        return f"version {version} is there, which should be {allowed}"
    true = truth(session, version)[0]
    if not np.array_equal(got.positions, true.positions):
        return "its positions are wrong"
    pairs = list(zip(true.keys + true.values, got.keys + got.values, strict=True))
    lost = sum(((a - b) ** 2).sum() for a, b in pairs) / sum((a**2).sum() for a, _ in pairs)
    if not lost < LARGEST_ERROR**2:
        return f"its error is {lost**0.5}"
    digest = digests.get(Operation(session, version))
    return None if digest in (None, digest_of(got)) else "it is not the same as before"


def digest_of(kv: KVCache) -> int:
    digest = xxhash.xxh3_64(kv.positions.tobytes())
    for array in kv.keys + kv.values:
        digest.update(np.ascontiguousarray(array).data)
    return digest.intdigest()


def soak(folder: Path, sessions: int, kills: int, readers: int, limit: int | None = None) -> dict[str, Any]:
    """Everything, in an empty folder, from a process of one thread. Returns the results; "wrong" must be empty."""
    calibrated(_model()).save(folder / "profile.safetensors")
    with SessionStore(folder / "trial", profile=Profile.load(folder / "profile.safetensors")) as trial:
        for version in (
            1,
            2,
        ):  # so that compiled code is loaded here, and not in each process forked from this
            kv, probs, attention = truth(0, version)
            trial.put(str(version), kv, probs, importance=attention)
            trial.get(str(version))
    operations, journal = schedule(sessions), Journal(folder / "journal")
    context = multiprocessing.get_context("fork")
    counts = context.Array("q", readers, lock=False)
    permitted = context.Value("q", 0, lock=False)  # operations; a fast writer waits for its killer
    rng = np.random.default_rng()
    began = time.monotonic()

    def start(target: Any, *more: Any) -> Any:
        process = context.Process(target=target, args=(folder, sessions, limit, *more), daemon=True)
        process.start()
        return process

    reading = [start(read, me, counts) for me in range(readers)]
    writing, killed, interrupted = start(write, permitted), 0, 0
    try:
        while True:
            journal.update(operations)
            due = (killed + 1) * len(operations) / (kills + 1)
            last = len(operations) - 1
            permitted.value = last if killed == kills else min(int(due) + len(operations) // (kills + 1), last - 1)
            if not writing.is_alive() and writing.exitcode != 0:
                raise RuntimeError(f"the writer ended with {writing.exitcode}")
            if journal.done == last:
                break
            if killed < kills and journal.done + 1 >= due:
                time.sleep(rng.exponential(0.1))
                _kill(writing)
                journal.update(operations)
                killed += 1
                interrupted += journal.begun > journal.done
                if killed % 5 == 0 and readers:
                    victim = int(rng.integers(readers))
                    _kill(reading[victim])
                    reading[victim] = start(read, victim, counts)
                writing = start(write, permitted)
                _show(f"{killed} kills, {journal.done + 1} of {len(operations)} operations, {sum(counts)} reads")
            time.sleep(0.003)
        writing.join(SECONDS_TO_STOP)
    finally:
        for process in [*reading, writing]:
            _kill(process)
    results = _finish(folder, operations, journal, limit)
    wrong = results.pop("wrong") + _reports(folder)
    figures = {
        "operations": len(operations),
        "kills": killed,
        "interrupted": interrupted,
        "readers": readers,
        "reads": sum(counts),
    }
    return figures | results | {"seconds": round(time.monotonic() - began, 1), "wrong": wrong}


def _finish(folder: Path, operations: list[Operation], journal: Journal, limit: int | None) -> dict[str, Any]:
    """All that was acknowledged is there, and nothing else."""
    wrong: list[str] = []
    last = {operation.session: operation.version for operation in operations}
    with _store(folder, limit) as store:
        before = store.verify()
        wrong += [problem.what for problem in before.problems]
        there = {entry.name: entry for entry in store.list()}
        for session, version in last.items():
            name = f"session {session}"
            if name in there or (version != ABSENT and not limit):
                try:
                    found = check(session, store.get(name), {version}, journal.digests)
                except SeqkvError as error:
                    found = str(error)
                wrong += [f"{name}, at the end: {found}"] if found else []
        store.compact()
        after = store.verify()
        wrong += [problem.what for problem in after.problems]
        if after.orphan_bytes:
            wrong.append(f"{after.orphan_bytes} bytes are left over")
        stats = store.stats()
    return {
        "sessions": stats.sessions,
        "coded against another": sum(entry.depth > 0 for entry in there.values()),
        "deepest": max(entry.depth for entry in there.values()),
        "streams": after.streams,
        "blobs": after.blobs,
        "bytes": stats.stored_bytes,
        "bytes that crashes left": before.orphan_bytes,
        "wrong": wrong,
    }


def _store(folder: Path, limit: int | None) -> SessionStore:
    return SessionStore(folder / "store", profile=Profile.load(folder / "profile.safetensors"), limit=limit)


def _report(folder: Path, what: str) -> None:
    with open(folder / f"wrong-{os.getpid()}", "a") as file:
        file.write(what.replace("\n", " ") + "\n")


def _reports(folder: Path) -> list[str]:
    return [line for path in folder.glob("wrong-*") for line in path.read_text().splitlines()]


def _kill(process: Any) -> None:
    process.kill()
    process.join()


def _show(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{line}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument(
        "--limit", type=int, help="bytes of the store: then sessions may be missing, as they are evicted"
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seqkv-") as folder:
        results = soak(Path(folder), options.sessions, options.kills, options.readers, options.limit)
    return finished(results, options.out)


if __name__ == "__main__":
    raise SystemExit(main())
