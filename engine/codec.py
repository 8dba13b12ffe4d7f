"""Encode and decode: the tiers behind one pair of functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import container, free, importance, near, prediction, quantiser, rate_control
from seqkv.engine.arrays import round_to_bfloat16
from seqkv.engine.cache import ITEM_BYTES, KVCache, Rope
from seqkv.engine.container import Buffer, Container, Section
from seqkv.engine.errors import CacheError, ProbsError, ProfileError, SeqkvError, StreamError
from seqkv.engine.layout import Turns, block_starts, block_widths
from seqkv.engine.probs import TokenProbs
from seqkv.engine.profile import Profile

TOKENS, TOPK_IDS, TOPK_PROBS, POSITIONS, CLASSES, CHUNK, CHANNELS, SCALES = range(1, 9)  # kinds of sections
_NAMES = {
    TOKENS: "token ids",
    TOPK_IDS: "top-k ids",
    TOPK_PROBS: "top-k probabilities",
    POSITIONS: "positions",
    CLASSES: "importance",
    CHUNK: "coefficients",
    CHANNELS: "channel statistics",
    SCALES: "scales",
}
_MOST_TOKENS = 1 << 31

WORKERS = min(4, os.cpu_count() or 1)  # chunks whose symbols are coded at the same time


def encode(
    kv: KVCache,
    probs: TokenProbs,
    *,
    profile: Profile | None = None,
    kl: float = 0.01,
    step: float | None = None,
    importance: Any = None,
) -> bytes:
    """Compress a cache (arXiv 2604.15356, layer 2; near tier).

    kv: the cache of one sequence.
    probs: its tokens and, if known, what the model expected of them.
    profile: of the model, from `calibrate`; None codes without calibration.
    kl: requested loss: mean KL in nats between the model's predictions from the true and from the decoded cache.
    step: quantiser step, instead of kl.
    importance: attention received, [layers, tokens], float, in any unit (the adapters observe it); estimated from the
        cache if not given.

    The same arguments give the same bytes on one machine. Raises CacheError, ProbsError, ProfileError if the arguments
    are bad or do not fit together, ValueError for kl or step out of range.
    """
    rate_control.check(kl, step)
    if probs.tokens != kv.tokens:
        raise ProbsError(f"the cache holds {kv.tokens} tokens, the probabilities are of {probs.tokens}")
    mode = _Calibrated(profile, kv) if profile is not None else _Free.measure(kv)
    index = quantiser.step_index(step) if step is not None else rate_control.step_for(mode.curve, kl)
    header, sections = _near(kv, probs, mode, index, importance)
    requested = None if step is not None else float(kl)
    header["kl"] = {"requested": requested, "expected": _short(rate_control.kl_at(mode.curve, index))}
    return container.write(header, sections)


def decode(
    stream: Buffer, *, profile: Profile | None = None, tokens: slice | None = None, layers: slice | None = None
) -> KVCache:
    """The cache that a stream holds, or a part of it.

    profile: the one it was encoded with, if there was one.
    tokens, layers: only these, as slices without a step; chunks and layers that they do not need are not decoded.

    Raises StreamError if the stream is damaged or not one, ProfileError if the profile is missing or another,
    CacheError if nothing is left of the slices.
    """
    parsed = Container.parse(stream)
    form = _Form(parsed)
    wanted, depth = _range(tokens, form.tokens, "tokens"), _range(layers, len(form.shape), "layers")
    mode = _stored_mode(parsed, form, profile)
    keys = [np.empty((heads, len(wanted), k), form.storage) for heads, k, _ in form.shape[depth.start : depth.stop]]
    values = [np.empty((heads, len(wanted), v), form.storage) for heads, _, v in form.shape[depth.start : depth.stop]]
    probs = _stored_probs(parsed, form, mode.predictor)
    classes = near.unpack_classes(parsed.section(CLASSES), len(form.shape), form.tokens)
    gain = near.gains(mode.gains, classes)
    chunks = range(0 if mode.sequential else wanted.start // near.CHUNK, (wanted.stop - 1) // near.CHUNK + 1)
    coded = len(form.shape) if mode.sequential else depth.stop  # layers that must be decoded

    def unpack(chunk: int) -> tuple[near.Side, NDArray[np.int32], NDArray[np.intp]]:
        try:
            side = _side(mode, probs, gain, form.steps[chunk], *_chunk_bounds(chunk, form.tokens))
        except ProbsError as error:
            raise StreamError(f"altered: {error}") from error
        scale = mode.stored_scale(parsed, chunk, side.step)
        return side, *near.unpack_chunk(scale, mode.starts, side, parsed.section(CHUNK, chunk), coded)

    def store(chunk: int, decoded: NDArray[np.float32]) -> None:
        start, stop = _chunk_bounds(chunk, form.tokens)
        first, last = max(start, wanted.start), min(stop, wanted.stop)
        if first >= last:
            return
        part, place = slice(first - start, last - start), slice(first - wanted.start, last - wanted.start)
        turns = Turns(form.positions[first:last])
        for block in range(2 * depth.start, 2 * depth.stop):
            layer, is_value = divmod(block, 2)
            into = (values if is_value else keys)[layer - depth.start][:, place]
            columns = slice(*mode.starts[block : block + 2])
            turns.to_heads(decoded[part, columns], None if is_value else form.rope[layer], into)
            if form.dtype == "bfloat16":
                into[...] = round_to_bfloat16(into)

    with ThreadPoolExecutor(WORKERS) as pool:
        for some in _batches(chunks):
            blocks = []
            for side, symbols, live in pool.map(unpack, some):
                blocks.append(near.decode_chunk(mode.model(), side, symbols, live, coded))
                mode.learn(blocks[-1])
            list(pool.map(store, some, blocks))
    positions, ropes = form.positions[wanted.start : wanted.stop], form.rope[depth.start : depth.stop]
    try:
        kv = KVCache(keys, values, positions=positions, rope=ropes)
    except CacheError as error:  # numbers that no cache led to
        raise StreamError(f"altered: {error}") from error
    kv.dtype = form.dtype  # rounded above, a chunk at a time: KVCache would need a second copy
    return kv


def inspect(stream: Buffer) -> dict[str, Any]:
    """What a stream says of itself, as JSON-able values; nothing is decoded. StreamError if it is not a stream."""
    parsed = Container.parse(stream)
    form = _Form(parsed)
    parts: dict[str, int] = {}
    for kind, index in parsed.sections:
        name = _NAMES.get(kind, f"section {kind}")
        parts[name] = parts.get(name, 0) + parsed.length(kind, index)
    total = memoryview(stream).nbytes
    parts["header and index"] = total - sum(parts.values())
    count = form.tokens * sum(heads * (k + v) for heads, k, v in form.shape)
    return {
        "version": container.VERSION,
        "tier": parsed.header["tier"],
        "dtype": form.dtype,
        "layers": len(form.shape),
        "shape": form.shape,
        "tokens": form.tokens,
        "values": count,
        "bytes": total,
        "bytes_by_part": parts,
        "bits_per_value": 8 * total / count,
        "ratio": count * ITEM_BYTES[form.dtype] / total,
        "steps": [quantiser.step_size(i) for i in form.steps],
        "kl": parsed.header.get("kl"),
        "loss": parsed.header.get("loss"),
        "profile": form.profile,
    }


class _Calibrated:
    """Coding with a profile: the same model for every chunk."""

    sequential = False

    def __init__(self, profile: Profile, kv: KVCache | None = None) -> None:
        if kv is not None:
            profile.check(kv)
        self.profile = profile
        self.starts, self.gains, self.curve = profile.starts, profile.gains, profile.curve
        self.table, self.predictor = profile.table, profile.predictor

    def model(self) -> near.Model:
        return self.profile

    def learn(self, decoded: NDArray[np.float32]) -> None:
        """Nothing to learn."""

    def attention(self, kv: KVCache) -> NDArray[np.float32]:
        return estimated_attention(kv, self.profile.attention)

    def scale(self, symbols: NDArray[np.int32], chunk: int, step: int) -> tuple[NDArray[np.int16], list[Section]]:
        return self.profile.scale, []

    def stored_scale(self, parsed: Container, chunk: int, step: int) -> NDArray[np.int16]:
        return self.profile.scale

    def sections(self) -> list[Section]:
        return []


class _Free:
    """Coding without a profile (engine.free): each chunk's model is fitted to the chunks before."""

    sequential = True
    predictor = "layers"
    curve = free.CURVE
    table = np.zeros((0, 0), np.float16)

    def __init__(self, shape: tuple[tuple[int, int, int], ...], channels: NDArray[np.int16]) -> None:
        self.widths = block_widths(shape)
        self.starts = block_starts(self.widths)
        self.channels, self.gains = channels, free.gain_table(len(shape))
        self.history = np.zeros((0, self.starts[-1]), np.float32)

    @classmethod
    def measure(cls, kv: KVCache) -> _Free:
        return cls(kv.shape, free.statistics(blocks_of(kv, slice(None)), 2 * kv.layers))

    def model(self) -> near.Model:
        return free.Model(self.widths, self.channels, self.history)

    def learn(self, decoded: NDArray[np.float32]) -> None:
        self.history = np.concatenate([self.history[len(decoded) - free.WINDOW :], decoded])[-free.WINDOW :]

    def attention(self, kv: KVCache) -> NDArray[np.float32]:
        return np.ones((kv.layers, kv.tokens), np.float32)

    def scale(self, symbols: NDArray[np.int32], chunk: int, step: int) -> tuple[NDArray[np.int16], list[Section]]:
        classes = free.scales(symbols)
        return free.places(classes, step), [Section(SCALES, chunk, container.pack(classes))]

    def stored_scale(self, parsed: Container, chunk: int, step: int) -> NDArray[np.int16]:
        stored = container.unpack(parsed.section(SCALES, chunk), np.int8, shape=(int(self.starts[-1]),))
        return free.places(stored, step)

    def sections(self) -> list[Section]:
        return [Section(CHANNELS, 0, container.pack(self.channels))]


