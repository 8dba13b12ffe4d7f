"""The tokens tier: a cache as the tokens that it follows from (arXiv 2604.15356, Theorem 1), and digests of it.

Decoding runs the model over the tokens and compares what it leaves with the digests, bit for bit. If the arithmetic is
not the same, it refuses and says where; it never returns another cache. Sections:

    TOKEN_IDS  token ids, see id_coding
    DIGESTS    see digests
    REPAIR     see repair; of a cache that the model does not give again by itself
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import digests, id_coding
from seqkv.engine import repair as repairing
from seqkv.engine.cache import KVCache
from seqkv.engine.container import Container, Section
from seqkv.engine.errors import CacheError, ProbsError, RecomputeError, StreamError, reading
from seqkv.engine.form import DIGESTS, NAMES, TOKEN_IDS, Form
from seqkv.engine.id_coding import Model
from seqkv.entropy_coding.intervals import MOST_SYMBOLS


def encode(
    kv: KVCache,
    token_ids: NDArray[np.int64],
    *,
    model: Model | None = None,
    archive: bool = False,
    repair: bool = False,
) -> tuple[dict[str, Any], list[Section]]:
    """The header and the sections of a cache as its tokens.

    kv: of the first tokens of a sequence, positions 0, 1, 2, ...
    token_ids: [tokens].
    model: runs once over the tokens, to make sure that it gives this cache. It can be left out, but for `archive`;
        then nobody has tried.
    archive: code ids at their surprisal. The model takes a step for each token, twice, and once more in decoding.

    repair: store as well what makes the model's own cache this one; nothing, if it is. Decoding still needs a model
        that gives again what it gave here.

    RecomputeError if the model gives another cache and there is no `repair`, ProbsError if ids are not of its
    vocabulary.
    """
    kv, ids = kv.to("cpu"), np.asarray(token_ids, np.int64)
    if not np.array_equal(kv.positions, np.arange(kv.tokens)):
        raise CacheError("the tokens tier needs positions 0, 1, 2, ...: no others come back from tokens")
    vocab = int(ids.max()) + 1 if model is None else model.vocab
    if ids.max() >= vocab or vocab > MOST_SYMBOLS:
        raise ProbsError(f"token id {ids.max()}: the vocabulary has {vocab} tokens (at most {MOST_SYMBOLS} can be)")
    kept = digests.stored(digests.digests(kv, ids))
    header: dict[str, Any] = {"tier": "tokens", "dtype": kv.dtype, "tokens": kv.tokens, "vocab": vocab}
    header |= {"ropes": [None], "positions": "arange", "profile": None, "steps": []}
    alike = len(set(kv.shape)) == 1
    header |= {"shape": kv.shape[:1], "layers": kv.layers} if alike else {"shape": kv.shape}
    if model is None and (archive or repair):
        raise ValueError("archive and repair need the model (model=...)")
    more: list[Section] = []
    if model is not None:
        header["model"] = {"fingerprint": model.fingerprint, "tokenizer": model.tokenizer_fingerprint}
        header["environment"] = model.environment
        recomputed = _recomputed(model, ids, kv.shape, kv.dtype)
        where = digests.difference(kept, digests.digests(recomputed, ids))
        if where is not None and not repair:
            raise RecomputeError(
                f"the model gives another cache of these tokens, {where}: it was computed in parts, beside other "
                "sequences, or by another library. repair=True stores the difference"
            )
        if where is not None:
            more = repairing.sections(kv, recomputed)
    if archive and model is not None:
        header["archive"] = True
        coded = id_coding.at_surprisal(ids, model)
    else:
        coded = id_coding.packed(ids, vocab)
    return header, [Section(TOKEN_IDS, 0, coded), Section(DIGESTS, 0, kept), *more]


def decode(parsed: Container, form: Form, model: Model | None, tokens: range, layers: range) -> KVCache:
    """A part of the cache; all of it is recomputed, whatever part is wanted.

    RecomputeError if the model is missing, or another one, or does not give what was stored.
    """
    if model is None:
        raise RecomputeError("this stream holds the tokens of a cache: give the model that they were for (model=...)")
    ids, (kept, _) = read_ids(parsed, form, model), digests.read(parsed, form)
    kv = repairing.apply(parsed, form, _recomputed(model, ids, form.shape, form.dtype))
    where = digests.difference(kept, digests.digests(kv, ids))
    if where is not None:
        raise RecomputeError(f"the model gives another cache than was stored, {where}. {_compared(parsed, model)}")
    part, some = slice(tokens.start, tokens.stop), range(layers.start, layers.stop)
    keys, values = ([side[layer][:, part] for layer in some] for side in (kv.keys, kv.values))
    return KVCache.of_parts(keys, values, kv.dtype, kv.positions[part], [kv.rope[layer] for layer in some])


def read_ids(parsed: Container, form: Form, model: Model | None) -> NDArray[np.int64]:
    """The token ids of a stream, [tokens].

    RecomputeError if the model is another one, or is needed and missing, or does not predict what it predicted.
    """
    header = parsed.header
    vocab, archive = header.get("vocab"), header.get("archive", False)
    if type(vocab) is not int or not 1 <= vocab <= MOST_SYMBOLS or type(archive) is not bool:
        raise StreamError(f"altered: the header's vocab or archive: {vocab!r}, {archive!r}")
    _, first = digests.read(parsed, form)
    if model is not None:
        _check_model(header, model)
    elif archive:
        raise RecomputeError("the token ids are coded under the model's predictions: give it (model=...)")
    ids = []
    with reading(NAMES[TOKEN_IDS]):
        data = parsed.section(TOKEN_IDS)
    chunks = id_coding.read(data, form.tokens, vocab, model if archive else None)
    for chunk, (some, predicted) in enumerate(chunks):
        ids.append(some)
        if digests.of_ids(some)[0] == first[chunk, 0]:
            continue
        if predicted and model is not None:
            raise RecomputeError(
                f"chunk {chunk}: the model does not predict what it predicted when the token ids were coded. "
                + _compared(parsed, model)
            )
        raise StreamError(f"chunk {chunk}: token ids: altered: they do not match their digest")
    return np.concatenate(ids)


def _check_model(header: dict[str, Any], model: Model) -> None:
    """RecomputeError if a stream names another model, or its ids cannot be of this one's vocabulary."""
    named = header.get("model", {})
    if not isinstance(named, dict):
        raise StreamError(f"altered: the header's model: {named!r}")
    fingerprint, tokenizer = named.get("fingerprint"), named.get("tokenizer")
    if fingerprint not in (None, model.fingerprint):
        raise RecomputeError(f"the stream is of model {fingerprint}, not of {model.fingerprint}: give that one")
    if tokenizer is not None and model.tokenizer_fingerprint not in (None, tokenizer):
        raise RecomputeError(
            f"the stream is of tokenizer {tokenizer}, not of {model.tokenizer_fingerprint}: give that one"
        )
    if header["vocab"] > model.vocab or (header.get("archive") and header["vocab"] != model.vocab):
        raise RecomputeError(
            f"the stream's vocabulary has {header['vocab']} tokens, the model's {model.vocab}: give the stream's model"
        )


def _recomputed(model: Model, ids: NDArray[np.int64], shape: tuple[tuple[int, int, int], ...], dtype: str) -> KVCache:
    """The cache of ids, in host memory. RecomputeError if it is not of a shape."""
    kv = model.recompute(ids).to("cpu")
    if kv.shape != shape:
        differ = next((i for i, two in enumerate(zip(shape, kv.shape, strict=False)) if two[0] != two[1]), 0)
        raise RecomputeError(
            f"the cache has {len(shape)} layers, layer {differ} of {shape[differ]}, the model's {kv.layers}, "
            f"{kv.shape[differ]}: it is of another model"
        )
    return kv if kv.dtype == dtype else KVCache(kv.keys, kv.values, rope=kv.rope, dtype=dtype)


def _compared(parsed: Container, model: Model) -> str:
    """What of the arithmetic is not as it was, in words."""
    then, now = parsed.header.get("environment"), model.environment
    if not isinstance(then, dict):
        return "The stream does not say on what it was computed."
    changed = [f"{name} was {then.get(name)}, is {now.get(name)}" for name in now if then.get(name) != now.get(name)]
    return f"Of what it was computed on, {', '.join(changed)}." if changed else "It was computed on the like of this."
