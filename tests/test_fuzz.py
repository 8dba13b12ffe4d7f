"""A short run of bench/fuzz.py, and what longer ones found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from seqkv.engine import SeqkvError
from tests import fuzz_mutations, fuzz_targets

ROOT = Path(__file__).parents[1]
CORPUS = sorted((Path(__file__).parent / "fuzz_corpus").iterdir())


def test_nothing_is_found_in_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    command = [sys.executable, str(ROOT / "bench" / "fuzz.py"), "--streams", "4000", "--seed", "7", "--minutes", "5"]
    command += ["--out", str(out), "--findings", str(tmp_path / "findings")]
    environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(out.read_text())["streams"] >= 4000


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_what_was_found_is_refused(path: Path) -> None:
    name = path.name.rsplit(".", 1)[0]
    target = fuzz_targets.targets({name})[name]
    try:
        found = target.read(path.read_bytes())
    except SeqkvError:
        return
    assert name == "store" and not found  # reading goes on beside what is damaged in one


def test_a_header_that_was_changed_before_is_not_blown_up() -> None:
    for shape in ([], [[1, 2]], None):
        header = {"shape": shape, "tokens": 3, "steps": [0]}
        assert fuzz_mutations.blown(Random(1), header, []) == header
