"""Runs Numba's CUDA kernels on the host: compiles their PTX as a launch would, and runs that."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from numba import cuda
from numba.core import types
from numba.cuda import dispatcher
from numba.cuda.errors import normalize_kernel_dimensions

from tests.emulator import ptx
from tests.emulator.device_array import ndarray
from tests.emulator.host_cuda import Module, Region

CAPABILITY = (9, 0)


@contextmanager
def emulated() -> Iterator[None]:
    """Within, kernel[blocks, threads, stream, shared_mem](*args) runs on the host."""
    with (
        mock.patch.object(dispatcher.CUDADispatcher, "__getitem__", _configured),
        mock.patch.object(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=CAPABILITY)),
        mock.patch.object(cuda, "external_stream", lambda pointer: pointer),
    ):
        yield


def _configured(kernel: dispatcher.CUDADispatcher, configuration: tuple[Any, ...]) -> Any:
    def launch(*args: Any) -> None:
        _launch(kernel, configuration, args)

    return launch


def _launch(kernel: dispatcher.CUDADispatcher, configuration: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    grid, block = normalize_kernel_dimensions(*configuration[:2])
    shared_mem = configuration[3] if len(configuration) > 3 else 0
    args = tuple(getattr(x, "array", x) for x in args)  # as device.launch gives them
    arrays = {f"argument {i}": x.host for i, x in enumerate(args) if isinstance(x, ndarray)}
    if any(isinstance(x, np.ndarray) for x in args):
        raise TypeError("an array of the host is given to a kernel: Numba would copy it there and back")
    kinds = tuple(kernel.typeof_pyval(x) for x in args)
    parameters = [p for kind, argument in zip(kinds, args, strict=True) for p in _parameters(kind, argument)]
    regions = [Region(host, False, name) for name, host in arrays.items()]
    _compiled(kernel, kinds).launch(_name(kernel), grid, block, parameters, regions, shared_mem)


@functools.cache
def _compiled(kernel: dispatcher.CUDADispatcher, kinds: tuple[types.Type, ...]) -> Module:
    options = {name: kernel.targetoptions[name] for name in ("lineinfo", "fastmath", "opt")}
    text, _ = cuda.compile_ptx(kernel.py_func, kinds, cc=CAPABILITY, **options)
    return ptx.module(text, _name(kernel))


def _name(kernel: dispatcher.CUDADispatcher) -> str:
    return re.sub(r"\W+", "_", kernel.py_func.__qualname__)


def _parameters(kind: types.Type, argument: Any) -> list[bytes]:
    """As Numba flattens arguments: of an array meminfo, parent, items, bytes of an item, address, shape, strides."""
    if not isinstance(kind, types.Array):
        return [np.dtype(kind.name).type(argument).tobytes()]
    host = argument.host
    integers = (0, 0, host.size, host.itemsize, host.ctypes.data, *host.shape, *host.strides)
    return [x.to_bytes(8, "little", signed=True) for x in integers]
