"""Errors of the GPU path."""


class DeviceError(RuntimeError):
    """The GPU path cannot run here: no CuPy, no Numba for CUDA, or no device. Install seqkv[cuda13] or seqkv[cuda12], or
    use the CPU (backend="cpu")."""
