"""How cost grows with the context: time, memory and bits, from 1,024 tokens to 32,768.

    python bench/growth.py [--model smollm2] [--folder ~/.cache/seqkv/frontier] [--out bench/results] [--quick]

Windows of a text that end at the same place, of 1,024 to 8,192 tokens, are run through the model; the last 256 tokens
are the same in all of them. Beyond the model's own reach, caches of 8,192 tokens of several texts are put behind each
other, their keys turned to the positions that follow.

seconds     of encode and decode, the fastest of 3; with the slope of log seconds over log tokens, where 1 is linear.
memory      what encode and decode hold at most, beside the cache and the profile (resident, as Linux counts it).
bits        of a value, over the whole stream, at a requested KL of 0.01.
last        bits of a value of the last 256 tokens alone, and the model's surprisal at them, in bits a token: arXiv
            2604.15356 expects that a token costs less, the more context came before. (A stream's chunks are coded each
            by itself, so that this is about what the model makes of context, not about what the coder has learnt.)

Results: growth.json and growth.png in --out. The folder is that of bench/frontier.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is measured without installing it

from bench import captures, domains  # noqa: E402
from seqkv import display, engine, evaluate, models  # noqa: E402
from seqkv.engine import KVCache, Profile, TokenProbs, form, mixture  # noqa: E402
from seqkv.engine.container import Container  # noqa: E402

LENGTHS, BEYOND = (1024, 2048, 4096, 8192), (2, 4)
QUICK_LENGTHS, QUICK_BEYOND = (256, 512), (2,)
LAST = 256  # tokens: a chunk
PARTS = (form.TOKENS, form.CLASSES, form.CHUNK, form.MEANS)  # of a stream, for each chunk
KL = 0.01
DOMAINS = ("prose", "code")
_CHARACTERS = 80_000  # of a text


@dataclass(frozen=True)
class Row:
    """What one cache costs. last_bits, last_surprisal: None for caches that were put together."""

    text: str
    tokens: int
    bits_per_value: float
    encode_s: float
    decode_s: float
    encode_peak: int | None
    decode_peak: int | None
    last_bits: float | None = None
    last_surprisal: float | None = None


@dataclass(frozen=True)
class Session:
    kv: KVCache
    probs: TokenProbs
    attention: Any

    @classmethod
    def joined(cls, parts: Sequence[Session]) -> Session:
        """One session of several, one behind the other."""
        keys: list[list[Any]] = [[] for _ in range(parts[0].kv.layers)]
        start = 0
        for part in parts:
            positions = part.kv.positions + start
            start += part.kv.tokens
            for into, key, rope in zip(keys, part.kv.keys, part.kv.rope, strict=True):
                into.append(key if rope is None else rope.apply(rope.undo(key, part.kv.positions), positions))
        values = [np.concatenate(some, axis=1) for some in zip(*(part.kv.values for part in parts), strict=True)]
        kv = KVCache([np.concatenate(some, axis=1) for some in keys], values, rope=parts[0].kv.rope)
        ids = np.concatenate([part.probs.token_ids for part in parts])
        return cls(kv, TokenProbs.from_tokens(ids), np.concatenate([part.attention for part in parts], axis=1))


def measured(name: str, session: Session, profile: Profile, whole: bool) -> Row:
    """whole: whether the cache is one that the model gave."""

    def encode() -> bytes:
        return engine.encode(session.kv, session.probs, profile=profile, kl=KL, importance=session.attention)

    encode_s, stream = _fastest(encode)
    decode_s, _ = _fastest(lambda: engine.decode(stream, profile=profile))
    encode_peak, _ = evaluate.peak(encode)
    decode_peak, decoded = evaluate.peak(lambda: engine.decode(stream, profile=profile))
    if decode_peak is not None:
        decode_peak -= sum(array.nbytes for array in decoded.keys + decoded.values)
    tokens, values = session.kv.tokens, session.kv.values_count
    row = Row(name, tokens, 8 * len(stream) / values, encode_s, decode_s, encode_peak, decode_peak)
    if not whole:
        return row
    parsed, chunk = Container.parse(stream), form.chunks(tokens) - 1
    size = sum(parsed.length(*key) for key in parsed.sections if key[0] != form.POSITIONS and key[1] == chunk)
    surprisal = float(session.probs.surprisal[-LAST:].mean())
    return dataclasses.replace(row, last_bits=8 * size / (values * LAST / tokens), last_surprisal=surprisal)


def rows(
    source: captures.Captures,
    texts: Sequence[domains.Text],
    profile: Profile,
    lengths: Sequence[int],
    beyond: Sequence[int],
    report: display.Report,
) -> Iterator[Row]:
    """Every length of every text, then caches that are put together."""
    longest: list[Session] = []
    for i, text in enumerate(texts):
        ids = source.tokenize(text.text)
        if len(ids) < lengths[-1]:
            raise models.UsageError(f"{text.name}: {len(ids)} tokens are not enough")
        for length in lengths:
            report(i / (len(texts) + 1), f"{text.name}: {length:,} tokens")
            source.context = length
            part = ids[lengths[-1] - length : lengths[-1]]
            session = Session(*source.prefill(source.begin(part)[:length]))
            yield measured(text.name, session, profile, whole=True)
        longest.append(session)
    for count in beyond:
        report(len(texts) / (len(texts) + 1), f"{count * lengths[-1]:,} tokens")
        parts = [longest[i % len(longest)] for i in range(count)]
        yield measured("several", Session.joined(parts), profile, whole=False)


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """What grows, and how. Exponents of time; the largest memory over the smallest; bits and the last tokens' cost by
    length, means over texts."""
    lengths = sorted({row.tokens for row in found})
    whole = sorted({row.tokens for row in found if row.last_bits is not None})

    def mean(name: str, tokens: int) -> float:
        return statistics.fmean(getattr(row, name) for row in found if row.tokens == tokens)

    def exponent(name: str) -> float:
        return float(np.polyfit(np.log(lengths), np.log([mean(name, n) for n in lengths]), 1)[0])

    peaks = {
        name: [max(getattr(row, name) or 0 for row in found if row.tokens == n) for n in lengths]
        for name in ("encode_peak", "decode_peak")
    }
    return {
        "encode_exponent": exponent("encode_s"),
        "decode_exponent": exponent("decode_s"),
        **{f"{name}_growth": peak[-1] / max(peak[0], 1) for name, peak in peaks.items()},
        "bits_per_value": {n: mean("bits_per_value", n) for n in lengths},
        "last_bits": {n: mean("last_bits", n) for n in whole},
        "last_surprisal": {n: mean("last_surprisal", n) for n in whole},
    }


def show(found: Sequence[Row], about: dict[str, Any]) -> None:
    def mb(peak: int | None) -> str:
        return "" if peak is None else f"{peak / 1e6:.0f} MB"

    cells = [
        [
            row.text,
            f"{row.tokens:,}",
            f"{row.encode_s:.2f} s",
            f"{row.decode_s:.2f} s",
            mb(row.encode_peak),
            mb(row.decode_peak),
            f"{row.bits_per_value:.3f}",
            "" if row.last_bits is None else f"{row.last_bits:.3f}",
            "" if row.last_surprisal is None else f"{row.last_surprisal:.2f}",
        ]
        for row in found
    ]
    columns = ["text", "tokens", "encode", "decode", "", "", "bits/value", "of the last 256", "their surprisal"]
    display.table("Cost by length", columns, cells)
    print(f"time grows as tokens^{about['encode_exponent']:.2f} (encode), ^{about['decode_exponent']:.2f} (decode)")
    for name, falls in (("last_bits", "bits a value of the same 256 tokens"), ("last_surprisal", "their surprisal")):
        by_length = about[name]
        print(f"{falls}: " + ", ".join(f"{value:.3f} at {int(n):,}" for n, value in by_length.items()))


def draw(found: Sequence[Row], path: Path) -> None:
    """ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, axes = pyplot.subplots(1, 4, figsize=(15, 4), layout="constrained")
    titles = ("seconds", "MB beside cache and profile", "bits per value", "the same 256 tokens, last of the context")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1024:g}k"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    panels = (
        (axes[0], {"encode": "encode_s", "decode": "decode_s"}, 1.0),
        (axes[1], {"encode": "encode_peak", "decode": "decode_peak"}, 1e6),
        (axes[2], {"bits/value": "bits_per_value"}, 1.0),
        (axes[3], {"bits/value": "last_bits", "surprisal, bits a token / 10": "last_surprisal"}, 1.0),
    )
    for axis, curves, unit in panels:
        for label, name in curves.items():
            known = [(row.tokens, getattr(row, name)) for row in found if getattr(row, name) is not None]
            lengths = sorted({n for n, _ in known})
            scale = unit * (10 if name == "last_surprisal" else 1)
            axis.plot(
                lengths,
                [statistics.fmean(value for n, value in known if n == length) / scale for length in lengths],
                marker="o",
                label=label,
            )
        axis.set_ylim(bottom=None if axis is axes[0] else 0)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _fastest(call: Callable[[], Any]) -> tuple[float, Any]:
    runs = [evaluate.timed(call, 1) for _ in range(3)]
    return min(seconds for seconds, _ in runs), runs[-1][1]