_Mode = _Calibrated | _Free


def _stored_mode(parsed: Container, form: _Form, profile: Profile | None) -> _Mode:
    """What a stream was coded with."""
    if form.profile is None:
        total = sum(heads * (k + v) for heads, k, v in form.shape)
        return _Free(form.shape, container.unpack(parsed.section(CHANNELS), np.int16, shape=(2, total)))
    if profile is None or profile.fingerprint != form.profile:
        given = "no profile was given" if profile is None else f"the profile given is {profile.fingerprint}"
        raise ProfileError(f"the stream was encoded with profile {form.profile}, {given}")
    if profile.shape != form.shape:
        raise StreamError("altered: its shape is not its profile's")
    return _Calibrated(profile)


def _near(
    kv: KVCache, probs: TokenProbs, mode: _Mode, index: int, received: Any
) -> tuple[dict[str, Any], list[Section]]:
    """Header and sections of the near tier."""
    attention = mode.attention(kv) if received is None else importance.checked(received, kv.layers, kv.tokens)
    classes = importance.classes(attention)
    gain = near.gains(mode.gains, classes)
    sections = [Section(TOKENS, 0, container.pack(probs.token_ids.astype(np.uint32)))]
    if mode.predictor == "expectation":
        probs = _rounded(probs)
        sections.append(Section(TOPK_IDS, 0, container.pack(probs.topk_ids)))
        sections.append(Section(TOPK_PROBS, 0, container.pack(probs.topk_probs.astype(np.float16))))
    sections += [*mode.sections(), Section(CLASSES, 0, near.pack_classes(classes))]
    loss = near.Loss.none()
    chunks = -(-kv.tokens // near.CHUNK)

    def pack(chunk: int, side: near.Side, symbols: NDArray[np.int32]) -> list[Section]:
        scale, extra = mode.scale(symbols, chunk, index)
        return [*extra, Section(CHUNK, chunk, near.pack_chunk(scale, mode.starts, side, symbols))]

    with ThreadPoolExecutor(WORKERS) as pool:
        for some in _batches(range(chunks)):
            coded = []
            for chunk in some:
                start, stop = _chunk_bounds(chunk, kv.tokens)
                side = _side(mode, probs, gain, index, start, stop)
                symbols, decoded, lost = near.encode_chunk(mode.model(), side, blocks_of(kv, slice(start, stop)))
                mode.learn(decoded)
                loss += lost
                coded.append((chunk, side, symbols))
            for packed in pool.map(pack, *zip(*coded, strict=True)):
                sections += packed
    relative = np.sqrt(loss.error / np.maximum(loss.energy, 1e-30))
    header: dict[str, Any] = {
        "tier": "near",
        "dtype": kv.dtype,
        "tokens": kv.tokens,
        "shape": kv.shape,
        "profile": mode.profile.fingerprint if isinstance(mode, _Calibrated) else None,
        "steps": [index] * chunks,
        "loss": {
            "keys": _short(relative[0]),
            "values": _short(relative[1]),
            "fisher": _short(loss.fisher / loss.tokens),
        },
    }
    header |= _rope_header(kv.rope)
    if (kv.positions == np.arange(kv.tokens)).all():
        header["positions"] = "arange"
    else:
        sections.append(Section(POSITIONS, 0, container.pack(kv.positions)))
    return header, sections


def blocks_of(kv: KVCache, tokens: slice) -> Callable[[int], NDArray[np.float32]]:
    """The blocks of some tokens of a cache: block -> [tokens, channels] float32, keys before rotation."""
    turns = Turns(kv.positions[tokens])

    def values(block: int) -> NDArray[np.float32]:
        layer, is_value = divmod(block, 2)
        if is_value:
            return turns.to_block(kv.values[layer][:, tokens], None)
        return turns.to_block(kv.keys[layer][:, tokens], kv.rope[layer])

    return values


def _batches(chunks: range) -> Iterator[range]:
    """As many chunks at a time as are coded in threads. Linear algebra, which has its own threads, is done between."""
    return (chunks[i : i + WORKERS] for i in range(0, len(chunks), WORKERS))


def estimated_attention(kv: KVCache, weights: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Attention received, [layers, tokens], estimated from keys and values (Profile.attention)."""
    out = np.empty((kv.layers, kv.tokens), np.float32)
    for start in range(0, kv.tokens, near.CHUNK):
        part = slice(start, start + near.CHUNK)
        for layer in range(kv.layers):
            out[layer, part] = attention_features(kv, layer, part) @ weights[layer]
    return np.exp2(np.clip(out, -12, 12))


def attention_features(kv: KVCache, layer: int, tokens: slice) -> NDArray[np.float32]:
    """[tokens, channels + 1]: un-rotated key, value, and 1."""
    values = blocks_of(kv, tokens)
    key, value = values(2 * layer), values(2 * layer + 1)
    return np.concatenate([key, value, np.ones((len(key), 1), np.float32)], axis=1)


class _Form:
    """A stream's header, every entry checked."""

    def __init__(self, parsed: Container) -> None:
        header = parsed.header
        try:
            if header["tier"] != "near":
                raise StreamError(f"tier {header['tier']!r} is not known to this version")
            self.dtype: str = header["dtype"]
            self.storage = np.dtype({"float32": "f4", "float16": "f2", "bfloat16": "f4"}[self.dtype])
            self.tokens = _count(header["tokens"], _MOST_TOKENS)
            self.shape = tuple((_count(h), _count(k), _count(v)) for h, k, v in header["shape"])
            self.profile: str | None = header["profile"]
            self.steps = [int(i) for i in header["steps"]]
            ropes = [None if r is None else Rope.from_dict(r) for r in header["ropes"]]
            self.rope = [ropes[i] for i in header["rope"]] if len(ropes) > 1 else ropes * len(self.shape)
            self._check()  # before anything of their size is made
            if header.get("positions") == "arange":
                self.positions = np.arange(self.tokens, dtype=np.int64)
            else:
                self.positions = container.unpack(parsed.section(POSITIONS), np.int64, shape=(self.tokens,))
        except StreamError:
            raise
        except (SeqkvError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise StreamError(f"altered: the header cannot be understood: {error!r}") from error
        if (self.positions[1:] <= self.positions[:-1]).any() or self.positions[0] < 0:
            raise StreamError("altered: positions do not increase")

    def _check(self) -> None:
        """StreamError unless the numbers fit together."""
        chunks = -(-self.tokens // near.CHUNK)
        fine = all(rate_control.COARSEST <= i <= rate_control.FINEST for i in self.steps)
        if not self.shape or len(self.rope) != len(self.shape) or len(self.steps) != chunks or not fine:
            raise StreamError("altered: the header contradicts itself")
        for rope, (_, width, _) in zip(self.rope, self.shape, strict=True):
            # the compiled rotation does not check its indices
            if rope is not None and rope.rotary_dim > width:
                raise StreamError(f"altered: a rope turns {rope.rotary_dim} channels, the keys have {width}")


def _count(value: Any, most: int = 1 << 20) -> int:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise StreamError(f"altered: {value!r} where a number from 1 to {most} is expected")
    return value


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None


def _rope_header(ropes: list[Rope | None]) -> dict[str, Any]:
    """The distinct ropes, and if there are several which layer has which."""
    distinct = list(dict.fromkeys(ropes))
    header: dict[str, Any] = {"ropes": [None if r is None else r.to_dict() for r in distinct]}
    if len(distinct) > 1:
        header["rope"] = [distinct.index(r) for r in ropes]
    return header


def _rounded(probs: TokenProbs) -> TokenProbs:
    """As the decoder will read them."""
    rounded = probs.topk_probs.astype(np.float16).astype(np.float32)
    return TokenProbs(probs.token_ids, probs.topk_ids, np.minimum(rounded, 1.0), probs.surprisal)


def _stored_probs(parsed: Container, form: _Form, predictor: str) -> TokenProbs:
    ids = container.unpack(parsed.section(TOKENS), np.uint32, shape=(form.tokens,))
    try:
        if predictor != "expectation":
            return TokenProbs.from_tokens(ids)
        topk = container.unpack(parsed.section(TOPK_IDS), np.int32, max_items=form.tokens * 1024)
        rows = container.unpack(parsed.section(TOPK_PROBS), np.float16, shape=topk.shape).astype(np.float32)
        return TokenProbs(ids, topk, rows, np.zeros(form.tokens, np.float32))
    except ProbsError as error:
        raise StreamError(f"altered: {error}") from error


def _side(mode: _Mode, probs: TokenProbs, gain: NDArray[np.int8], step: int, start: int, stop: int) -> near.Side:
    part = TokenProbs(
        probs.token_ids[start:stop],
        probs.topk_ids[start:stop],
        probs.topk_probs[start:stop],
        probs.surprisal[start:stop],
    )
    rows, index = prediction.token_rows(mode.table, part, mode.predictor)
    return near.Side(rows, index, np.ascontiguousarray(gain[:, start:stop]), step, first=start == 0)


def _chunk_bounds(chunk: int, tokens: int) -> tuple[int, int]:
    return chunk * near.CHUNK, min((chunk + 1) * near.CHUNK, tokens)


def _range(part: slice | None, size: int, what: str) -> range:
    if part is not None and part.step not in (None, 1):
        raise ValueError(f"{what}: a slice without a step is needed")
    out = range(size)[part] if part is not None else range(size)
    if len(out) == 0:
        raise CacheError(f"nothing is left: {what} {part} of {size}")
    return out
