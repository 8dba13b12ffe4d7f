"""CUDA C++ by way of NVRTC: what its compiler makes of a kernel, run on the host. No device is needed for that."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from cuda.bindings import nvrtc

from tests.emulator import host_cuda, ptx

ARCHITECTURE = "compute_90"


@functools.cache
def module(code: str, options: tuple[str, ...]) -> host_cuda.Module:
    program = _checked(nvrtc.nvrtcCreateProgram(code.encode(), b"kernel", 0, [], []))
    flags = [option.encode() for option in (*options, f"--gpu-architecture={ARCHITECTURE}")]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise host_cuda.KernelError(log.decode().rstrip("\0"))
    text = b" " * _checked(nvrtc.nvrtcGetPTXSize(program))
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.module(text.decode().rstrip("\0"))


def _checked(result: tuple[nvrtc.nvrtcResult, int]) -> int:
    status, value = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise host_cuda.KernelError(str(status))
    return value


class RawModule:
    """Like cupy.RawModule."""

    def __init__(self, code: str, options: Sequence[str] = ()) -> None:
        self.module = module(code, tuple(options))

    def get_function(self, name: str) -> host_cuda.Kernel:
        return host_cuda.Kernel(self.module, name)
