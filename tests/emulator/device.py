"""A device for tests, emulated: kernels run on the host, from the text or the PTX that a device would get.

It cannot see how memory is reordered between threads beyond what barriers forbid, what ptxas makes of PTX, nor how long
anything takes. Blocks run one after another: one that waits for another waits for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from seqkv.cuda_kernels import device
from tests.emulator import host_cuda, numba_kernels, nvrtc
from tests.emulator.fake_cupy import FakeCupy
from tests.emulator.host_cuda import Settings


@contextmanager
def emulated_device(
    mode: str = "fast", order: int = 0, preempt: int = 0, *, by_nvrtc: bool = False, **more: int
) -> Iterator[FakeCupy]:
    """Within, `import cupy` gives the stand-in, which is yielded, and kernels run on the host as Settings says.

    by_nvrtc: CUDA C++ as NVRTC compiles it, not its text as g++ does.
    """
    settings, installed = host_cuda.settings, sys.modules.pop("cupy", None)
    host_cuda.settings = Settings(mode, order, preempt, **more)
    cupy = sys.modules["cupy"] = FakeCupy(nvrtc.RawModule if by_nvrtc else host_cuda.RawModule)
    device.raw_module.cache_clear()
    try:
        with numba_kernels.emulated():
            yield cupy
    finally:
        device.raw_module.cache_clear()
        host_cuda.settings = settings
        del sys.modules["cupy"]
        if installed is not None:
            sys.modules["cupy"] = installed
