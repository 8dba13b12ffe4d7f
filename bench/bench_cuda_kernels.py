"""Values a second of every kernel: on the device, if there is one, with a copy of as many bytes beside it; else on the
emulated device of the tests, with what the CPU does for the same beside it.

    pytest bench/bench_cuda_kernels.py

The emulator says nothing of a GPU's speed, only that the kernels run, and what tests of them cost. A call's time is
until the device is done. "of a copy" and "of the CPU" are how fast a kernel is beside these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from bench.workloads import Work, workloads
from seqkv.cuda_kernels import device
from tests.emulator.device import emulated_device

DEVICE = device.available()
SIZE = {"chunks": 128, "heads": 8} if DEVICE else {"chunks": 2, "heads": 1}
ROUNDS, WARM_UP = (20, 3) if DEVICE else (5, 1)
KERNELS = (
    *(
        "statistics",
        "Encoder.add",
        "Encoder.finish",
        "Decoder.next",
        "accumulate",
        "quantise",
        "dequantise",
        "energies",
    ),
    *(f"{name} {dtype}" for name in ("to_block", "to_heads", "finite") for dtype in ("float32", "float16", "uint16")),
)


@pytest.fixture(scope="module")
def cupy() -> Iterator[Any]:
    with nullcontext(device.cupy()) if DEVICE else emulated_device() as module:
        yield module


@pytest.fixture(scope="module")
def works(cupy: Any) -> dict[str, Work]:
    found = workloads(cupy, **SIZE)
    assert set(found) == set(KERNELS)
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(benchmark: Any, cupy: Any, works: dict[str, Work], kernel: str) -> None:
    work = works[kernel]

    def run(*args: Any) -> None:
        work.run(*args)
        cupy.cuda.get_current_stream().synchronize()

    benchmark.pedantic(run, setup=lambda: (work.prepare(), {}), rounds=ROUNDS, warmup_rounds=WARM_UP)
    seconds = benchmark.stats["min"]
    benchmark.extra_info["backend"] = name_of_device(cupy) if DEVICE else "emulated"
    benchmark.extra_info["million values a second"] = round(work.values / seconds / 1e6, 1)
    benchmark.extra_info["GB/s"] = round(work.bytes / seconds / 1e9, 3)
    if DEVICE:
        benchmark.extra_info["of a copy"] = round(copying(cupy, work.bytes) / seconds, 3)
    else:
        benchmark.extra_info["of the CPU"] = round(fastest(work.cpu) / seconds, 4)


def name_of_device(cupy: Any) -> str:
    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()


def copying(cupy: Any, size: int) -> float:
    """Seconds in which a copy reads and writes this many bytes of the device's memory together."""
    source = cupy.zeros(size // 2, "uint8")
    target = cupy.empty_like(source)

    def copy() -> None:
        target[:] = source
        cupy.cuda.get_current_stream().synchronize()

    return fastest(copy)


def fastest(call: Callable[[], Any]) -> float:
    """Seconds, once warm."""
    call()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
