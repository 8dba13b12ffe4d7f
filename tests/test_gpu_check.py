"""All of `seqkv gpu-check` on an emulated device; its times mean nothing here."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqkv import cli, coder_checks, device_checks, engine, gpu_check, synthetic
from seqkv.cuda_kernels import coder, elementwise
from seqkv.device_speed import Kernel
from seqkv.gpu_check import Effort
from seqkv.synthetic import Sizes
from tests.emulator.device import emulated_device

TINY = Sizes(layers=3, heads=2, width=16, tokens=300, vocab=100, rank=8)


@pytest.fixture(scope="module")
def reports() -> list[tuple[float, str]]:
    return []


@pytest.fixture(scope="module")
def result(reports: list[tuple[float, str]]) -> dict[str, Any]:
    with emulated_device():
        return gpu_check.run(Effort(TINY, copy_bytes=1 << 16, repeats=1), lambda *args: reports.append(args))


@pytest.fixture
def cupy() -> Iterator[Any]:
    with emulated_device() as device:
        yield device


def test_kernels_pass_all_checks(result: dict[str, Any]) -> None:
    assert [check["name"] + check["problem"] for check in result["checks"] if not check["ok"]] == []
    assert result["ok"] and len({check["name"] for check in result["checks"]}) == 23


def test_every_kernel_is_measured(result: dict[str, Any]) -> None:
    by_name = {kernel["name"]: kernel for kernel in result["kernels"]}
    assert len(by_name) == 13 and all(kernel["gb_s"] > 0 for kernel in by_name.values())
    coded, every = (by_name[f"coder: {name}"] for name in ("decode", "statistics"))
    assert every["bytes"] == 4 * 64 * 300 < coded["bytes"]  # symbols of a layer; and the stream
    assert 0 < coded["symbols_s"] * coded["ms"] / 1e3 < 64 * 300
    assert coded["fp16_gb_s"] * coded["ms"] == pytest.approx(2 * 64 * 300 / 1e6)


def test_the_whole_is_measured(result: dict[str, Any]) -> None:
    whole = result["whole"]
    assert whole["values"] == 3 * 64 * 300 and whole["cache_bytes"] == 2 * whole["values"]
    assert whole["bits_per_value"] == 8 * whole["stream_bytes"] / whole["values"]
    assert 0.1 < whole["live"] < 0.9
    for side in ("encode", "decode"):
        assert whole[side]["fp16_gb_s"] * whole[side]["s"] == pytest.approx(2e-9 * whole["values"])
    assert {target["name"]: target["met"] for target in result["targets"]} == dict.fromkeys(gpu_check.TARGETS, False)


def test_progress_goes_on(result: dict[str, Any], reports: list[tuple[float, str]]) -> None:
    fractions = [fraction for fraction, _ in reports]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] < 1


def test_speeds_follow_from_times() -> None:
    found = Kernel("k", 1e-3, 10**9, 10**6, 10**5, 10**9).to_dict(copy_bandwidth=4e12)
    assert found == {
        "name": "k",
        "ms": 1.0,
        "bytes": 10**9,
        "gb_s": 1000.0,
        "of_copy": 0.25,
        "fp16_gb_s": 2.0,
        "symbols_s": 1e8,
        "tflop_s": 1.0,
    }


# ------------------------------------------------------------------------------------------------------------- failures


def wrong(name: str) -> str:
    """What the check of this name says."""
    ((name, check),) = [one for one in device_checks._checks() if one[0] == name]
    return device_checks.one(name, check).problem


def test_other_bytes_are_found(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = coder.Encoder.finish

    def changed(self: Any) -> Any:
        groups, live = finish(self)
        return [bytes(groups[0][:-1]) + bytes([groups[0][-1] ^ 1]), *groups[1:]], live

    monkeypatch.setattr(coder.Encoder, "finish", changed)
    assert "256 tokens" in wrong("coder: the device writes the CPU's bytes")
    assert "CorruptGroup" in wrong("coder: the CPU decodes the device's bytes")


def test_a_change_of_the_format_is_found(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coder_checks, "_cpu_bytes", lambda: [b"other bytes"] * 5)
    assert "digests" in wrong("coder: the CPU writes the bytes on record")


def test_other_symbols_are_found(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = coder.Decoder.next

    def changed(self: Any, base: Any, offset: Any, starts: Any, symbols: Any) -> None:
        decode(self, base, offset, starts, symbols)
        symbols[0, 0] += 1

    monkeypatch.setattr(coder.Decoder, "next", changed)
    assert "2 symbols differ, the first at [0, 0]" in wrong("coder: the device decodes the CPU's bytes")


def test_damage_that_is_not_refused_is_found(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coder.Decoder, "check", lambda self: None)
    assert "it is decoded" in wrong("coder: the device refuses damaged groups")


def test_the_last_bit_counts(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dequantise, accumulate = elementwise.dequantise, elementwise.accumulate

    def beside(symbols: Any, steps: Any, out: Any) -> None:
        dequantise(symbols, steps, out)
        out[0, 0] = cupy.nextafter(out[0, 0], np.float32(9))

    def raises(*args: Any) -> None:
        raise RuntimeError("cannot be launched")

    monkeypatch.setattr(elementwise, "dequantise", beside)
    assert "residuals: 1 of" in wrong("quantise and dequantise")
    monkeypatch.setattr(elementwise, "accumulate", raises)
    assert wrong("accumulate") == "RuntimeError: cannot be launched"
    monkeypatch.setattr(elementwise, "accumulate", accumulate)
    monkeypatch.setattr(elementwise, "dequantise", lambda symbols, steps, out: dequantise(symbols, steps * 1.01, out))
    assert "apart" in wrong("the CPU decodes what the device encoded, with a profile")


def test_checks_are_reported_if_speed_cannot_be_measured(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "run", lambda report: [])
    monkeypatch.setattr(gpu_check.device_speed, "whole", lambda *args: 1 / 0)
    result = gpu_check.run(Effort(TINY, copy_bytes=1 << 16, repeats=1), lambda *args: None)
    assert not result["ok"] and [check["problem"] for check in result["checks"]] == [
        "ZeroDivisionError: division by zero"
    ]
    gpu_check.show(result)


def test_a_small_device_gets_a_small_cache(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_check._fitting(gpu_check.REAL) == gpu_check.REAL
    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", lambda: (16 << 30, 16 << 30))
    assert gpu_check._fitting(gpu_check.REAL).tokens == 16384


# ---------------------------------------------------------------------------------------------------------- the command


def test_command(
    result: dict[str, Any],
    cupy: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpu_check, "run", lambda effort, report: result)
    path = tmp_path / "found.json"
    assert cli.main(["gpu-check", "--out", str(path)]) == 0
    shown = capsys.readouterr().out
    assert json.loads(path.read_text()) == result
    for text in ("an emulated device", "coder: decode", "3 layers of 2 heads of 16", "150 wanted: missed", "0 of 23"):
        assert text in shown
    assert cli.main(["gpu-check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result

    failed = result | {"ok": False, "checks": [{"name": "a check", "problem": "a difference", "ok": False}]}
    monkeypatch.setattr(gpu_check, "run", lambda effort, report: failed)
    assert cli.main(["gpu-check"]) == 1
    assert "FAIL  a check: a difference" in capsys.readouterr().out
    assert cli.main(["gpu-check", "--out", str(tmp_path / "no" / "found.json")]) == 2


def test_without_a_device_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        assert cli.main(["gpu-check"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    with emulated_device() as cupy:
        monkeypatch.setattr(cupy.cuda, "is_available", lambda: False)
        assert "no CUDA device" in said()

        def version(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        assert "numba-cuda: install seqkv[cuda13]" in said()
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "CuPy: install seqkv[cuda13]" in said()


# ------------------------------------------------------------------------------------------------- synthetic statistics


def test_hashes_are_the_same_everywhere(cupy: Any) -> None:
    assert (
        synthetic.hashed(np, 3, 5).tolist()
        == synthetic.hashed(cupy, 3, 5).get().tolist()
        == [3059392347, 3682100500, 1648919018]
    )
    x = synthetic.normal(np, 100000, 1)
    assert x.dtype == np.float32 and abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02 and abs(x).max() < 6


def test_transforms_are_inverse() -> None:
    profile = synthetic.profile(TINY)
    for block, (_, inverse) in enumerate(profile.maps):
        found = np.linalg.inv(inverse.astype(np.float64))
        np.testing.assert_allclose(profile.forward[block], found, atol=1e-6 * abs(found).max())
        assert np.linalg.cond(inverse) < 1.01
    assert len({array.tobytes() for array in (*profile.weights, *profile.inverse)}) == 12


def test_the_cache_has_the_statistics_of_its_profile(cupy: Any) -> None:
    """What is coded is as large as the profile says, and channels are near 1."""
    sizes = Sizes(layers=3, heads=2, width=32, tokens=512, vocab=300, rank=8)
    profile, probs = synthetic.profile(sizes), synthetic.token_probs(sizes)
    kv = synthetic.cache(sizes, profile, probs, span=200).to("cpu")
    deviations = [x.std() for x in kv.keys + kv.values]
    assert kv.shape == profile.shape and min(deviations) > 0.5 and max(deviations) < 3
    stream = engine.encode(kv, probs, profile=profile, step=synthetic.STEP, importance=synthetic.attention(sizes))
    found = engine.inspect(stream)
    assert 0.1 < found["bits_per_value"] < 0.6
    assert 0.2 < found["loss"]["keys"] < 0.9 and 0.2 < found["loss"]["values"] < 0.9
