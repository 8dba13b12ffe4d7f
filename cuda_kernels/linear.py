"""Matrix products on the device, by cuBLAS, with float32 accumulation."""

from __future__ import annotations

from typing import Any

import numpy as np

from seqkv.cuda_kernels.device import cupy

_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


def multiply(a: Any, b: Any, out: Any, *, accumulate: bool = False, exact: bool = False) -> None:
    """out = a @ b, or out += a @ b: float32 CuPy matrices [m, k], [k, n], [m, n], each with contiguous rows or columns.

    a and b are rounded to the 10 bits of TF32 for the tensor cores, unless `exact`. Sums are float32.
    """
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or out.shape != (m, n):
        raise ValueError(f"cannot multiply {a.shape} and {b.shape} into {out.shape}")
    if not all(x.dtype == np.float32 for x in (a, b, out)):
        raise ValueError(f"float32 matrices are needed, not {a.dtype}, {b.dtype}, {out.dtype}")
    if m == 0 or n == 0 or k == 0:
        if not accumulate:
            out.fill(0)
        return
    # cuBLAS thinks in columns: a matrix with contiguous rows is the transpose of one that has contiguous columns
    if not _by_columns(out):
        m, n, a, b, out = n, m, b.T, a.T, out.T
    cuda = cupy().cuda
    cublas = cuda.cublas
    (transpose_a, lda), (transpose_b, ldb), (_, ldc) = _layout(a), _layout(b), _layout(out)
    cublas.gemmEx(
        cuda.device.get_cublas_handle(),
        cublas.CUBLAS_OP_T if transpose_a else cublas.CUBLAS_OP_N,
        cublas.CUBLAS_OP_T if transpose_b else cublas.CUBLAS_OP_N,
        m,
        n,
        k,
        _ONE.ctypes.data,
        a.data.ptr,
        cuda.runtime.CUDA_R_32F,
        lda,
        b.data.ptr,
        cuda.runtime.CUDA_R_32F,
        ldb,
        (_ONE if accumulate else _ZERO).ctypes.data,
        out.data.ptr,
        cuda.runtime.CUDA_R_32F,
        ldc,
        cublas.CUBLAS_COMPUTE_32F if exact else cublas.CUBLAS_COMPUTE_32F_FAST_TF32,
        cublas.CUBLAS_GEMM_DEFAULT,
    )


def _by_columns(x: Any) -> bool:
    """Whether columns, rather than rows, are contiguous."""
    return bool(x.shape[0] == 1 or x.strides[0] == x.itemsize) and not (x.shape[1] > 1 and x.strides[1] == x.itemsize)


def _layout(x: Any) -> tuple[bool, int]:
    """For cuBLAS: whether it must transpose x [rows, columns], and the distance of x's columns (or rows) in items."""
    by_columns = _by_columns(x)
    inner, outer = (0, 1) if by_columns else (1, 0)
    if x.shape[inner] > 1 and x.strides[inner] != x.itemsize:
        raise ValueError(f"rows or columns must be contiguous: shape {x.shape}, strides {x.strides}")
    return not by_columns, max(x.strides[outer] // x.itemsize, x.shape[inner], 1)
