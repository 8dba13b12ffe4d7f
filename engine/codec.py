"""Encode and decode: the tiers behind one pair of functions, on the CPU or on a CUDA device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from seqkv.cuda_kernels.errors import DeviceError
from seqkv.engine import container, importance, lossless, near, quantiser, rate_control, tokens_tier
from seqkv.engine.arrays import current
from seqkv.engine.cache import ITEM_BYTES, KVCache
from seqkv.engine.container import Buffer, Container, Section
from seqkv.engine.errors import CacheError, ProbsError, StreamError, reading
from seqkv.engine.form import (
    MOST_LAYERS,
    NAMES,
    TIERS,
    TOKENS,
    TOPK_IDS,
    TOPK_PROBS,
    Form,
    chunks,
    describe,
    write_padded,
)
from seqkv.engine.host import needed
from seqkv.engine.id_coding import Model
from seqkv.engine.known import Known, plain_ids
from seqkv.engine.modes import Calibrated, Free, Mode, stored_mode
from seqkv.engine.probs import TokenProbs
from seqkv.engine.profile import Profile, check_kind
from seqkv.engine.reference import Aligned, Reference
from seqkv.engine.sharing import Shared
from seqkv.engine.target import Target

Backend = Literal["cpu", "cuda"]
Measure = Callable[[KVCache], float]


def encode(
    kv: KVCache,
    probs: TokenProbs,
    *,
    tier: Literal["near", "lossless", "tokens"] = "near",
    profile: Profile | None = None,
    kl: float = 0.01,
    step: float | None = None,
    bits: float | None = None,
    measure: Measure | None = None,
    importance: Any = None,
    reference: Any = None,
    model: Model | None = None,
    archive: bool = False,
    repair: bool = False,
    backend: Backend | None = None,
) -> bytes:
    """Compress a cache (arXiv 2604.15356, layer 2).

    kv: the cache of one sequence.
    probs: its tokens and, if known, what the model expected of them.
    tier: "near" loses what was asked for. "lossless" keeps every bit, without running the model. "tokens" keeps the
        tokens, and proof of the cache that a model gives for them.
    profile: of the model, from `calibrate`; None codes without calibration.
    kl: requested loss: mean KL in nats between the model's predictions from the true and from the decoded cache.
    step: quantiser step, instead of kl.
    bits: a value at the most, all bytes counted, instead of kl: the finest step that takes no more. A few encodings.
    measure: gives what a decoded cache loses, in nats, by running the model. Then a step is looked for at which that is
        at most kl, and the stream says what it was; without, the step is what texts of calibration needed.
    importance: attention received, [layers, tokens], float, in any unit (the adapters observe it); estimated from the
        cache if not given, at a finer step for the same kl.
    reference: another session's stream of the same profile, or an engine.Reference. What both begin with is copied;
        where it holds the same tokens later, at whatever place, only what differs is coded, and the stream needs it to
        be decoded. Coded on the CPU.
    model, archive, repair: of the tokens tier, see tokens_tier.encode: an adapter's model, whether ids are coded at
        their surprisal, and whether to keep what makes a recomputed cache this one.
    backend: "cuda" codes on the current CUDA device and stream, "cpu" on the CPU; where the cache is if not given.
        A cache on a device is not copied to the host, but for `backend="cpu"`.

    The same arguments give the same bytes on one machine. Raises CacheError, ProbsError, ProfileError if the arguments
    are bad or do not fit together, ValueError for kl or step out of range, DeviceError if there is no device.
    """
    if tier not in TIERS:
        raise ValueError(f'tier must be "near", "lossless" or "tokens", not {tier!r}')
    if measure is not None and (tier != "near" or step is not None or bits is not None):
        raise ValueError('measure is of tier="near", to reach a kl')
    if bits is not None and tier != "near":
        raise ValueError('bits are of tier="near"')
    if reference is not None and tier != "near":
        raise ValueError('a reference is of tier="near"')
    if tier != "tokens" and (model is not None or archive or repair):
        raise ValueError('model, archive and repair are of tier="tokens"')
    if probs.tokens != kv.tokens:
        raise ProbsError(
            f"the cache holds {kv.tokens} tokens, the probabilities are of {probs.tokens}: give those of the same"
        )
    if kv.layers > MOST_LAYERS:
        raise CacheError(f"the cache has {kv.layers} layers, a stream at most {MOST_LAYERS}: encode a part at a time")
    if tier == "tokens":
        return container.write(*tokens_tier.encode(kv, probs.token_ids, model=model, archive=archive, repair=repair))
    check_kind(profile)
    if profile is not None:
        profile.check(kv)
    header, positions = describe(kv)
    if tier == "lossless":
        entries, sections = lossless.encode(kv.to("cpu"), probs, profile)
        return write_padded(header | entries, sections + positions)
    rate_control.check(kl, step, bits)
    if kv.exact:
        kv.check_finite()
    if reference is not None:
        if profile is None or profile.predictor == "expectation":
            raise ValueError("a reference needs a profile, of another predictor than the expectation")
        reference, backend = Reference.of(reference, profile), "cpu"
    where = _where(backend or kv.backend)
    kv = kv.to(backend or kv.backend)
    with current(kv.keys[0]):
        mode: Mode = Free.measure(kv, where.blocks_of) if profile is None else Calibrated(profile)
        classes, curve = _classes(kv, mode, importance, where), mode.curve
        if importance is None and profile is not None:
            curve = rate_control.without_importance(curve)

        def at(index: int) -> tuple[dict[str, Any], list[Section]]:
            mode.begin()
            entries, sections = _near(kv, probs, mode, index, classes, reference, where)
            requested = float(kl) if step is None and bits is None else None
            about = {"requested": requested, "expected": _short(rate_control.kl_at(curve, index))}
            return header | entries | {"kl": about}, sections + positions

        if step is not None:
            return write_padded(*at(quantiser.step_index(step)))
        if bits is not None:
            streams: dict[int, bytes] = {}

            def take(index: int) -> float:
                streams[index] = write_padded(*at(index))
                return 8 * len(streams[index]) / kv.values_count

            return streams[rate_control.search_bits(curve, bits, take)]
        if measure is None:
            return write_padded(*at(rate_control.step_for(curve, kl)))
        tried: dict[int, tuple[dict[str, Any], list[Section]]] = {}

        def attempt(index: int) -> float:
            tried[index] = at(index)
            stream = write_padded(*tried[index])
            lost = float(measure(decode(stream, profile=profile, reference=reference, backend=backend or kv.backend)))
            tried[index][0]["kl"]["measured"] = _short(lost)
            return lost

        return write_padded(*tried[rate_control.search(curve, kl, attempt)])


def decode(
    stream: Buffer,
    *,
    profile: Profile | None = None,
    reference: Any = None,
    model: Model | None = None,
    tokens: slice | None = None,
    layers: slice | None = None,
    backend: Backend = "cpu",
) -> KVCache:
    """The cache that a stream holds, or a part of it.

    profile: the one it was encoded with, if there was one.
    reference: what it was coded against, if it was (`inspect` tells): a stream, an engine.Reference, or a function that
        returns the stream of a key.
    model: for the tokens tier: the one whose cache it was, as an adapter gives it (adapters.source.ModelSource).
    tokens, layers: only these, as slices without a step; chunks and layers that they do not need are not decoded.
    backend: "cuda" decodes on the current CUDA device and stream, into its memory.

    Raises StreamError if the stream is damaged or not one, ProfileError if the profile is missing or another,
    CacheError if nothing is left of the slices, DeviceError if there is no device.
    """
    parsed = Container.parse(stream)
    form = Form(parsed)
    wanted, depth = _range(tokens, form.tokens, "tokens"), _range(layers, len(form.shape), "layers")
    if form.tier == "tokens":
        return tokens_tier.decode(parsed, form, model, wanted, depth).to(backend)
    if form.tier == "lossless":
        return lossless.decode(parsed, form, profile, wanted, depth).to(backend)
    where = _where(backend if form.reference is None else "cpu")
    shape = form.shape[depth.start : depth.stop]
    new = functools.partial(Target.new, shape, len(wanted), where.empty(form))
    target = _decode(parsed, form, profile, reference, wanted, depth, new, where)
    positions, ropes = form.positions[wanted.start : wanted.stop], form.rope[depth.start : depth.stop]
    keys, values = ([array[0] for array in side] for side in (target.keys, target.values))
    try:
        return KVCache.of_parts(keys, values, form.dtype, positions, ropes).to(backend)
    except CacheError as error:  # numbers that no cache led to
        raise StreamError(f"altered: {error}") from error


def decode_into(
    stream: Buffer,
    keys: Any,
    values: Any,
    *,
    slots: Any = None,
    profile: Profile | None = None,
    reference: Any = None,
    tokens: slice | None = None,
    layers: slice | None = None,
) -> None:
    """Decode as `decode` does, into arrays of the caller, on the device that they are on.

    keys, values: an array for each of the layers, float32, float16 or bfloat16 of NumPy, CuPy or torch, with any
        strides: [kv_heads, tokens, width]; with `slots`, [blocks, kv_heads, block, width]. Numbers are rounded to the
        array's dtype. Of pages [blocks, kv_heads, block, 2 * head_dim], give the two halves of the last axis.
    slots: [tokens] different integers: token i goes to place slots[i] % block of block slots[i] // block. Nothing is
        written anywhere else.

    Raises what `decode` raises, CacheError if arrays or slots do not fit, and DeviceError for arrays on a device if the
    stream was coded against a reference: decode that, and copy. If the stream turns out to be damaged,
    part of the tokens may have been written.
    """
    parsed = Container.parse(stream)
    form = Form(parsed)
    if form.tier != "near":
        raise ValueError(f"streams of tier {form.tier!r} are not decoded into arrays: use decode, and copy")
    wanted, depth = _range(tokens, form.tokens, "tokens"), _range(layers, len(form.shape), "layers")
    target, backend = Target.owned(keys, values, slots, form.shape[depth.start : depth.stop], len(wanted))
    if form.reference is not None and backend == "cuda":
        raise DeviceError("streams that were coded against a reference are decoded on the CPU: use decode, and copy")
    with current(target.keys[0]):
        _decode(parsed, form, profile, reference, wanted, depth, lambda: target, _where(backend))


def inspect(stream: Buffer) -> dict[str, Any]:
    """What a stream says of itself, as JSON-able values; nothing is decoded. StreamError if it is not a stream."""
    parsed = Container.parse(stream)
    form = Form(parsed)
    parts: dict[str, int] = {}
    for kind, index in parsed.sections:
        name = (NAMES | lossless.NAMES).get(kind, f"section {kind}")
        parts[name] = parts.get(name, 0) + parsed.length(kind, index)
    total = memoryview(stream).nbytes
    parts["header and index"] = total - sum(parts.values())
    count = form.tokens * form.coefs
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
        "reference": form.reference,
    }


def token_ids(
    stream: Buffer, *, reference: Any = None, profile: Profile | None = None, model: Model | None = None
) -> NDArray[np.int64]:
    """The token ids of a stream, [tokens]; nothing else is decoded.

    reference, profile: needed if it was coded against a reference. model: if ids are coded at their surprisal.
    StreamError as `decode`.
    """
    parsed = Container.parse(stream)
    form = Form(parsed)
    if form.tier == "tokens":
        return tokens_tier.read_ids(parsed, form, model)
    if form.tier == "lossless":
        return plain_ids(parsed, form, range(chunks(form.tokens)))
    aligned = Aligned.read(parsed, form, profile, reference)
    return Known.read(parsed, form, range(chunks(form.tokens)), aligned).ids


def _where(backend: str) -> Any:
    """The module that codes chunks there: engine.host or engine.device."""
    if backend not in ("cpu", "cuda"):
        raise ValueError(f'backend must be "cpu" or "cuda", not {backend!r}')
    return importlib.import_module("seqkv.engine.host" if backend == "cpu" else "seqkv.engine.device")


def _classes(kv: KVCache, mode: Mode, received: Any, where: Any) -> NDArray[np.uint8]:
    """Importance classes [layers, tokens], from attention received if that was given."""
    if received is None:
        attention = mode.attention(kv, where.blocks_of, where.SPAN)
    else:
        attention = importance.checked(received, kv.layers, kv.tokens)
    return importance.classes(attention, importance.sinks(kv.positions))


def _near(
    kv: KVCache,
    probs: TokenProbs,
    mode: Mode,
    index: int,
    classes: NDArray[np.uint8],
    reference: Reference | None,
    where: Any,
) -> tuple[dict[str, Any], list[Section]]:
    """Header entries and sections of the near tier, but for positions, at a step index."""
    about: dict[str, Any] = {"profile": mode.fingerprint, "steps": [index] * chunks(kv.tokens)}
    if isinstance(mode, Calibrated) and reference is not None:
        sections, loss, aligned, about["steps"] = Shared.encode(kv, mode, probs, classes, index, reference)
        if aligned is not None:
            about |= {"reference": reference.key, "depth": reference.depth + 1}
            sections.append(aligned.section())
        return about | {"loss": _shown(loss)}, sections
    sections = mode.sections()
    if mode.predictor == "expectation":
        if probs.k > mode.starts[-1]:
            raise ProbsError(f"{probs.k} candidates for a token, at most {mode.starts[-1]} can be: give a smaller k")
        probs = _rounded(probs)
        sections.append(Section(TOPK_IDS, 0, container.pack(probs.topk_ids)))
        sections.append(Section(TOPK_PROBS, 0, container.pack(probs.topk_probs.astype(np.float16))))
    known = Known(probs.token_ids, classes)
    for chunk in range(chunks(kv.tokens)):
        sections += known.sections(chunk)
    coded, loss = where.encode_chunks(kv, mode, probs, classes, index)
    return about | {"loss": _shown(loss)}, sections + coded


def _decode(
    parsed: Container,
    form: Form,
    profile: Profile | None,
    reference: Any,
    wanted: range,
    depth: range,
    made: Callable[[], Target],
    where: Any,
) -> Target:
    mode = stored_mode(parsed, form, profile)
    aligned = Aligned.read(parsed, form, profile, reference)
    known = Known.read(parsed, form, needed(mode, wanted), aligned)
    probs = _stored_probs(parsed, form, mode.predictor, known.ids)
    target = made()  # not before it is known that the shape is right
    where.decode_chunks(parsed, form, mode, probs, known.classes, wanted, depth, target, aligned)
    return target


def _shown(loss: near.Loss) -> dict[str, float | None]:
    """What quantisation lost, as the header has it: relative errors, and nats a token in the Fisher metric."""
    keys, values = np.sqrt(loss.error / np.maximum(loss.energy, 1e-30))
    return {"keys": _short(keys), "values": _short(values), "fisher": _short(loss.fisher / loss.tokens)}


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None


def _rounded(probs: TokenProbs) -> TokenProbs:
    """As the decoder will read them."""
    rounded = probs.topk_probs.astype(np.float16).astype(np.float32)
    return TokenProbs(probs.token_ids, probs.topk_ids, np.minimum(rounded, 1.0), probs.surprisal)


def _stored_probs(parsed: Container, form: Form, predictor: str, ids: NDArray[np.int64]) -> TokenProbs:
    if predictor != "expectation":
        with reading(f"{NAMES[TOKENS]}: altered"):
            return TokenProbs.from_tokens(ids)
    with reading(NAMES[TOPK_IDS]):
        topk = container.unpack(parsed.section(TOPK_IDS), np.int32, max_items=form.tokens * form.coefs)
    with reading(NAMES[TOPK_PROBS]):
        rows = container.unpack(parsed.section(TOPK_PROBS), np.float16, shape=topk.shape).astype(np.float32)
        return TokenProbs(ids, topk, rows, np.zeros(form.tokens, np.float32))


def _range(part: slice | None, size: int, what: str) -> range:
    if part is not None and not (isinstance(part, slice) and part.step in (None, 1)):
        raise ValueError(f"{what}: a slice without a step is needed, not {part!r}")
    out = range(size)[part] if part is not None else range(size)
    if len(out) == 0:
        raise CacheError(f"nothing is left of {size} {what} by {part}: give a slice within 0 to {size}")
    return out
