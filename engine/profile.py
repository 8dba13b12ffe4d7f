"""A profile: what calibration learnt about the caches of one model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from seqkv.engine import importance, prediction
from seqkv.engine.cache import KVCache
from seqkv.engine.cached import cached_property
from seqkv.engine.errors import ProfileError
from seqkv.engine.layout import block_starts, block_widths

FORMAT = 0
_MOST = 1 << 20  # heads of a layer, and width of one


@dataclass(frozen=True, eq=False)
class Profile:
    """The constants of the near tier for one model, made by `engine.calibrate`. Immutable.

    With B = 2 * layers blocks, C_b channels in block b and F_b features (see engine.prediction):

    model: fingerprint of the model, as the calibration's source gave it.
    shape: for each layer (kv_heads, key width, value width).
    predictor: one of prediction.PREDICTORS; depth: how many layers before predict a block.
    table: token table [vocab, rank] float16; rank 0 for a predictor without tokens.
    weights: B matrices [F_b, C_b] float16: features to predicted values.
    bias: [sum C_b] float32; sink_bias: [SINKS, sum C_b] float32, added for the first tokens of a sequence.
    inverse: B matrices [C_b, C_b] float16, and exponent [B] int8: 2 ** exponent * inverse, coefficients to values. The
        coefficients of a block are its residual in the Fisher metric, in the order of their variance, largest first.
    scale: [sum C_b] int16: place of each coefficient on the coder's scale axis at step 1 and gain 1.
    gains: [2, layers, importance.CLASSES] int8: gain indices (engine.quantiser) by side, layer and class.
    attention: for each layer [key and value channels + 1] float32: estimates log2 of attention received, in multiples
        of the mean, from a token's un-rotated key and value (and a constant), where it was not observed.
    curve: [points, 2] float64: step index, and log2 of the KL in nats that it gave on texts of calibration that the
        rest was not fitted on; increasing steps.
    info: what it was made from (JSON-able).
    """

    model: str
    shape: tuple[tuple[int, int, int], ...]
    predictor: str
    depth: int
    table: NDArray[np.float16]
    weights: tuple[NDArray[np.float16], ...]
    bias: NDArray[np.float32]
    sink_bias: NDArray[np.float32]
    inverse: tuple[NDArray[np.float16], ...]
    exponent: NDArray[np.int8]
    scale: NDArray[np.int16]
    gains: NDArray[np.int8]
    attention: tuple[NDArray[np.float32], ...]
    curve: NDArray[np.float64]
    info: dict[str, Any]

    def __post_init__(self) -> None:
        if not all(1 <= n <= _MOST for layer in self.shape for n in layer):
            raise ProfileError(f"profile: shape {self.shape}, where numbers from 1 to {_MOST} are expected")
        layers, total = len(self.shape), int(self.starts[-1])
        if layers == 0 or self.predictor not in prediction.PREDICTORS or not 0 <= self.depth <= layers:
            raise ProfileError(f"not a usable profile: {layers} layers, predictor {self.predictor!r}, {self.depth=}")
        dtypes = {"table": "f2", "bias": "f4", "sink_bias": "f4", "scale": "i2", "gains": "i1", "exponent": "i1"}
        dtypes |= {"curve": "f8"}
        for name, dtype in dtypes.items():
            if getattr(self, name).dtype != np.dtype(dtype):
                raise ProfileError(f"profile: {name} is {getattr(self, name).dtype}, expected {np.dtype(dtype)}")
        if self.table.ndim == 2 and self.table.shape[1] and not prediction.uses_token(self.predictor):
            raise ProfileError(f"profile: a token table of rank {self.table.shape[1]} for predictor {self.predictor!r}")
        if self.table.ndim != 2 or self.curve.ndim != 2 or self.curve.shape[1] != 2 or len(self.curve) < 2:
            raise ProfileError(f"profile: table of shape {self.table.shape}, curve of shape {self.curve.shape}")
        if not (np.diff(self.curve, axis=0) * (1, -1) > 0).all():
            raise ProfileError("profile: its curve does not fall; calibrate again, with more text")
        expected: dict[str, tuple[int, ...]] = {
            "bias": (total,),
            "sink_bias": (importance.SINKS, total),
            "scale": (total,),
            "gains": (2, layers, importance.CLASSES),
        }
        expected["exponent"] = (len(self.widths),)
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise ProfileError(f"profile: {name} has shape {getattr(self, name).shape}, expected {shape}")
        for layer, (heads, key, value) in enumerate(self.shape):
            if self.attention[layer].shape != (heads * (key + value) + 1,) or self.attention[layer].dtype != np.float32:
                raise ProfileError(f"profile: attention of layer {layer} has shape {self.attention[layer].shape}")
        rank = self.table.shape[1] if prediction.uses_token(self.predictor) else 0
        for b, width in enumerate(self.widths):
            inputs = rank + sum(self.widths[i] for i in self.sources(b))
            if self.weights[b].shape != (inputs, width) or self.inverse[b].shape != (width, width):
                raise ProfileError(f"profile: the matrices of block {b} do not fit {inputs} features, {width} channels")
        single: list[NDArray[Any]] = [self.table, self.bias, self.sink_bias, self.curve]
        arrays = [*single, *self.weights, *self.inverse, *self.attention]
        if not all(np.isfinite(a).all() for a in arrays):
            raise ProfileError("profile: it holds NaN or infinity; calibrate again")

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Channels of each block."""
        return block_widths(self.shape)

    @cached_property
    def starts(self) -> NDArray[np.int32]:
        """First coefficient of each block, and their number: [B + 1]."""
        return block_starts(self.widths)

    def sources(self, block: int) -> range:
        """The decoded blocks that predict a block."""
        return prediction.sources(block, self.predictor, self.depth)

    @cached_property
    def token_map(self) -> NDArray[np.float32]:
        """Rows of the token table to what they add to every block, [rank, sum C_b] float32: one product for all."""
        rank = self.table.shape[1]
        return np.concatenate([w[:rank] for w in self.weights], axis=1).astype(np.float32)

    @cached_property
    def maps(self) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """For each block, in float32, the weights of the blocks before and the inverse transform."""
        rank, scale = self.table.shape[1], np.exp2(self.exponent.astype(np.float32))
        return [
            (w[rank:].astype(np.float32), inverse.astype(np.float32) * s)
            for w, inverse, s in zip(self.weights, self.inverse, scale, strict=True)
        ]

    @cached_property
    def forward(self) -> list[NDArray[np.float32]]:
        """For each block the transform [C_b, C_b] float32: values to coefficients. Only an encoder needs it."""
        return [np.linalg.inv(inverse.astype(np.float64)).astype(np.float32) for _, inverse in self.maps]

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over everything that decoding depends on."""
        state = xxhash.xxh3_128(json.dumps([FORMAT, self.shape, self.predictor, self.depth]).encode())
        for array in (
            self.table,
            *self.weights,
            self.bias,
            self.sink_bias,
            *self.inverse,
            self.exponent,
            self.scale,
            self.gains,
        ):
            state.update(np.ascontiguousarray(array).view(np.uint8).data)
        return state.hexdigest()

    def _rest(self) -> str:
        """xxh3_64 of the arrays that encoding alone depends on."""
        return xxhash.xxh3_64_hexdigest(b"".join(np.asarray(a).tobytes() for a in (*self.attention, self.curve)))

    def check(self, kv: KVCache) -> None:
        """ProfileError unless a cache has the shape of this profile's model."""
        if kv.shape != self.shape:
            raise ProfileError(
                f"the profile is for caches with {_shown(self.shape)}, this one has {_shown(kv.shape)}: "
                "calibrate one for this model, or encode without a profile"
            )

    def save(self, path: str | Path) -> None:
        """Write it as a safetensors file, whole or not at all."""
        path = Path(path)
        tensors: dict[str, NDArray[Any]] = {
            "table": self.table,
            "bias": self.bias,
            "sink_bias": self.sink_bias,
            "scale": self.scale,
            "gains": self.gains,
            "exponent": self.exponent,
            "curve": self.curve,
        }
        tensors |= {f"weights.{b}": w for b, w in enumerate(self.weights)}
        tensors |= {f"inverse.{b}": i for b, i in enumerate(self.inverse)}
        tensors |= {f"attention.{layer}": a for layer, a in enumerate(self.attention)}
        form = {"format": FORMAT, "model": self.model, "shape": self.shape, "predictor": self.predictor}
        form |= {"depth": self.depth, "info": self.info, "fingerprint": self.fingerprint, "rest": self._rest()}
        part = path.with_name(path.name + ".part")
        part.write_bytes(save(tensors, metadata={"seqkv": json.dumps(form)}))
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote. ProfileError if the file is something else, damaged, or of another version."""
        try:
            with safe_open(path, framework="numpy") as file:
                form = json.loads((file.metadata() or {})["seqkv"])
                if form["format"] != FORMAT:
                    raise ProfileError(f"{path}: format {form['format']}, this version reads {FORMAT}; calibrate again")
                blocks = range(2 * len(form["shape"]))
                profile = cls(
                    model=form["model"],
                    shape=tuple((int(h), int(k), int(v)) for h, k, v in form["shape"]),
                    predictor=form["predictor"],
                    depth=int(form["depth"]),
                    weights=tuple(file.get_tensor(f"weights.{b}") for b in blocks),
                    inverse=tuple(file.get_tensor(f"inverse.{b}") for b in blocks),
                    attention=tuple(file.get_tensor(f"attention.{layer}") for layer in range(len(form["shape"]))),
                    info=form["info"],
                    **{name: file.get_tensor(name) for name in _TENSORS},
                )
                if (profile.fingerprint, profile._rest()) != (form["fingerprint"], form["rest"]):
                    raise ProfileError(f"{path}: its content does not match its fingerprint; the file is damaged")
        except FileNotFoundError:
            raise ProfileError(f"{path}: there is no such file") from None
        except (SafetensorError, OSError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ProfileError(f"{path} is not a seqkv profile: {error}") from error
        return profile


_TENSORS = ("table", "bias", "sink_bias", "exponent", "scale", "gains", "curve")


def _shown(shape: tuple[tuple[int, int, int], ...]) -> str:
    kinds = sorted(set(shape))
    return f"{len(shape)} layers of (kv_heads, key width, value width) {', '.join(map(str, kinds))}"


def check_kind(profile: Any) -> None:
    """ProfileError unless it is a Profile, or None: a path is not."""
    if profile is not None and not isinstance(profile, Profile):
        raise ProfileError(f"a profile is needed, not a {type(profile).__name__}: use engine.Profile.load(path)")
