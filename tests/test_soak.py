"""bench/soak.py, in small, and that it fails when it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import soak
from seqkv import engine
from seqkv.engine import Profile

MEMORY = ("--growth", "500", "--slope", "5000")  # in ten seconds nothing is warm
ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read as Linux shows it")


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The soak after some code, in a process of its own, as it forks."""
    begin = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom bench import soak\n"
    command = [sys.executable, "-c", f"{begin}{code}\nsys.exit(soak.main())", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_threads_and_processes_do_not_disturb_each_other(tmp_path: Path) -> None:
    out = tmp_path / "results"
    done = run("", "--minutes", "0.16", *MEMORY, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads(out.read_text())
    assert results["wrong"] == []
    assert results["forked while threads code"] and results["others that were forked"] >= 1
    assert len(results["coded by threads"]) == 8 and min(results["coded by threads"]) > 0
    processes = results["coded by processes"]
    assert [name.split(", ")[1] for name in processes] == ["fork", "forkserver", "spawn", "fork"]
    assert min(processes.values()) > 0
    assert set(results["MB"]) == {"this one", *processes}


def test_who_does_nothing_is_named_and_shown() -> None:
    code = """
import threading, time
true = soak.wrong
def wrong(case, alone):
    if threading.current_thread().name == "thread 1":
        time.sleep(999)
    return true(case, alone)
soak.wrong = wrong
"""
    done = run(code, "--minutes", "1", "--threads", "2", "--processes", "1", "--stall", "8")
    assert done.returncode == 1
    assert "thread 1 did nothing for 8.0 s" in json.loads(done.stdout)["wrong"]
    assert "in wrong" in done.stderr and "stacks of process" in done.stderr


@pytest.fixture(scope="module")
def cases(profile: Profile) -> dict[str, soak.Case]:
    return soak.cases(profile)


def test_what_is_not_the_same_is_seen(cases: dict[str, soak.Case]) -> None:
    assert len({id(case.kv) for case in cases.values()}) > 6
    for case in cases.values():
        stream, digest = case.result()
        assert soak.wrong(case, (stream, digest)) is None
        assert "another stream" in str(soak.wrong(case, (stream[:-1], digest)))
        assert "another cache" in str(soak.wrong(case, (stream, digest + 1)))


def test_errors_are_seen(cases: dict[str, soak.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["near 130"]
    alone = case.result()
    monkeypatch.setattr(engine, "decode", lambda stream, **options: 1 // 0)
    assert "ZeroDivisionError" in str(soak.wrong(case, alone))


def test_memory_that_grows_is_seen() -> None:
    memory = soak.Memory()
    at = np.arange(0.0, 60, 0.5)
    memory.samples = {"flat": [(t, 100.0) for t in at], "leaks": [(t, 100 + t) for t in at], "ended": [(1.0, 5.0)]}
    assert memory.figures(15, 60) == {
        "flat": {"warm": 100.0, "most": 100.0, "growth": 0.0, "slope": pytest.approx(0, abs=1e-6)},
        "leaks": {"warm": 114.5, "most": 159.5, "growth": 45.0, "slope": pytest.approx(60)},
    }


def test_numbas_threads_are_seen() -> None:
    code = """
import numba, numpy as np
from bench import soak
assert soak.layer() is None
numba.njit(parallel=True)(lambda x: x + 1)(np.ones(1000))
assert soak.layer() is not None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
