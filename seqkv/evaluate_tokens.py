"""What a cache costs as the tokens that it follows from."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv import engine, evaluate
from seqkv.adapters.source import ModelSource
from seqkv.engine.container import Container
from seqkv.engine.form import DIGESTS, TOKEN_IDS


@dataclass(frozen=True)
class TokensResult:
    """What `measure` found.

    bits_per_token: of the coded ids, the end of the coder and its flags too. cross_entropy_bits: the mean of
        -log2 p(token | tokens before) under the model, for the first token log2 of the vocabulary.
    digest_bits_per_token, stream_bits_per_token: of the digests; of the whole stream, its header too.
    fp16_ratio, stream_fp16_ratio: how many times less than 2 bytes for each number of the cache the ids take, and the
        whole stream.
    exact: whether decoding gave the cache again, bit for bit.
    encode_s, decode_s, prefill_s: seconds of one run each; encode makes sure that the model gives the cache again.
    """

    text: str
    tokens: int
    bytes: int
    bits_per_token: float
    cross_entropy_bits: float
    digest_bits_per_token: float
    stream_bits_per_token: float
    fp16_ratio: float
    stream_fp16_ratio: float
    exact: bool
    encode_s: float
    decode_s: float
    prefill_s: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def measure(source: ModelSource, name: str, ids: NDArray[np.int64], archive: bool) -> TokensResult:
    """Encode the cache of the first `source.context` ids as its tokens, decode it, and compare."""
    ids = ids[: source.context]
    prefill_s = evaluate.prefill_seconds(source, ids, repeats=1)
    kv, probs, _ = source.prefill(ids)
    start = time.perf_counter()
    stream = engine.encode(kv, probs, tier="tokens", model=source, archive=archive)
    encoded = time.perf_counter()
    decoded = engine.decode(stream, model=source)
    decode_s = time.perf_counter() - encoded
    parsed = Container.parse(stream)
    coded = parsed.length(TOKEN_IDS)
    return TokensResult(
        text=name,
        tokens=kv.tokens,
        bytes=len(stream),
        bits_per_token=8 * coded / kv.tokens,
        cross_entropy_bits=float(probs.surprisal.mean(dtype=np.float64)),
        digest_bits_per_token=8 * parsed.length(DIGESTS) / kv.tokens,
        stream_bits_per_token=8 * len(stream) / kv.tokens,
        fp16_ratio=2 * kv.values_count / coded,
        stream_fp16_ratio=2 * kv.values_count / len(stream),
        exact=decoded.digest() == kv.digest(),
        encode_s=encoded - start,
        decode_s=decode_s,
        prefill_s=prefill_s,
    )
