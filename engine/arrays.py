"""Arrays of any library, as NumPy arrays in host memory or as CuPy arrays on a CUDA device.

Neither has bfloat16. In host memory such numbers are float32 of the same value, on a device (and where a caller's own
array is written to) uint16 that hold their bits.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.cuda_kernels import device
from seqkv.engine.errors import CacheError, SeqkvError


def on_device(array: Any) -> bool:
    """Whether an array is in the memory of a CUDA device."""
    if hasattr(array, "is_cuda"):  # torch
        return bool(array.is_cuda)
    return hasattr(array, "__cuda_array_interface__") or _dlpack_device(array)[0] in _DLPACK_CUDA


def place_of(array: Any) -> int | None:
    """The number of the device that an array is on, None for the host."""
    if not on_device(array):
        return None
    if hasattr(array, "is_cuda"):
        return int(array.device.index)
    if hasattr(array, "__cuda_array_interface__"):
        return int(device.cupy().asarray(array).device.id)
    return _dlpack_device(array)[1]


_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def _dlpack_device(array: Any) -> tuple[int, int]:
    """Kind and number of an array's device as DLPack has them; those of the host if it does not say."""
    kind, number = array.__dlpack_device__() if hasattr(array, "__dlpack_device__") else (1, 0)
    return int(kind), int(number)


def current(array: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which the device that an array is on is the current one; nothing changes for an array in host
    memory."""
    place = place_of(array)
    return contextlib.nullcontext() if place is None else device.cupy().cuda.Device(place)


def module_of(array: Any) -> Any:
    """NumPy, or CuPy for an array on a device."""
    return device.cupy() if on_device(array) else np


def to_numpy(array: Any, error: type[SeqkvError] = CacheError) -> tuple[NDArray[Any], str]:
    """`array` as a NumPy array in host memory, without a copy where possible, and the name of its own dtype.

    NumPy, torch and CuPy arrays, and whatever has DLPack or `__array__`. bfloat16 comes back as float32 of the same
    values, with the name "bfloat16". Objects are told apart by their methods, so that no library is imported for it.
    error: what is raised for what cannot be read: sparse or quantised tensors, dtypes that NumPy does not know, devices
        without memory of their own.
    """
    try:
        return _to_numpy(array)
    except (TypeError, ValueError, RuntimeError, BufferError) as problem:
        raise error(f"{_described(array)} cannot be read as an array: {_first_line(problem)}") from problem


def _to_numpy(array: Any) -> tuple[NDArray[Any], str]:
    if hasattr(array, "detach") and hasattr(array, "cpu"):  # torch: off the graph, off the device
        array = array.detach().cpu().resolve_conj().resolve_neg()
        if str(array.dtype) == "torch.bfloat16":
            return array.float().numpy(), "bfloat16"
        out = array.numpy()
    elif hasattr(array, "__cuda_array_interface__") and hasattr(array, "get"):  # CuPy refuses __array__
        out = array.get()
    elif hasattr(array, "__array__") or not hasattr(array, "__dlpack__"):
        out = np.asarray(array)
    else:
        out = np.from_dlpack(array)
    if out.dtype.name == "bfloat16":  # ml_dtypes, the NumPy side of JAX
        return out.astype(np.float32), "bfloat16"
    return out, out.dtype.name


def _described(array: Any) -> str:
    about = [str(getattr(array, name)) for name in ("layout", "dtype", "device") if hasattr(array, name)]
    return " ".join([type(array).__name__, *about])


def _first_line(problem: Exception) -> str:
    return str(problem).partition("\n")[0]


def to_cupy(array: Any) -> tuple[Any, str]:
    """An array on a CUDA device as a CuPy array that shares its memory, and the name of its dtype."""
    cupy = device.cupy()
    if hasattr(array, "detach"):
        array = array.detach()
        name = str(array.dtype).removeprefix("torch.")
        return _bits(cupy.from_dlpack(_plain(array)), name), name
    if not hasattr(array, "__cuda_array_interface__"):
        array = cupy.from_dlpack(array)
    out = array if isinstance(array, cupy.ndarray) else cupy.asarray(array)
    name = out.dtype.name
    return _bits(out, name), name


def shared(array: Any, what: str) -> Any:
    """A caller's array that is to be written to, as a NumPy or CuPy array in the same memory: float32, float16, or
    uint16 for bfloat16. CacheError if it cannot be written to, or holds something else."""
    out: Any
    if on_device(array):
        out, name = to_cupy(array)
    elif hasattr(array, "detach"):
        array = array.detach()
        name = str(array.dtype).removeprefix("torch.")
        out = _bits(_plain(array).numpy(), name)
    elif isinstance(array, np.ndarray):
        name = array.dtype.name
        out = _bits(array, name)
    else:
        raise CacheError(f"{what}: a NumPy, CuPy or torch array is needed to write to, not {type(array).__name__}")
    if name not in ("float32", "float16", "bfloat16"):
        raise CacheError(f"{what}: float32, float16 or bfloat16 is needed to write to, not {name}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise CacheError(f"{what}: the array cannot be written to")
    return out


def host_integers(array: Any, what: str) -> NDArray[np.int64]:
    """Integers of any library as an int64 array in host memory. CacheError if they are not integers."""
    out = to_numpy(array)[0]
    if out.dtype.kind not in "iu":
        raise CacheError(f"{what}: expected integers, got {out.dtype}")
    return out.astype(np.int64)


def _plain(tensor: Any) -> Any:
    """A torch tensor, of bfloat16 the bits: neither DLPack nor `numpy()` gives those to a library without it."""
    return tensor.view(sys.modules["torch"].int16) if str(tensor.dtype) == "torch.bfloat16" else tensor


def _bits(array: Any, name: str) -> Any:
    return array.view(np.uint16) if name == "bfloat16" else array


def bfloat16_bits(values: Any) -> Any:
    """The bfloat16 nearest to each float32 (ties to even), as its 16 bits: uint16. Finite values only."""
    bits = module_of(values).ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16_bits(bits: Any) -> Any:
    """The float32 that bits (uint16) of bfloat16 stand for."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_to_bfloat16(values: Any) -> Any:
    """Each float32 rounded to the nearest bfloat16, still as float32. Finite values only."""
    return from_bfloat16_bits(bfloat16_bits(values))
