"""Chunks of a cache as servers keep them, without token ids or positions, as checksummed bytes; and back.

A chunk is a tensor [2, layers, tokens, heads * width], keys and then values, or one plane [1, layers, tokens, heads *
(key width + value width)] or [layers, tokens, ...] of keys and values side by side in each head: fused layouts, and
multi-head latent attention, whose latent counts as keys. Keys are turned by their position.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import xxhash

from seqkv import engine
from seqkv.adapters.torch_tensors import to_tensor
from seqkv.engine import CacheError, KVCache, Profile, Rope, StreamError, TokenProbs, rate_control
from seqkv.engine.recognition import Recogniser, placed

Tier = Literal["near", "lossless"]
Ropes = Rope | Sequence[Rope | None] | None

_HEADER = struct.Struct("<4sBBxx4IQ")  # magic, what follows, dtype, [planes, layers, tokens, width], bytes that follow
_DIGEST = struct.Struct("<Q")  # xxh3_64 of the header and of what follows
_MAGIC, _AS_IS, _STREAM = b"SQC2", 0, 1
OVERHEAD = _HEADER.size + _DIGEST.size  # bytes that a chunk takes at most beside those that it has in memory
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_NUMBERS = tuple(_DTYPES)  # the header has a dtype's place here
_log = logging.getLogger(__name__)


class ChunkCodec:
    """Codes chunks of one model, each alone.

    profile: of the model; tokens and positions are recognised (engine.recognition). None codes without calibration.
    head: (key width, value width) of a head. Not needed with a profile; without either, a plane counts as one head.
    rope: how keys are turned, one Rope for all layers, or one or None for each; None if they are not.
    tier: "near" loses `kl` nats, or what `step` loses, as in engine.encode; "lossless" nothing.

    A chunk that the tier cannot take (infinity or NaN in the near tier), or that would not become smaller, is kept as
    it is. ValueError and ProfileError for arguments that do not fit together.
    """

    def __init__(
        self,
        profile: Profile | None = None,
        *,
        head: tuple[int, int] | None = None,
        rope: Ropes = None,
        tier: Tier = "near",
        kl: float = 0.01,
        step: float | None = None,
    ) -> None:
        if tier not in get_args(Tier):
            raise ValueError(f'tier must be "near" or "lossless", not {tier!r}')
        rate_control.check(kl, step)
        if head is not None and not (len(head) == 2 and all(isinstance(w, int) and w > 0 for w in head)):
            raise ValueError(f"head must be (key width, value width), 1 or more each, not {head!r}")
        self.profile, self.rope, self.tier, self.kl, self.step = profile, rope, tier, kl, step
        self.head = profile.shape[0][1:] if profile is not None else head
        turning = [r for r in ([rope] if isinstance(rope, Rope) else rope or ()) if r is not None]
        if turning and (self.head is None or max(r.rotary_dim for r in turning) > self.head[0]):
            raise ValueError(f"rope turns more channels than a key has, or the head is not given: {self.head}")
        self._recogniser = None if profile is None else Recogniser(profile)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ChunkCodec:
        """From what a server's configuration file can say.

        profile: path of a profile. model: path of the model's transformers directory or its config.json, which tells
        how keys are turned; or rope: {"theta": ..., "dim": ..., "scaling": 1.0, "layout": "half"}, or null for keys
        that are not turned. tier, kl, step: as in the class.

        ValueError for names or values that are not understood, and for a profile without model or rope.
        """
        unknown = sorted(set(config) - {"profile", "model", "rope", "tier", "kl", "step"})
        if unknown:
            raise ValueError(f"not understood: {', '.join(unknown)}")
        if "profile" in config and not {"model", "rope"} & set(config):
            raise ValueError(
                'a profile needs to know how keys are turned: give "model" (a path), or "rope" (maybe null)'
            )
        profile = Profile.load(config["profile"]) if "profile" in config else None
        head: tuple[int, int] | None = None
        rope: Ropes = None
        if "model" in config:
            head, rope = _of_model(Path(config["model"]))
        if "rope" in config:
            rope = _rope(config["rope"])
        if rope is not None and profile is None and head is None:
            raise ValueError('"rope" needs to know how wide heads are: give "model" or "profile"')
        given = {name: config[name] for name in ("tier", "kl", "step") if name in config}
        return cls(profile, head=head, rope=rope, **given)

    def encode(self, chunk: torch.Tensor) -> bytes:
        """A chunk as bytes.

        CacheError or ProfileError if it is not one of this model, or not in float32, float16 or bfloat16.
        """
        chunk = chunk.detach().cpu()
        layers = _heads_of(chunk, self.head)
        ropes = self._ropes(len(layers))
        try:
            stream = self._stream(layers, ropes)
        except CacheError as error:
            _log.warning("a chunk is kept as it is: %s", error)
            stream = b""
        if 0 < len(stream) < chunk.nbytes:
            return _framed(_STREAM, stream, chunk)
        return _framed(_AS_IS, chunk.contiguous().view(torch.uint8).numpy().tobytes(), chunk)

    def decode(self, data: Any, chunk: torch.Tensor) -> None:
        """Write the chunk that `data` holds into `chunk`, which has its shape and dtype. `data` may be longer.

        StreamError if it is damaged, or of another shape or dtype; ProfileError if it needs another profile; CacheError
        if this codec's heads do not fit in it. What is in `chunk` then is not to be used.
        """
        kind, about, body = _unframed(memoryview(data).cast("B"))
        here = _DTYPES.get(chunk.dtype, str(chunk.dtype)), _shape(chunk)
        if about != here:
            raise StreamError(f"the chunk is {about[0]} {about[1]}, the buffer {here[0]} {here[1]}")
        _heads_of(chunk, self.head)  # refuses what is not of this model
        host = chunk if chunk.device.type == "cpu" else torch.empty_like(chunk, device="cpu")
        if kind == _AS_IS:
            if body.nbytes != host.nbytes:
                raise StreamError(f"altered: the chunk has {body.nbytes} bytes, the buffer {host.nbytes}")
            as_bytes = torch.from_numpy(np.frombuffer(body, np.uint8).copy())
            host.copy_(as_bytes.view(host.dtype).view(host.shape))
        else:
            self._decode(body, host)
        if host is not chunk:
            chunk.copy_(host)

    def _stream(self, layers: list[tuple[torch.Tensor, torch.Tensor]], ropes: Ropes) -> bytes:
        """layers: keys and values, [heads, tokens, width]."""
        exact = self.tier == "lossless"
        kv = KVCache([k for k, _ in layers], [v for _, v in layers], rope=ropes, exact=exact)
        if self._recogniser is not None:
            kv, probs = self._recogniser.recognise(kv)
        else:
            kv, probs = placed(kv), TokenProbs.from_tokens(np.zeros(kv.tokens, np.int64))
        return engine.encode(kv, probs, tier=self.tier, profile=self.profile, kl=self.kl, step=self.step)

    def _decode(self, stream: memoryview, chunk: torch.Tensor) -> None:
        about, layers = engine.inspect(stream), _heads_of(chunk, self.head)
        keys, values = [k for k, _ in layers], [v for _, v in layers]
        shape = tuple((k.shape[0], k.shape[2], v.shape[2]) for k, v in layers)
        here = shape, keys[0].shape[1], _DTYPES[chunk.dtype]
        if here != (about["shape"], about["tokens"], about["dtype"]):
            raise StreamError(f"the chunk is {about['dtype']} {about['shape']}, the buffer {chunk.dtype} {shape}")
        if about["tier"] == "near":
            engine.decode_into(stream, keys, values, profile=self.profile)
            return
        kv = engine.decode(stream, profile=self.profile)
        for there, part in zip(keys + values, kv.keys + kv.values, strict=True):
            there.copy_(to_tensor(part, kv.dtype))

    def _ropes(self, layers: int) -> Ropes:
        """For a chunk of some layers: of all, or of those of one stage of a pipeline if these are alike."""
        if self.rope is None or isinstance(self.rope, Rope) or len(self.rope) == layers:
            return self.rope
        if len(set(self.rope)) > 1:
            raise CacheError(f"the model has {len(self.rope)} layers that turn keys differently, the chunk {layers}")
        return self.rope[0]


def _heads_of(chunk: torch.Tensor, head: tuple[int, int] | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer, [heads, tokens, width], as views. CacheError unless heads fit in the chunk."""
    if chunk.dtype not in _DTYPES:
        raise CacheError(f"chunks of {', '.join(_DTYPES.values())} are coded, not of {chunk.dtype}")
    planes = chunk[None] if chunk.ndim == 3 else chunk
    if planes.ndim != 4 or len(planes) not in (1, 2) or 0 in planes.shape:
        raise CacheError(
            f"expected [2 or 1, layers, tokens, width] or [layers, tokens, width], got {tuple(chunk.shape)}"
        )
    width = planes.shape[-1]
    if head is None:
        head = (width, width) if len(planes) == 2 else (width - width // 2, width // 2)
    key, value = head
    if len(planes) == 2 and key == value and width % key == 0:
        keys, values = (plane.unflatten(-1, (-1, key)) for plane in planes)
    elif len(planes) == 1 and width % (key + value) == 0:
        keys, values = planes[0].unflatten(-1, (-1, key + value)).split((key, value), -1)
    else:
        raise CacheError(f"heads of {key} and {value} do not fit in a chunk {tuple(chunk.shape)}")
    return list(zip(keys.transpose(1, 2), values.transpose(1, 2), strict=True))


def _shape(chunk: torch.Tensor) -> tuple[int, ...]:
    """With the plane's own axis, which a chunk of one plane may lack."""
    return (1, *chunk.shape) if chunk.ndim == 3 else tuple(chunk.shape)


def _framed(kind: int, body: bytes, chunk: torch.Tensor) -> bytes:
    header = _HEADER.pack(_MAGIC, kind, _NUMBERS.index(chunk.dtype), *_shape(chunk), len(body))
    return header + _DIGEST.pack(_digest(header, body)) + body


def _unframed(data: memoryview) -> tuple[int, tuple[str, tuple[int, ...]], memoryview]:
    """What follows, the chunk's dtype and shape, and the bytes that follow."""
    if data.nbytes < OVERHEAD:
        raise StreamError(f"truncated: a chunk has {OVERHEAD} bytes or more, this one {data.nbytes}")
    magic, kind, number, *shape, length = _HEADER.unpack(data[: _HEADER.size])
    if magic != _MAGIC:
        raise StreamError("not a chunk that this release of seqkv wrote")
    body = data[OVERHEAD : OVERHEAD + length]
    (digest,) = _DIGEST.unpack(data[_HEADER.size : OVERHEAD])
    if body.nbytes < length or _digest(data[: _HEADER.size], body) != digest:
        raise StreamError("altered or truncated: the chunk does not match its checksum")
    if kind not in (_AS_IS, _STREAM) or number >= len(_NUMBERS):
        raise StreamError(f"not understood: a chunk of kind {kind}, dtype {number}")
    return kind, (_DTYPES[_NUMBERS[number]], tuple(shape)), body


def _digest(header: bytes | memoryview, body: bytes | memoryview) -> int:
    state = xxhash.xxh3_64(header)
    state.update(body)
    return state.intdigest()


def _rope(given: Any) -> Rope | None:
    if given is None:
        return None
    try:
        plain = Rope.from_theta(float(given["theta"]), int(given["dim"]))
        if unknown := sorted(set(given) - {"theta", "dim", "scaling", "layout"}):
            raise ValueError(f"not understood: {', '.join(unknown)}")
        return Rope(plain.inv_freq, given.get("scaling", 1.0), given.get("layout", "half"))
    except (CacheError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f'rope: expected {{"theta": number, "dim": number}} or null, got {given!r}: {error}'
        ) from error


def _of_model(path: Path) -> tuple[tuple[int, int], list[Rope | None]]:
    """(key width, value width) of a head, and how each layer's keys are turned, from a model's configuration."""
    from transformers import AutoConfig

    from seqkv.adapters import rope

    config = AutoConfig.from_pretrained(str(path.parent if path.is_file() else path), local_files_only=True)
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):  # multi-head latent attention: one head, the latent and the turned part
        head = text.kv_lora_rank, text.qk_rope_head_dim
    else:
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        head = width, width
    return head, rope.of_config(config, [head[0]] * text.num_hidden_layers)
