"""The lossless tier on texts: how many times smaller it makes a cache, and how long that takes beside the prefill.

    python bench/lossless.py MODEL PROFILE.safetensors TEXT... [--dtype bfloat16] [--out lossless.json]

For each text the cache of its first 1,024 tokens, computed in float32 and rounded to --dtype, is encoded and decoded
with the profile and without one, and compared bit for bit. Bytes are those of the whole stream. Seconds are the fastest
of --repeats; processor seconds, over all threads, are what is left of them on a machine that does other work too.
Exits with 1 if a cache does not come back.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is measured without installing it

from seqkv import engine, models  # noqa: E402
from seqkv.engine import KVCache, Profile, TokenProbs  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("profile", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    source, profile = models.load(options.model), Profile.load(options.profile)
    results = []
    for path in options.text:
        ids = models.read_ids(source, path)[: source.context]
        kv, _, _ = source.prefill(ids)
        _, prefill = timed(lambda ids=ids: prefilled(source, ids), options.repeats)
        kv = KVCache(kv.keys, kv.values, positions=kv.positions, rope=kv.rope, dtype=options.dtype)
        result = {"text": path.stem, "dtype": options.dtype, "tokens": kv.tokens, "prefill": prefill}
        for name, known in (("profile", profile), ("free", None)):
            result[name] = coded(kv, TokenProbs.from_tokens(ids), known, options.repeats)
            print(json.dumps({"text": path.stem, name: result[name], "prefill": prefill}), flush=True)
        results.append(result)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(r[name]["exact"] for r in results for name in ("profile", "free")) else 1


def prefilled(source: Any, ids: Any) -> None:
    """What a server computes: the cache, and the logits of the last token."""
    with torch.inference_mode():
        source.model(torch.as_tensor(ids)[None], use_cache=True, logits_to_keep=1)


def coded(kv: KVCache, probs: TokenProbs, profile: Profile | None, repeats: int) -> dict[str, Any]:
    """What a cache takes, and how long."""
    stream, encode = timed(lambda: engine.encode(kv, probs, profile=profile, tier="lossless"), repeats)
    out, decode = timed(lambda: engine.decode(stream, profile=profile), repeats)
    exact = out.digest() == kv.digest()
    return {
        "bytes": len(stream),
        "ratio": round(kv.nbytes / len(stream), 4),
        "exact": exact,
        "encode": encode,
        "decode": decode,
    }


def timed(call: Callable[[], Any], repeats: int) -> tuple[Any, dict[str, float]]:
    """What a call returns, and the least seconds that it took, after once that does not count."""
    call()
    wall, processor = [], []
    for _ in range(repeats):
        start, used = time.perf_counter(), time.process_time()
        out = call()
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    return out, {"seconds": round(min(wall), 3), "processor": round(min(processor), 3)}


if __name__ == "__main__":
    sys.exit(main())
