from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("engine", "entropy_coding", "cuda_kernels", "adapters")

needs_checkout = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not a checkout")


def sources(suffix: str) -> set[str]:
    """Where the repository's files with this suffix belong in an installed tree."""
    inside = {p.relative_to(ROOT).as_posix() for f in FOLDERS for p in (ROOT / f).rglob(f"*{suffix}")}
    front = {
        p.relative_to(ROOT).as_posix() for f in ("seqkv", "seqkv/demo_text") for p in (ROOT / f).glob(f"*{suffix}")
    }
    return {f"seqkv/{name}" for name in inside} | front


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel built from a copy of the tree, so that no build folder is left in it."""
    pytest.importorskip("setuptools", minversion="77")
    tmp = tmp_path_factory.mktemp("wheel")
    skipped = shutil.ignore_patterns(".*", "build", "dist", "venv", "*.egg-info", "__pycache__", "tests", "bench")
    shutil.copytree(ROOT, tmp / "tree", symlinks=True, ignore=skipped)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp)]
    done = subprocess.run([*build, str(tmp / "tree")], capture_output=True, text=True)
    if "No module named pip" in done.stderr:
        pytest.skip("pip is not installed")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp.glob("seqkv-*.whl"))) as file:
        return file.namelist()


@needs_checkout
def test_every_module_and_data_file_is_in_the_wheel_once(wheel: list[str]) -> None:
    assert max(Counter(wheel).values()) == 1
    expected = {name for suffix in (".py", ".npy", ".npz", ".txt", ".cu", "py.typed") for name in sources(suffix)}
    files = {name for name in wheel if ".dist-info/" not in name}
    assert {"seqkv/__init__.py", "seqkv/engine/cache.py", "seqkv/py.typed"} <= expected
    assert files == expected


@needs_checkout
def test_the_wheel_carries_its_licence_and_command(wheel: list[str]) -> None:
    meta = {name.split(".dist-info/")[1] for name in wheel if ".dist-info/" in name}
    assert {"licenses/LICENSE", "entry_points.txt"} <= meta


@needs_checkout
def test_the_folders_stand_in_the_package_for_static_tools() -> None:
    for folder in FOLDERS:
        assert (ROOT / "seqkv" / folder).resolve() == ROOT / folder


@needs_checkout
def test_import_engine_from_a_checkout_gives_the_same_modules() -> None:
    code = """
import engine
from engine.cache import KVCache
import seqkv.engine, seqkv.engine.cache
assert engine is seqkv.engine
assert engine.cache is seqkv.engine.cache
assert KVCache is seqkv.engine.KVCache
"""
    for order in (code, "import seqkv\n" + code):
        environment = {**os.environ, "PYTHONPATH": ""}
        done = subprocess.run([sys.executable, "-c", order], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
