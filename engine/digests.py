"""Digests of a cache, for each chunk and layer: what tells whether another one is equal to it bit for bit.

The stream keeps the first byte of each, and the xxh3_128 of all of them in full, the seal: nothing that differs passes,
and the first bytes say where it begins to differ (but for one case in 256).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from seqkv.engine.cache import KVCache
from seqkv.engine.container import Container
from seqkv.engine.errors import reading
from seqkv.engine.form import DIGESTS, NAMES, SEAL, Form, chunk_bounds, chunks


def digests(kv: KVCache, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """xxh3_128 of each chunk's ids, then of the exact bits of its keys and values in each layer, in the cache's dtype:
    [chunks, 1 + layers, 16]. kv: in host memory."""
    out = np.empty((chunks(kv.tokens), 1 + kv.layers, 16), np.uint8)
    for chunk in range(len(out)):
        part = slice(*chunk_bounds(chunk, kv.tokens))
        out[chunk, 0] = of_ids(ids[part])
        for layer, sides in enumerate(zip(kv.keys, kv.values, strict=True)):
            state = xxhash.xxh3_128()
            for array in sides:
                raw = bits_of(array[:, part], kv.dtype)
                state.update(raw.astype(raw.dtype.newbyteorder("<"), copy=False).view(np.uint8).data)
            out[chunk, 1 + layer] = np.frombuffer(state.digest(), np.uint8)
    return out


def bits_of(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The bits of a cache's numbers, uint16 or uint32, contiguous. array: as a KVCache in host memory has it."""
    raw = np.ascontiguousarray(array).view(np.uint16 if dtype == "float16" else np.uint32)
    return (raw >> np.uint32(16)).astype(np.uint16) if dtype == "bfloat16" else raw


def of_ids(ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The digest of a chunk's ids, [16]."""
    return np.frombuffer(xxhash.xxh3_128_digest(ids.astype("<i8").tobytes()), np.uint8)


def stored(found: NDArray[np.uint8]) -> bytes:
    """What the stream keeps of digests."""
    return xxhash.xxh3_128_digest(found.tobytes()) + found[:, :, 0].tobytes()


def read(parsed: Container, form: Form) -> tuple[bytes, NDArray[np.uint8]]:
    """What a stream kept: all of it, and the first bytes of the digests, [chunks, 1 + layers]."""
    with reading(NAMES[DIGESTS]):
        kept = bytes(parsed.section(DIGESTS))
    return kept, np.frombuffer(kept, np.uint8, offset=SEAL).reshape(chunks(form.tokens), 1 + len(form.shape))


def difference(kept: bytes, found: NDArray[np.uint8]) -> str | None:
    """Where digests are not the ones that were stored, in words; None if all are."""
    if stored(found) == kept:
        return None
    places = np.argwhere(np.frombuffer(kept, np.uint8, offset=SEAL).reshape(found.shape[:2]) != found[:, :, 0])
    if len(places) == 0:
        return "somewhere: only the seal over all digests tells"
    chunk, layer = (int(i) for i in places[0])
    return f"in chunk {chunk}" + (f", layer {layer - 1}" if layer else ": its token ids")
