"""Runs the text of a CUDA kernel on the host, called as CuPy calls it.

`settings` says how, for all kernels; `tests.emulator.device.emulated_device` sets it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.emulator.device_array import initialised, ndarray

FOLDER = Path(__file__).parent
CACHE = FOLDER.parents[1] / ".pytest_cache" / "emulator"
SHARED_BYTES, MOST_SHARED_BYTES = 48 << 10, 227 << 10  # dynamic shared memory: unasked, and at most (H100)

PLAIN = "-std=c++17 -fPIC -fvisibility=hidden -ffp-contract=off -fno-strict-aliasing -w"
COMMON = (f"-I{FOLDER}", *PLAIN.split())
CHECK = "-fsanitize=thread,undefined,float-cast-overflow -fno-sanitize=vptr --param=tsan-instrument-func-entry-exit=0"
KERNEL_FLAGS = {"fast": ("-O2",), "check": ("-O1", "-g", *CHECK.split())}
RUNTIME_FLAGS = {"fast": ("-O2",), "check": ("-O2", "-DSIMT_CHECK")}
RUNTIME_SOURCES = {"fast": ("runtime.cpp", "waiting.cpp"), "check": ("runtime.cpp", "waiting.cpp", "checker.cpp")}


class KernelError(RuntimeError):
    """A kernel does not compile, is launched wrongly, or does something that it must not."""


@dataclass(frozen=True)
class Settings:
    """mode: "fast", or "check", which watches every access to memory. order of lanes and blocks: 0 ascending, 1
    descending, from 2 on a seed. preempt: in check mode a lane loses its turn at one access in so many; 0: never."""

    mode: str = "fast"
    order: int = 0
    preempt: int = 0
    most_accesses: int = 10**9  # of a launch in check mode: more are taken for an endless loop


settings = Settings()

# ------------------------------------------------------------------------------------------------------------ compiling


def _compile(*arguments: str) -> None:
    done = subprocess.run([os.environ.get("CXX", "g++"), *COMMON, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise KernelError("the kernel does not compile for the host:\n" + done.stderr[:4000])


def _cached(suffix: str, inputs: Any, make: Callable[[Path], None]) -> Path:
    """The file that was made of these inputs. Whoever else makes it meanwhile makes the same."""
    path = CACHE / (hashlib.sha256(repr(inputs).encode()).hexdigest()[:32] + suffix)
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder, "made")
            make(made)
            made.replace(path)
    return path


@cache
def _runtime(mode: str) -> tuple[Path, ...]:
    texts = [path.read_text() for path in sorted(FOLDER.glob("*.[ch]*")) if path.suffix in (".h", ".cpp")]

    def compiled(source: str) -> Path:
        def make(made: Path) -> None:
            _compile(*RUNTIME_FLAGS[mode], "-c", str(FOLDER / source), "-o", str(made))

        return _cached(".o", (texts, mode, RUNTIME_FLAGS[mode], source), make)

    return tuple(map(compiled, RUNTIME_SOURCES[mode]))


def _shared_object(text: str, mode: str, options: Sequence[str]) -> Path:
    runtime = _runtime(mode)

    def make(made: Path) -> None:
        source, compiled = made.with_suffix(".cpp"), made.with_suffix(".o")
        source.write_text(text)
        _compile(*KERNEL_FLAGS[mode], *options, "-c", str(source), "-o", str(compiled))
        _compile("-shared", "-Wl,-Bsymbolic", str(compiled), *map(str, runtime), "-o", str(made))

    return _cached(".so", (text, mode, KERNEL_FLAGS[mode], options, runtime), make)


# ------------------------------------------------------------------------------------------------------------ launching


class _Region(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("initialised", ctypes.c_void_p),
        ("read_only", ctypes.c_int),
        ("name", ctypes.c_char_p),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_shared", ctypes.c_size_t),
        ("regions", ctypes.POINTER(_Region)),
        ("region_count", ctypes.c_size_t),
        ("order", ctypes.c_uint64),
        ("preempt", ctypes.c_uint),
        ("most_accesses", ctypes.c_uint64),
        ("independent", ctypes.c_int),
    )


@dataclass(frozen=True)
class Region:
    """Memory that a launch may touch."""

    array: np.ndarray
    read_only: bool
    name: str

    @property
    def start(self) -> int:
        return self.array.ctypes.data

    @property
    def end(self) -> int:
        if not self.array.size:
            return self.start
        last = sum((n - 1) * stride for n, stride in zip(self.array.shape, self.array.strides, strict=True))
        return self.start + last + self.array.itemsize


def _merged(regions: Sequence[Region]) -> list[_Region]:
    """Regions that overlap, as views of one array do, are one."""
    merged: list[_Region] = []
    for region in sorted(regions, key=lambda region: region.start):
        start, end = region.start, region.end
        last = merged[-1] if merged else None
        if last is not None and start < last.start + last.bytes:
            last.bytes = max(last.bytes, end - last.start)
            last.read_only = last.read_only and region.read_only
            last.name += f", {region.name}".encode()
        else:
            flags = initialised(region.array)
            address = None if flags is None else flags.ctypes.data
            merged.append(_Region(start, end - start, address, region.read_only, region.name.encode()))
    return merged


class Module:
    """Kernels, run by the settings.

    text: what findings quote lines of; source: C++ whose #line directives lead there, in the file "kernel"; bounds: the
    most threads of a block, a C++ expression, of each kernel; independent: no thread waits for another.
    """

    def __init__(
        self, text: str, source: str, bounds: dict[str, str], options: Sequence[str] = (), *, independent: bool
    ) -> None:
        self.text, self.bounds, self.options, self.independent = text, bounds, tuple(options), independent
        trailer = "".join(f"SIMT_KERNEL({name}, ({bound}))\n" for name, bound in bounds.items())
        self._source = f'{source}\n#line 1 "trailer"\n{trailer}'
        self._libraries: dict[str, tuple[Path, ctypes.PyDLL]] = {}

    def library(self) -> ctypes.PyDLL:
        """For the mode of the settings. It holds the interpreter's lock: a library runs one launch at a time."""
        mode = settings.mode
        if mode not in self._libraries:
            path = _shared_object(self._source, mode, self.options)
            self._libraries[mode] = path, ctypes.PyDLL(str(path))
        return self._libraries[mode][1]

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[bytes],
        regions: Sequence[Region],
        shared_mem: int = 0,
    ) -> None:
        """arguments: the bytes of each parameter."""
        library = self.library()
        grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        most_threads = min(getattr(library, f"simt_most_threads_{name}")(), 1024)
        if not 1 <= np.prod(block) <= most_threads:
            raise KernelError(f"{name}: {block} threads a block, where at least 1 and at most {most_threads} can be")
        if min(grid) < 1 or grid[0] >= 1 << 31 or max(grid[1:]) >= 1 << 16:
            raise KernelError(f"{name}: no device can run {grid} blocks")
        buffers = [ctypes.create_string_buffer(argument, len(argument)) for argument in arguments]
        pointers = (ctypes.c_void_p * max(len(buffers), 1))(*map(ctypes.addressof, buffers))
        merged = _merged(regions)
        launch = _Launch(
            ctypes.cast(getattr(library, f"simt_call_{name}"), ctypes.c_void_p),
            ctypes.cast(pointers, ctypes.c_void_p),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            shared_mem,
            (_Region * max(len(merged), 1))(*merged),
            len(merged),
            settings.order,
            settings.preempt,
            settings.most_accesses,
            self.independent,
        )
        message = ctypes.create_string_buffer(1 << 16)
        if library.simt_launch(ctypes.byref(launch), message, ctypes.c_size_t(len(message))):
            raise KernelError(f"{name}:\n{self._with_lines(message.value.decode())}")

    def _with_lines(self, message: str) -> str:
        """Lines of the kernel's text for places in the code, and what stands there."""
        places = sorted(set(re.findall(r"@pc=0x([0-9a-f]+)", message)))
        if places:
            path, _ = self._libraries[settings.mode]
            calls = [hex(int(place, 16) - 1) for place in places]
            command = ["addr2line", "-a", "-i", "-e", str(path), *calls]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            # an address, then a line for each function that is inlined there, the kernel's last
            for place, frames in zip(places, re.split(r"^0x[0-9a-f]+\n", told, flags=re.M)[1:], strict=True):
                lines = [line for file, line in re.findall(r"(\S*?):(\d+)", frames) if file.endswith("kernel")]
                message = re.sub(rf"@pc=0x{place}\b", f"line {lines[-1] if lines else '?'}", message)
        text = self.text.split("\n")
        named = sorted({int(line) for line in re.findall(r"\bline (\d+)", message)})
        return message + "".join(f"  {line}: {text[line - 1].strip()}\n" for line in named if 0 < line <= len(text))


