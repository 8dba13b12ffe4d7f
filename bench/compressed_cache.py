"""A model that generates with `CompressedCache`: what is held, how fast it is, and which tokens come out.

    python bench/compressed_cache.py smollm2 PROFILE TEXT [--new 1000] [--out bench/results/compressed_cache.json]
    python bench/compressed_cache.py path/to/model.gguf none TEXT ...

MODEL: as the commands of seqkv take it. PROFILE: a file, or "none". From the first --prompt tokens of TEXT, --new are
generated greedily, one at a time. Then the model goes over the same tokens in the same steps with a DynamicCache. Of
each step: is the most probable token the same, and the KL divergence of the prediction, in nats; and how long did it
take. slowdown: all steps after the prompt together, those in which tokens were coded too.
share_beyond_window: what coded layers hold without their last `window` tokens, of what a DynamicCache holds of the
tokens before these; in the end, and the most since there were four windows of tokens. Processor seconds are over all
threads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
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
    parser.add_argument("--follow", action="store_true", help="go on with the text itself, not greedily")
    parser.add_argument("--keep", default="compact", help="compact, streams or decoded, as CompressedCache takes it")
    parser.add_argument("--threads", type=int, help="of PyTorch; as many as it takes by itself")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    source = models.load(options.model)
    model, profile = source.model, None if options.profile == "none" else engine.Profile.load(options.profile)
    ids = torch.as_tensor(models.read_ids(source, options.text)[: options.prompt + options.new])[None]
    result: dict[str, Any] = {"model": Path(options.model).stem, "text": options.text.stem, "prompt": options.prompt}
    result |= {"new": options.new, "greedy": not options.follow, "kl": options.kl, "window": options.window}
    result |= {"profile": profile is not None, "keep": options.keep, "threads": torch.get_num_threads()}
    with torch.inference_mode():

        def cache_of(window: int) -> hf.CompressedCache:
            return hf.CompressedCache(model, profile=profile, kl=options.kl, window=window, keep=options.keep)

        Run(model, cache_of(16), ids[:, :1], 60)  # what is compiled when it is first called
        cache, text = cache_of(options.window), ids if options.follow else None
        mine = Run(model, cache, ids[:, : options.prompt], options.new, text)
        plain = Run(model, DynamicCache(config=model.config), ids[:, : options.prompt], options.new, mine.sequence)
        result |= mine.held(cache) | compared(cache, mine, plain) | slowdown(mine, plain)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


class Run:
    """Generation, step by step: greedy, or along `text` [1, tokens].

    Attributes: sequence [1, tokens]; logits of each step; seconds of each step, by the wall and of the processor.
    """

    def __init__(self, model: Any, cache: Any, ids: torch.Tensor, new: int, text: torch.Tensor | None = None) -> None:
        self.sequence, self.logits, self.seconds = ids, [], []
        self.shares: list[float] = []
        name = hf.cache_kwarg(model)
        for step in range(new):
            seen, wall, processor = cache.get_seq_length(), time.perf_counter(), time.process_time()
            out = model(self.sequence[:, seen:], use_cache=True, **{name: cache})
            self.seconds.append((time.perf_counter() - wall, time.process_time() - processor))
            self.logits.append(out.logits[0, -1].clone())
            length = self.sequence.shape[1]
            token = self.logits[-1].argmax().view(1, 1) if text is None else text[:, length : length + 1]
            self.sequence = torch.cat([self.sequence, token], dim=1)
            if isinstance(cache, hf.CompressedCache) and cache.past.stop:
                self.shares.append(share(cache, cache.get_seq_length()))
            if sys.stderr.isatty():
                print(f"\r{type(cache).__name__}: {step + 1} of {new} steps", end="", file=sys.stderr)

    def held(self, cache: hf.CompressedCache) -> dict[str, Any]:
        """Bytes in the end."""
        late = self.shares[3 * cache.window :]
        return {
            "tokens": cache.get_seq_length(),
            "coded": cache.past.stop,
            "bytes": cache.nbytes,
            "bytes_of_the_past": cache.past.nbytes,
            "most_bytes_beside": cache.most_decoded_nbytes,
            "share_beyond_window": round(self.shares[-1], 4),
            "most_share_beyond_window": round(max(late or self.shares), 4),
        }


def compared(cache: hf.CompressedCache, mine: Run, plain: Run) -> dict[str, Any]:
    """With the predictions of the uncompressed model for the same tokens."""
    same, divergence = [], []
    for one, other in zip(mine.logits, plain.logits, strict=True):
        log_mine, log_true = (torch.log_softmax(x.float(), -1) for x in (one, other))
        same.append(bool(log_mine.argmax() == log_true.argmax()))
        divergence.append(float((log_true.exp() * (log_true - log_mine)).sum()))
    # steps at which some tokens are coded
    coded = slice(max(0, cache.window + cache.chunk - (mine.sequence.shape[1] - len(mine.logits))), None)
    return {
        "same": round(sum(same) / len(same), 4),
        "same_where_tokens_are_coded": round(sum(same[coded]) / len(same[coded]), 4),
        "kl_where_tokens_are_coded": round(sum(divergence[coded]) / len(divergence[coded]), 5),
    }


def slowdown(mine: Run, plain: Run) -> dict[str, Any]:
    """Of the steps after the prompt."""
    result: dict[str, Any] = {}
    for i, what in enumerate(("seconds", "processor_seconds")):
        own, dynamic = (sum(step[i] for step in run.seconds[1:]) / len(run.seconds[1:]) for run in (mine, plain))
        result[f"{what}_a_step"] = {"compressed": round(own, 4), "dynamic": round(dynamic, 4)}
        result[f"slowdown_in_{what}"] = round(own / dynamic, 3)
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
