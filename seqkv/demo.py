"""The whole of seqkv on a small model: calibrate, encode, decode, continue, beside plain quantisation."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import seqkv
from seqkv import display, engine, evaluate, models
from seqkv.engine import KVCache, ProfileError
from seqkv.engine.mixture import default_pieces

CONTEXT, CONTINUATION = 1024, 256
TARGETS = (0.003, 0.01, 0.03, 0.1)  # nats
BITS = (4, 3, 2)
GROUP = 64
GENERATED = 40  # tokens of the continuation that is printed

OURS, UNCALIBRATED, PLAIN = "seqkv", "seqkv, no profile", f"per vector, min-max of {GROUP}"


@dataclass(frozen=True)
class Point:
    """One codec at one setting on one text. kl in nats a token, top1 a share, times in seconds where known."""

    text: str
    codec: str
    setting: str
    bytes: int
    bits_per_value: float
    fp16_ratio: float
    kl: float
    top1: float
    encode_s: float | None = None
    decode_s: float | None = None


def cache_directory() -> Path:
    """Where profiles are kept: $SEQKV_CACHE, or ~/.cache/seqkv."""
    return Path(os.environ.get("SEQKV_CACHE") or Path.home() / ".cache" / "seqkv")


def cached_profile(source: Any, fresh: bool, report: display.Report) -> engine.Profile:
    """This model's and release's profile from the cache directory; calibrated if it is not there, or if `fresh`."""
    path = cache_directory() / f"{source.fingerprint}-{seqkv.__version__}.safetensors"
    if not fresh and path.exists():
        try:
            return engine.Profile.load(path)
        except ProfileError as error:
            display.note(f"{path} cannot be used ({error}); calibrating anew")
    profile = engine.calibrate(source, default_pieces(), progress=report)
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.save(path)
    return profile


def quantise_per_vector(kv: KVCache, bits: int, group: int = GROUP) -> tuple[KVCache, int]:
    """Plain quantisation, the usual comparison: the cache that comes back, and the bytes it would take.

    Each `group` neighbouring values of a token, in a layer and side, become 2^bits even levels from the least to the
    greatest of them, which are kept in 2 bytes each. (From minus to plus the greatest magnitude saves the one, and
    loses several times as much at equal rate: keys are far from centred.)
    """
    total = 0

    def quantise(array: NDArray[Any]) -> NDArray[np.float32]:
        nonlocal total
        heads, tokens, width = array.shape
        flat = array.astype(np.float32).transpose(1, 0, 2).reshape(tokens, -1)
        missing = -flat.shape[1] % group
        groups = np.pad(flat, ((0, 0), (0, missing)), mode="edge").reshape(tokens, -1, group)
        low, high = (end(-1, keepdims=True).astype(np.float16).astype(np.float32) for end in (groups.min, groups.max))
        unit = np.maximum(high - low, 1e-30) / (2**bits - 1)
        level = np.rint((groups - low) / unit).clip(0, 2**bits - 1)
        total += (bits * array.size + 7) // 8 + 2 * low.size + 2 * high.size
        out = (level * unit + low).reshape(tokens, -1)[:, : flat.shape[1]]
        return out.reshape(tokens, heads, width).transpose(1, 0, 2)

    keys, values = [quantise(array) for array in kv.keys], [quantise(array) for array in kv.values]
    return KVCache(keys, values, positions=kv.positions, rope=kv.rope, dtype=kv.dtype), total


def points(source: Any, subject: evaluate.Subject, profile: engine.Profile) -> Iterator[Point]:
    """Every codec and setting on one text."""
    settings: list[tuple[str, engine.Profile | None, float]] = [(OURS, profile, kl) for kl in TARGETS]
    for codec, given, kl in [*settings, (UNCALIBRATED, None, 0.01)]:
        result = evaluate.measure(source, subject, profile=given, kl=kl, repeats=1)
        yield Point(
            text=subject.name,
            codec=codec,
            setting=f"kl={kl}",
            bytes=result.bytes,
            bits_per_value=result.bits_per_value,
            fp16_ratio=result.fp16_ratio,
            kl=result.kl,
            top1=result.top1,
            encode_s=result.encode_s,
            decode_s=result.decode_s,
        )
    for bits in BITS:
        kv, size = quantise_per_vector(subject.kv, bits)
        kl, top1 = source.divergence(subject.ids, kv, subject.reference)
        values = kv.values_count
        yield Point(subject.name, PLAIN, f"{bits} bits", size, 8 * size / values, 2 * values / size, kl, top1)


def run(out: Path, fresh: bool = False) -> None:
    """What `seqkv demo` does: tables on stdout; rate.png and rate.csv in the directory `out`."""
    texts = sorted((Path(__file__).parent / "demo_text").glob("*.txt"))
    with display.progress("demo") as report:
        report(0.0, "loading SmolLM2-135M")
        source = models.load(models.SMOLLM2, CONTEXT, CONTINUATION)
    with display.progress("calibrating") as report:
        report(0.0, "looking for a profile")
        profile = cached_profile(source, fresh, report)
    found: list[Point] = []
    continued: dict[str, dict[str, str]] = {}
    prefill_s = 0.0
    with display.progress("demo") as report:
        steps = len(texts) * (len(TARGETS) + 1 + len(BITS))
        for path in texts:
            report(len(found) / steps, f"{path.stem}: prefill")
            ids = models.read_ids(source, path, 0, CONTEXT + CONTINUATION)
            subject = evaluate.prepare(source, path.stem, ids, prefill_s)
            if not found:
                prefill_s = evaluate.prefill_seconds(source, ids, repeats=1)  # prepare has warmed the model up
                warm_up(subject, profile)
            for point in points(source, subject, profile):
                found.append(point)
                report(len(found) / steps, f"{path.stem}: {point.codec}, {point.setting}")
            if not continued:
                report(len(found) / steps, f"{path.stem}: continuing from both caches")
                continued[path.stem] = continue_both(source, subject, profile)
    show(found, prefill_s)
    print(f"\nWhat the model writes after {CONTEXT:,} tokens, each time its most probable token")
    print("(decoded: at kl=0.01; after one other token all that follow may differ):")
    for text, continuations in continued.items():
        print(f"\n{text}")
        for name, written in continuations.items():
            print(f"  from the {name} cache  {written!r}")
    out.mkdir(parents=True, exist_ok=True)
    write_csv(found, out / "rate.csv")
    print(f"\n{out / 'rate.csv'}")
    if write_png(found, out / "rate.png"):
        print(out / "rate.png")


def warm_up(subject: evaluate.Subject, profile: engine.Profile) -> None:
    """Compile, so that the times are those of the work."""
    for given in (profile, None):
        engine.decode(engine.encode(subject.kv, subject.probs, profile=given), profile=given)


def continue_both(source: Any, subject: evaluate.Subject, profile: engine.Profile) -> dict[str, str]:
    """The greedy continuation from the original cache and from the decoded one."""
    stream = engine.encode(subject.kv, subject.probs, profile=profile, kl=0.01, importance=subject.importance)
    caches = {"original": subject.kv, " decoded": engine.decode(stream, profile=profile)}
    first = int(subject.ids[CONTEXT])
    return {name: source.tokenizer.decode([first, *source.greedy(first, kv, GENERATED)]) for name, kv in caches.items()}


def show(found: list[Point], prefill_s: float) -> None:
    """Print a table for each text."""
    columns = ("codec", "setting", "bytes", "bits/value", "x fp16", "KL", "top-1", "encode", "decode")
    for text in dict.fromkeys(point.text for point in found):
        rows = [
            (
                p.codec,
                p.setting,
                f"{p.bytes:,}",
                f"{p.bits_per_value:.3f}",
                f"{p.fp16_ratio:.1f}",
                f"{p.kl:.4f}",
                f"{p.top1:.1%}",
                "" if p.encode_s is None else f"{p.encode_s:.2f} s",
                "" if p.decode_s is None else f"{p.decode_s:.2f} s",
            )
            for p in found
            if p.text == text
        ]
        display.table(
            f"{text}: the cache of {CONTEXT:,} tokens; KL (nats) and top-1 over the next {CONTINUATION}", columns, rows
        )
    times = [
        (prefill_s / p.encode_s, prefill_s / p.decode_s) for p in found if p.codec == OURS and p.encode_s and p.decode_s
    ]
    encode, decode = np.median(times, axis=0)
    print(f"The prefill takes {prefill_s:.2f} s: {encode:.1f} times as long as encoding, {decode:.1f} as decoding.")


def write_csv(found: list[Point], path: Path) -> None:
    """One line for each point."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names = list(Point.__dataclass_fields__)
        writer.writerow(names)
        writer.writerows([getattr(point, name) for name in names] for point in found)


