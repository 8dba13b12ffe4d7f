"""Readers and a writer in processes of their own, killed at random points: bench/store_soak.py, in small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import store_soak
from bench.store_soak import ABSENT, Operation
from seqkv.engine import KVCache


def test_nothing_is_lost_or_mixed_up(tmp_path: Path) -> None:
    results = store_soak.soak(tmp_path, sessions=12, kills=5, readers=2)
    assert results["wrong"] == []
    assert (results["sessions"], results["kills"]) == (12, 5)
    assert results["reads"] > 20


def test_nor_while_sessions_are_evicted(tmp_path: Path) -> None:
    results = store_soak.soak(tmp_path, sessions=14, kills=2, readers=2, limit=60_000)
    assert results["wrong"] == []
    assert 1 < results["sessions"] < 14 and results["bytes"] <= 60_000
    assert results["reads"] > 20


def test_what_is_wrong_is_seen(tmp_path: Path) -> None:
    journal = store_soak.Journal(tmp_path / "journal")
    kv = store_soak.truth(3, 2)[0]
    assert store_soak.check(3, kv, {1, 2}, journal) is None
    assert store_soak.check(3, None, {2, ABSENT}, journal) is None
    assert store_soak.check(3, None, {2}, journal)  # lost
    assert store_soak.check(3, kv, {1}, journal)  # another version
    assert store_soak.check(3, kv, {ABSENT}, journal)  # deleted
    assert store_soak.check(4, kv, {2}, journal)  # another session
    other = store_soak.truth(3 + store_soak.FAMILIES + 1, 2)[0]
    keys = [np.resize(key, kv.keys[0].shape) for key in other.keys]
    mixed = KVCache(keys, kv.values, positions=kv.positions, rope=kv.rope)
    assert store_soak.check(3, mixed, {2}, journal)
    journal.digests[Operation(3, 2)] = store_soak.digest_of(kv)
    assert store_soak.check(3, kv, {2}, journal) is None
    journal.digests[Operation(3, 2)] += 1
    assert store_soak.check(3, kv, {2}, journal)


def test_the_journal(tmp_path: Path) -> None:
    operations = store_soak.schedule(5)
    journal, reader = (store_soak.Journal(tmp_path / "journal") for _ in range(2))
    reader.update(operations)
    assert (reader.begun, reader.done) == (-1, -1)
    journal.write("begin", 0)
    journal.write("done", 0, 77)
    journal.write("begin", 1)
    reader.update(operations)
    assert (reader.begun, reader.done, reader.digests) == (1, 0, {operations[0]: 77})


@pytest.mark.parametrize("sessions", [1, 30])
def test_the_schedule(sessions: int) -> None:
    last = {operation.session: operation.version for operation in store_soak.schedule(sessions)}
    assert sum(version != ABSENT for version in last.values()) == sessions
