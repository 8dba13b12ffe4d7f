"""How fast the device codes: each kernel, and the whole, beside how fast it copies memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv import engine, synthetic
from seqkv.cuda_kernels import coder, device, elementwise
from seqkv.cuda_kernels.linear import multiply
from seqkv.engine import KVCache, Profile, TokenProbs, importance, near
from seqkv.engine.container import Container
from seqkv.engine.device import SPAN
from seqkv.engine.form import CHUNK, chunk_bounds, chunks
from seqkv.engine.matrices import Batch, forward_matrices, matrices
from seqkv.engine.modes import Calibrated

HALF = 2  # bytes of a value of the cache in float16


class Clock:
    """Times what the current stream does, by events: the best of `repeats`, after one that does not count.

    While the host queues what is to be timed the stream is held up by copies of memory, so that it is not the queueing
    that is timed, but where the host has to wait for the device in between.
    """

    HELD = 16  # copies

    def __init__(self, copy_bytes: int, repeats: int) -> None:
        xp = device.cupy()
        self.repeats, self._from, self._to = repeats, xp.zeros(copy_bytes, np.uint8), xp.zeros(copy_bytes, np.uint8)

    def seconds(self, make: Callable[[], Callable[[], Any]], calls: int = 1) -> float:
        """Of one call. make() returns what is called, `calls` times in a row."""
        cuda, found = device.cupy().cuda, []
        for _ in range(self.repeats + 1):
            run, start, end = make(), cuda.Event(), cuda.Event()
            for _ in range(self.HELD):
                self._copy()
            start.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            found.append(cuda.get_elapsed_time(start, end) / 1000 / calls)
        return min(found[1:])

    def copy_bandwidth(self) -> float:
        """Bytes read and written a second when memory is copied within the device."""
        return 2 * self._from.nbytes / self.seconds(lambda: self._copy, calls=8)

    def _copy(self) -> None:
        device.cupy().copyto(self._to, self._from)


@dataclass(frozen=True)
class Kernel:
    """What was measured of one. bytes: that it has to read and write; values of a cache, coded symbols (those of live
    coefficients) and floating-point operations, where that makes sense."""

    name: str
    seconds: float
    bytes: int
    values: int = 0
    symbols: int = 0
    operations: int = 0

    def to_dict(self, copy_bandwidth: float) -> dict[str, Any]:
        """As JSON-able values."""
        out: dict[str, Any] = {"name": self.name, "ms": 1e3 * self.seconds, "bytes": self.bytes}
        out["gb_s"] = self.bytes / self.seconds / 1e9
        out["of_copy"] = self.bytes / self.seconds / copy_bandwidth
        if self.values:
            out["fp16_gb_s"] = HALF * self.values / self.seconds / 1e9
            out["symbols_s"] = self.symbols / self.seconds
        if self.operations:
            out["tflop_s"] = self.operations / self.seconds / 1e12
        return out


@dataclass(frozen=True)
class Subject:
    """A cache on the device, and all that it is coded with."""

    sizes: synthetic.Sizes
    profile: Profile
    probs: TokenProbs
    attention: NDArray[np.float32]
    kv: KVCache

    @classmethod
    def new(cls, sizes: synthetic.Sizes) -> Subject:
        profile, probs = synthetic.profile(sizes), synthetic.token_probs(sizes)
        kv = synthetic.cache(sizes, profile, probs, SPAN)
        return cls(sizes, profile, probs, synthetic.attention(sizes), kv)

    def encode(self) -> bytes:
        return engine.encode(self.kv, self.probs, profile=self.profile, step=synthetic.STEP, importance=self.attention)

    def decode(self, stream: bytes) -> KVCache:
        return engine.decode(stream, profile=self.profile, backend="cuda")

    def live(self, stream: bytes) -> NDArray[np.bool_]:
        """Whether each coefficient of each chunk of a stream is live, [chunks, coefs]."""
        parsed = Container.parse(stream)
        sections = (parsed.section(CHUNK, chunk) for chunk in range(chunks(self.sizes.tokens)))
        scale = near.Scale(self.profile.scale)
        return np.array([near.split(scale, section)[0] for section in sections])


def first_use() -> float:
    """Seconds that making, encoding and decoding a tiny cache take at first: kernels are compiled, if none are kept on
    disk."""

    def use() -> None:
        subject = Subject.new(synthetic.Sizes(layers=2, heads=1, width=16, tokens=32, vocab=8, rank=4))
        subject.decode(subject.encode())

    return _timed(use)[1]


def whole(subject: Subject, repeats: int) -> tuple[dict[str, Any], bytes]:
    """Encoding and decoding all of a cache, called as users call them; and the stream."""
    values, nbytes = subject.sizes.values, subject.kv.nbytes
    stream, encoding = _measured(subject.encode, repeats)
    _, decoding = _measured(lambda: subject.decode(stream), repeats)
    decoding["workspace_bytes"] -= nbytes  # what is returned
    live = subject.live(stream)
    tokens = [stop - start for start, stop in _bounds(subject.sizes.tokens)]
    for one in (encoding, decoding):
        one["fp16_gb_s"] = HALF * values / one["s"] / 1e9
        one["symbols_s"] = int(live.sum(axis=1) @ tokens) / one["s"]
    out: dict[str, Any] = {"cache_bytes": nbytes, "values": values, "stream_bytes": len(stream)}
    out |= {"bits_per_value": 8 * len(stream) / values, "live": float(live.mean())}
    return out | {"encode": encoding, "decode": decoding}, stream


def _measured(run: Callable[[], Any], repeats: int) -> tuple[Any, dict[str, Any]]:
    """What it returns, and seconds of the first call and of the best of those after it, and the bytes of device memory
    that these took beyond what was taken before."""
    pool = device.cupy().get_default_memory_pool()
    out, first = _timed(run)
    out = None
    pool.free_all_blocks()
    before, best = pool.used_bytes(), float("inf")
    for _ in range(repeats):
        out = None
        out, seconds = _timed(run)
        best = min(best, seconds)
    return out, {"s": best, "first_s": first, "workspace_bytes": pool.total_bytes() - before}


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    stream = device.cupy().cuda.get_current_stream()
    stream.synchronize()
    start = time.perf_counter()
    out = run()
    stream.synchronize()
    return out, time.perf_counter() - start


def _bounds(tokens: int) -> NDArray[np.int64]:
    return np.array([chunk_bounds(chunk, tokens) for chunk in range(chunks(tokens))], np.int64)


def kernels(subject: Subject, clock: Clock) -> list[Kernel]:
    """Each kernel as a batch of chunks uses it: the coder on a layer, the others on the keys of a layer.

    Classifying and encoding copy sizes to the host, and wait for it: their times include that, as a caller's do.
    """
    sizes, xp = subject.sizes, device.cupy()
    tokens, channels, layer = min(sizes.tokens, SPAN), sizes.channels, sizes.layers // 2
    keys, values, batch = 2 * layer, 2 * layer + 1, _batch(subject, tokens)
    residual = xp.concatenate([synthetic.residuals(subject.profile, block, tokens, block) for block in (keys, values)])
    symbols = xp.empty(residual.shape, np.int32)
    lost = xp.empty((elementwise.slabs(channels), tokens), np.float32)
    for block, part in ((keys, slice(0, channels)), (values, slice(channels, 2 * channels))):
        elementwise.quantise(residual[part], batch.fineness[block], symbols[part], lost)
    out = _coder(subject, clock, batch, layer, symbols)

    count, calls = channels * tokens, 10
    part, symbols, back = residual[:channels], symbols[:channels], xp.empty((channels, tokens), np.float32)
    heads, block = subject.kv.keys[layer][:, :tokens], xp.zeros((tokens, channels), np.float32)
    cos, sin = sizes.rope.tables(np.arange(tokens))
    turn = elementwise.Turn.of(cos, sin, *sizes.rope.pairs())
    stored = xp.empty((1, *heads.shape), np.uint16)
    rows, bias = xp.ones((len(batch.rows), channels), np.float32), xp.zeros(channels, np.float32)
    decoded, sums = block + 1, xp.empty((2, len(batch.tokens), channels), np.float64)
    found, square = xp.zeros(1, np.int32), 4 * channels**2
    forward, inverse = forward_matrices(subject.profile)[keys], matrices(subject.profile).maps[keys][1]

    def timed(name: str, run: Callable[[], Any], nbytes: int, operations: int = 0) -> None:
        out.append(Kernel(name, clock.seconds(lambda: run, calls), nbytes, operations=operations))

    timed("quantise", lambda: elementwise.quantise(part, batch.fineness[keys], symbols, lost), 8 * count + lost.nbytes)
    timed("dequantise", lambda: elementwise.dequantise(symbols, batch.steps[keys], back), 8 * count)
    timed("to_block", lambda: elementwise.to_block(heads, turn, block), 6 * count)
    timed("to_heads", lambda: elementwise.to_heads(block, turn, None, stored), 6 * count)
    timed(
        "accumulate",
        lambda: elementwise.accumulate(rows, batch.index, batch.weights, bias, decoded),
        4 * count + rows.nbytes,
    )
    timed("energies", lambda: elementwise.energies(block, decoded, near.CHUNK, sums), 8 * count)
    timed("finite", lambda: elementwise.finite(heads, found), 2 * count)
    product = 2 * count * channels
    timed("multiply, TF32", lambda: multiply(part.T, inverse, block, accumulate=True), 12 * count + square, product)
    timed("multiply, exact", lambda: multiply(block, forward, back.T, exact=True), 8 * count + square, product)
    return out


def _batch(subject: Subject, tokens: int) -> Batch:
    bounds, classes = _bounds(tokens), importance.classes(subject.attention)
    return Batch(bounds, Calibrated(subject.profile), subject.probs, classes, [synthetic.STEP_INDEX] * len(bounds))


def _coder(subject: Subject, clock: Clock, batch: Batch, layer: int, symbols: Any) -> list[Kernel]:
    """The coder on the symbols of a layer, [coefs, columns]."""
    first, middle, last = (int(start) for start in subject.profile.starts[2 * layer : 2 * layer + 3])
    starts, offset = [0, middle - first, last - first], batch.offset[2 * layer : 2 * layer + 2]
    base = device.cupy().asarray(near.Scale(subject.profile.scale[first:last]).at_step(synthetic.STEP_INDEX)[None])
    places = (batch.first, batch.tokens)
    statistics = coder.statistics(symbols, *places)

    def classify() -> Callable[[], None]:
        encoder = coder.Encoder(*places, batch.columns)
        return lambda: encoder.add(symbols, statistics, base, offset, starts)

    def finish() -> Callable[[], Any]:
        encoder = coder.Encoder(*places, batch.columns)
        encoder.add(symbols, statistics, base, offset, starts)
        return encoder.finish

    groups, live = finish()()

    def decode() -> Callable[[], None]:
        decoder = coder.Decoder(groups, live, *places, batch.columns)
        return lambda: decoder.next(base, offset, starts, decoded)

    decoded = device.cupy().empty(symbols.shape, np.int32)
    every, coded, stream = symbols.size, int(live.sum(axis=1, dtype=np.int64) @ batch.tokens), sum(map(len, groups))
    measured = clock.seconds(lambda: lambda: coder.statistics(symbols, *places), 10)
    return [
        Kernel("coder: statistics", measured, 4 * every, every, every),
        Kernel("coder: classify", clock.seconds(classify), 6 * coded, every, coded),
        Kernel("coder: encode, compact", clock.seconds(finish), 2 * coded + 3 * stream, every, coded),
        Kernel("coder: decode", clock.seconds(decode), 4 * every + stream, every, coded),
    ]
