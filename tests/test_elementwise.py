"""The kernels on values of the device, run from their PTX on an emulated one, against the engine's loops on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda, types
from numpy.typing import NDArray

from seqkv.cuda_kernels import device, elementwise, scalar
from seqkv.cuda_kernels.elementwise import SLAB, Turn, slabs
from seqkv.engine import prediction, quantiser
from seqkv.engine.arrays import bfloat16_bits, round_to_bfloat16
from seqkv.engine.cache import Rope
from seqkv.engine.layout import Turns
from tests.emulator import numba_kernels
from tests.emulator.device import emulated_device
from tests.emulator.fake_cupy import FakeCupy

TINY = np.float32(2.0**-149)
SPECIAL = np.array([0, -0.0, TINY, -TINY, 1e-38, 0.5, -0.5, 1.5, 2.5, 3.4e38, -3.4e38, 65504, 65519, 65520], np.float32)
NOT_FINITE = np.array([np.inf, -np.inf, np.nan, np.uint32(0x7F800001).view(np.float32)], np.float32)
ROPES = {
    "none": None,
    "half": Rope.from_theta(1e4, 6),
    "interleaved": Rope(np.array([1.0, 0.1, 0.01]), scaling=1.3, layout="interleaved"),
}
DTYPES = ("float32", "float16", "uint16")
SIZES = [(0, 0), (0, 5), (3, 0), (1, 1), (1, 7), (SLAB, 33), (SLAB + 1, 31), (4 * SLAB - 1, 70)]


SIMULATED = bool(os.environ.get("NUMBA_ENABLE_CUDASIM"))  # by Numba's own simulator, in a process of its own
EMULATED = [("fast", 0), ("check", 0), ("check", 1), ("check", 7)]  # mode, order of lanes

# Numba imports parts of itself when it first compiles; within `emulated_device` they would be forgotten at its end
quantiser.dequantise(np.zeros((0, 0), np.int32), np.zeros(0, np.float32))


@pytest.fixture(params=[("simulated", 0)] if SIMULATED else EMULATED, ids=lambda p: f"{p[0]}-{p[1]}")
def cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An emulated device: fast, and checked, with lanes in several orders."""
    mode, order = request.param
    if SIMULATED:
        monkeypatch.setattr(device, "cupy", FakeCupy)
        monkeypatch.setattr(device, "launch", simulate)
        yield FakeCupy()
    else:
        with emulated_device(mode, order, preempt=5 if mode == "check" else 0) as cupy:
            yield cupy


def simulate(kernel: Any, count: int, *args: Any) -> None:
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray  # keeps strides, where it would copy

    if count:
        kernel[2, 32](*(FakeCUDAArray(x.host) if hasattr(x, "host") else x for x in args))


@pytest.mark.skipif(SIMULATED, reason="this is the simulator")
def test_numbas_simulator_agrees() -> None:
    """The same tests, of the kernels as Python."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "simulated", __file__]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


def values(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Of all magnitudes, with special ones among them."""
    out = (rng.standard_normal(shape) * 2.0 ** rng.uniform(-20, 20, shape)).astype(np.float32)
    special = rng.random(shape) < 0.2
    out[special] = rng.choice(SPECIAL, int(special.sum()))
    return out


def same(one: Any, other: NDArray[Any]) -> None:
    """Equal bit for bit; NaN is NaN."""
    host = one.get()
    assert host.dtype == other.dtype and host.shape == other.shape
    if host.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(host) & ~np.isnan(host), np.signbit(other) & ~np.isnan(other))
    np.testing.assert_array_equal(host, other)


# ------------------------------------------------------------------------------------------------------------ one value


def test_quantised_takes_the_nearest_integer_and_halves_away_from_zero() -> None:
    for residual, fineness, symbol, error in [
        (0.5, 1.0, 1, -0.5),
        (-0.5, 1.0, -1, 0.5),
        (np.nextafter(np.float32(0.5), np.float32(0)), 1.0, 0, 0.5),
        (2.5, 1.0, 3, -0.5),
        (-0.0, 1.0, 0, 0.0),
        (1 + 2.0**-23, 0.5 - 2.0**-25, 1, -0.5),  # just above 1/2: float32 would round the product to 1/2
        (TINY, 3e38, 0, 0.0),
        (2.0**30, 1.0, 2**30, np.inf),
        (-3e38, 3e38, -(2**30), np.inf),
        (np.nan, 1.0, -(2**30), np.inf),
    ]:
        got, lost = scalar.quantised(np.float32(residual), np.float32(fineness))
        assert got == symbol and lost == pytest.approx(error, rel=1e-6, abs=1e-6)