def run(model: str, folder: Path, out: Path, quick: bool) -> dict[str, Any]:
    """Measure, print, write; returns what the JSON holds."""
    lengths, beyond = (QUICK_LENGTHS, QUICK_BEYOND) if quick else (LENGTHS, BEYOND)
    with display.progress("growth") as report:
        report(0.0, "loading the model")
        source = captures.load(model, folder, *((512, 256) if quick else ()))
        profile = captures.profile(source, folder, mixture.default_pieces(), "all", report)
        wanted = DOMAINS[1:] if quick else DOMAINS
        texts = domains.texts(folder, source.tokenizer, wanted, _CHARACTERS)
        texts = [text for text in texts if len(text.text) > 5 * lengths[-1]]
        found = list(rows(source, texts, profile, lengths, beyond, report))
    about = summary(found)
    results = {"model": model, "kl": KL, "summary": about, "rows": [asdict(row) for row in found]}
    out.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(results), parse_float=lambda x: float(f"{float(x):.5g}"))
    (out / "growth.json").write_text(json.dumps(rounded, indent=1) + "\n")
    show(found, about)
    try:
        draw(found, out / "growth.png")
    except ImportError:
        display.note("no picture: matplotlib is not installed")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.SMOLLM2)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "seqkv" / "frontier")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    try:
        run(options.model, options.folder, options.out, options.quick)
    except (models.UsageError, domains.MissingText) as error:
        parser.exit(1, f"{error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
