"""A device for tests, emulated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from seqkv.cuda_kernels import device
from tests.emulator import host_cuda, numba_kernels
from tests.emulator.fake_cupy import FakeCupy
from tests.emulator.host_cuda import Settings


@contextmanager
def emulated_device(mode: str = "fast", order: int = 0, preempt: int = 0) -> Iterator[FakeCupy]:
    """Within, `import cupy` gives the stand-in, which is yielded, and kernels run on the host as Settings says."""
    outer, cupy = host_cuda.settings, FakeCupy()
    host_cuda.settings = Settings(mode, order, preempt)
    device.raw_module.cache_clear()
    try:
        with mock.patch.dict(sys.modules, {"cupy": cupy}), numba_kernels.emulated():
            yield cupy
    finally:
        device.raw_module.cache_clear()
        host_cuda.settings = outer
