"""A stand-in for the module cupy, for an emulated device: as much of it as seqkv uses.

What is not here is NumPy's function of the same name, over arrays of the device.
"""

from __future__ import annotations

import ctypes
import time
import types
from typing import Any

import numpy as np

from tests.emulator import device_array, host_cuda
from tests.emulator.device_array import (
    DevicePointer,
    as_device,
    as_host,
    demand_initialised,
    mark_initialised,
    ndarray,
)

# ----------------------------------------------------------------------------------------------------------- new arrays


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """In check mode it is known what of it was written; reads of the rest are found."""
    return device_array.empty(shape, dtype, tracked=host_cuda.settings.mode == "check")


def _filled(shape: Any, value: Any, dtype: Any) -> ndarray:
    array = device_array.empty(shape, dtype)
    array.host[...] = value
    return array


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return _filled(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return _filled(shape, 1, dtype)


def full(shape: Any, value: Any, dtype: Any = None) -> ndarray:
    value = as_host(value)
    return _filled(shape, value, np.asarray(value).dtype if dtype is None else dtype)


def empty_like(a: ndarray, dtype: Any = None) -> ndarray:
    return empty(a.shape, a.dtype if dtype is None else dtype)


def zeros_like(a: ndarray, dtype: Any = None) -> ndarray:
    return zeros(a.shape, a.dtype if dtype is None else dtype)


def array(a: Any, dtype: Any = None, copy: bool = True) -> ndarray:
    """A copy on the device, of what is there or on the host."""
    if isinstance(a, ndarray):
        return as_device(np.array(a.host, dtype, copy=True)) if copy else asarray(a, dtype)
    if isinstance(a, (list, tuple)) and any(isinstance(x, ndarray) for x in a):
        return as_device(np.array(as_host(a), dtype))
    host = np.asarray(a, dtype)
    device_array.transfers.to_device += host.nbytes
    return _filled(host.shape, host, host.dtype)


def asarray(a: Any, dtype: Any = None) -> ndarray:
    if isinstance(a, ndarray) and dtype in (None, a.dtype):
        return a
    return array(a, dtype)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    a = asarray(a, dtype)
    return a if a.flags.c_contiguous else as_device(np.ascontiguousarray(a.host))


def asnumpy(a: Any) -> np.ndarray:
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def from_dlpack(a: Any) -> ndarray:
    """The same memory. It may be the host's: for the emulator that is where the device's memory lies."""
    return ndarray(np.from_dlpack(a))


# ------------------------------------------------------------------------------------------------ streams, events, BLAS


class Stream:
    """Everything has happened by the time it was asked for."""

    ptr = 0

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def use(self) -> Stream:
        return self

    def synchronize(self) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    time = 0.0

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None: ...

    def record(self, stream: Stream | None = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None: ...


_current_stream = Stream()
_OP_N, _OP_T = 0, 1
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32 = 68, 77
_CUDA_R_32F, _GEMM_DEFAULT = 0, -1


def _round_to_tf32(matrix: np.ndarray) -> np.ndarray:
    """float32 rounded to 10 bits of mantissa, ties to even."""
    bits = np.ascontiguousarray(matrix).view(np.uint32)
    rounded = bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(matrix), rounded, bits).view(np.float32)


def _matrix(pointer: DevicePointer, rows: int, columns: int, leading: int) -> np.ndarray:
    """The memory of a float32 matrix [rows, columns], rows contiguous in memory, `leading` from column to column."""
    if not isinstance(pointer, DevicePointer):
        raise TypeError("a pointer to memory of the device is needed")
    host = pointer.host
    items = 1 + sum((n - 1) * s for n, s in zip(host.shape, host.strides, strict=True)) // 4
    if leading < rows or rows + (columns - 1) * leading > items:
        raise ValueError(f"a matrix [{rows}, {columns}], {leading} from column to column, is not {host.shape}")
    return np.lib.stride_tricks.as_strided(host, (rows, columns), (4, 4 * leading))


def gemm_ex(
    handle: int,
    transpose_a: int,
    transpose_b: int,
    m: int,
    n: int,
    k: int,
    alpha: int,
    a: Any,
    a_type: int,
    lda: int,
    b: Any,
    b_type: int,
    ldb: int,
    beta: int,
    c: Any,
    c_type: int,
    ldc: int,
    compute: int,
    algorithm: int,
) -> None:
    """cublasGemmEx on float32: C [m, n] = alpha op(A) op(B) + beta C, all of contiguous columns."""
    if (a_type, b_type, c_type) != (_CUDA_R_32F,) * 3 or compute not in (_COMPUTE_32F, _COMPUTE_32F_FAST_TF32):
        raise NotImplementedError("only float32 is emulated")
    left = _matrix(a, *((k, m) if transpose_a else (m, k)), lda)
    right = _matrix(b, *((n, k) if transpose_b else (k, n)), ldb)
    out = _matrix(c, m, n, ldc)
    scale, keep = (ctypes.c_float.from_address(x).value for x in (alpha, beta))
    for pointer in (a, b, c) if keep else (a, b):
        demand_initialised(pointer.host, "gemmEx")
    if compute == _COMPUTE_32F_FAST_TF32:
        left, right = _round_to_tf32(left), _round_to_tf32(right)
    product = np.float32(scale) * ((left.T if transpose_a else left) @ (right.T if transpose_b else right))
    out[...] = product + np.float32(keep) * out if keep else product
    mark_initialised(c.host)


_MEMORY = 1 << 40
_properties = {"name": b"an emulated device"}
_pool = types.SimpleNamespace(used_bytes=lambda: 0, total_bytes=lambda: 0, free_all_blocks=lambda: None)

cuda = types.SimpleNamespace(
    is_available=lambda: True,
    get_current_stream=lambda: _current_stream,
    Device=device_array.Device,
    Stream=Stream,
    Event=Event,
    get_elapsed_time=lambda start, end: 1000 * (end.time - start.time),
    cublas=types.SimpleNamespace(
        gemmEx=gemm_ex,
        CUBLAS_OP_N=_OP_N,
        CUBLAS_OP_T=_OP_T,
        CUBLAS_COMPUTE_32F=_COMPUTE_32F,
        CUBLAS_COMPUTE_32F_FAST_TF32=_COMPUTE_32F_FAST_TF32,
        CUBLAS_GEMM_DEFAULT=_GEMM_DEFAULT,
    ),
    device=types.SimpleNamespace(get_cublas_handle=lambda: 1),
    runtime=types.SimpleNamespace(
        CUDA_R_32F=_CUDA_R_32F,
        getDeviceProperties=lambda number: _properties,
        memGetInfo=lambda: (_MEMORY, _MEMORY),
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
    ),
)

# ----------------------------------------------------------------------------------------------------------- the module


def _over_device(module: Any, name: str) -> Any:
    """NumPy's function, submodule or constant of a name, over arrays of the device."""
    found = getattr(module, name)
    if isinstance(found, types.ModuleType):
        return types.SimpleNamespace(**{n: _over_device(found, n) for n in found.__all__})
    if not callable(found) or isinstance(found, type):
        return found

    def function(*args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        result = found(*as_host(args), **{key: as_host(value) for key, value in kwargs.items()})
        if out is None:
            return as_device(result)
        mark_initialised(out.host)
        return out

    return function


class FakeCupy(types.ModuleType):
    """What stands in sys.modules for cupy. raw_module: what RawModule is in it."""

    def __init__(self, raw_module: Any = host_cuda.RawModule) -> None:
        super().__init__("cupy", __doc__)
        new = (empty, zeros, ones, full, empty_like, zeros_like)
        copied = (array, asarray, ascontiguousarray, asnumpy, from_dlpack)
        for function in (*new, *copied):
            setattr(self, function.__name__, function)
        self.ndarray, self.RawModule, self.cuda = ndarray, raw_module, cuda
        self.get_default_memory_pool, self.__version__ = lambda: _pool, "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _over_device(np, name)
