"""A model that generates with `CompressedCache` beside a `DynamicCache`: what is held, how fast, and which tokens.

    python bench/compressed_cache.py smollm2 PROFILE TEXT [--new 1000] [--out bench/results/compressed_cache.json]
    python bench/compressed_cache.py path/to/model.gguf none TEXT ...

MODEL: as the commands of seqkv take it. PROFILE: a file, or "none". From the first --prompt tokens of TEXT, --new
tokens are generated greedily with a DynamicCache. The same tokens then go through a CompressedCache one at a time
(teacher forcing). At each step: is the most probable token the same, and the KL divergence of the prediction, in nats.

What is decoded is kept from step to step, but for every --every steps: there it is dropped, as a cache with
keep_decoded=False does at every step, which gives the bytes and the time of that ("again"; the others are "kept").
share_beyond_window: what coded layers hold without their last `window` tokens, of what a DynamicCache holds of the
tokens before these; in the end, and the most since there were four windows of tokens. Processor seconds, over all
threads, are what is left of seconds on a machine that does other work too.
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
from transformers import DynamicCache

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is measured without installing it

from seqkv import engine, models  # noqa: E402
from seqkv.adapters import huggingface as hf  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("profile")
    parser.add_argument("text", type=Path)
    parser.add_argument("--prompt", type=int, default=24, help="tokens of the text to begin with")
    parser.add_argument("--new", type=int, default=1000, help="tokens to generate")
    parser.add_argument("--kl", type=float, default=0.01)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--every", type=int, default=40, help="steps from one that drops what is decoded to the next")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    source = models.load(options.model)
    model, profile = source.model, None if options.profile == "none" else engine.Profile.load(options.profile)
    ids = torch.as_tensor(models.read_ids(source, options.text)[: options.prompt])[None]
    result: dict[str, Any] = {"model": options.model, "text": options.text.stem, "prompt": options.prompt}
    result |= {"new": options.new, "kl": options.kl, "window": options.window, "profile": profile is not None}
    with torch.inference_mode():
        sequence, logits, plain = original(model, ids, options.new)
        cache = hf.CompressedCache(model, profile=profile, kl=options.kl, window=options.window, keep_decoded=True)
        result |= forced(model, cache, sequence, options.prompt, logits, plain, options.every)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def timed(call: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """What a call gives, and its seconds by the wall and of the processor."""
    seconds, processor = time.perf_counter(), time.process_time()
    out = call()
    return out, (time.perf_counter() - seconds, time.process_time() - processor)


def original(model: Any, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, list[torch.Tensor], list[Any]]:
    """Greedy tokens after `ids`, the logits that chose them, and the seconds of each step."""
    name, seconds, logits, sequence = hf.cache_kwarg(model), [], [], ids
    cache = DynamicCache(config=model.config)
    for _ in range(new):
        recent = sequence[:, cache.get_seq_length() :]
        out, took = timed(lambda recent=recent: model(recent, use_cache=True, **{name: cache}))
        seconds.append(took)
        logits.append(out.logits[0, -1].clone())
        sequence = torch.cat([sequence, logits[-1].argmax().view(1, 1)], dim=1)
    return sequence, logits, seconds


def forced(
    model: Any,
    cache: hf.CompressedCache,
    sequence: torch.Tensor,
    prompt: int,
    logits: list[torch.Tensor],
    plain: list[Any],
    every: int,
) -> dict[str, Any]:
    """The same tokens through `cache`."""
    name, same, divergence, seen = hf.cache_kwarg(model), [], [], 0
    seconds: dict[str, list[Any]] = {"again": [], "kept": []}
    shares: dict[str, list[float]] = {"again": [], "kept": []}
    for step, true in enumerate(logits):
        way = "again" if step % every == every - 1 else "kept"
        if way == "again":
            cache.rest()
            shares[way].append(share(cache, seen))
        ids = sequence[:, seen : max(prompt, seen + 1)]
        out, took = timed(lambda ids=ids: model(ids, use_cache=True, **{name: cache}))
        seconds[way].append([took, plain[step]])
        seen += ids.shape[1]
        mine, expected = (torch.log_softmax(x.float(), -1) for x in (out.logits[0, -1], true))
        same.append(bool(mine.argmax() == expected.argmax()))
        divergence.append(float((expected.exp() * (expected - mine)).sum()))
    shares["kept"].append(share(cache, seen))
    decoded = cache.nbytes
    cache.rest()
    shares["again"].append(share(cache, seen))
    late = slice(4 * cache.window // every, None)
    coded = slice(max(0, cache.window + cache.chunk - prompt), None)  # steps at which some tokens are coded
    result: dict[str, Any] = {"tokens": seen, "bytes_of_streams": cache.past.nbytes}
    for way, held in (("again", cache.nbytes), ("kept", decoded)):
        mine, own = (torch.tensor([pair[i] for pair in seconds[way]]).sum(0) for i in (0, 1))
        result[way] = {
            "bytes": held,
            "share_beyond_window": round(shares[way][-1], 4),
            "slowdown": round(float(mine[0] / own[0]), 2),
            "slowdown_of_processor": round(float(mine[1] / own[1]), 2),
            "seconds_a_step": round(float(mine[0]) / len(seconds[way]), 4),
        }
    result["again"]["most_share_beyond_window"] = round(max(shares["again"][late]), 4)
    result |= {"most_decoded_bytes": cache.most_decoded_nbytes, "same": round(sum(same) / len(same), 4)}
    result["same_where_tokens_are_coded"] = round(sum(same[coded]) / len(same[coded]), 4)
    result["kl_where_tokens_are_coded"] = round(sum(divergence[coded]) / len(divergence[coded]), 5)
    return result


def share(cache: hf.CompressedCache, seen: int) -> float:
    """Of coded layers, what is held beyond the window, of what a DynamicCache would hold of it."""
    layers = cache.coded.values()
    token = sum(x.nbytes // x.shape[2] for layer in layers for x in (layer.keys, layer.values))
    others = [x for place, layer in enumerate(cache.layers) if place not in cache.coded for x in vars(layer).values()]
    held = cache.nbytes - sum(x.untyped_storage().nbytes() for x in others if isinstance(x, torch.Tensor))
    return (held - cache.window * token) / ((seen - cache.window) * token)


if __name__ == "__main__":
    main()