def write_png(found: list[Point], path: Path) -> bool:
    """Rate against KL, both logarithmic. False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        display.note("no picture: matplotlib is not installed (pip install 'seqkv[demo]')")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    texts = list(dict.fromkeys(point.text for point in found))
    styles = {OURS: ("o", "-"), UNCALIBRATED: ("D", "none"), PLAIN: ("s", "--")}
    for text, colour in zip(texts, ("tab:blue", "tab:orange", "tab:green", "tab:red"), strict=False):
        for codec, (marker, line) in styles.items():
            some = [point for point in found if (point.text, point.codec) == (text, codec)]
            axes.plot(
                [p.bits_per_value for p in some],
                [p.kl for p in some],
                color=colour,
                marker=marker,
                linestyle=line,
                label=f"{codec}: {text}",
            )
    first = [point for point in found if point.text == texts[0]]
    for point in first:
        axes.annotate(
            point.setting, (point.bits_per_value, point.kl), textcoords="offset points", xytext=(7, 5), fontsize=8
        )
    axes.margins(0.1)  # room for what is written beside the points
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("bits per value of the cache, all bytes of the stream (fp16: 16)")
    axes.set_ylabel(f"KL to the true cache's predictions, nats a token, over the next {CONTINUATION}")
    axes.set_title(f"SmolLM2-135M, the KV cache of {CONTEXT:,} tokens: lower left is better")
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
