"""Whether the device does what the CPU does: one check for each thing that could differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv import coder_checks, engine, synthetic
from seqkv.cuda_kernels import device, elementwise, linear
from seqkv.engine import KVCache, Profile, Rope, prediction, quantiser
from seqkv.engine.arrays import bfloat16_bits, round_to_bfloat16
from seqkv.engine.layout import Turns

CLOSE = 2.0**-8
"""Of the root mean square of a layer: how far the decoded caches of two backends may be from each other. They decode
the same symbols. The device multiplies in TF32, which keeps 10 bits, and both are rounded to bfloat16, which keeps 7:
together 2^-10 is expected. What quantisation loses is 2^-4 to 1, and one wrong token in 2^16 would be noticed."""

_SIZES = synthetic.Sizes(layers=3, heads=2, width=32, tokens=600, vocab=500, rank=16)


@dataclass(frozen=True)
class Check:
    """What was checked, and what is wrong: nothing if it is empty."""

    name: str
    problem: str

    @property
    def ok(self) -> bool:
        return not self.problem


def run(report: Callable[[float, str], None]) -> list[Check]:
    """All checks, on the current device."""
    todo = list(_checks())
    done = []
    for i, (name, check) in enumerate(todo):
        report(i / len(todo), name)
        done.append(one(name, check))
    return done


def one(name: str, check: Callable[[], str]) -> Check:
    """A check whose function returns what is wrong, or raises."""
    try:
        return Check(name, check())
    except Exception as error:
        return Check(name, f"{type(error).__name__}: {error}"[:500])


def _checks() -> Iterator[tuple[str, Callable[[], str]]]:
    yield from coder_checks.checks()
    yield "quantise and dequantise", _quantise
    yield "accumulate", _accumulate
    for dtype in ("float32", "float16", "uint16"):
        shown = "bfloat16" if dtype == "uint16" else dtype
        yield f"rotation from and to {shown}", partial(_rotation, dtype)
        yield f"NaN and infinity are found in {shown}", partial(_finite, dtype)
    yield "energies", _energies
    yield "matrix products in TF32", partial(_products, False)
    yield "matrix products in float32", partial(_products, True)
    sample = _Sample()
    for what, profile in (("with a profile", True), ("without a profile", False)):
        yield f"the CPU decodes what the device encoded, {what}", partial(_codec, sample, "cuda", profile)
        yield f"the device decodes what the CPU encoded, {what}", partial(_codec, sample, "cpu", profile)
    yield "pages of the caller", partial(_pages, sample)


def differs(got: Any, expected: NDArray[Any], what: str = "") -> str:
    """Where an array of the device is not, bit for bit, that of the host."""
    host = np.ascontiguousarray(got.get())
    if host.shape != expected.shape or host.dtype != expected.dtype:
        return f"{what}{host.dtype} {host.shape} instead of {expected.dtype} {expected.shape}"
    bits = np.dtype(f"u{host.itemsize}")
    wrong = np.argwhere(host.view(bits) != np.ascontiguousarray(expected).view(bits))
    if not len(wrong):
        return ""
    at = tuple(int(i) for i in wrong[0])
    return f"{what}{len(wrong):,} of {host.size:,} differ, the first at {at}: {host[at]!r} instead of {expected[at]!r}"


def distance(a: KVCache, b: KVCache) -> str:
    """Where two caches in host memory are not as near to each other as CLOSE says."""
    for side in ("keys", "values"):
        for layer, (x, y) in enumerate(zip(getattr(a, side), getattr(b, side), strict=True)):
            far = float(np.sqrt(np.mean((x - y) ** 2, dtype=np.float64) / np.mean(x**2, dtype=np.float64)))
            if not far <= CLOSE:
                return f"{side} of layer {layer}: {far:.2g} apart, at most {CLOSE:.2g} is expected"
    return ""


def _values(*shape: int) -> NDArray[np.float32]:
    """Of many magnitudes, some of them 0 or halves, where rounding is decided."""
    rng = np.random.default_rng(len(shape))
    out = rng.standard_normal(shape) * 2.0 ** rng.uniform(-12, 12, shape)
    out[rng.random(shape) < 0.2] = 0.5
    out[rng.random(shape) < 0.2] = 0
    return out.astype(np.float32)


def _quantise() -> str:
    xp, coefs, columns = device.cupy(), 70, 333
    residual = _values(coefs, columns)
    steps = np.exp2(np.arange(columns) % 41 / 4 - 7).astype(np.float32)
    fineness = (1 / steps).astype(np.float32)
    symbols, lost = xp.empty((coefs, columns), np.int32), xp.empty((elementwise.slabs(coefs), columns), np.float32)
    elementwise.quantise(xp.asarray(residual), xp.asarray(fineness), symbols, lost)
    expected = np.empty((columns, coefs), np.int32)
    loss = quantiser.quantise(np.ascontiguousarray(residual.T), fineness, expected)
    total = float(lost.get().sum(dtype=np.float64))
    if abs(total - loss) > 1e-6 * loss:
        return f"a loss of {total!r} instead of {loss!r}"
    out = xp.empty((coefs, columns), np.float32)
    elementwise.dequantise(symbols, xp.asarray(steps), out)
    back = np.ascontiguousarray(quantiser.dequantise(expected, steps).T)
    return differs(symbols, np.ascontiguousarray(expected.T), "symbols: ") or differs(out, back, "residuals: ")


def _accumulate() -> str:
    xp, width, tokens = device.cupy(), 70, 333
    rng, rows = np.random.default_rng(0), _values(50, width)
    for k in (1, 20, 64):
        index, weights = rng.integers(0, len(rows), (tokens, k)).astype(np.int32), rng.random((tokens, k), np.float32)
        out = xp.empty((tokens, width), np.float32)
        zeros = xp.zeros(width, np.float32)
        elementwise.accumulate(xp.asarray(rows), xp.asarray(index), xp.asarray(weights), zeros, out)
        if wrong := differs(out, prediction.accumulate(rows, index, weights), f"{k} rows a token: "):
            return wrong
    return ""


def _rotation(dtype: str) -> str:
    """Keys turned back and into the cache again, also where slots say, as the CPU does it."""
    xp, (heads, tokens, width) = device.cupy(), (3, 150, 40)
    turns = Turns(np.arange(tokens) * 97)
    given = _values(heads, tokens, width)
    stored = bfloat16_bits(given) if dtype == "uint16" else given.astype(dtype)
    wide = round_to_bfloat16(given) if dtype == "uint16" else stored.astype(np.float32)
    slots = np.random.default_rng(0).permutation(4 * 50)[:tokens]
    partial_rope = Rope(np.geomspace(1, 1e-3, 15), scaling=1.3, layout="interleaved")
    for name, rope in (("none", None), ("half", Rope.from_theta(1e4, width)), ("interleaved", partial_rope)):
        back = forth = None
        if rope is not None:
            cos, sin = rope.tables(turns.positions)
            up, down = np.float32(rope.scaling), np.float32(1 / rope.scaling)
            back, forth = (elementwise.Turn.of(cos * f, sin * s, *rope.pairs()) for f, s in ((down, -down), (up, up)))
        block, out = turns.to_block(wide, rope), xp.empty((tokens, heads * width), np.float32)
        elementwise.to_block(xp.asarray(stored), back, out)
        pages, expected = xp.zeros((4, heads, 50, width), dtype), np.zeros((4, heads, 50, width), dtype)
        elementwise.to_heads(xp.asarray(block), forth, xp.asarray(slots), pages)
        turns.to_heads(block, rope, expected, slots)
        if wrong := differs(out, block, f"{name}, back: ") or differs(pages, expected, f"{name}, forth: "):
            return wrong
    return ""


def _finite(dtype: str) -> str:
    xp = device.cupy()
    for value, known in ((np.float32(6e4), 0), (np.float32(np.inf), 1), (np.float32(np.nan), 1)):
        heads, bits = np.zeros((2, 70, 9), dtype), int(value.view(np.uint32)) >> 16
        heads[1, 69, 8] = bits if dtype == "uint16" else value
        found = xp.zeros(1, np.int32)
        elementwise.finite(xp.asarray(heads), found)
        if int(found.get()[0]) != known:
            return f"of {value}: {int(found.get()[0])} instead of {known}"
    return ""


def _energies() -> str:
    xp, (tokens, channels, chunk) = device.cupy(), (600, 70, 256)
    true, decoded = _values(tokens, channels), _values(channels, tokens).T.copy()
    out = xp.empty((2, -(-tokens // chunk), channels), np.float64)
    elementwise.energies(xp.asarray(true), xp.asarray(decoded), chunk, out)
    expected = np.zeros(out.shape)
    for part, start in enumerate(range(0, tokens, chunk)):
        x, y = true[start : start + chunk], decoded[start : start + chunk]
        mean = (np.cumsum(x, axis=0, dtype=np.float64)[-1] / len(x)).astype(np.float32)  # in the order of tokens
        for i, difference in enumerate((x - y, x - mean)):
            expected[i, part] = np.cumsum(difference.astype(np.float64) ** 2, axis=0)[-1]
    return differs(out, expected)


def _products(exact: bool) -> str:
    """Each factor is off by 2^-10 at most in TF32, which may cut it off; sums in float32 by 2^-24 a term."""
    xp, (m, k, n) = device.cupy(), (70, 45, 33)
    a, b, c = _values(m, k), _values(k, n), _values(m, n)
    size = np.abs(a).astype(np.float64) @ np.abs(b) + np.abs(c)
    bound = size * ((k + 2) * 2.0**-24 + (0 if exact else 2.0**-9))
    for a_by_columns, b_by_columns, c_by_columns, accumulate in itertools.product((False, True), repeat=4):
        left, right, out = (
            xp.asarray(x.T.copy()).T if by_columns else xp.asarray(x)
            for x, by_columns in ((a, a_by_columns), (b, b_by_columns), (c, c_by_columns))
        )
        linear.multiply(left, right, out, accumulate=accumulate, exact=exact)
        expected = a.astype(np.float64) @ b + (c if accumulate else 0)
        excess = float((np.abs(out.get() - expected) / bound).max())
        if not excess <= 1:
            layouts = f"{a_by_columns=}, {b_by_columns=}, {c_by_columns=}, {accumulate=}"
            return f"{excess:.3g} times the error that can be ({layouts})"
    return ""


class _Sample:
    """A small cache, and what each backend encodes of it."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, bool], bytes] = {}

    @cached_property
    def profile(self) -> Profile:
        return synthetic.profile(_SIZES)

    @cached_property
    def kv(self) -> KVCache:
        return synthetic.cache(_SIZES, self.profile, synthetic.token_probs(_SIZES), span=256)

    def stream(self, backend: str, with_profile: bool) -> bytes:
        if (backend, with_profile) not in self._streams:
            kv, probs = self.kv.to("cuda" if backend == "cuda" else "cpu"), synthetic.token_probs(_SIZES)
            quality: dict[str, Any] = {"profile": self.profile, "step": synthetic.STEP} if with_profile else {}
            self._streams[backend, with_profile] = engine.encode(kv, probs, **quality)
        return self._streams[backend, with_profile]