# ---------------------------------------------------------------------------------------------- as CuPy has its kernels

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_KERNEL = re.compile(r"__global__\s+(?:void\s+)?(?:__launch_bounds__\s*\(([^()]*)\)\s*)?(?:void\s+)?(\w+)\s*\(")
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+([\w ]+?)\s+(\w+)\s*\[\s*\]\s*;")
_WAITING = re.compile(r"\b__\w*sync\w*\s*\(")  # kernels in which threads wait for each other
_KINDS = {"u": "u", "b": "u", "i": "i", "f": "f"}


class RawModule:
    """Like cupy.RawModule, of CUDA C++ text. Of the options only -D means something here."""

    def __init__(self, code: str, options: Sequence[str] = ()) -> None:
        bare = _COMMENT.sub("", code)
        bounds = {name: (bound or "1024").split(",")[0] for bound, name in _KERNEL.findall(bare)}
        text = _DYNAMIC_SHARED.sub(r"\1* \2 = (\1*)simt::dynamic_shared();", code)
        defines = [option for option in options if option.startswith("-D")]
        source = f'#include "simt.h"\n#line 1 "kernel"\n{text}'
        self.module = Module(code, source, bounds, defines, independent=not _WAITING.search(bare))

    def get_function(self, name: str) -> Kernel:
        if name not in self.module.bounds:
            raise KernelError(f"there is no kernel {name}, only {sorted(self.module.bounds)}")
        return Kernel(self.module, name)


