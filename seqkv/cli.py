"""The command `seqkv`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from seqkv import __version__, arguments, display, engine, models, plan_cli, store_cli
from seqkv.engine import SeqkvError
from seqkv.models import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0, or 1 if a check failed, or 2 with a line on stderr if something was
    refused."""
    args = parser().parse_args(argv)
    # before PyTorch is loaded: its threads spin while they wait, which beside other processes costs several times over
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: display.note(f"warning: {message}")
            return args.run(args) or 0
    except OSError as error:
        display.note(f"seqkv: {error.filename}: {error.strerror}" if error.filename else f"seqkv: {error}")
        return 2
    except ModuleNotFoundError as error:
        package = error.name if error.name in ("redis", "fsspec") else "'seqkv[demo]'"
        display.note(f"seqkv: this command needs {error.name}: pip install {package}")
        return 2
    except (SeqkvError, engine.DeviceError) as error:
        display.note(f"seqkv: {error}")
        return 2
    except KeyboardInterrupt:
        display.note("seqkv: interrupted")
        return 130


def parser() -> argparse.ArgumentParser:
    """What the commands take."""
    top = argparse.ArgumentParser(prog="seqkv", description="Compress a transformer's KV cache by predicting it.")
    top.add_argument("--version", action="version", version=f"seqkv {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=help)
        one.set_defaults(run=run)
        return one

    one = command("calibrate", calibrate, "Fit a profile to a model, once.")
    one.add_argument("model", help=arguments.MODEL)
    one.add_argument("--text", nargs="+", metavar="FILE", help="texts to fit to, instead of the default mixture")
    one.add_argument("--out", required=True, type=Path, metavar="P.safetensors", help="where to write the profile")

    one = command("encode", encode, "Run a model over a text and write its cache as a stream.")
    one.add_argument("model", help=arguments.MODEL)
    one.add_argument("--text", required=True, metavar="FILE")
    one.add_argument(
        "--tokens", type=arguments.positive, metavar="N", help="no more than the first N tokens of the text"
    )
    one.add_argument("--profile", default="none", metavar="P", help=arguments.PROFILE)
    one.add_argument("--out", required=True, type=Path, metavar="S", help="where to write the stream")
    arguments.quality(one)

    one = command("decode", decode, "Read a stream back, and let the model continue from it.")
    one.add_argument("model", help=arguments.MODEL)
    one.add_argument("stream", type=Path)
    one.add_argument("--profile", default="none", metavar="P", help=arguments.PROFILE)
    one.add_argument(
        "--prompt-continue", type=arguments.positive, metavar="N", help="print the N most probable tokens that follow"
    )

    one = command("info", info, "What a stream or a profile holds.")
    one.add_argument("file", type=Path)
    one.add_argument("--json", action="store_true", help="print JSON")

    one = command("eval", evaluate_texts, "Measure size, loss and time on texts.")
    one.add_argument("model", help=arguments.MODEL)
    one.add_argument("--profile", default="none", metavar="P", help=arguments.PROFILE)
    one.add_argument("--text", required=True, nargs="+", metavar="FILE")
    one.add_argument(
        "--context", type=arguments.positive, default=1024, metavar="N", help="tokens whose cache is coded (1024)"
    )
    one.add_argument(
        "--continuation", type=arguments.positive, default=512, metavar="N", help="tokens to predict after it (512)"
    )
    one.add_argument("--offset", type=int, default=0, metavar="N", help="token of the text to start at (0)")
    one.add_argument("--memory", action="store_true", help="measure the peak memory as well (Linux)")
    one.add_argument("--tier", choices=("near", "tokens"), default="near", help="what of the cache is stored (near)")
    one.add_argument("--archive", action="store_true", help="tokens: code them at their surprisal under the model")
    one.add_argument("--json", action="store_true", help="print JSON")
    arguments.quality(one)

    store_cli.add(commands)
    plan_cli.add(commands)

    one = command("gpu-check", check_gpu, "Compare this machine's GPU with the CPU, and measure it.")
    one.add_argument("--out", type=Path, metavar="FILE", help="where to write JSON")
    one.add_argument("--json", action="store_true", help="print JSON")

    one = command("demo", demo, "All of it on SmolLM2-135M: a table, a picture, two continuations.")
    one.add_argument(
        "what",
        nargs="?",
        choices=("rate", "sessions"),
        default="rate",
        help="rate: size against loss, beside plain quantisation (default); sessions: ten that share, in a store",
    )
    one.add_argument("--fresh", action="store_true", help="calibrate even if a profile is in the cache")
    one.add_argument(
        "--out", type=Path, default=Path("seqkv-demo"), metavar="DIR", help="for picture and figures (seqkv-demo)"
    )
    one.add_argument("--store", type=Path, metavar="DIR", help="sessions: a folder where the store is kept")
    return top


def calibrate(args: argparse.Namespace) -> None:
    from seqkv.engine.mixture import default_pieces, split

    arguments.writable(args.out)
    own = [piece for path in args.text or () for piece in split(arguments.text(path))]
    pieces = {"text": own} if args.text else default_pieces()
    start = time.perf_counter()
    with display.progress("calibrating") as report:
        report(0.0, "loading the model")
        source = models.load(args.model)
        profile = engine.calibrate(source, pieces, progress=report)
    profile.save(args.out)
    size, seconds = args.out.stat().st_size, time.perf_counter() - start
    print(f"{args.out}: profile {profile.fingerprint}, {size:,} bytes, in {seconds:.0f} s")


def encode(args: argparse.Namespace) -> None:
    profile = arguments.profile(args.profile)
    arguments.check_quality(args.kl, args.step)
    arguments.writable(args.out)
    with display.progress("encoding") as report:
        report(0.0, "loading the model")
        source = models.load(args.model)
        arguments.check_model(profile, source)
        ids = models.read_ids(source, args.text)[: args.tokens]
        source.context = len(ids)
        report(0.5, f"prefill of {len(ids):,} tokens")
        kv, probs, importance = source.prefill(ids)
        report(0.8, "encoding")
        start = time.perf_counter()
        stream = engine.encode(kv, probs, profile=profile, kl=args.kl, step=args.step, importance=importance)
        seconds = time.perf_counter() - start
    args.out.write_bytes(stream)
    print(
        f"{args.out}: {kv.tokens:,} tokens, {kv.nbytes:,} bytes of {kv.dtype} as {len(stream):,} "
        f"({8 * len(stream) / kv.values_count:.3f} bits/value) in {seconds:.2f} s"
    )


def decode(args: argparse.Namespace) -> None:
    profile = arguments.profile(args.profile)
    stream = args.stream.read_bytes()
    start = time.perf_counter()
    kv = engine.decode(stream, profile=profile)
    print(f"{kv} in {time.perf_counter() - start:.2f} s")
    source = models.load(args.model)
    arguments.check_layers(kv, source, args.stream)
    if args.prompt_continue:
        print(models.continuation(source, engine.token_ids(stream), kv, args.prompt_continue))


def info(args: argparse.Namespace) -> None:
    from seqkv.engine.container import MAGIC

    with args.file.open("rb") as file:
        start = file.read(len(MAGIC))
    if start == MAGIC:
        found = engine.inspect(args.file.read_bytes())
    else:
        found = _describe(engine.Profile.load(args.file)) | {"bytes": args.file.stat().st_size}
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        entries = list(_flat(found))
        width = max(len(name) for name, _ in entries)
        for name, text in entries:
            print(f"{name:<{width}}  {text}")


def evaluate_texts(args: argparse.Namespace) -> None:
    from seqkv import evaluate

    if args.tier == "tokens":
        evaluate_tokens(args)
        return
    if args.archive:
        raise UsageError("--archive belongs to --tier tokens")
    profile = arguments.profile(args.profile)
    arguments.check_quality(args.kl, args.step)
    if args.offset < 0:
        raise UsageError("--offset must not be negative")
    with display.progress("eval") as report:
        report(0.0, "loading the model")
        source = models.load(args.model, args.context, args.continuation)
        arguments.check_model(profile, source)
        length = args.context + args.continuation
        texts = {path: models.read_ids(source, path, args.offset, length) for path in args.text}
        results = []
        for i, (path, ids) in enumerate(texts.items()):
            report(i / len(texts), f"{path}: prefill")
            subject = evaluate.prepare(source, path, ids)
            report((i + 0.5) / len(texts), f"{path}: encode, decode, continue")
            results.append(
                evaluate.measure(source, subject, profile=profile, kl=args.kl, step=args.step, memory=args.memory)
            )
    if args.json:
        setting = {"kl": args.kl} if args.step is None else {"step": args.step}
        heading = {
            "seqkv": __version__,
            "model": args.model,
            "model_fingerprint": source.fingerprint,
            "profile": None if profile is None else profile.fingerprint,
            **setting,
            "context": args.context,
            "continuation": args.continuation,
            "offset": args.offset,
        }
        texts_found = [result.to_dict() for result in results]
        print(json.dumps(heading | {"texts": texts_found, "mean": evaluate.mean(results)}, indent=2))
        return
    columns = ["text", "bytes", "bits/value", f"x {results[0].cache_dtype}", "x fp16", "KL", "top-1"]
    columns += ["prefill", "encode", "decode"] + ["encode peak", "decode peak"] * args.memory
    rows = [
        [
            r.text,
            f"{r.bytes:,}",
            f"{r.bits_per_value:.3f}",
            f"{r.cache_ratio:.1f}",
            f"{r.fp16_ratio:.1f}",
            f"{r.kl:.4f}",
            f"{r.top1:.1%}",
            f"{r.prefill_s:.2f} s",
            f"{r.encode_s:.2f} s (1/{r.prefill_s / r.encode_s:.1f})",
            f"{r.decode_s:.2f} s (1/{r.prefill_s / r.decode_s:.1f})",
            *[_megabytes(r.encode_peak), _megabytes(r.decode_peak)] * args.memory,
        ]
        for r in results
    ]
    title = (
        f"{args.model}: the cache of {args.context:,} tokens; KL (nats) and top-1 over the next {args.continuation:,}"
    )
    display.table(title, columns, rows)


def evaluate_tokens(args: argparse.Namespace) -> None:
    from seqkv.evaluate_tokens import measure

    if args.offset < 0:
        raise UsageError("--offset must not be negative")
    with display.progress("eval") as report:
        report(0.0, "loading the model")
        source = models.load(args.model, args.context)
        texts = {path: models.read_ids(source, path, args.offset, args.context) for path in args.text}
        results = []
        for i, (path, ids) in enumerate(texts.items()):
            report(i / len(texts), f"{path}: encode, decode")
            results.append(measure(source, path, ids, args.archive))
    if args.json:
        heading = {
            "seqkv": __version__,
            "model": args.model,
            "model_fingerprint": source.fingerprint,
            "environment": source.environment,
            "tier": "tokens",
            "archive": args.archive,
            "context": args.context,
            "offset": args.offset,
        }
        print(json.dumps(heading | {"texts": [result.to_dict() for result in results]}, indent=2))
        return
    columns = ["text", "bytes", "bits/token", "cross-entropy", "x fp16", "with digests, header", "exact"]
    columns += ["prefill", "encode", "decode"]
    rows = [
        [
            r.text,
            f"{r.bytes:,}",
            f"{r.bits_per_token:.3f}",
            f"{r.cross_entropy_bits:.3f}",
            f"{r.fp16_ratio:,.0f}",
            f"{r.stream_fp16_ratio:,.0f}",
            "yes" if r.exact else "no",
            *(f"{seconds:.2f} s" for seconds in (r.prefill_s, r.encode_s, r.decode_s)),
        ]
        for r in results
    ]
    display.table(f"{args.model}: {args.context:,} tokens as tokens", columns, rows)


def demo(args: argparse.Namespace) -> None:
    if args.what == "sessions":
        from seqkv import demo_sessions

        demo_sessions.run(args.out, args.fresh, args.store)
        return
    if args.store:
        raise UsageError("--store belongs to seqkv demo sessions")
    from seqkv import demo as demonstration

    demonstration.run(args.out, args.fresh)


def check_gpu(args: argparse.Namespace) -> int:
    from seqkv.cuda_kernels import device

    device.demand()  # before anything is loaded that needs Numba for CUDA
    from seqkv import gpu_check

    if args.out:
        arguments.writable(args.out)
    with display.progress("gpu-check") as report:
        result = gpu_check.run(gpu_check.Effort(), report)
    text = json.dumps(result, indent=2)
    if args.out:
        args.out.write_text(text + "\n")
    if args.json:
        print(text)
    else:
        gpu_check.show(result)
    return 0 if result["ok"] else 1


def _describe(profile: engine.Profile) -> dict[str, Any]:
    from seqkv.engine import quantiser

    return {
        "profile": profile.fingerprint,
        "model": profile.model,
        "layers": len(profile.shape),
        "predictor": profile.predictor,
        "depth": profile.depth,
        "kl_by_step": {
            f"{quantiser.step_size(index):.3g}": float(f"{2**log2_kl:.3g}") for index, log2_kl in profile.curve
        },
        "texts": {name: dict(Counter(profile.info.get(name, ()))) for name in ("fitted", "checked")},
    }


def _flat(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The entries of nested JSON as (name, text)."""
    for name, value in found.items():
        if isinstance(value, dict):
            for inner, text in _flat(value):
                yield f"{name}: {inner}", text
        else:
            yield name, _brief(value)


def _brief(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > 1 and all(other == value[0] for other in value):
        return f"{len(value)} times {_brief(value[0])}"
    return f"{value:,}" if type(value) is int else f"{value:.5g}" if isinstance(value, float) else str(value)


def _megabytes(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e6:.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
