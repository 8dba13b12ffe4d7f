"""Arrays of any library, as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_numpy(array: Any) -> tuple[NDArray[Any], str]:
    """`array` as a NumPy array in host memory, without a copy where possible, and the name of its own dtype.

    NumPy, torch and CuPy arrays, and whatever has DLPack or `__array__`. NumPy has no bfloat16: such arrays come back
    as float32 of the same values, with the name "bfloat16". Objects are told apart by their methods, so that no
    library is imported for it.
    """
    if hasattr(array, "detach") and hasattr(array, "cpu"):  # torch: off the graph, off the device
        array = array.detach().cpu()
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


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bfloat16 nearest to each float32 (ties to even), as its 16 bits. Finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each float32 rounded to the nearest bfloat16, still as float32. Finite values only."""
    return (bfloat16_bits(values).astype(np.uint32) << np.uint32(16)).view(np.float32)
