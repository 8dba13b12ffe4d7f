"""Errors of the GPU path."""


class DeviceError(RuntimeError):
    """The GPU path cannot run here: CuPy, Numba for CUDA or a device is missing.

    Install seqkv[cuda13] or seqkv[cuda12], or use the CPU (backend="cpu").
    """
