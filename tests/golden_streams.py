"""The golden streams: caches, what is made of them, and how they are decoded. Their files are in tests/golden/."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv import engine
from seqkv.engine import KVCache, Profile, Rope, TokenProbs

HERE = Path(__file__).parent / "golden"
STEP = 2.0**-9


@dataclass(frozen=True)
class Golden:
    """A stream: the cache that it is of, what `encode` and `decode` take beside it, and whether nothing is lost.

    reference: the golden stream that it is coded against. backend: that it was encoded on.
    """

    cache: str
    options: dict[str, Any]
    profile: bool = True
    model: bool = False
    reference: str | None = None
    backend: str = "cpu"

    @property
    def exact(self) -> bool:
        return "tier" in self.options


GOLDEN = {
    "near": Golden("text", {"step": STEP}),
    "near_cuda": Golden("text", {"step": STEP}, backend="cuda"),
    "free": Golden("long", {"step": 2.0**-4}, profile=False),
    "reference": Golden("known", {"step": STEP}),
    "delta": Golden("session", {"step": STEP}, reference="reference"),
    "lossless": Golden("text", {"tier": "lossless"}),
    "lossless_free": Golden("strange", {"tier": "lossless"}, profile=False),
    "tokens": Golden("counted", {"tier": "tokens"}, profile=False, model=True),
    "archive": Golden("nudged", {"tier": "tokens", "archive": True, "repair": True}, profile=False, model=True),
}


class Counting:
    """A model of the tokens tier in small integers, which all machines compute alike."""

    fingerprint, tokenizer_fingerprint, vocab = "counting", "numbers", 50
    environment: dict[str, Any] = {"library": "integers"}  # noqa: RUF012

    def recompute(self, ids: NDArray[np.int64]) -> KVCache:
        places = np.cumsum(ids)[:, None] + 5 * np.arange(8)
        keys, values = (
            [((places * (factor + layer)) % 17 - 8).astype(np.float32)[None] for layer in (0, 1)] for factor in (3, 5)
        )
        return KVCache(keys, values, dtype="float16")

    def stepper(self) -> Callable[[int], NDArray[np.float32]]:
        def step(token: int) -> NDArray[np.float32]:
            return ((np.arange(self.vocab) * 31 + 7 * token) % 23).astype(np.float32) / 2

        return step


def encoded(golden: Golden, cache: dict[str, Any], profile: Profile) -> bytes:
    """The stream anew. cache: arrays as `caches` has them."""
    kv = kv_of(cache, exact=golden.exact)
    options = golden.options | {"profile": profile if golden.profile else None}
    if golden.model:
        options["model"] = Counting()
    if golden.reference is not None:
        options["reference"] = stream(golden.reference)
    if not golden.exact and golden.profile:
        options["importance"] = cache["importance"]
    return engine.encode(kv.to(golden.backend), TokenProbs.from_tokens(cache["ids"]), **options)


def decoded(golden: Golden, data: bytes, profile: Profile, **options: Any) -> KVCache:
    """What a stream holds, in host memory."""
    options["profile"] = profile if golden.profile else None
    if golden.model:
        options["model"] = Counting()
    if golden.reference is not None:
        options.setdefault("reference", stream(golden.reference))
    return engine.decode(data, **options).to("cpu")


def kv_of(cache: dict[str, Any], exact: bool = False) -> KVCache:
    rope = Rope(cache["inv_freq"]) if "inv_freq" in cache else None
    dtype = str(cache["dtype"])
    return KVCache(cache["keys"], cache["values"], positions=cache["positions"], rope=rope, dtype=dtype, exact=exact)


def stream(name: str) -> bytes:
    return (HERE / f"{name}.skv").read_bytes()


def profile() -> Profile:
    """2 layers of 1 head, keys 8 wide, values 6."""
    return Profile.load(HERE / "profile.safetensors")


def caches() -> dict[str, dict[str, Any]]:
    """name -> ids, keys, values, positions, dtype, and if it has them importance and inv_freq."""
    return _nested("caches")


def expected() -> dict[str, dict[str, Any]]:
    """name of a near stream -> keys and values that it was decoded to."""
    return _nested("decoded")


def about() -> dict[str, Any]:
    """zstd: its version; fingerprint: the profile's; digests: `KVCache.digest` of what the others are decoded to."""
    return json.loads((HERE / "about.json").read_text())


def _nested(name: str) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    with np.load(HERE / f"{name}.npz") as file:
        for key, array in file.items():
            owner, what = key.split(".")
            out.setdefault(owner, {})[what] = array
    return out
