"""The device: the one place that loads CuPy and launches kernels, always on CuPy's current stream.

CuPy and Numba for CUDA are imported when a kernel is first needed, so that everything else works without them.
"""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path
from typing import Any

from seqkv.cuda_kernels.errors import DeviceError

THREADS, FEWEST_THREADS = 256, 32  # of a block of an elementwise kernel
FEWEST_BLOCKS = 128  # over which few elements are spread: Numba warns of a launch with less
MOST_BLOCKS = 1 << 16  # elementwise kernels stride over what is beyond
LOWEST_CAPABILITY = 80  # Ampere: sums over a warp in one instruction
NVRTC_OPTIONS = ("--std=c++17", "--fmad=false")


def cupy() -> Any:
    """The module CuPy. DeviceError if it is not installed."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"CUDA arrays need CuPy: install seqkv[cuda13] or seqkv[cuda12], or move them to the host ({error})"
        ) from error
    return cupy


def available() -> bool:
    """Whether there is a device that kernels can run on."""
    try:
        return bool(cupy().cuda.is_available())
    except DeviceError:
        return False


def demand() -> None:
    """DeviceError unless kernels can run here: says what is missing."""
    cupy()
    try:
        importlib.metadata.version("numba-cuda")
    except importlib.metadata.PackageNotFoundError:
        raise DeviceError("kernels need numba-cuda: install seqkv[cuda13] or seqkv[cuda12]") from None
    if not available():
        raise DeviceError("CuPy finds no CUDA device: is there one, with a driver for the CUDA that CuPy is built for?")


@functools.cache
def raw_module(file: str, defines: tuple[tuple[str, int], ...] = ()) -> Any:
    """The kernels of a `.cu` file of this folder, compiled for the current device when one is first launched.

    DeviceError if the device is too old for them.
    """
    capability = int(cupy().cuda.Device().compute_capability)
    if capability < LOWEST_CAPABILITY:
        least = f"compute capability {LOWEST_CAPABILITY / 10} or more"
        raise DeviceError(f"kernels need a device of {least}, this one has {capability / 10}")
    code = Path(__file__).with_name(file).read_text()
    options = (*NVRTC_OPTIONS, *(f"-D{name}={value}" for name, value in defines))
    return cupy().RawModule(code=code, options=options)


def launch(kernel: Any, count: int, *args: Any) -> None:
    """Run a Numba CUDA kernel with a thread, or more, for each of `count` elements (it strides over more than there are
    threads).

    args: CuPy arrays and NumPy scalars. Nothing is launched for no elements.
    """
    if count == 0:
        return
    from numba import cuda

    stream = cuda.external_stream(cupy().cuda.get_current_stream().ptr)
    blocks, threads = grid(count)
    kernel[blocks, threads, stream](*(_OnStream(x) if hasattr(x, "__cuda_array_interface__") else x for x in args))


def grid(count: int) -> tuple[int, int]:
    """Blocks, and threads of each, for `count` elements."""
    threads = THREADS
    while threads > FEWEST_THREADS and count <= threads // 2 * FEWEST_BLOCKS:
        threads //= 2
    return min(max(-(-count // threads), FEWEST_BLOCKS), MOST_BLOCKS), threads


class _OnStream:
    """An array as a kernel on its own stream may take it: Numba would wait for a stream that the array names."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": None}
