"""docs/complaints.md: the tests that it names are there. And those that had no other place."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| (\d+) \|.*\|$", (ROOT / "docs" / "complaints.md").read_text(), re.MULTILINE)


def test_every_complaint_has_a_test_that_exists() -> None:
    assert [int(number) for number in ROWS] == list(range(1, 21))
    for line in (ROOT / "docs" / "complaints.md").read_text().splitlines():
        if re.match(r"\| \d+ \|", line):
            named = re.findall(r"`(tests/\w+\.py)::(\w+)`", line)
            assert named, line
            for file, test in named:
                tree = ast.parse((ROOT / file).read_text())
                assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, test)


KEYS = """
from tests import golden_streams as golden
from seqkv import engine
from seqkv.engine.records import blob_name, tenant_id
one = golden.GOLDEN["lossless"]
cache = golden.caches()[one.cache]
stream = golden.encoded(one, cache, golden.profile())
near = golden.encoded(golden.GOLDEN["near"], cache, golden.profile())
print(engine.stream_key(stream), engine.stream_key(near), golden.kv_of(cache).digest(), blob_name(near, tenant_id("a")))
"""


def test_keys_are_the_same_in_another_process() -> None:
    def said(seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", KEYS]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout

    first = said("1")
    assert len(first.split()) == 4 and first == said("2")


@pytest.mark.parametrize("folder", ["engine", "entropy_coding", "adapters", "seqkv", "cuda_kernels"])
def test_nothing_is_pickled(folder: str) -> None:
    """Nor read by what would: numpy.load only if it is told to, torch.load by default in old releases."""
    for path in (ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"} & set(names), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                assert not (isinstance(owner, ast.Name) and (owner.id, node.func.attr) == ("torch", "load")), path
                allowed = [ast.literal_eval(k.value) for k in node.keywords if k.arg == "allow_pickle"]
                assert not any(allowed), path
