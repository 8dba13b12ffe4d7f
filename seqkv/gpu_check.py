"""The command `seqkv gpu-check`: is the GPU of this machine right, and how fast is it?"""

from __future__ import annotations

import importlib.metadata
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import seqkv
from seqkv import device_checks, device_speed, display, engine
from seqkv.cuda_kernels import device
from seqkv.device_checks import Check
from seqkv.device_speed import Clock, Subject
from seqkv.engine import near
from seqkv.synthetic import Sizes

REAL = Sizes(layers=32, heads=8, width=128, tokens=32768, vocab=32000, rank=192)
"""Of the cache of a model like Llama 3.1 8B."""

TARGETS = {"coder decode": 150.0, "whole decode": 50.0, "whole encode": 25.0}
"""GB/s of a cache in float16."""

_ROOM = 4 << 30  # bytes of device memory for matrices and workspace, beside four times the cache
_MATCH = "the CPU decodes the end of the large cache as the device does"


@dataclass(frozen=True)
class Effort:
    """What the speed is measured on. copy_bytes: of memory that is copied; repeats: of which the best counts."""

    sizes: Sizes = REAL
    copy_bytes: int = 1 << 30
    repeats: int = 5


def run(effort: Effort, report: display.Report) -> dict[str, Any]:
    """All of it, on the current device, as JSON-able values. DeviceError if there is none, or something is missing."""
    start = time.perf_counter()
    device.demand()
    out: dict[str, Any] = {"seqkv": seqkv.__version__, "device": describe()}
    report(0.0, "compiling kernels")
    out["first_use_s"] = device_speed.first_use()
    report(0.1, "copying memory")
    clock = Clock(effort.copy_bytes, effort.repeats)
    out["copy_gb_s"] = clock.copy_bandwidth() / 1e9
    checks = device_checks.run(_part(report, 0.1, 0.5))
    sizes = _fitting(effort.sizes)
    checks.append(device_checks.one("speed was measured", lambda: _speed(out, sizes, effort, clock, checks, report)))
    out["checks"] = [asdict(check) | {"ok": check.ok} for check in checks]
    out["ok"] = all(check.ok for check in checks)
    out["seconds"] = time.perf_counter() - start
    return out


def _speed(
    out: dict[str, Any], sizes: Sizes, effort: Effort, clock: Clock, checks: list[Check], report: display.Report
) -> str:
    """Fills `out` as far as it comes."""
    report(0.5, f"making a cache of {sizes.tokens:,} tokens")
    out["cache"] = asdict(sizes)
    subject = Subject.new(sizes)
    report(0.65, "encoding and decoding it")
    out["whole"], stream = device_speed.whole(subject, effort.repeats)
    report(0.75, "decoding a part of it on the CPU")
    checks.append(device_checks.one(_MATCH, lambda: _end_differs(subject, stream)))
    report(0.85, "timing kernels")
    found = device_speed.kernels(subject, clock)
    out["kernels"] = [kernel.to_dict(1e9 * out["copy_gb_s"]) for kernel in found]
    speeds = {
        "coder decode": next(kernel["fp16_gb_s"] for kernel in out["kernels"] if kernel["name"] == "coder: decode"),
        "whole decode": out["whole"]["decode"]["fp16_gb_s"],
        "whole encode": out["whole"]["encode"]["fp16_gb_s"],
    }
    out["targets"] = [
        {"name": name, "fp16_gb_s": speeds[name], "target": target, "met": speeds[name] >= target}
        for name, target in TARGETS.items()
    ]
    return ""


def _end_differs(subject: Subject, stream: bytes) -> str:
    part = slice(-near.CHUNK, None)
    ours = engine.decode(stream, profile=subject.profile, tokens=part, backend="cuda").to("cpu")
    return device_checks.distance(engine.decode(stream, profile=subject.profile, tokens=part), ours)


def _part(report: display.Report, start: float, end: float) -> Callable[[float, str], None]:
    return lambda fraction, message: report(start + (end - start) * fraction, message)


