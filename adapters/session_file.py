"""A `CompressedCache` as a safetensors file, without pickle: streams, recent tokens, and layers of other kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from seqkv import engine
from seqkv.adapters.parts import fingerprint, text_config
from seqkv.adapters.past import Piece
from seqkv.engine import CacheError, ProfileError, StreamError

FORMAT = 0
_NOT_SAVED = {"past", "index", "keep", "before", "most_decoded"}  # of a layer: what is decoded again, or made again


def save(cache: Any, path: str | Path) -> None:
    """Write it, whole or not at all."""
    tensors: dict[str, torch.Tensor] = {}
    form: dict[str, Any] = {"format": FORMAT, "kl": cache.past.kl, "tier": cache.past.tier, "window": cache.window}
    form["model"] = _model_form(cache)
    pieces = cache.past.pieces
    form["pieces"] = [[piece.start, piece.stop] for piece in pieces]
    for number, piece in enumerate(pieces):
        for row, stream in enumerate(piece.streams):
            if stream is not None:
                tensors[f"stream.{number}.{row}"] = torch.frombuffer(bytearray(stream), dtype=torch.uint8)
    for name, tensor in (("ids", cache._ids), ("hidden", cache.past.hidden)):
        if tensor is not None:
            tensors[name] = tensor
    form["layers"] = []
    for place, layer in enumerate(cache.layers):
        own = {name: value for name, value in vars(layer).items() if name not in _NOT_SAVED}
        form["layers"].append([type(layer).__name__, _plain(own, f"layer.{place}", tensors)])
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    form["digest"] = _digest(form, tensors)
    path = Path(path)
    part = path.with_name(path.name + ".part")
    part.write_bytes(to_bytes(tensors, metadata={"seqkv session": json.dumps(form)}))
    part.replace(path)


def load(cls: type, path: str | Path, model: Any, profile: Any, keep: str) -> Any:
    """What `save` wrote, as `cls`, for `model`."""
    try:
        with safe_open(path, framework="pt") as file:
            form = json.loads((file.metadata() or {})["seqkv session"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        digest = form.pop("digest")
        if form["format"] != FORMAT:
            raise StreamError(f"{path}: format {form['format']}, this version reads {FORMAT}")
        right = _digest(form, tensors) == digest
    except FileNotFoundError:
        raise StreamError(f"{path}: there is no such file") from None
    except (SafetensorError, OSError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise StreamError(f"{path} is not a session: {error}") from error
    if not right:
        raise StreamError(f"{path}: its content does not match its digest; the file is damaged")
    try:
        return _built(cls, path, form, tensors, model, profile, keep)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise StreamError(f"{path}: its parts do not fit together: {error!r}") from error


def _built(
    cls: type, path: str | Path, form: dict[str, Any], tensors: dict[str, torch.Tensor], model: Any, *given: Any
) -> Any:
    """The cache of a file whose content is what was written. given: profile, keep."""
    profile, keep = given
    sizes = {name: form[name] for name in ("kl", "tier", "window")}
    cache = cls(model, profile=profile, keep=keep, **sizes)
    kinds = [kind for kind, _ in form["layers"]]
    if [type(layer).__name__ for layer in cache.layers] != kinds or form["model"] != _model_form(cache):
        raise CacheError(f"{path} is of another model, {form['model']}, or of another release of this or transformers")
    pieces = []
    for number, (start, stop) in enumerate(form["pieces"]):
        names = [f"stream.{number}.{row}" for row in range(len(tensors["hidden"]))]
        streams = tuple(tensors[name].numpy().tobytes() if name in tensors else None for name in names)
        pieces.append(Piece(start, stop, streams))
    first = next((stream for piece in pieces for stream in piece.streams if stream is not None), None)
    if first is not None:
        made, now = engine.inspect(first)["profile"], None if profile is None else profile.fingerprint
        if made != now:
            raise ProfileError(f"{path} was made with profile {made}, not with {now}")
    cache.past.hidden = tensors.pop("hidden", None)
    cache._ids = tensors.pop("ids", None)
    for layer, (_, state) in zip(cache.layers, form["layers"], strict=True):
        vars(layer).update({name: _restored(value, tensors, model.device) for name, value in state.items()})
    if pieces:
        cache.begin()
        cache.past.take(pieces)
    cache._agreed()
    return cache


def _model_form(cache: Any) -> dict[str, Any]:
    """What tells models apart: loaded into another, a session would go on to nonsense."""
    model = cache.model
    dtype = str(model.dtype).removeprefix("torch.")
    return {"model_type": text_config(model).model_type, "dtype": dtype, "fingerprint": fingerprint(model)}


def _digest(form: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    state = xxhash.xxh3_128(json.dumps(form, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        state.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def _plain(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A layer's state as JSON, with its tensors put aside under their names. CacheError for what neither can hold."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        pairs = [[key, _plain(one, f"{name}.{key}", tensors)] for key, one in value.items()]
        if all(isinstance(key, int) for key, _ in pairs):
            return {"numbered": pairs}
        return {str(key): one for key, one in pairs}
    if isinstance(value, torch.dtype | torch.device):
        return {"torch": str(value).removeprefix("torch."), "device": isinstance(value, torch.device)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CacheError(f"{name} is a {type(value).__name__}: sessions with such layers cannot be saved")


def _restored(value: Any, tensors: dict[str, torch.Tensor], device: torch.device) -> Any:
    """The inverse of `_plain`, on this device. Each tensor is taken out, as it has one place."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors.pop(value["tensor"]).to(device)
    if "numbered" in value:
        return {key: _restored(one, tensors, device) for key, one in value["numbered"]}
    if "torch" in value:
        dtype = getattr(torch, value["torch"], None)
        if not value["device"] and not isinstance(dtype, torch.dtype):
            raise StreamError(f"{value['torch']!r} is not a dtype")
        return device if value["device"] else dtype
    return {key: _restored(one, tensors, device) for key, one in value.items()}
