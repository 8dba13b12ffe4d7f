"""Readers and a writer in processes of their own, killed at random points: bench/store_soak.py, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import store_soak
from bench.store_soak import ABSENT, Operation
from seqkv.engine import KVCache


def soak(tmp_path: Path, *options: str) -> Any:
    """Its results. A process of its own, as it forks."""
    command = [sys.executable, store_soak.__file__, "--out", str(tmp_path / "results"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "results").read_text())


def test_nothing_is_lost_or_mixed_up(tmp_path: Path) -> None:
    results = soak(tmp_path, "--sessions", "15", "--kills", "6", "--readers", "2")
    assert results["wrong"] == []
    assert (results["sessions"], results["kills"]) == (15, 6)
    assert results["reads"] > 0  # how many depends on the machine


def test_nor_while_sessions_are_evicted(tmp_path: Path) -> None:
    results = soak(tmp_path, "--sessions", "15", "--kills", "3", "--readers", "2", "--limit", "60000")
    assert results["wrong"] == []
    assert 1 < results["sessions"] < 15 and results["bytes"] <= 60_000
    assert results["reads"] > 0  # how many depends on the machine


def test_what_is_wrong_is_seen() -> None:
    digests: dict[Operation, int] = {}
    kv = store_soak.truth(3, 2)[0]
    assert store_soak.check(3, kv, {1, 2}, digests) is None
    assert store_soak.check(3, None, {2, ABSENT}, digests) is None
    assert store_soak.check(3, None, {2}, digests)  # lost
    assert store_soak.check(3, kv, {1}, digests)  # another version
    assert store_soak.check(3, kv, {ABSENT}, digests)  # deleted
    assert store_soak.check(4, kv, {2}, digests)  # another session
    other = store_soak.truth(3 + store_soak.FAMILIES + 1, 2)[0]
    keys = [np.resize(key, kv.keys[0].shape) for key in other.keys]
    mixed = KVCache(keys, kv.values, positions=kv.positions, rope=kv.rope)
    assert store_soak.check(3, mixed, {2}, digests)
    digests[Operation(3, 2)] = store_soak.digest_of(kv)
    assert store_soak.check(3, kv, {2}, digests) is None
    digests[Operation(3, 2)] += 1
    assert store_soak.check(3, kv, {2}, digests)


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
