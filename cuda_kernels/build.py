"""Kernels compiled without a device: what a GPU would load (a cubin), and what each kernel needs of it.

CUDA C++ goes through NVRTC with the options that CuPy uses; Numba kernels become PTX, which nvJitLink assembles, as
when Numba launches them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from seqkv.cuda_kernels.device import NVRTC_OPTIONS

ARCHITECTURES = ("sm_80", "sm_90")  # A100; H100 and H200
_CUPY_OPTIONS = ("-ftz=true",)  # what CuPy adds to every kernel's own options


class BuildError(RuntimeError):
    """A kernel does not compile; the message is the compiler's."""


@dataclass(frozen=True)
class Resources:
    """What a kernel needs: registers of a thread, bytes of a thread that are spilled or on its stack, bytes of static
    shared memory of a block."""

    registers: int
    spills: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Binary:
    """A cubin (ELF) and the resources of its kernels, by their names in it."""

    cubin: bytes
    kernels: dict[str, Resources]


def compile_file(file: str, defines: tuple[tuple[str, int], ...], architecture: str) -> Binary:
    """The kernels of a `.cu` file of this folder; arguments as for :func:`device.raw_module`."""
    return compile_source(Path(__file__).with_name(file).read_text(), defines, architecture)


def compile_source(code: str, defines: tuple[tuple[str, int], ...], architecture: str) -> Binary:
    """The kernels of a CUDA C++ text; the cubin knows its lines. Raises BuildError with the compiler's log."""
    from cuda.bindings import nvrtc

    options = (*NVRTC_OPTIONS, *_CUPY_OPTIONS, *(f"-D{name}={value}" for name, value in defines))
    options += (f"--gpu-architecture={architecture}", "--ptxas-options=-v", "--generate-line-info")
    program = _checked(nvrtc.nvrtcCreateProgram(code.encode(), b"kernels.cu", 0, [], []))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        if status:
            raise BuildError(_text(log))
        cubin = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Binary(bytes(cubin), _resources(_text(log)))


def compile_numba(function: Any, signature: tuple[Any, ...], architecture: str) -> Binary:
    """A Numba CUDA kernel, as Python function or `@cuda.jit` dispatcher, for arguments of these Numba types."""
    from numba import cuda
    from numba.cuda import dispatcher

    capability = divmod(int(architecture.removeprefix("sm_")), 10)
    # Numba asks the device at hand what the functions that a kernel calls are for
    at_hand = SimpleNamespace(compute_capability=capability)
    with mock.patch.object(dispatcher, "get_current_device", lambda: at_hand):
        ptx, _ = cuda.compile_ptx(getattr(function, "py_func", function), signature, cc=capability)
    return assemble(ptx, architecture)


def assemble(ptx: str, architecture: str) -> Binary:
    """The kernels of a PTX text. Raises BuildError with the assembler's log."""
    from cuda.bindings import nvjitlink

    linker = nvjitlink.create(2, [f"-arch={architecture}", "-Xptxas=-v"])
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, ptx.encode(), len(ptx.encode()), "kernels.ptx")
        nvjitlink.complete(linker)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(linker))
        nvjitlink.get_error_log(linker, log)
        raise BuildError(_text(log)) from error
    finally:
        nvjitlink.destroy(linker)
    return Binary(bytes(cubin), _resources(_text(log)))


def compiler_versions() -> str:
    """The compilers that resources and instructions are of."""
    from cuda.bindings import nvjitlink, nvrtc

    return "NVRTC {}.{}, nvJitLink {}.{}".format(*_checked(nvrtc.nvrtcVersion()), *nvjitlink.version())


def _resources(log: str) -> dict[str, Resources]:
    """What ptxas reports of each kernel."""
    kernels = {}
    for report in log.split("Compiling entry function ")[1:]:

        def number(pattern: str, report: str = report) -> int:
            return sum(map(int, re.findall(pattern, report)))

        kernels[report.split("'")[1]] = Resources(
            registers=number(r"Used (\d+) registers"),
            spills=number(r"(\d+) bytes spill"),
            stack=number(r"(\d+) bytes stack frame"),
            shared=number(r"registers.* (\d+) bytes smem"),
        )
    return kernels


def _text(log: bytearray) -> str:
    return log.decode().rstrip("\0 \n")


def _checked(result: tuple[Any, ...]) -> Any:
    """The values of a call of NVRTC, whose first one is its status."""
    status, *values = result
    if status:
        raise BuildError(str(status))
    return values[0] if len(values) == 1 else tuple(values)
