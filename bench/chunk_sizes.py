"""What chunks cost as LMCache cuts a cache, by the size of a chunk, and what is lost.

    python bench/chunk_sizes.py MODEL PROFILE.safetensors TEXT... [--without-tokens OTHER.safetensors] [--out FILE.json]

For each text the cache of its first 1,024 tokens, in bfloat16, is coded in chunks of 256 and in one of 1,024 as
adapters.chunks does it for adapters.lmcache: each alone, without token ids, positions or attention. Bytes are those of
files, everything counted; KL, of the near tier with the profile, is in nats a token over the 512 tokens that follow,
with all chunks decoded, beside the bfloat16 cache. For chunks of 256 it also counts what they cost if tokens, or the
place, or both are not told from layer 0 (and so are wrong), and with another profile, `--without-tokens`.
Exits with 1 if chunks of 256 cost more than 1.3 times what those of 1,024 do, with the profile.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is measured without installing it

from seqkv import engine, models  # noqa: E402
from seqkv.adapters.chunks import ChunkCodec  # noqa: E402
from seqkv.adapters.torch_tensors import to_tensors  # noqa: E402
from seqkv.engine import KVCache, Profile, TokenProbs  # noqa: E402
from seqkv.engine.recognition import Recogniser  # noqa: E402

TOKENS, SIZES, MOST = 1024, (256, 1024), 1.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("profile", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--kl", type=float, default=0.01)
    parser.add_argument("--without-tokens", type=Path, help="a profile of the predictor `layers`")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    source, profile = models.load(options.model), Profile.load(options.profile)
    rope, kl = source.rope, options.kl
    codecs = {
        "near": ChunkCodec(profile, rope=rope, kl=kl),
        "near, no profile": ChunkCodec(head=profile.shape[0][1:], rope=rope, kl=kl),
        "lossless": ChunkCodec(profile, rope=rope, tier="lossless"),
    }
    if options.without_tokens:
        codecs["near, no tokens"] = ChunkCodec(Profile.load(options.without_tokens), rope=rope, kl=kl)
    results = []
    for path in options.text:
        ids = models.read_ids(source, path)[: TOKENS + source.continuation]
        kv, _, _ = source.prefill(ids[:TOKENS])
        kv = KVCache(kv.keys, kv.values, rope=kv.rope, dtype="bfloat16")
        result: dict[str, Any] = {"text": path.stem, "kl": kl, "told": told(profile, kv, ids)}
        result["256 untold"] = untold(profile, kv, ids, kl)
        reference = source.logprobs(ids, kv)
        for name, codec in codecs.items():
            result[name] = {}
            for size in SIZES:
                back, result[name][str(size)] = coded(codec, kv, size)
                if name == "near":
                    lost, kept = source.divergence(ids, back, reference)
                    result[name][str(size)] |= {"KL": lost, "top-1": kept}
            result[name]["ratio"] = result[name]["256"]["bits"] / result[name]["1024"]["bits"]
        print(json.dumps(result), flush=True)
        results.append(result)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["near"]["ratio"] <= MOST for result in results) else 1


def plane(kv: KVCache) -> torch.Tensor:
    """[2, layers, tokens, channels], as LMCache keeps it."""
    return torch.stack([torch.stack([x.transpose(0, 1).flatten(1) for x in side]) for side in to_tensors(kv)])


def coded(codec: ChunkCodec, kv: KVCache, size: int) -> tuple[KVCache, dict[str, Any]]:
    """A cache after it was coded in chunks of this size, and bits a value, of all and of each chunk."""
    whole = plane(kv)
    back, lengths = torch.empty_like(whole), []
    for start in range(0, TOKENS, size):
        part = slice(start, start + size)
        data = codec.encode(whole[:, :, part])
        codec.decode(data, back[:, :, part])
        lengths.append(len(data))
    heads = kv.keys[0].shape[0]
    keys, values = (side.unflatten(-1, (heads, -1)).transpose(1, 2) for side in back)
    bits = [8 * length / (whole.numel() * size / TOKENS) for length in lengths]
    return KVCache(keys, values, rope=kv.rope), {"bits": float(np.mean(bits)), "chunks": bits}


def told(profile: Profile, kv: KVCache, ids: Any) -> dict[str, float]:
    """How much of tokens and of beginnings is told rightly, chunks of 256."""
    right, there, starts = 0, 0, range(0, TOKENS, 256)
    for start in starts:
        found, probs = Recogniser(profile).recognise(cut(kv, start, 0))
        right += int((probs.token_ids == ids[start : start + 256]).sum())
        there += int(found.positions[0] == start)
    return {"tokens": right / TOKENS, "beginnings": there / len(starts)}


def untold(profile: Profile, kv: KVCache, ids: Any, kl: float) -> dict[str, float]:
    """Bits a value of chunks of 256 if tokens or places are known, or are all 0."""
    bits = {}
    for name, tokens, places in (
        ("all known", True, True),
        ("no tokens", False, True),
        ("no places", True, False),
        ("neither", False, False),
    ):
        length = 0
        for start in range(0, TOKENS, 256):
            part = ids[start : start + 256] * (1 if tokens else 0)
            here = cut(kv, start, start if places else 0)
            length += len(engine.encode(here, TokenProbs.from_tokens(part), profile=profile, kl=kl))
        bits[name] = 8 * length / kv.values_count
    return bits


def cut(kv: KVCache, start: int, position: int) -> KVCache:
    """256 tokens, as if they began at a position."""
    part = slice(start, start + 256)
    keys, values = ([x[:, part] for x in side] for side in (kv.keys, kv.values))
    return KVCache(keys, values, positions=np.arange(256) + position, rope=kv.rope, dtype="bfloat16")


if __name__ == "__main__":
    sys.exit(main())