def _codec(sample: _Sample, backend: str, with_profile: bool) -> str:
    """Both backends decode alike what one of them encoded, and it is of the size that the other one's is."""
    profile = sample.profile if with_profile else None
    size, other = (len(sample.stream(b, with_profile)) for b in (backend, "cpu" if backend == "cuda" else "cuda"))
    if abs(size - other) > 0.01 * other:
        return f"{size:,} bytes, {other:,} from the other backend"
    stream = sample.stream(backend, with_profile)
    return distance(
        engine.decode(stream, profile=profile), engine.decode(stream, profile=profile, backend="cuda").to("cpu")
    )


def _pages(sample: _Sample) -> str:
    """Decoded into pages, at slots in any order, it is the cache that decode returns."""
    xp, pages, size = device.cupy(), 11, 64
    stream, (heads, width, _) = sample.stream("cuda", True), sample.profile.shape[0]
    paged = [xp.zeros((pages, heads, size, 2 * width), np.float32) for _ in sample.profile.shape]
    slots = np.random.default_rng(0).permutation(pages * size)[: sample.kv.tokens]
    sides = [[layer[..., :width] for layer in paged], [layer[..., width:] for layer in paged]]
    engine.decode_into(stream, *sides, slots=slots, profile=sample.profile)
    plain = engine.decode(stream, profile=sample.profile, backend="cuda").to("cpu")
    for layer, whole in enumerate(paged):
        host = whole.get().transpose(0, 2, 1, 3).reshape(pages * size, heads, 2 * width)[slots].transpose(1, 0, 2)
        both = np.concatenate([plain.keys[layer], plain.values[layer]], axis=2)
        if not np.array_equal(round_to_bfloat16(host), both):
            return f"layer {layer} differs"
    return ""
