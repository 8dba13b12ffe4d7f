"""What is written in LLVM's own language, which no bounds checking reaches: it touches nothing around its matrices.

Each matrix gets pages of its own, with pages around them that must not be touched, once at their start and once at
their end. A process that touches one dies, so that each case is a process.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from seqkv.engine.exact_products import STEP, TILE, product

SHAPES = [(TILE, TILE, STEP), (TILE, 3 * TILE, 5 * STEP), (9 * TILE, 2 * TILE, STEP), (16 * TILE, 16 * TILE, 9 * STEP)]


def fenced(shape: tuple[int, int], dtype: Any, end: bool) -> NDArray[Any]:
    """An array that begins, or ends, where a page begins or ends that must not be touched."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    inside = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, inside + 2 * mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (first, first + mmap.PAGESIZE + inside):
        if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = mmap.PAGESIZE + (inside - size if end else 0)
    return np.frombuffer(pages, dtype, int(np.prod(shape)), start).reshape(shape)


def case(end: bool, beyond: bool) -> None:
    """Products of fenced matrices; beyond: one of them moved by a number over the fence."""
    rng = np.random.default_rng(0)
    for tokens, channels, count in SHAPES:
        features, weights = fenced((tokens, count), np.int16, end), fenced((channels, count), np.int16, end)
        out = fenced((tokens, channels), np.int32, end)
        features[:], weights[:] = rng.integers(-999, 999, features.shape), rng.integers(-999, 999, weights.shape)
        if beyond:
            place = features.ctypes.data + (1 if end else -1) * features.itemsize
            features = np.ctypeslib.as_array((ctypes.c_int16 * features.size).from_address(place)).reshape(
                tokens, count
            )
        product(features, 0, weights, out)
        assert np.array_equal(out, features.astype(np.int64) @ weights.T)


def returned(end: bool, beyond: bool) -> int:
    """What became of a process with a case."""
    code = f"from tests.test_exact_products import case; case({end}, {beyond})"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); {code}"]
    return subprocess.run(command, capture_output=True, timeout=300).returncode


linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are protected as Linux does it")


@linux
@pytest.mark.parametrize("end", [False, True], ids=["start", "end"])
def test_touches_nothing_around_its_matrices(end: bool) -> None:
    assert returned(end, beyond=False) == 0


@linux
@pytest.mark.parametrize("end", [False, True], ids=["start", "end"])
def test_what_is_around_them_cannot_be_touched(end: bool) -> None:
    assert returned(end, beyond=True) in (-signal.SIGSEGV, -signal.SIGBUS)


def matrices(tokens: int = TILE, count: int = STEP, channels: int = TILE) -> list[NDArray[Any]]:
    return [
        np.ones((tokens, count), np.int16),
        np.ones((channels, count), np.int16),
        np.zeros((tokens, channels), "i4"),
    ]


def test_matrices_that_do_not_fit_are_refused() -> None:
    features, weights, out = matrices()
    wide, tall = matrices(count=3 * STEP)[0], matrices(tokens=2 * TILE)[2]
    bad: list[tuple[Any, int, Any, Any, str]] = [
        (features, -1, weights, out, "fit"),
        (features, 1, weights, out, "fit"),
        (features, 1 << 62, weights, out, "fit"),
        (features, 0, weights, tall, "fit"),
        (features, 0, matrices(channels=2 * TILE)[1], out, "fit"),
        (features[:3], 0, weights, out[:3], "padded"),
        (features, 0, weights[:3], out[:, :3], "padded"),
        (features[:, :8], 0, weights[:, :8], out, "padded"),
        (features.astype(np.int32), 0, weights, out, "bits"),
        (features, 0, weights.astype(np.int8), out, "bits"),
        (features, 0, weights, out.astype(np.int16), "bits"),
        (np.asfortranarray(features), 0, weights, out, "contiguous"),
        (wide[:, ::3], 0, weights, out, "contiguous"),
        (features, 0, weights[::-1], out, "contiguous"),
        (features, 0, weights, out.T, "contiguous"),
    ]
    for *arguments, message in bad:
        with pytest.raises(ValueError, match=message):
            product(*arguments)
    assert not out.any()


def test_no_features_are_zeros() -> None:
    features, weights, out = matrices(count=0)
    out[:] = 7
    product(features, 0, weights, out)
    assert not out.any()
