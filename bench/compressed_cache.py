"""A model that generates with `CompressedCache`: what is held, how fast it is, and which tokens come out.

    python bench/compressed_cache.py smollm2 PROFILE TEXT [--new 1000] [--out bench/results/compressed_cache.json]
    python bench/compressed_cache.py path/to/model.gguf none TEXT ...

MODEL: as the commands of seqkv take it. PROFILE: a file, or "none". From the first --prompt tokens of TEXT, --new are
generated greedily. The model without any compression then goes over all of them at once (teacher forcing). At each
place that was generated: is the most probable token the same, and the KL divergence of the prediction, in nats.

What is decoded is kept from step to step, but for every --every steps: there it is dropped, as a cache with
keep_decoded=False does at every step, which gives the bytes and the time of that ("again"; the others are "kept"). At
the same places steps are timed with a DynamicCache of the same length.
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
    parser.add_argument("--follow", action="store_true", help="go on with the text itself, not greedily")
    parser.add_argument("--every", type=int, default=40, help="steps from one that drops what is decoded to the next")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    if options.new < options.every:
        parser.error(f"of {options.new} steps none drops what is decoded: --every must be smaller than that")
    source = models.load(options.model)
    model, profile = source.model, None if options.profile == "none" else engine.Profile.load(options.profile)
    ids = torch.as_tensor(models.read_ids(source, options.text)[: options.prompt + options.new])[None]
    result: dict[str, Any] = {"model": Path(options.model).stem, "text": options.text.stem, "prompt": options.prompt}
    result |= {
        "new": options.new,
        "greedy": not options.follow,
        "kl": options.kl,
        "window": options.window,
        "profile": profile is not None,
    }
    with torch.inference_mode():
        cache = hf.CompressedCache(model, profile=profile, kl=options.kl, window=options.window, keep="decoded")
        run = Run(model, cache, ids[:, : options.prompt], options.new, options.every, ids if options.follow else None)
        result |= run.held() | run.compared() | run.slowdown()
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


Seconds = tuple[float, float]  # by the wall, and of the processor


def timed(call: Callable[[], Any]) -> tuple[Any, Seconds]:
    seconds, processor = time.perf_counter(), time.process_time()
    out = call()
    return out, (time.perf_counter() - seconds, time.process_time() - processor)


class Run:
    """Generation, step by step: greedy, or along `text` [1, tokens]."""

    def __init__(
        self,
        model: Any,
        cache: hf.CompressedCache,
        ids: torch.Tensor,
        new: int,
        every: int,
        text: torch.Tensor | None = None,
    ) -> None:
        self.model, self.cache, self.prompt, self.every = model, cache, ids.shape[1], every
        self.name, self.sequence = hf.cache_kwarg(model), ids
        self.logits: list[torch.Tensor] = []
        self.shares: list[float] = []  # where nothing is kept decoded
        self.seconds: dict[str, dict[int, Seconds]] = {"kept": {}, "again": {}}  # of steps, by tokens before
        for step in range(new):
            seen = cache.get_seq_length()
            again = step % every == every - 1
            if again:
                cache.rest()
                self.shares.append(share(cache, seen))
            recent = self.sequence[:, seen:]
            out, took = timed(lambda recent=recent: model(recent, use_cache=True, **{self.name: cache}))
            if step > 0:  # not the prompt
                self.seconds["again" if again else "kept"][seen] = took
            self.logits.append(out.logits[0, -1].clone())
            length = self.sequence.shape[1]
            token = self.logits[-1].argmax().view(1, 1) if text is None else text[:, length : length + 1]
            self.sequence = torch.cat([self.sequence, token], dim=1)

    def held(self) -> dict[str, Any]:
        """Bytes in the end."""
        cache, seen = self.cache, self.cache.get_seq_length()
        kept, of_kept = cache.nbytes, share(cache, seen)
        cache.rest()
        late = self.shares[4 * cache.window // self.every :]
        again = {"bytes": cache.nbytes, "share_beyond_window": round(share(cache, seen), 4)}
        if late:
            again["most_share_beyond_window"] = round(max(late), 4)
        return {
            "tokens": seen,
            "coded": cache.past.stop,
            "bytes_of_streams": cache.past.nbytes,
            "most_decoded_bytes": cache.most_decoded_nbytes,
            "again": again,
            "kept": {"bytes": kept, "share_beyond_window": round(of_kept, 4)},
        }

    def compared(self) -> dict[str, Any]:
        """With the predictions of the uncompressed model for the same tokens."""
        out = self.model(self.sequence[:, :-1], use_cache=True, **{self.name: DynamicCache(config=self.model.config)})
        same, divergence = [], []
        for mine, true in zip(self.logits, out.logits[0, self.prompt - 1 :], strict=True):
            log_mine, log_true = (torch.log_softmax(x.float(), -1) for x in (mine, true))
            same.append(bool(log_mine.argmax() == log_true.argmax()))
            divergence.append(float((log_true.exp() * (log_true - log_mine)).sum()))
        # steps at which some tokens are coded
        coded = slice(max(0, self.cache.window + self.cache.chunk - self.prompt), None)
        return {
            "same": round(sum(same) / len(same), 4),
            "same_where_tokens_are_coded": round(sum(same[coded]) / len(same[coded]), 4),
            "kl_where_tokens_are_coded": round(sum(divergence[coded]) / len(divergence[coded]), 5),
        }

    def slowdown(self) -> dict[str, Any]:
        """Against steps with a DynamicCache that is as long."""
        plain, places = DynamicCache(config=self.model.config), self.seconds["again"]
        token = self.sequence[:, :1]
        steps: list[list[Seconds]] = []
        for seen, again in places.items():
            have = plain.get_seq_length()
            self.model(self.sequence[:, have : seen - 1], use_cache=True, logits_to_keep=1, **{self.name: plain})
            _, own = timed(lambda: self.model(token, use_cache=True, **{self.name: plain}))
            near_by = [self.seconds["kept"][seen + by] for by in (-2, -1, 1) if seen + by in self.seconds["kept"]]
            kept = (sum(s for s, _ in near_by) / len(near_by), sum(p for _, p in near_by) / len(near_by))
            steps.append([own, kept, again])
        wall, processor = (torch.tensor([[way[i] for way in step] for step in steps]).mean(0) for i in (0, 1))
        names = ("dynamic", "kept", "again")
        result: dict[str, Any] = {"steps_timed": len(steps)}
        for what, found in (("seconds", wall), ("processor_seconds", processor)):
            result[f"{what}_a_step"] = {name: round(float(x), 4) for name, x in zip(names, found, strict=True)}
            result[f"slowdown_in_{what}"] = {
                name: round(float(x / found[0]), 2) for name, x in zip(names[1:], found[1:], strict=True)
            }
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
