"""What a stream says of the cache in it: the kinds of its sections, and its header."""

from __future__ import annotations

from typing import Any

import numpy as np

from seqkv.engine import container, near, rate_control
from seqkv.engine.cache import KVCache, Rope
from seqkv.engine.container import Container, Section
from seqkv.engine.errors import SeqkvError, StreamError, reading

TOKENS, TOPK_IDS, TOPK_PROBS, POSITIONS, CLASSES, CHUNK, CHANNELS, SCALES, RUNS, DELTA = range(1, 11)  # kinds
MEANS, DELTA_MEANS = 11, 12
TOKEN_IDS, DIGESTS, REPAIR = 40, 41, 42  # of the tokens tier
PADDING = 255
SEAL = 16  # bytes before the digests
NAMES = {
    TOKENS: "token ids",
    TOPK_IDS: "top-k ids",
    TOPK_PROBS: "top-k probabilities",
    POSITIONS: "positions",
    CLASSES: "importance",
    CHUNK: "coefficients",
    CHANNELS: "channel statistics",
    SCALES: "scales",
    RUNS: "runs",
    DELTA: "deltas",
    MEANS: "means",
    DELTA_MEANS: "means of deltas",
    TOKEN_IDS: "token ids",
    DIGESTS: "digests",
    REPAIR: "repair",
    PADDING: "padding",
}
TIERS = ("near", "lossless", "tokens")
_MOST_TOKENS = 1 << 31
MOST_LAYERS = 1 << 12
MOST_VALUES_PER_BYTE = 1024
"""What a stream of the near or lossless tier may hold, as `least_bytes` counts. Streams of text hold at most 200; the
encoder pads those of constants and the like. So memory follows from how many bytes there are, not what they say."""
_LEAST_ROWS = 32  # tokens that any number of tokens is counted as, if it is smaller
MAX_DEPTH = 3  # how long chains of references get


