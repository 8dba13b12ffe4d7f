"""All functions that Numba compiles for the CPU, together. What each computes is tested where it is."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from numba.core.registry import CPUDispatcher

from seqkv import engine, entropy_coding

ROOT = Path(__file__).parents[1]
FOLDERS = {"engine": engine, "entropy_coding": entropy_coding}


def kernels() -> dict[str, Any]:
    """By module and name."""
    found = {}
    for package in FOLDERS.values():
        for about in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(about.name)).items():
                if isinstance(value, CPUDispatcher) and value.py_func.__module__ == about.name:
                    found[f"{about.name}.{name}"] = value
    return found


def test_they_are_where_they_are_looked_for() -> None:
    sources = [
        path for folder in ("adapters", "cuda_kernels", "seqkv", *FOLDERS) for path in (ROOT / folder).glob("*.py")
    ]
    count = sum(path.read_text().count("\n@njit(") for path in sources)
    assert count == len(kernels()) > 50
    assert not any(word in path.read_text() for path in sources for word in ("prange", "guvectorize", "@vectorize"))


def test_none_has_threads_of_its_own_and_all_let_others_run() -> None:
    for name, kernel in kernels().items():
        options = kernel.targetoptions
        assert options.get("nogil") is True, name
        assert not options.get("parallel"), name  # Numba's threading layers: not all may be entered from two threads
        # sums would be rounded in any order, which does no harm where they stay in the process
        assert not options.get("fastmath") or name.startswith("seqkv.engine.compact_kernels."), name


def test_the_documentation_says_where_their_indices_come_from() -> None:
    text = (ROOT / "docs" / "robustness.md").read_text()
    modules = {name.rpartition(".")[0].removeprefix("seqkv.").replace(".", "/") for name in kernels()}
    assert [module for module in sorted(modules) if f"`{module}.py`" not in text] == []
