"""Arrays of an emulated device: NumPy memory behind CuPy's manners.

As with CuPy nothing goes between host and device unless it is said: NumPy refuses them, they refuse NumPy's arrays, and
what is copied is counted in `transfers`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

ALIGNMENT = 256  # of what an allocator of device memory gives
POISON = 0x7F  # what new memory holds: large numbers, or none, of any type


@dataclass
class Transfers:
    """Bytes copied since the start, or since `counted` began."""

    to_host: int = 0
    to_device: int = 0


transfers = Transfers()


@contextmanager
def counted() -> Iterator[Transfers]:
    """The bytes that are copied between host and device meanwhile."""
    global transfers
    outer, transfers = transfers, Transfers()
    try:
        yield transfers
    finally:
        outer.to_host += transfers.to_host
        outer.to_device += transfers.to_device
        transfers = outer


class UninitialisedRead(RuntimeError):
    """Something read memory of the device that nothing has written."""


# id of an array that owns memory -> whether each byte was written, where that is tracked
_written: dict[int, np.ndarray] = {}


def empty(shape: Any, dtype: Any = float, *, tracked: bool = False) -> ndarray:
    """New memory, poisoned. If tracked, it is known what was written."""
    dtype = np.dtype(dtype)
    sizes = (shape,) if np.ndim(shape) == 0 else tuple(shape)
    size = int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize
    memory = np.full(size + 2 * ALIGNMENT, POISON, np.uint8)
    if tracked:
        _written[id(memory)] = np.zeros(memory.size, np.uint8)
        weakref.finalize(memory, _written.pop, id(memory))
    start = -memory.ctypes.data % ALIGNMENT
    return ndarray(memory[start : start + size].view(dtype).reshape(sizes))


def initialised(host: np.ndarray) -> np.ndarray | None:
    """For memory that is tracked: whether each byte was written, uint8 [*host.shape, itemsize], a view."""
    owner = host
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    written = _written.get(id(owner))
    if written is None:
        return None
    offset = host.ctypes.data - owner.ctypes.data if host.size else 0
    return np.ndarray((*host.shape, host.itemsize), np.uint8, written, offset, (*host.strides, 1))


def mark_initialised(host: np.ndarray) -> None:
    flags = initialised(host)
    if flags is not None:
        flags[...] = 1


def demand_initialised(host: np.ndarray, reader: str) -> None:
    flags = initialised(host)
    if flags is not None and not flags.all():
        raise UninitialisedRead(f"{reader} reads {int((flags == 0).sum())} bytes that nothing has written")


@dataclass(frozen=True)
class _Pointer:
    ptr: DevicePointer


class DevicePointer(int):
    """An address that knows what it points to."""

    host: np.ndarray


class Device:
    """The one there is; a context in which it is the current one."""

    attributes: ClassVar = {"MultiProcessorCount": 1, "ClockRate": 1}
    compute_capability = "90"

    def __init__(self, number: int = 0) -> None:
        self.id = number

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: Any) -> None: ...


def as_device(result: Any) -> Any:
    """What a NumPy function returned, as CuPy would return it: arrays, also of no dimension, are on the device."""
    if isinstance(result, (np.ndarray, np.generic)):
        return ndarray(np.asarray(result))
    if isinstance(result, (tuple, list)):
        return type(result)(as_device(x) for x in result)
    return result


def as_host(value: Any) -> Any:
    """Arguments of a function of CuPy, for NumPy. Arrays of the host are refused."""
    if isinstance(value, ndarray):
        return value.host
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}: CuPy does not copy arrays of the host to the device unasked")
    if isinstance(value, (tuple, list)):
        return type(value)(as_host(x) for x in value)
    return value


class ndarray(NDArrayOperatorsMixin):
    """An array of the device. host: the memory, as NumPy's array, for the emulator alone."""

    def __init__(self, host: np.ndarray) -> None:
        self.host = host

    shape = property(lambda self: self.host.shape)
    dtype = property(lambda self: self.host.dtype)
    size = property(lambda self: self.host.size)
    ndim = property(lambda self: self.host.ndim)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    strides = property(lambda self: self.host.strides)
    flags = property(lambda self: self.host.flags)

    @property
    def device(self) -> Device:
        return Device()

    @property
    def data(self) -> _Pointer:
        pointer = DevicePointer(self.host.ctypes.data)
        pointer.host = self.host
        return _Pointer(pointer)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = dict(self.host.__array_interface__)
        return {key: interface[key] for key in ("shape", "typestr", "data", "strides")} | {"version": 3, "stream": 1}

    # -- from and to the host

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def get(self) -> np.ndarray:
        demand_initialised(self.host, ".get()")
        transfers.to_host += self.nbytes
        return self.host.copy()

    def set(self, values: np.ndarray) -> None:
        if not isinstance(values, np.ndarray) or values.shape != self.shape or values.dtype != self.dtype:
            raise ValueError("set needs an array of the host, of the same shape and type")
        transfers.to_device += self.nbytes
        self.host[...] = values
        mark_initialised(self.host)

    def item(self, *index: int) -> Any:
        return self[index].get().item() if index else self.get().item()

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def __index__(self) -> int:
        return self.get().__index__()

    def tolist(self) -> Any:
        return self.get().tolist()

    # -- on the device

    def __len__(self) -> int:
        return len(self.host)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> ndarray:
        return as_device(self.host[as_host(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.host[as_host(key)] = as_host(value)
        flags = initialised(self.host)
        if flags is not None:
            flags[as_host(key)] = 1

    def fill(self, value: Any) -> None:
        self[...] = value

    def __getattr__(self, name: str) -> Any:
        """T and the methods of NumPy's arrays: views are views of the same memory, other results are new arrays."""
        if name.startswith("__") or name in ("ctypes", "base", "tofile", "tobytes", "dumps"):
            raise AttributeError(f"CuPy's arrays have no {name}")
        attribute = getattr(self.host, name)
        if not callable(attribute):
            return as_device(attribute)

        def method(*args: Any, **kwargs: Any) -> Any:
            return as_device(attribute(*as_host(args), **{key: as_host(value) for key, value in kwargs.items()}))

        return method

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is not None:
            kwargs["out"] = as_host(out)
        for x in inputs:
            if isinstance(x, ndarray):
                demand_initialised(x.host, ufunc.__name__)
        result = getattr(ufunc, method)(*as_host(inputs), **kwargs)
        if out is None:
            return as_device(result)
        for x in out:
            mark_initialised(x.host)
        return out[0] if len(out) == 1 else out

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(issubclass(t, np.ndarray) for t in types):
            raise TypeError(f"{function.__name__} of arrays of the host and of the device")
        return as_device(function(*as_host(args), **{key: as_host(value) for key, value in kwargs.items()}))

    def __repr__(self) -> str:
        return f"emulated {self.host!r}"
