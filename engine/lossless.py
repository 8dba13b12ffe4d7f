"""The lossless tier: every bit of a cache, without a forward pass of the model.

Blocks are predicted as in the near tier (engine.prediction), from numbers that are exact, so that the encoder knows
them all from the start. What is coded of a number is how far its leading part is from the one expected, in steps about
as large as the prediction's error, with the coder's adaptive contexts; the bits below are noise and stored as they are
(engine.exact_values). What both sides compute is exact (engine.exact_model), and a digest for each layer of each chunk
proves it: a decoder returns the cache, bit for bit, or refuses.

With a profile, blocks are predicted from tokens and from the layers before; without one from the mean of each channel
before rotation. A block of a chunk that this does not make smaller is stored through zstandard.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.cuda_kernels.errors import DeviceError
from seqkv.engine import container
from seqkv.engine.cache import KVCache
from seqkv.engine.container import Container, Section
from seqkv.engine.errors import ProfileError, StreamError, reading
from seqkv.engine.exact_chunk import CHANNELS, NAMES, SYMBOLS, Coded, Stored, as_float32
from seqkv.engine.exact_model import LARGEST_EXPONENT, Model, measured
from seqkv.engine.exact_prediction import Prediction
from seqkv.engine.exact_values import FORMATS
from seqkv.engine.form import NAMES as form_names
from seqkv.engine.form import TOKENS, Form, chunk_bounds, chunks
from seqkv.engine.host import WORKERS
from seqkv.engine.known import plain_ids
from seqkv.engine.modes import stored_profile
from seqkv.engine.near import CHUNK
from seqkv.engine.probs import TokenProbs
from seqkv.engine.profile import Profile

__all__ = ["NAMES", "decode", "encode"]


def encode(kv: KVCache, probs: TokenProbs, profile: Profile | None) -> tuple[dict[str, Any], list[Section]]:
    """Header entries and sections of a cache in host memory.

    ProfileError if a token is not of the profile's model, DeviceError for a cache on a device.
    """
    if kv.backend != "cpu":
        raise DeviceError('the lossless tier codes on the CPU: use backend="cpu", or kv.to("cpu")')
    with ThreadPoolExecutor(WORKERS) as pool:
        channels = measured(kv, pool.map)
        model = Model(kv.shape, channels, profile, pool.map)

        def code(chunk: int) -> list[Section]:
            tokens = slice(*chunk_bounds(chunk, kv.tokens))
            ids = probs.token_ids[tokens]
            prediction = Prediction(model, kv.rope, kv.positions[tokens], ids)
            coded = Coded(model, FORMATS[kv.dtype], len(ids))
            for block in range(len(model.widths)):
                values = _block_of(kv, block, tokens)
                coded.add(block, values, prediction.expected(block))
                prediction.learn(block, as_float32(values))
            return [*coded.sections(chunk), Section(TOKENS, chunk, container.pack(ids.astype(np.uint32)))]

        sections = [Section(CHANNELS, 0, container.pack(channels))]
        for some in pool.map(code, range(chunks(kv.tokens))):
            sections += some
    about: dict[str, Any] = {
        "tier": "lossless",
        "profile": None if profile is None else profile.fingerprint,
        "steps": [],
    }
    return about, sections


def decode(parsed: Container, form: Form, profile: Profile | None, wanted: range, depth: range) -> KVCache:
    """The tokens `wanted` of the layers `depth`. ProfileError for another profile, StreamError on damage."""
    profile = stored_profile(form, profile)
    with reading(NAMES[CHANNELS]):
        channels = container.unpack(parsed.section(CHANNELS), np.int16, shape=(2, form.coefs))
        if np.abs(channels[0].astype(np.int64)).max() > LARGEST_EXPONENT:
            raise StreamError("altered: the scale of a channel is out of range")
    some = range(wanted.start // CHUNK, chunks(wanted.stop))
    for chunk in some:
        with reading(f"chunk {chunk}: {NAMES[SYMBOLS]}"):
            parsed.length(SYMBOLS, chunk)  # before anything of their size is made
    ids, numbers = plain_ids(parsed, form, some), FORMATS[form.dtype]
    kind = np.float16 if form.dtype == "float16" else np.float32
    sides = [
        [np.empty((heads, len(wanted), widths[side]), kind) for heads, *widths in form.shape[depth.start : depth.stop]]
        for side in (0, 1)
    ]
    with ThreadPoolExecutor(WORKERS) as pool:
        model = Model(form.shape, channels, profile, pool.map)

        def code(chunk: int) -> None:
            start, stop = chunk_bounds(chunk, form.tokens)
            try:
                prediction = Prediction(model, form.rope, form.positions[start:stop], ids[start:stop])
            except ProfileError as error:
                raise StreamError(f"chunk {chunk}: {form_names[TOKENS]}: altered: {error}") from error
            with reading(f"chunk {chunk}"):
                restore(chunk, prediction, Stored.read(parsed, model, form, chunk, depth.stop))

        def restore(chunk: int, prediction: Prediction, stored: Stored) -> None:
            start, stop = chunk_bounds(chunk, form.tokens)
            begin, end = max(start, wanted.start), min(stop, wanted.stop)
            for block in range(2 * depth.stop):
                values = numbers.values(stored.block(block, prediction.expected(block)))
                prediction.learn(block, as_float32(values))
                layer, side = divmod(block, 2)
                if layer in depth:
                    out = sides[side][layer - depth.start]
                    heads = values.reshape(len(values), len(out), -1).transpose(1, 0, 2)
                    out[:, begin - wanted.start : end - wanted.start] = heads[:, begin - start : end - start]

        list(pool.map(code, some))
    positions, ropes = form.positions[wanted.start : wanted.stop], form.rope[depth.start : depth.stop]
    return KVCache.of_parts(sides[0], sides[1], form.dtype, positions, ropes, exact=True)


def _block_of(kv: KVCache, block: int, tokens: slice) -> NDArray[Any]:
    """Numbers of a block as they are in the cache, [tokens, channels]."""
    layer, side = divmod(block, 2)
    heads = (kv.values if side else kv.keys)[layer][:, tokens]
    return np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(heads.shape[1], -1)