def test_bfloat16_is_the_nearest_and_keeps_what_is_not_a_number() -> None:
    rng = np.random.default_rng(0)
    ties = (rng.integers(0, 0x7F7F, 500) << 16 | 0x8000).astype(np.uint32).view(np.float32)
    x = np.concatenate([values(rng, 3000), SPECIAL, NOT_FINITE, ties, -ties])
    bits = np.array([scalar.bfloat16_bits(value) for value in x])
    back = np.array([scalar.from_bfloat16(b) for b in bits])
    finite = np.isfinite(x)
    np.testing.assert_array_equal(bits[finite], bfloat16_bits(x[finite]))
    np.testing.assert_array_equal(back[finite], round_to_bfloat16(x[finite]))
    np.testing.assert_array_equal(np.isnan(back), np.isnan(x))
    np.testing.assert_array_equal(np.isinf(back[~finite]), np.isinf(x[~finite]))


# ---------------------------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize("size", SIZES)
def test_quantise_and_dequantise(cupy: Any, size: tuple[int, int]) -> None:
    coefs, columns = size
    rng = np.random.default_rng(coefs * 100 + columns)
    residual = values(rng, coefs, columns)
    residual[rng.random(size) < 0.2] = 0.5  # ties
    fineness = (np.exp2(rng.integers(-3, 12, columns)) * rng.choice([1, 1.1], columns)).astype(np.float32)
    symbols, lost = cupy.empty(size, np.int32), cupy.empty((slabs(coefs), columns), np.float32)
    elementwise.quantise(cupy.asarray(residual), cupy.asarray(fineness), symbols, lost)
    expected = np.empty((columns, coefs), np.int32)
    total = quantiser.quantise(np.ascontiguousarray(residual.T), fineness, expected)
    same(symbols, np.ascontiguousarray(expected.T))
    np.testing.assert_allclose(lost.get().sum(dtype=np.float64), total, rtol=1e-6)
    scaled = residual.astype(np.float64) * fineness
    errors = np.where(np.abs(scaled) < 2**30, scaled - expected.T, np.inf).astype(np.float32).astype(np.float64)
    by_slab = np.zeros(lost.shape)
    for coef in range(coefs):
        by_slab[coef // SLAB] += errors[coef] ** 2
    same(lost, by_slab.astype(np.float32))

    steps, out = (1 / fineness).astype(np.float32), cupy.empty(size, np.float32)
    elementwise.dequantise(symbols, cupy.asarray(steps), out)
    same(out, np.ascontiguousarray(quantiser.dequantise(expected, steps).T))


def test_what_cannot_be_quantised_shows(cupy: Any) -> None:
    residual = cupy.asarray(np.concatenate([NOT_FINITE, np.float32([2**30, 2**31, 1.0])])[None])
    symbols, lost = cupy.empty((1, 7), np.int32), cupy.empty((1, 7), np.float32)
    elementwise.quantise(residual, cupy.ones(7, np.float32), symbols, lost)
    assert np.abs(symbols.get()[0]).tolist() == [2**30] * 6 + [1]
    assert lost.get()[0].tolist() == [np.inf] * 6 + [0]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 7, 8, 31, 64])
