"""The emulator sees what it must: every planted bug, and nothing where there is none."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda

from seqkv.cuda_kernels import coder, device, linear
from seqkv.cuda_kernels.device import launch
from seqkv.entropy_coding import encode_group
from tests.emulator import device_array, host_cuda, nvrtc
from tests.emulator.device import emulated_device
from tests.emulator.device_array import UninitialisedRead
from tests.emulator.host_cuda import KernelError

PLANTED = (Path(__file__).parent / "emulator" / "planted.cu").read_text()
ORDERS = [(0, 0), (1, 0), (7, 0), (8, 3)]  # (order, preempt)
i32 = np.int32

Get = Callable[[str], Any]  # name of a kernel of planted.cu -> the kernel


# ----------------------------------------------- each kernel of planted.cu, run with a bug: whether its result is right


def packed_and_unpacked(cupy: Any, get: Get, pack_bug: int = 0, unpack_bug: int = 0, cut: bool = False) -> bool:
    """cut: the last words are missing, which must be noticed and do no harm."""
    values = np.random.default_rng(1).geometric(0.2, 9001).clip(max=255).astype(np.uint8)
    codes = np.roll(np.arange(256), 1).astype(np.uint8)  # 1, the most frequent value, has code 0
    length, chunks = 1024, 9
    sizes = i32(chunks), i32(length), i32(values.size)
    words, counts = cupy.empty(chunks * length, np.uint16), cupy.empty(chunks, np.uint32)
    masks, sums = cupy.empty(-(-values.size // 32), np.uint32), cupy.empty(32 * chunks, np.uint32)
    args = cupy.asarray(values), cupy.asarray(codes), words, counts, masks, sums
    get("pack")((3,), (128,), (*args, *sizes, i32(pack_bug)))

    counted = counts.get()
    dense = cupy.concatenate([words[c * length : c * length + count] for c, count in enumerate(counted)])
    offsets = np.concatenate([[0], np.cumsum(counted)])
    if cut:
        dense = cupy.array(dense[:-40])
        offsets = offsets.clip(max=dense.size)
    decoded, bad = cupy.empty(values.size, np.uint8), cupy.zeros(1, np.uint32)
    decode = cupy.asarray(np.argsort(codes).astype(np.uint8))
    args = dense, cupy.asarray(offsets.astype(np.uint32)), masks, sums, decode, decoded, bad
    get("unpack")((3,), (128,), (*args, *sizes, i32(unpack_bug)))
    return bad.get()[0] == 1 if cut else bad.get()[0] == 0 and np.array_equal(decoded.get(), values)


def pack(cupy: Any, get: Get, bug: int) -> bool:
    return packed_and_unpacked(cupy, get, pack_bug=bug)


def unpack(cupy: Any, get: Get, bug: int) -> bool:
    return packed_and_unpacked(cupy, get, unpack_bug=bug)


def unpack_cut(cupy: Any, get: Get, bug: int) -> bool:
    return packed_and_unpacked(cupy, get, unpack_bug=bug, cut=True)


def histogram(cupy: Any, get: Get, bug: int) -> bool:
    values = np.random.default_rng(2).integers(0, 20, 5000).astype(np.uint8)
    counts = cupy.zeros(256, np.uint32)
    get("histogram")((3,), (96,), (cupy.asarray(values), counts, i32(values.size), i32(bug)))
    return np.array_equal(counts.get(), np.bincount(values, minlength=256))


def weighted_rows(cupy: Any, get: Get, bug: int) -> bool:
    rng, k, width = np.random.default_rng(3), 8, 64
    weights, rows = rng.random((4, k), np.float32), rng.standard_normal((9, width), np.float32)
    index = rng.integers(0, 9, (4, k)).astype(np.int32)
    out = cupy.empty((4, width), np.float32)
    args = cupy.asarray(weights), cupy.asarray(index), cupy.asarray(rows), out, i32(k), i32(width), i32(bug)
    get("weighted_rows")((4,), (64,), args, shared_mem=8 * k // (2 if bug == 1 else 1))
    return np.allclose(out.get(), np.einsum("tk,tkd->td", weights, rows[index]), atol=1e-5)


def largest(cupy: Any, get: Get, bug: int) -> bool:
    values = np.random.default_rng(4).standard_normal((7, 32), np.float32)
    out = cupy.empty(7, np.float32)
    get("largest")((3,), (96,), (cupy.asarray(values), out, i32(7), i32(bug)))
    return np.array_equal(out.get(), abs(values).max(axis=1))


def warp_sum(cupy: Any, get: Get, bug: int) -> bool:
    values = np.random.default_rng(5).integers(0, 9, 256).astype(np.float32)
    out = cupy.empty(8, np.float32)
    get("warp_sum")((4,), (64,), (cupy.asarray(values), out, i32(bug)))
    return np.array_equal(out.get(), values.reshape(8, 32).sum(axis=1))


def reverse(cupy: Any, get: Get, bug: int) -> bool:
    values = np.arange(5 * 64, dtype=np.int32)
    out = cupy.empty(values.size, np.int32)
    get("reverse")((1,), (64,), (cupy.asarray(values), out, i32(5), i32(bug)))
    return np.array_equal(out.get().reshape(5, 64), values.reshape(5, 64)[:, ::-1])


def total(cupy: Any, get: Get, bug: int) -> bool:
    values = np.arange(6 * 64, dtype=np.int32)
    out = cupy.empty(1, np.int32)
    args = cupy.asarray(values), cupy.empty(6, np.int32), cupy.zeros(1, np.uint32), out, i32(bug)
    get("total")((6,), (64,), args)
    return out.get()[0] == values.sum()


def rank(cupy: Any, get: Get, bug: int) -> bool:
    flags = np.random.default_rng(6).integers(0, 2, 32).astype(np.uint32)
    out = cupy.empty(32, np.uint32)
    get("rank")((1,), (32,), (cupy.asarray(flags), out, i32(bug)))
    return np.array_equal(out.get(), np.cumsum(flags))


def pair(cupy: Any, get: Get, bug: int) -> bool:
    values = np.arange(66, dtype=np.uint16)
    out = cupy.empty(32, np.uint32)
    get("pair")((1,), (32,), (cupy.asarray(values), out, i32(bug)))
    return np.array_equal(out.get(), values[:64].view(np.uint32))


def copy(cupy: Any, get: Get, bug: int, *, written: int = 100) -> bool:
    """The copy of a copy of which only so much was written."""
    values = np.arange(1, 101, dtype=np.int32)
    between, out = cupy.empty(100, np.int32), cupy.zeros(100, np.int32)
    get("copy")((2,), (64,), (cupy.asarray(values), between, i32(written), i32(0)))
    get("copy")((2,), (64,), (between, out, i32(100), i32(bug)))
    return np.array_equal(out.get(), values)


copy_of_less = functools.partial(copy, written=99)
KERNELS = [pack, unpack, unpack_cut, histogram, weighted_rows, largest, warp_sum, reverse, total, rank, pair, copy]
BUGS = [
    (pack, 1, "wrong", "words that should be stored are not"),
    (pack, 2, "wrong", "slots overlap"),
    (unpack, 1, "uninitialised read", "no barrier after the table is filled"),
    (unpack, 2, "out of bounds", "the table is filled one too far"),
    (unpack_cut, 3, "out of bounds", "words are read beyond the end of a stream that was cut"),
    (unpack, 4, "different warp operations", "a ballot in a divergent branch"),
    (unpack, 5, "wrong", "a lane counts itself among those below"),
    (unpack, 6, "uninitialised read", "warps exit before they filled their part of the table"),
    (unpack, 7, "out of bounds", "the next lane's sum is read"),
    (histogram, 1, "race: write after write", "a bin is counted up without an atomic"),
    (histogram, 2, "race", "no barrier before the bins are flushed"),
    (histogram, 3, "uninitialised read", "the bins are not cleared"),
    (histogram, 4, "race: write after write", "blocks add to the counts without an atomic"),
    (weighted_rows, 1, "out of bounds", "half the dynamic shared memory"),
    (weighted_rows, 2, "uninitialised read", "no barrier after staging"),
    (largest, 1, "does not take part|not in the mask", "a shuffle of half the warp reads the other"),
    (largest, 2, "does not take part", "a shuffle in a divergent branch reads a lane that is elsewhere"),
    (warp_sum, 1, "uninitialised read", "no __syncwarp: the warp is taken to run in step"),
    (warp_sum, 2, "race: write after read", "one __syncwarp is missing"),
    (warp_sum, 3, "race", "a ballot is taken for a barrier"),
    (reverse, 1, "race: write after read", "no barrier at the end of a loop"),
    (reverse, 2, "divergent", "a barrier in a divergent branch"),
    (reverse, 3, "deadlock", "half a warp waits for the other, which is at a barrier"),
    (total, 1, "race: read after write", "no __threadfence before the ticket"),
    (rank, 1, "shift by too much", "a shift by 32"),
    (pair, 1, "misaligned", "a misaligned load"),
    (copy, 1, "write to a const argument", "an argument that is const is written"),
    (copy, 2, "endless", "a loop that does not end"),
    (copy, 3, "sum overflows", "a signed sum overflows"),
    (copy_of_less, 0, "uninitialised read", "memory that the launch before did not fill is read"),
]


@pytest.fixture(scope="module")
def planted() -> Get:
    return host_cuda.RawModule(PLANTED).get_function


@pytest.fixture(scope="module")
def planted_by_nvrtc() -> Get:
    return nvrtc.RawModule(PLANTED, device.NVRTC_OPTIONS).get_function


@pytest.mark.parametrize("route", ["planted", "planted_by_nvrtc"])
@pytest.mark.parametrize("mode", ["fast", "check"])
def test_nothing_is_found_where_nothing_is_wrong(route: str, mode: str, request: pytest.FixtureRequest) -> None:
    get = request.getfixturevalue(route)
    for order, preempt in ORDERS:
        with emulated_device(mode, order, preempt) as cupy:
            for kernel in KERNELS:
                assert kernel(cupy, get, 0), (kernel, order)


@pytest.mark.parametrize("kernel, bug, finding, what", BUGS, ids=[what for *_, what in BUGS])
def test_a_planted_bug_is_seen(kernel: Any, bug: int, finding: str, what: str, planted: Get) -> None:
    for order, preempt in ((0, 0), (8, 3)):
        with emulated_device("check", order, preempt, most_accesses=10**6) as cupy:
            if finding == "wrong":
                assert not kernel(cupy, planted, bug)
            else:
                with pytest.raises(KernelError, match=finding):
                    kernel(cupy, planted, bug)


def test_what_is_found_names_the_place(planted: Get) -> None:
    with emulated_device("check") as cupy, pytest.raises(KernelError) as raised:
        histogram(cupy, planted, 1)
    line = 1 + PLANTED[: PLANTED.index("bins[values[i]]++")].count("\n")
    where = rf"__shared__\+\d+ by block 0 thread \d+ line {line}; earlier by block 0 thread \d+ line {line}"
    assert re.search(f"race: write after write: {where}", str(raised.value))
    assert f"{line}: bins[values[i]]++;" in str(raised.value)


@pytest.mark.parametrize(
    "args, complaint",
    [
        (lambda x: (x, x, i32(1)), "3 arguments for 4"),
        (lambda x: (x.get(), x, i32(1), i32(0)), "argument 0 must be an array of the device"),
        (lambda x: (x[::2], x, i32(1), i32(0)), "argument 0 is not contiguous"),
        (lambda x: (x.astype(np.float32), x, i32(1), i32(0)), "argument 0 is float32"),
        (lambda x: (x, x, 1, i32(0)), "argument 2 has 8 bytes, not 4"),
        (lambda x: (x, x, np.float32(1), i32(0)), "argument 2 is float32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args: Any, complaint: str, planted: Get) -> None:
    with emulated_device() as cupy, pytest.raises(KernelError, match=complaint):
        planted("copy")((1,), (64,), args(cupy.zeros(64, np.int32)))


def test_launches_that_no_device_can_run_are_refused(planted: Get) -> None:
    with emulated_device() as cupy:
        args = (cupy.zeros(1, np.int32), cupy.zeros(1, np.int32), i32(1), i32(0))
        for grid, block, shared_mem in ((0, 32, 0), (1, 0, 0), (1, 1025, 0), (1, 32, 49 << 10)):
            with pytest.raises(KernelError):
                planted("copy")((grid,), (block,), args, shared_mem=shared_mem)
        with pytest.raises(KernelError, match="at most 128"):  # its __launch_bounds__
            planted("pack")((1,), (160,), (*(cupy.zeros(8, t) for t in PACK_TYPES), *[i32(0)] * 4))


PACK_TYPES = (np.uint8, np.uint8, np.uint16, np.uint32, np.uint32, np.uint32)


@pytest.mark.parametrize("mode, order", [("fast", 0), ("check", 7)])
def test_the_coder_as_nvrtc_compiles_it(mode: str, order: int) -> None:
    """Its text by way of g++ has tests of its own."""
    rng = np.random.default_rng(0)
    first, tokens, columns, starts = [0, 40], [40, 21], 61, [0, 7, 7, 19]
    symbols = np.rint(rng.laplace(scale=2.0 ** rng.uniform(-4, 12, (19, 1)), size=(19, columns))).astype(np.int32)
    base = rng.integers(0, 4000, (2, 19)).astype(np.int16)
    offset = rng.integers(-300, 300, (3, columns)).astype(np.int16)
    with emulated_device(mode, order, preempt=3, by_nvrtc=True) as cupy:
        on_device, contexts = cupy.asarray(symbols), (cupy.asarray(base), cupy.asarray(offset), starts)
        encoder = coder.Encoder(first, tokens, columns)
        encoder.add(on_device, coder.statistics(on_device, first, tokens), *contexts)
        streams, live = encoder.finish()
        decoded = cupy.empty(symbols.shape, np.int32)
        decoder = coder.Decoder(streams, live, first, tokens, columns)
        decoder.next(*contexts, decoded)
        decoder.check()
        assert np.array_equal(decoded.get(), symbols)
    for group, stream in enumerate(streams):
        own, kept = slice(first[group], first[group] + tokens[group]), live[group].astype(bool)
        live_starts = np.concatenate([[0], np.cumsum(kept)])[starts]
        assert stream == encode_group(symbols[kept, own].T, base[group, kept], offset[:, own].T, live_starts)


# ------------------------------------------------------------------------------------------------------ Numba's kernels


@cuda.jit
def scaled(values, factors, out, beyond):
    """out = values * factors, [rows, columns] by [columns], and `beyond` columns more than there are."""
    rows, columns = out.shape
    for place in range(cuda.grid(1), rows * columns + beyond, cuda.gridsize(1)):
        row = place // columns
        column = place - row * columns
        out[row, column] = np.float64(values[row, column]) * factors[column]


@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32])
def test_numba_kernels_compute_what_numpy_does(mode: str, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    values, factors = rng.normal(0, 100, (37, 53)).astype(np.float32), rng.standard_normal(53)
    for order, _ in ORDERS:
        with emulated_device(mode, order) as cupy:
            out = cupy.empty((37, 53), dtype)
            launch(scaled, out.size, cupy.asarray(values), cupy.asarray(factors), out, np.int64(0))
            expected = values * factors
            if dtype == np.float16:
                expected = expected.astype(np.float32)
            assert np.array_equal(out.get(), expected.astype(dtype))


def test_numba_kernels_are_checked() -> None:
    with emulated_device("check") as cupy:
        values, factors, out = cupy.zeros((3, 5), np.float32), cupy.zeros(5), cupy.empty((3, 5), np.float32)
        with pytest.raises(KernelError, match=r"out of bounds \(past the end\): argument 0\+60"):
            launch(scaled, out.size, values, factors, out, np.int64(1))
        with pytest.raises(KernelError, match="uninitialised read: argument 1"):
            launch(scaled, out.size, values, cupy.empty(5), out, np.int64(0))
        with pytest.raises(TypeError, match="array of the host"):
            launch(scaled, out.size, values.get(), factors, out, np.int64(0))


def test_numba_kernels_take_views() -> None:
    values = np.arange(60, dtype=np.float32).reshape(6, 10)
    with emulated_device("check") as cupy:
        out = cupy.zeros((4, 6), np.float32)
        launch(scaled, 12, cupy.asarray(values).T[::3], cupy.full(6, 2.0), out[:, ::1], np.int64(0))
        assert np.array_equal(out.get(), 2 * values.T[::3])


# ------------------------------------------------------------------------------------------------------ CuPy's stand-in


@pytest.mark.parametrize(
    "mix",
    [
        lambda cupy, device, host: np.asarray(device),
        lambda cupy, device, host: np.array(device),
        lambda cupy, device, host: device + host,
        lambda cupy, device, host: host + device,
        lambda cupy, device, host: np.add(host, device),
        lambda cupy, device, host: np.concatenate([host, device]),
        lambda cupy, device, host: cupy.concatenate([host, device]),
        lambda cupy, device, host: cupy.sum(host),
        lambda cupy, device, host: device.dot(host),
        lambda cupy, device, host: host.__setitem__(0, device),
        lambda cupy, device, host: device.__setitem__(0, host),
    ],
)
def test_arrays_of_host_and_device_do_not_mix(mix: Any) -> None:
    with emulated_device() as cupy, pytest.raises((TypeError, ValueError)):
        mix(cupy, cupy.zeros(4), np.zeros(4))


def test_arrays_of_the_device_are_like_numpys() -> None:
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    with emulated_device() as cupy:
        device = cupy.asarray(host)
        for f in (
            lambda xp, x: xp.cumsum(x * 2 + 1, axis=1),
            lambda xp, x: x.T[1:].reshape(-1)[::2],
            lambda xp, x: xp.clip(xp.abs(-x), 1, 5).astype(np.int64) // 2,
            lambda xp, x: xp.linalg.solve(xp.eye(3, dtype=np.float32) * 2, x),
            lambda xp, x: x[xp.isfinite(x)],
            lambda xp, x: x.sum(axis=0, dtype=np.float64) - xp.float64(3),
        ):
            result = f(cupy, device)
            assert isinstance(result, cupy.ndarray)
            assert np.array_equal(result.get(), f(np, host)) and result.dtype == f(np, host).dtype
        view = device[1:]
        view += 1
        view[:, 0] = 0
        assert np.array_equal(device.get()[1:, 1:], host[1:, 1:] + 1) and device.sum() == host.sum() + 8 - 14


def test_copies_between_host_and_device_are_counted() -> None:
    with emulated_device() as cupy, device_array.counted() as all_copies:
        device = cupy.asarray(np.zeros((4, 5), np.float32))
        with device_array.counted() as none:
            cupy.ascontiguousarray(device.T).sum()
        with device_array.counted() as some:
            device[:2].get()
            float(device[0, 0])
            device.set(np.ones((4, 5), np.float32))
    assert (none.to_host, none.to_device) == (0, 0)
    assert (some.to_host, some.to_device) == (44, 80)
    assert (all_copies.to_host, all_copies.to_device) == (44, 160)


def test_what_nothing_has_written_is_not_read() -> None:
    with emulated_device("check") as cupy:
        device = cupy.empty((4, 5), np.float32)
        device[:, 1:] = 0
        assert not device[:, 1:].get().any()
        for read in (device.get, lambda: device + 1, lambda: device[2].get(), lambda: device[:, :1].T.get()):
            with pytest.raises(UninitialisedRead):
                read()
        device[:, 0].fill(1)
        assert (device + 1).sum() == 24


# --------------------------------------------------------------------------------------------------- products by cuBLAS


@pytest.mark.parametrize("layouts", [f"{a}{b}{c}" for a in "CF" for b in "CF" for c in "CF"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 5, 7), (3, 1, 7), (3, 5, 1), (1, 1, 1), (3, 0, 7), (0, 5, 7)])
def test_matrix_products(layouts: str, shape: tuple[int, int, int]) -> None:
    """Of all layouts, with rows or columns further apart than they are long."""
    m, k, n = shape
    rng = np.random.default_rng(0)
    with emulated_device("check") as cupy:

        def matrix(rows: int, columns: int, layout: str) -> Any:
            if layout == "F":
                return matrix(columns, rows, "C").T
            return cupy.asarray(rng.standard_normal((rows, columns + 2), np.float32))[:, :columns]

        a, b, out = (matrix(*size, layout) for size, layout in zip(((m, k), (k, n), (m, n)), layouts, strict=True))
        before, product = out.get(), a.get().astype(np.float64) @ b.get()
        linear.multiply(a, b, out, exact=True)
        assert np.allclose(out.get(), product, atol=1e-6)
        out[...] = cupy.asarray(before)
        linear.multiply(a, b, out, accumulate=True, exact=True)
        assert np.allclose(out.get(), before + product, atol=1e-6)
        linear.multiply(a, b, out)
        rounded = abs(out.get() - product)
        assert (rounded <= k * 2**-9).all() and (not rounded.size or not k or rounded.max() > 1e-6)