class Kernel:
    """kernel(grid, block, args, shared_mem=bytes), args: arrays of the device and NumPy scalars."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name = module, name
        self.max_dynamic_shared_size_bytes = SHARED_BYTES

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        if shared_mem > min(self.max_dynamic_shared_size_bytes, MOST_SHARED_BYTES):
            raise KernelError(f"{self.name}: set max_dynamic_shared_size_bytes, at most {MOST_SHARED_BYTES}")
        signature = getattr(self.module.library(), f"simt_signature_{self.name}")
        signature.restype = ctypes.c_char_p
        parameters = signature().decode().split(";")[:-1]
        if len(args) != len(parameters):
            raise KernelError(f"{self.name}: {len(args)} arguments for {len(parameters)} parameters")
        arguments, regions = [], []
        for number, (argument, parameter) in enumerate(zip(args, parameters, strict=True)):
            name = f"argument {number}"
            try:
                host = _checked(argument, parameter)
            except TypeError as error:
                raise KernelError(f"{self.name}: {name} {error}") from error
            if isinstance(argument, ndarray):
                regions.append(Region(host, parameter[1] == "k", name))
            arguments.append(address_bytes(host) if isinstance(argument, ndarray) else host.tobytes())
        self.module.launch(self.name, grid, block, arguments, regions, shared_mem)


def address_bytes(host: np.ndarray) -> bytes:
    return host.ctypes.data.to_bytes(8, "little")


def _checked(argument: Any, parameter: str) -> np.ndarray:
    """The memory or the value of an argument. parameter: see `signature` in simt.h. Kind V is not known: bytes."""
    pointer, size, kind = parameter[0] == "P", int(parameter[2:-1]), parameter[-1]
    if isinstance(argument, ndarray):
        host = argument.host
        if not pointer and kind != "V":
            raise TypeError("must be a number, not an array")
        if not host.flags.c_contiguous:
            raise TypeError("is not contiguous")
    else:
        if pointer or isinstance(argument, np.ndarray):
            raise TypeError(f"must be an array of the device, not {type(argument).__name__}")
        host = np.asarray(argument)  # a Python int is an int64, as for CuPy
        if host.itemsize != size:
            raise TypeError(f"has {host.itemsize} bytes, not {size}")
    if kind != "V" and (_KINDS.get(host.dtype.kind), host.itemsize) != (kind, size):
        raise TypeError(f"is {host.dtype}, not {size} bytes of kind {kind}")
    return host