def _fitting(sizes: Sizes) -> Sizes:
    """Half the tokens, and half again, where memory is too small for all."""
    free, _ = device.cupy().cuda.runtime.memGetInfo()
    while sizes.tokens > near.CHUNK and 4 * device_speed.HALF * sizes.values + _ROOM > free:
        sizes = replace(sizes, tokens=sizes.tokens // 2)
    return sizes


def describe() -> dict[str, Any]:
    """The current device, and what drives it."""
    xp = device.cupy()
    runtime, current = xp.cuda.runtime, xp.cuda.Device()
    attributes = current.attributes
    return {
        "name": runtime.getDeviceProperties(current.id)["name"].decode(),
        "compute_capability": current.compute_capability,
        "multiprocessors": attributes["MultiProcessorCount"],
        "clock_mhz": attributes["ClockRate"] / 1000,
        "memory_bytes": runtime.memGetInfo()[1],
        "driver": _driver(),
        "driver_cuda": _version(runtime.driverGetVersion()),
        "runtime_cuda": _version(runtime.runtimeGetVersion()),
        "cupy": xp.__version__,
        "numba-cuda": importlib.metadata.version("numba-cuda"),
    }


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver() -> str | None:
    """The version of NVIDIA's driver, where Linux tells it."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found and found.group()


def show(result: dict[str, Any]) -> None:
    """Print what `run` found."""
    about = result["device"]
    print(
        f"{about['name']}: {about['multiprocessors']} multiprocessors at {about['clock_mhz']:.0f} MHz, "
        f"{about['memory_bytes'] / 1e9:.0f} GB, copies {result['copy_gb_s']:,.0f} GB/s; driver {about['driver']} "
        f"(CUDA {about['driver_cuda']}), CUDA {about['runtime_cuda']}, CuPy {about['cupy']}, "
        f"numba-cuda {about['numba-cuda']}"
    )
    for check in result["checks"]:
        print(f"{'ok  ' if check['ok'] else 'FAIL'}  {check['name']}" + (check["problem"] and f": {check['problem']}"))
    if "kernels" in result:
        columns = ["kernel", "ms", "GB/s", "of copying", "fp16 GB/s", "Gsymbols/s", "TFLOP/s"]
        display.table("Kernels, on a layer of a batch of chunks", columns, [_row(k) for k in result["kernels"]])
    if "whole" in result:
        _show_whole(result["cache"], result["whole"])
    for target in result.get("targets", ()):
        verdict = "met" if target["met"] else "missed"
        print(f"{target['name']}: {target['fp16_gb_s']:.1f} GB/s of fp16, {target['target']:.0f} wanted: {verdict}")
    failed = sum(not check["ok"] for check in result["checks"])
    print(
        f"{failed} of {len(result['checks'])} checks failed; {result['first_use_s']:.1f} s to compile kernels, "
        f"{result['seconds']:.0f} s in all"
    )


def _row(kernel: dict[str, Any]) -> list[str]:
    def shown(name: str, factor: float = 1.0) -> str:
        return f"{kernel[name] * factor:.1f}" if name in kernel else ""

    speeds = [shown("fp16_gb_s"), shown("symbols_s", 1e-9), shown("tflop_s")]
    return [kernel["name"], f"{kernel['ms']:.3f}", f"{kernel['gb_s']:,.0f}", f"{kernel['of_copy']:.0%}", *speeds]


def _show_whole(cache: dict[str, Any], whole: dict[str, Any]) -> None:
    title = (
        f"{cache['layers']} layers of {cache['heads']} heads of {cache['width']}, {cache['tokens']:,} tokens: "
        f"{whole['cache_bytes'] / 1e9:.2f} GB as {whole['bits_per_value']:.3f} bits/value, {whole['live']:.0%} live"
    )
    columns = ["whole", "s", "first call, s", "fp16 GB/s", "Gsymbols/s", "workspace, GB"]
    rows = []
    for name in ("encode", "decode"):
        one = whole[name]
        times = [f"{one['s']:.3f}", f"{one['first_s']:.3f}"]
        speeds = [f"{one['fp16_gb_s']:.1f}", f"{one['symbols_s'] / 1e9:.1f}", f"{one['workspace_bytes'] / 1e9:.2f}"]
        rows.append([name, *times, *speeds])
    display.table(title, columns, rows)