class Form:
    """A stream's header, every entry checked. StreamError if it cannot be right."""

    def __init__(self, parsed: Container) -> None:
        header = parsed.header
        try:
            self.tier: str = header["tier"]
            if self.tier not in TIERS:
                raise StreamError(f"tier {self.tier!r} is not known to this version")
            self.dtype: str = header["dtype"]
            self.storage = np.dtype({"float32": "f4", "float16": "f2", "bfloat16": "f4"}[self.dtype])
            self.tokens = _count("tokens", header["tokens"], _MOST_TOKENS)
            shape = header["shape"]
            if len(shape) > MOST_LAYERS:  # before each is looked at
                raise StreamError(f"altered: the header has {len(shape)} layers, {MOST_LAYERS} can be")
            self.shape = tuple((_count("heads", h), _count("widths", k), _count("widths", v)) for h, k, v in shape)
            if len(self.shape) == 1:
                self.shape *= _count("layers", header.get("layers", 1), MOST_LAYERS)  # all alike
            self.coefs = sum(heads * (key + value) for heads, key, value in self.shape)
            self.profile: str | None = header["profile"]
            self.reference: str | None = header.get("reference")
            self.depth = 0 if self.reference is None else _count("depth", header["depth"], MAX_DEPTH)
            self.steps = [int(i) for i in header["steps"]]  # of chunks, in the near tier
            ropes = [None if r is None else Rope.from_dict(r) for r in header["ropes"]]
            self.rope = [ropes[i] for i in header["rope"]] if len(ropes) > 1 else ropes * len(self.shape)
            self._check(parsed)  # before anything of their size is made
            if header.get("positions") == "arange":
                self.positions = np.arange(self.tokens, dtype=np.int64)
            else:
                with reading(NAMES[POSITIONS]):
                    self.positions = container.unpack(parsed.section(POSITIONS), np.int64, shape=(self.tokens,))
        except StreamError:
            raise
        except (SeqkvError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise StreamError(f"altered: the header cannot be understood: {type(error).__name__}: {error}") from error
        if (self.positions[1:] <= self.positions[:-1]).any() or self.positions[0] < 0:
            raise StreamError("altered: positions do not increase")

    def _check(self, parsed: Container) -> None:
        """StreamError unless the numbers fit together."""
        layers = len(self.shape)
        if not layers or len(self.rope) != layers:
            raise StreamError(f"altered: the header has {layers} layers and the rotations of {len(self.rope)}")
        least = 0 if self.tier == "tokens" else least_bytes(self.shape, self.tokens, self.tier, self.profile)
        if parsed.size < least:
            raise StreamError(
                f"altered: a stream of {parsed.size} bytes cannot hold {self.tokens} tokens of {layers} layers, "
                f"which take at least {least}"
            )
        steps = chunks(self.tokens) if self.tier == "near" else 0
        if len(self.steps) != steps:
            raise StreamError(f"altered: the header has {len(self.steps)} steps for {steps} chunks")
        for chunk, step in enumerate(self.steps):
            if not rate_control.COARSEST <= step <= rate_control.FINEST:
                raise StreamError(f"altered: the header's step index of chunk {chunk} is {step}, out of range")
        if self.tier == "lossless":
            for chunk in range(chunks(self.tokens)):  # ends at the first that is missing
                parsed.length(TOKENS, chunk)
        digests = SEAL + chunks(self.tokens) * (1 + layers)
        if self.tier == "tokens" and parsed.length(DIGESTS) != digests:
            raise StreamError("altered: there are more or fewer digests than the header has chunks and layers")
        for layer, (rope, (_, width, _)) in enumerate(zip(self.rope, self.shape, strict=True)):
            # the compiled rotation does not check its indices
            if rope is not None and rope.rotary_dim > width:
                turned = f"{rope.rotary_dim} channels are turned, keys have {width}"
                raise StreamError(f"altered: the header's rotation of layer {layer}: {turned}")


def describe(kv: KVCache) -> tuple[dict[str, Any], list[Section]]:
    """What Form reads of a cache itself: header entries, and a section for positions that are not 0, 1, 2, ..."""
    distinct = list(dict.fromkeys(kv.rope))
    header: dict[str, Any] = {"tier": "near", "dtype": kv.dtype, "tokens": kv.tokens, "shape": kv.shape}
    header["ropes"] = [None if r is None else r.to_dict() for r in distinct]
    if len(distinct) > 1:
        header["rope"] = [distinct.index(r) for r in kv.rope]
    if (kv.positions == np.arange(kv.tokens)).all():
        return header | {"positions": "arange"}, []
    return header, [Section(POSITIONS, 0, container.pack(kv.positions))]


def least_bytes(shape: tuple[tuple[int, int, int], ...], tokens: int, tier: str, profile: str | None) -> int:
    """Bytes that a stream of the near or lossless tier has at the least: one for MOST_VALUES_PER_BYTE values."""
    layers = [heads * (key + value) for heads, key, value in shape]
    rows = max(tokens, _LEAST_ROWS)
    if tier == "near" and profile is None and tokens > near.CHUNK:  # what is fitted has two layers' channels as rows
        rows = max(rows, 2 * max(layers, default=0))
    return -(-rows * sum(layers) // MOST_VALUES_PER_BYTE)


def write_padded(header: dict[str, Any], sections: list[Section]) -> bytes:
    """A stream, padded to what it has at the least."""
    stream = container.write(header, sections)
    missing = least_bytes(header["shape"], header["tokens"], header["tier"], header["profile"]) - len(stream)
    return stream if missing <= 0 else container.write(header, [*sections, Section(PADDING, 0, bytes(missing))])


def chunks(tokens: int) -> int:
    """How many chunks that many tokens have."""
    return -(-tokens // near.CHUNK)


def chunk_bounds(chunk: int, tokens: int) -> tuple[int, int]:
    """First token of a chunk, and the one after its last."""
    return chunk * near.CHUNK, min((chunk + 1) * near.CHUNK, tokens)


def _count(name: str, value: Any, most: int = 1 << 20) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise StreamError(f"altered: the header's {name}: {value!r} where a number from 1 to {most} is expected")
    return value
