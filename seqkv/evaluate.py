"""What a cache costs as a stream, and what the model loses by continuing from it."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from seqkv import engine
from seqkv.adapters.source import ModelSource
from seqkv.engine import KVCache, TokenProbs

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """A text, what the model made of its first part, and what it truly predicts of the rest.

    ids: the context, then the continuation.
    reference: [continuation, vocab] log p, nats, with the true cache.
    prefill_s: seconds that a server would take to compute the cache: see `prefill_seconds`.
    """

    name: str
    ids: NDArray[np.int64]
    kv: KVCache
    probs: TokenProbs
    importance: NDArray[np.float32]
    reference: torch.Tensor
    prefill_s: float


@dataclass(frozen=True)
class Result:
    """What `measure` found. Times in seconds, KL in nats a token of the continuation.

    bits_per_value: 8 * bytes / values: all bytes of the stream count, side information and header too.
    cache_ratio, fp16_ratio: how many times smaller the stream is than the cache in its own dtype, and in 2 bytes a
        value.
    kl: mean KL(with the true cache || with the decoded one). top1: how often both rank the same token first.
    encode_s, decode_s: of `engine.encode` and `engine.decode` alone. prefill_s: of the forward they replace.
    encode_peak, decode_peak: bytes that the process held at most, over what it held before and the cache itself;
        None if not asked for, or not known on this system.
    """

    text: str
    tokens: int
    values: int
    bytes: int
    bits_per_value: float
    cache_dtype: str
    cache_ratio: float
    fp16_ratio: float
    kl: float
    top1: float
    encode_s: float
    decode_s: float
    prefill_s: float
    encode_peak: int | None
    decode_peak: int | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with the ratios of the times."""
        ratios = {
            "prefill_per_encode": self.prefill_s / self.encode_s,
            "prefill_per_decode": self.prefill_s / self.decode_s,
        }
        return asdict(self) | ratios


def prepare(source: ModelSource, name: str, ids: NDArray[np.int64], prefill_s: float | None = None) -> Subject:
    """Run the model over a text: its cache, and its predictions from it. prefill_s is measured if it is not given."""
    seconds = prefill_seconds(source, ids) if prefill_s is None else prefill_s
    kv, probs, importance = source.prefill(ids)
    return Subject(name, ids, kv, probs, importance, source.logprobs(ids, kv), seconds)


def measure(
    source: ModelSource,
    subject: Subject,
    *,
    profile: engine.Profile | None = None,
    kl: float = 0.01,
    step: float | None = None,
    repeats: int = 3,
    memory: bool = False,
) -> Result:
    """Encode the subject's cache, decode it, and continue from what came back.

    profile, kl, step: as in `engine.encode`.
    repeats: times are the median of as many runs, after one that does not count (compilation, caches). 1: that one
        run counts.
    memory: measure the peaks too.
    """

    def encode() -> bytes:
        return engine.encode(
            subject.kv, subject.probs, profile=profile, kl=kl, step=step, importance=subject.importance
        )

    encode_s, stream = timed(encode, repeats)
    decode_s, decoded = timed(lambda: engine.decode(stream, profile=profile), repeats)
    encode_peak = decode_peak = None
    if memory:
        decoded = None  # type: ignore[assignment]
        encode_peak, _ = peak(encode)
        decode_peak, decoded = peak(lambda: engine.decode(stream, profile=profile))
        if decode_peak is not None:
            decode_peak -= sum(array.nbytes for array in decoded.keys + decoded.values)
    divergence, top1 = source.divergence(subject.ids, decoded, subject.reference)
    values = subject.kv.values_count
    return Result(
        text=subject.name,
        tokens=subject.kv.tokens,
        values=values,
        bytes=len(stream),
        bits_per_value=8 * len(stream) / values,
        cache_dtype=subject.kv.dtype,
        cache_ratio=subject.kv.nbytes / len(stream),
        fp16_ratio=2 * values / len(stream),
        kl=divergence,
        top1=top1,
        encode_s=encode_s,
        decode_s=decode_s,
        prefill_s=subject.prefill_s,
        encode_peak=encode_peak,
        decode_peak=decode_peak,
    )


def mean(results: Sequence[Result]) -> dict[str, float]:
    """The means over texts of rate, KL and top-1, the total times' ratios."""
    encode, decode, prefill = (
        sum(getattr(r, f"{name}_s") for r in results) for name in ("encode", "decode", "prefill")
    )
    means = {name: statistics.fmean(getattr(r, name) for r in results) for name in ("bits_per_value", "kl", "top1")}
    return means | {"prefill_per_encode": prefill / encode, "prefill_per_decode": prefill / decode}


def prefill_seconds(source: ModelSource, ids: NDArray[np.int64], repeats: int = 3) -> float:
    """Seconds that a server takes to compute the cache of the context: the logits of the last token only, no observer.

    The median of `repeats`, after one that does not count.
    """
    context = torch.as_tensor(ids[: source.context], device=source.model.device)[None]

    def forward() -> None:
        with torch.inference_mode():
            source.model(context, use_cache=True, logits_to_keep=1)

    return timed(forward, repeats)[0]


def timed(call: Callable[[], T], repeats: int) -> tuple[float, T]:
    """The median of `repeats` runs in seconds, after one that does not count if there is more than one; the result."""
    seconds = []
    for _ in range(repeats + (repeats > 1)):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[repeats > 1 :]), result


def peak(call: Callable[[], T]) -> tuple[int | None, T]:
    """How many bytes the process held at most during a call, over what it held before; the result.

    Resident memory, as Linux counts it (None elsewhere). The allocator's free memory is given back before, so that
    what the call reuses of it counts as well.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status("VmRSS")
    except OSError:
        return None, call()
    result = call()
    return _status("VmHWM") - before, result


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
