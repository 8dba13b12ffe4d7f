"""Every bit of a small stream of each kind, flipped: all of them are refused.

Every section that the kind can have is in its stream. The tokens tier is enumerated in test_tokens_tier.py, a stream
with positions of its own and the expectation of tokens in test_codec.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqkv import engine
from seqkv.engine import KVCache, Profile, StreamError, TokenProbs, exact_chunk, form, host, lossless
from seqkv.engine.container import Container
from tests.conftest import LinearModel
from tests.sessions import CausalModel

GOLDEN = Path(__file__).parent / "golden"
STEP = 2.0**-6

Decode = Callable[[bytes], KVCache]


class Inline:
    """A pool without threads: to start them takes longer than to refuse a stream."""

    def __init__(self, workers: int) -> None: ...

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *error: object) -> None: ...

    map = staticmethod(map)


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host, lossless):
        monkeypatch.setattr(module, "ThreadPoolExecutor", Inline)


@pytest.fixture(scope="module")
def golden_profile() -> Profile:
    """2 layers of 1 head, keys 8 wide, values 6."""
    return Profile.load(GOLDEN / "profile.safetensors")


def small(tokens: int, **guise: Any) -> tuple[KVCache, TokenProbs]:
    model = LinearModel(layers=2, heads=1)
    ids = model.tokenize(model.text(3, tokens))
    return model.cache(ids, **guise)[0], TokenProbs.from_tokens(ids)


def kinds(stream: bytes) -> set[int]:
    return {kind for kind, _ in Container.parse(stream).sections}


def all_are_refused(stream: bytes, decode: Decode) -> None:
    decode(stream)
    for bit in range(8 * len(stream)):
        flipped = bytearray(stream)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            decode(bytes(flipped))
        except StreamError:
            continue
        pytest.fail(f"bit {bit} of {8 * len(stream)}")


def test_of_the_near_tier(golden_profile: Profile) -> None:
    stream = (GOLDEN / "near.skv").read_bytes()
    assert kinds(stream) == {form.TOKENS, form.POSITIONS, form.CLASSES, form.CHUNK, form.MEANS}
    all_are_refused(stream, lambda data: engine.decode(data, profile=golden_profile))


def test_of_the_near_tier_without_a_profile() -> None:
    kv, probs = small(6, rope=None)
    stream = engine.encode(kv, probs, step=STEP)
    assert kinds(stream) == {form.TOKENS, form.CLASSES, form.CHUNK, form.CHANNELS, form.SCALES}
    all_are_refused(stream, engine.decode)


def test_of_the_lossless_tier() -> None:
    kv, probs = small(6, rope=None)
    keys = [k.copy() for k in kv.keys]
    keys[1][0, 3, 2] = np.nan
    stream = engine.encode(KVCache(keys, kv.values, dtype="bfloat16", exact=True), probs, tier="lossless")
    assert kinds(stream) == {form.TOKENS, *exact_chunk.NAMES}
    all_are_refused(stream, engine.decode)


def test_of_a_delta_and_of_its_reference(profile: Profile) -> None:
    model = CausalModel()
    texts = model.tokens(0, 64), model.tokens(1, 8)
    known, new = model.session(texts[0]), model.session(np.concatenate([texts[1], texts[0][8:]]))
    behind = engine.encode(known[0], known[1], profile=profile, step=STEP)
    stream = engine.encode(new[0], new[1], profile=profile, step=STEP, reference=behind)
    expected = {form.TOKENS, form.CLASSES, form.CHUNK, form.MEANS, form.DELTA, form.DELTA_MEANS, form.RUNS}
    assert kinds(stream) == expected
    reference = engine.Reference(behind, profile)
    all_are_refused(stream, lambda data: engine.decode(data, profile=profile, reference=reference))
    all_are_refused(behind, lambda data: engine.decode(stream, profile=profile, reference=data))
