"""Small streams that ask for a lot: checksums are right, and sections are there and of the shape that is said."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import safetensors.numpy
import zstandard

from seqkv.engine import KVCache, TokenProbs, container, encode, exact_chunk, form, near
from seqkv.engine.container import Container, Section, pack
from seqkv.entropy_coding import encode_group
from seqkv.entropy_coding.intervals import MOST_SYMBOLS

Shape = list[list[int]]
EMPTY_GROUP = np.full(32, 1 << 16, "<u4").tobytes()


def header(tier: str, shape: Shape, layers: int, tokens: int, **entries: Any) -> dict[str, Any]:
    steps = [0] * form.chunks(tokens) if tier == "near" else []
    said = {"tier": tier, "dtype": "float32", "tokens": tokens, "shape": shape, "layers": layers, "steps": steps}
    return said | {"ropes": [None], "positions": "arange", "profile": None} | entries


def near_stream(shape: Shape, layers: int, tokens: int, profile: str | None = None) -> bytes:
    """Of zeros, without a profile, or with one whose shape this is."""
    coefs = layers * sum(heads * (key + value) for heads, key, value in shape)
    depth = layers * len(shape)
    sections = [] if profile is not None else [Section(form.CHANNELS, 0, pack(np.zeros((2, coefs), np.int16)))]
    bits = zstandard.ZstdCompressor(level=19).compress(bytes(-(-coefs // 8)))
    zeros = len(bits).to_bytes(4, "little") + bits + EMPTY_GROUP
    for chunk in range(form.chunks(tokens)):
        start, stop = form.chunk_bounds(chunk, tokens)
        count = stop - start
        # half a million of them are too many to be coded here, and to be read
        small = depth * count < 1 << 19
        classes = near.pack_classes(np.full((depth, count), 10, np.uint8)) if small else EMPTY_GROUP
        sections.append(Section(form.TOKENS, chunk, pack(np.zeros(count, np.uint32))))
        sections.append(Section(form.CLASSES, chunk, classes))
        sections.append(Section(form.CHUNK, chunk, zeros))
        if profile is None:
            sections.append(Section(form.SCALES, chunk, pack(np.zeros(coefs, np.int8))))
        else:
            sections.append(Section(form.MEANS, chunk, zeros))
    return container.write(header("near", shape, layers, tokens, profile=profile), sections)


def lossless_stream(shape: Shape, layers: int, tokens: int) -> bytes:
    """Of plain blocks of zeros."""
    widths = [heads * width for heads, *sides in shape for width in sides] * layers
    sections = [Section(exact_chunk.CHANNELS, 0, pack(np.zeros((2, sum(widths)), np.int16)))]
    blocks: dict[int, bytes] = {}
    for chunk in range(form.chunks(tokens)):
        start, stop = form.chunk_bounds(chunk, tokens)
        count = stop - start
        for width in set(widths):
            blocks[width] = zstandard.ZstdCompressor(level=19).compress(bytes(4 * width * count))
        some = [blocks[width] for width in widths]
        nothing = [0] * (len(widths) + 1)
        group = encode_group(np.zeros((count, 0), np.int32), [], np.zeros((count, len(widths)), np.int16), nothing)
        sections += [
            Section(form.TOKENS, chunk, pack(np.zeros(count, np.uint32))),
            Section(exact_chunk.GRIDS, chunk, pack(np.zeros(sum(widths), np.int8))),
            Section(exact_chunk.SIZES, chunk, pack(-np.array([len(b) for b in some], np.int64))),
            Section(exact_chunk.SYMBOLS, chunk, group),
            Section(exact_chunk.BITS, chunk, b"".join(some)),
            Section(exact_chunk.DIGESTS, chunk, pack(np.zeros(len(widths) // 2, np.uint64))),
        ]
    return container.write(header("lossless", shape, layers, tokens), sections)


def tokens_stream(layers: int, tokens: int, vocab: int) -> bytes:
    digests = bytes(form.SEAL + form.chunks(tokens) * (1 + layers))
    sections = [Section(form.TOKEN_IDS, 0, b""), Section(form.DIGESTS, 0, digests)]
    return container.write(header("tokens", [[2, 8, 8]], layers, tokens, vocab=vocab), sections)


def profile_file(shape: Shape, depth: int = 1) -> bytes:
    """Of a shape that it has no tensors for."""
    form = {"format": 0, "model": "", "shape": shape, "predictor": "layers", "depth": depth, "info": {}}
    form |= {"fingerprint": "", "rest": ""}
    names = ["bias", "sink_bias", "exponent", "scale", "gains", "curve", "table"]
    names += [f"{kind}.{i}" for i in range(2 * len(shape)) for kind in ("weights", "inverse", "attention")]
    tensors = {name: np.zeros((0, 2), np.float16) for name in names}
    return safetensors.numpy.save(tensors, metadata={"seqkv": json.dumps(form)})


def packed_ids() -> bytes:
    """Right token ids, of a cache of zeros."""
    zeros = KVCache(np.zeros((1, 1, 3, 2), np.float32), np.zeros((1, 1, 3, 2), np.float32))
    return encode(zeros, TokenProbs.from_tokens([1, 2, 3]), tier="tokens")


def bare(tier: str, shape: Shape, layers: int, tokens: int, **entries: Any) -> bytes:
    """Nothing but a header."""
    return container.write(header(tier, shape, layers, tokens, **entries), [])


def padded(stream: bytes, size: int) -> bytes:
    """Of that many bytes, with a section that is not looked at."""
    parsed = Container.parse(stream)
    sections = [Section(k, i, parsed.section(k, i)) for k, i in parsed.sections]
    missing = size - len(container.write(parsed.header, [*sections, Section(250, 0, bytes(200))])) + 200
    return container.write(parsed.header, [*sections, Section(250, 0, bytes(max(missing, 0)))])


def largest(tier: str, layers: int, tokens: int, size: int = 990) -> tuple[Shape, int, int]:
    """The widest shape of as many layers that a stream of that size can have without a profile."""
    width = 1
    while form.least_bytes(((1, width + 1, width + 1),) * layers, tokens, tier, None) <= size:
        width += 1
    return [[1, width, width]], layers, tokens


REFUSED = "cannot hold"
STREAMS: dict[str, tuple[bytes, str]] = {
    "near, width 2^12": (near_stream([[1, 1 << 12, 1 << 12]], 1, 256), REFUSED),
    "near, width 2^20": (near_stream([[1, 1 << 20, 1 << 20]], 1, 1), REFUSED),
    "near, one wide layer of many chunks": (near_stream([[1, 1 << 13, 1]], 1, 257), REFUSED),
    "near, 2^12 layers": (near_stream([[8, 128, 128]], 1 << 12, 1), REFUSED),
    "near, 2^20 layers": (near_stream([[1, 1, 1]], 1 << 20, 1), "layers: 1048576"),
    "near, 80 layers of 8 heads": (near_stream([[8, 128, 128]], 80, 256), REFUSED),
    "near, 2^31 tokens": (bare("near", [[1, 1, 1]], 1, 1 << 31, steps=[0]), REFUSED),
    "near, of a profile": (near_stream([[8, 128, 128]], 80, 256, profile="0" * 32), REFUSED),
    "near, of a reference": (
        bare("near", [[8, 128, 128]], 80, 256, profile="0" * 32, reference="0" * 32, depth=1),
        REFUSED,
    ),
    "lossless, width 2^20": (lossless_stream([[1, 1 << 20, 1 << 20]], 1, 1), REFUSED),
    "lossless, 2^12 layers": (bare("lossless", [[8, 128, 128]], 1 << 12, 1), REFUSED),
    "lossless, 2^20 layers": (bare("lossless", [[1, 1, 1]], 1 << 20, 1), "layers: 1048576"),
    "lossless, 80 layers of 8 heads": (lossless_stream([[8, 128, 128]], 80, 256), REFUSED),
    "lossless, 2^31 tokens": (bare("lossless", [[1, 1, 1]], 1, 1 << 31), REFUSED),
    "tokens, 2^20 ids": (tokens_stream(3, 256, MOST_SYMBOLS), "token ids: altered"),
    "tokens, 2^22 ids": (tokens_stream(3, 256, 1 << 22), "vocab"),
    "tokens, many layers": (tokens_stream(900, 1, 300), "token ids: altered"),
    "tokens, 2^20 layers": (bare("tokens", [[1, 1, 1]], 1 << 20, 1, vocab=9), "layers: 1048576"),
    "tokens, many tokens": (tokens_stream(1, 100_000, 300), "token ids: altered"),
    "tokens, 2^31 tokens": (bare("tokens", [[1, 1, 1]], 1, 1 << 31, vocab=9), "no section 41/0"),
}
"""Streams, and what a refusal of each says."""
LARGEST: dict[str, bytes] = {
    f"{tier}, {layers} layers, {tokens} tokens": padded(make(*largest(tier, layers, tokens)), 1000)
    for tier, make in (("near", near_stream), ("lossless", lossless_stream))
    for layers, tokens in ((1, 1), (1, 256), (1, 257), (2, 257), (4, 300), (1, 600), (20, 32), (2000, 32))
}
"""Those that a stream of 1,000 bytes may just say, if its sections were smaller."""
PROFILES = {"profile, wide": profile_file([[1 << 20] * 3]), "profile, layers": profile_file([[1, 1, 1]] * 4)}
