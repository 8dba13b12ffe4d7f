"""The command `seqkv plan`: which tier has a session ready first, from rates that are measured or given."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seqkv import arguments, display, engine, models
from seqkv.engine.planning import Plan, Rates, plan
from seqkv.models import UsageError

SHAPES = {  # layers, key and value heads, width of a head
    "smollm2-135m": (30, 3, 64),
    "llama-3.1-8b": (32, 8, 128),
    "llama-3.1-70b": (80, 8, 128),
}
TEXT = Path(engine.__file__).parent / "calibration_text" / "prose_en.txt"


def add(commands: Any) -> None:
    """The command, to argparse's subcommands."""
    text = "Which tier has a session ready first, on this link and this machine, and when running the model is faster."
    one = commands.add_parser("plan", help=text, description=text)
    one.set_defaults(run=run)
    one.add_argument("model", nargs="?", help=f"to measure: {arguments.MODEL}")
    one.add_argument("--profile", default="none", metavar="P", help=arguments.PROFILE)
    one.add_argument("--cache", choices=sorted(SHAPES), help="whose cache, in 2 bytes a number, instead of a model's")
    one.add_argument("--tokens", type=arguments.positive, default=1024, metavar="N", help="of the session (1024)")
    one.add_argument("--link", type=_rate, required=True, metavar="GBIT", help="what the link brings, Gbit/s")
    one.add_argument("--prefill", type=_rate, metavar="T", help="tokens/s of the model (measured if there is a model)")
    one.add_argument("--decode", type=_rate, metavar="GB", help="GB/s of cache that decoding gives (measured likewise)")
    one.add_argument("--kl", type=float, default=0.01, metavar="NATS", help="loss allowed, nats a token (0.01)")
    one.add_argument("--near-ratio", type=_rate, metavar="X", help="near tier at --kl (measured, or 52)")
    one.add_argument("--lossless-ratio", type=_rate, metavar="X", help="lossless tier (measured, or 1.75)")
    one.add_argument("--ids", type=_rate, default=12.0, metavar="BITS", help="tokens tier, a token (12)")
    one.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    if (args.model is None) == (args.cache is None):
        raise UsageError("give a model to measure, or --cache with --prefill and --decode")
    if not (args.kl >= 0 and math.isfinite(args.kl)):
        raise UsageError("--kl must not be negative")
    measured: dict[str, float] = {}
    if args.model is not None:
        measured = _measure(args)
        bits = measured["bits_per_token"]
    elif args.prefill is None or args.decode is None:
        raise UsageError("--cache needs --prefill and --decode: there is nothing to measure them with")
    else:
        layers, heads, width = SHAPES[args.cache]
        bits = 16.0 * 2 * layers * heads * width
    if args.decode:
        measured["near"] = measured["lossless"] = args.decode * 1e9
    rates = Rates(args.link * 1e9 / 8, args.prefill or measured["prefill"], measured["near"], measured["lossless"])
    near = [(args.kl, args.near_ratio or measured.get("near_ratio", 52.0))] if args.kl > 0 else []
    found = plan(
        args.tokens,
        bits,
        rates,
        loss=args.kl,
        near_ratio=near,
        lossless_ratio=args.lossless_ratio or measured.get("lossless_ratio", 1.75),
        ids_bits=args.ids,
    )
    if args.json:
        print(json.dumps(_described(found, rates, args.tokens, bits), indent=2))
        return
    rows = [[o.tier, f"{o.bytes:,.0f}", f"{o.loss:g}", _time(o.send_s), _time(o.ready_s)] for o in found.options]
    what = args.model or args.cache
    display.table(
        f"{what}: {args.tokens:,} tokens over {args.link:g} Gbit/s; prefill {rates.prefill:,.0f} tokens/s, decode "
        f"{rates.near / 1e9:.2g} GB/s (near), {rates.lossless / 1e9:.2g} GB/s (lossless)",
        ["tier", "bytes", "KL", "sent", "ready"],
        rows,
    )
    print(_sentence(found))


def _measure(args: argparse.Namespace) -> dict[str, float]:
    """Prefill and decoding of a model's cache, in bfloat16, on this machine, over as many tokens as are asked for and
    the text has."""
    from seqkv import evaluate

    profile = arguments.profile(args.profile)
    with display.progress("plan") as report:
        report(0.0, "loading the model")
        source = models.load(args.model)
        ids = models.read_ids(source, TEXT)[: args.tokens]
        source.context = len(ids)
        report(0.2, f"prefill of {len(ids):,} tokens")
        prefill = evaluate.prefill_seconds(source, ids)
        kv, probs, importance = source.prefill(ids)
        kv = engine.KVCache(kv.keys, kv.values, rope=kv.rope, dtype="bfloat16")
        report(0.5, "near")
        near = engine.encode(kv, probs, profile=profile, kl=args.kl or 0.01, importance=importance)
        near_s, _ = evaluate.timed(lambda: engine.decode(near, profile=profile), 3)
        report(0.75, "lossless")
        lossless = engine.encode(kv, probs, profile=profile, tier="lossless")
        lossless_s, _ = evaluate.timed(lambda: engine.decode(lossless, profile=profile), 3)
    return {
        "bits_per_token": 8 * kv.nbytes / kv.tokens,
        "prefill": len(ids) / prefill,
        "near": kv.nbytes / near_s,
        "lossless": kv.nbytes / lossless_s,
        "near_ratio": kv.nbytes / len(near),
        "lossless_ratio": kv.nbytes / len(lossless),
    }


def _described(found: Plan, rates: Rates, tokens: int, bits: float) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "bits_per_token": bits,
        "rates": asdict(rates),
        "best": found.best.tier,
        "options": [asdict(option) for option in found.options],
        "break_even": found.break_even,
    }


def _sentence(found: Plan) -> str:
    even = found.break_even
    if even == 0:
        return "The tokens tier is the fastest on no link."
    return f"Break-even: below {even * 8 / 1e9:.3g} Gbit/s tokens and a prefill are the fastest, above it they are not."


def _rate(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(text)
    return value


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