def test_accumulate(cupy: Any, k: int) -> None:
    rng = np.random.default_rng(k)
    for tokens, width in [(0, 3), (1, 1), (SLAB + 3, 0), (SLAB - 1, 37), (2 * SLAB + 1, 5)]:
        rows, bias = values(rng, 9, width), values(rng, width)
        weights, index = rng.random((tokens, k), np.float32), rng.integers(0, 9, (tokens, k)).astype(np.int32)
        on_device = [cupy.asarray(x) for x in (rows, index, weights)]
        out = cupy.empty((tokens, width), np.float32)
        elementwise.accumulate(*on_device, cupy.zeros(width, np.float32), out)
        same(out, prediction.accumulate(rows, index, weights))
        elementwise.accumulate(*on_device, cupy.asarray(bias), out)
        total = np.tile(bias.astype(np.float64), (tokens, 1))
        for j in range(k):
            total += weights[:, j, None].astype(np.float64) * rows[index[:, j]]
        with np.errstate(over="ignore"):
            same(out, total.astype(np.float32))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_and_heads(cupy: Any, rope: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for heads, tokens, width in [(1, 0, 8), (1, 1, 6), (3, 19, 7), (2, 5, 33)]:
        turns, given = Turns(np.arange(tokens) * 37), values(rng, heads, tokens, width)
        with np.errstate(over="ignore"):
            stored = bfloat16_bits(given) if dtype == "uint16" else np.clip(given, -65504, 65504).astype(dtype)
        wide = round_to_bfloat16(given) if dtype == "uint16" else stored.astype(np.float32)
        back, forth = turns_of(turns, ROPES[rope])
        block = turns.to_block(wide, ROPES[rope])
        out = cupy.empty((tokens, heads * width + 2), np.float32)[:, 1:-1]  # columns of a wider array
        elementwise.to_block(cupy.asarray(stored), back, out)
        same(out, block)

        expected = np.empty((heads, tokens, width), dtype)
        turns.to_heads(block, ROPES[rope], expected)
        plain = cupy.empty((1, heads, tokens, width), dtype)
        elementwise.to_heads(cupy.asarray(block), forth, None, plain)
        same(plain[0], expected)

        count, size = 4, 7
        slots = rng.permutation(count * size)[:tokens]
        pages = cupy.zeros((count, heads, size, 2 * width), dtype)
        elementwise.to_heads(cupy.asarray(block), forth, cupy.asarray(slots), pages[..., width:])
        paged = np.zeros((count * size, heads, 2 * width), dtype)
        paged[slots, :, width:] = expected.transpose(1, 0, 2)
        same(pages, np.ascontiguousarray(paged.reshape(count, size, heads, 2 * width).transpose(0, 2, 1, 3)))


def test_what_is_too_large_for_a_half_is_clipped(cupy: Any) -> None:
    block = np.array([[65504, 65520, 1e30, -65519, -65520, np.inf, np.nan]], np.float32)
    out = cupy.empty((1, 1, 1, block.size), np.float16)
    elementwise.to_heads(cupy.asarray(block), None, None, out)
    same(out[0, 0], np.clip(block, -65504, 65504).astype(np.float16))


def turns_of(turns: Turns, rope: Rope | None) -> tuple[Turn | None, Turn | None]:
    """Out of the rotation, and into it."""
    if rope is None:
        return None, None
    (cos, sin), pairs = rope.tables(turns.positions), rope.pairs()
    up, down = np.float32(rope.scaling), np.float32(1 / rope.scaling)
    return Turn.of(cos * down, sin * -down, *pairs), Turn.of(cos * up, sin * up, *pairs)


def test_part_of_a_cache_is_turned_in_place(cupy: Any) -> None:
    """Heads that are a slice of the tokens of a longer cache: their rows are apart in memory."""
    whole, block = values(np.random.default_rng(3), 3, 20, 5), cupy.empty((8, 15), np.float32)
    elementwise.to_block(cupy.asarray(whole)[:, 7:15], None, block)
    same(block, whole[:, 7:15].transpose(1, 0, 2).reshape(8, 15))
    out = cupy.zeros((1, 3, 20, 5), np.float32)
    elementwise.to_heads(block, None, None, out[:, :, 7:15])
    same(out[0, :, 7:15], whole[:, 7:15])
    assert not out.get()[0, :, :7].any() and not out.get()[0, :, 15:].any()


def test_slots_outside_the_cache_are_written_nowhere(cupy: Any) -> None:
    out = cupy.zeros((2, 1, 3, 4), np.float32)
    slots = cupy.asarray(np.array([-1, 6, 2**62, -(2**62), 5]))
    elementwise.to_heads(cupy.ones((5, 4), np.float32), None, slots, out)
    assert out.get().sum() == 4 and out.get()[1, 0, 2].all()


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_energies(cupy: Any, chunk: int) -> None:
    rng = np.random.default_rng(chunk)
    for tokens, channels in [(0, 3), (1, 1), (9, 0), (9, 35)]:
        true = rng.standard_normal((tokens, channels), np.float32) + np.float32(3)
        wrong = rng.standard_normal((tokens, channels), np.float32) / np.float32(100)
        decoded = cupy.asarray(np.tile(true + wrong, 2))[:, channels:]  # columns of a wider array
        chunks = -(-tokens // chunk)
        out = cupy.empty((2, chunks, channels), np.float64)
        elementwise.energies(cupy.asarray(true), decoded, chunk, out)
        expected = np.zeros((2, chunks, channels))
        for part in range(chunks):
            rows = slice(part * chunk, (part + 1) * chunk)
            mean = np.add.accumulate(true[rows].astype(np.float64))[-1] / len(true[rows])
            around = true[rows] - mean.astype(np.float32)
            for side, x in enumerate((true[rows] - decoded.get()[rows], around)):
                expected[side, part] = np.add.accumulate(x.astype(np.float64) ** 2)[-1]
        same(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite(cupy: Any, dtype: str) -> None:
    for heads, tokens, width in [(1, 0, 8), (1, 1, 1), (3, 9, 11)]:
        array = values(np.random.default_rng(4), heads, tokens, width).clip(-65504, 65504)
        for wrong in (None, *NOT_FINITE):
            if wrong is not None and array.size:
                array[heads // 2, tokens // 2, 0] = wrong
            bits = np.array([scalar.bfloat16_bits(x) for x in array.ravel()], np.uint16).reshape(array.shape)
            found = cupy.zeros(1, np.int32)
            elementwise.finite(cupy.asarray(bits if dtype == "uint16" else array.astype(dtype)), found)
            assert found.get()[0] == (wrong is not None and array.size > 0)


# ------------------------------------------------------------------------------------------------- what is not accepted


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    with emulated_device() as cupy:

        def new(*shape: int, dtype: Any = np.float32) -> Any:
            return cupy.zeros(shape, dtype)

        with pytest.raises(ValueError, match=r"lost: float32 of shape \(2, 3\) is needed"):
            elementwise.quantise(new(SLAB + 1, 3), new(3), new(SLAB + 1, 3, dtype=np.int32), new(1, 3))
        with pytest.raises(ValueError, match="symbols: int32"):
            elementwise.dequantise(new(2, 3), new(3), new(2, 3))
        with pytest.raises(ValueError, match="index: int32"):
            elementwise.accumulate(new(4, 3), new(2, 1, dtype=np.int64), new(2, 1), new(3), new(2, 3))
        with pytest.raises(ValueError, match="heads: float32, float16, uint16 is needed, not float64"):
            elementwise.to_block(new(1, 2, 3, dtype=np.float64), None, new(2, 3))
        with pytest.raises(ValueError, match="4 channels are turned, heads have 3"):
            elementwise.to_block(new(1, 2, 3), Turn.of(np.ones((2, 2)), np.ones((2, 2)), [0, 1], [2, 3]), new(2, 3))
        with pytest.raises(ValueError, match="channels of pairs"):
            Turn.of(np.ones((2, 2)), np.ones((2, 2)), [0, 1], [2, 4])
        with pytest.raises(ValueError, match="cos: float32 of shape"):
            turn = Turn.of(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32), [0], [1])
            elementwise.to_heads(new(2, 3), turn, None, new(1, 1, 2, 3))
        with pytest.raises(ValueError, match="3 tokens do not fit into 1 blocks of 2"):
            elementwise.to_heads(new(3, 3), None, None, new(1, 1, 2, 3))
        with pytest.raises(ValueError, match="slots: int64"):
            elementwise.to_heads(new(3, 3), None, new(2, dtype=np.int64), new(1, 1, 2, 3))
        with pytest.raises(ValueError, match="at least one token"):
            elementwise.energies(new(2, 3), new(2, 3), 0, new(2, 0, 3, dtype=np.float64))
        with pytest.raises(ValueError, match="found: int32"):
            elementwise.finite(new(1, 2, 3), new(1))


# ----------------------------------------------------------------------------------------------- why they can be alike


@pytest.mark.skipif(SIMULATED, reason="nothing is compiled")
def test_what_is_fused_is_float64() -> None:
    """The compiler joins products and sums: of float64 alone, where the product is exact."""
    f4, i4, i8 = types.float32, types.int32, types.int64
    turn = (f4[:, ::1], f4[:, ::1], i4[::1], i4[::1])
    for kernel, signature in [
        (elementwise._quantise, (f4[:, ::1], f4[::1], i4[:, ::1], f4[:, ::1])),
        (elementwise._accumulate, (f4[:, ::1], i4[:, ::1], f4[:, ::1], f4[::1], f4[:, ::1])),
        (elementwise._TO_HEADS["float32"], (f4[:, :, ::1], *turn, i8[::1], f4[:, :, :, ::1])),
        (elementwise._TO_BLOCK["float32"], (f4[:, :, ::1], *turn, f4[:, :, ::1])),
        (elementwise._energies, (f4[:, ::1], f4[:, ::1], i8, types.float64[:, :, ::1])),
    ]:
        with numba_kernels.emulated():
            ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=numba_kernels.CAPABILITY)
        assert "fma.rn.f64" in ptx and not re.search(r"\b(fma|mad)\.\S*f32", ptx)
