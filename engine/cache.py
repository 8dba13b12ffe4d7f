"""A transformer's KV cache in host memory or on a CUDA device, and the rotation that its keys carry."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from seqkv.cuda_kernels import device
from seqkv.engine.arrays import (
    bfloat16_bits,
    current,
    from_bfloat16_bits,
    module_of,
    on_device,
    place_of,
    round_to_bfloat16,
    to_cupy,
    to_numpy,
)
from seqkv.engine.errors import CacheError

LARGEST_SCALING = 1e6  # of a Rope; 1 / this is the smallest
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embedding of one or all layers: how keys were turned by their position.

    inv_freq: [rotary_dim / 2] float32 or float64, radians a position. With rotary_dim < head_dim only the first
        rotary_dim channels of a head are turned (partial rotary).
    scaling: factor on the turned channels (transformers' attention_scaling; 1 unless YaRN or the like), 1e-6 to
        1e6.
    layout: "half" pairs channel i with i + rotary_dim/2 (Llama), "interleaved" pairs 2i with 2i + 1 (GPT-J).

    A description that does not fit the model costs compression, never correctness: `undo` and `apply` are inverses.
    """

    inv_freq: NDArray[Any]
    scaling: float = 1.0
    layout: Literal["half", "interleaved"] = "half"

    def __post_init__(self) -> None:
        freq = np.array(self.inv_freq)
        if freq.dtype not in (np.float32, np.float64):
            freq = freq.astype(np.float64)
        if freq.ndim != 1 or freq.size == 0 or not np.isfinite(freq).all():
            raise CacheError(f"Rope.inv_freq must be a finite vector of at least one frequency, not shape {freq.shape}")
        scaling = float(self.scaling)
        if not 1 / LARGEST_SCALING <= scaling <= LARGEST_SCALING:  # beyond, float32 has no room for it or for keys
            raise CacheError(f"Rope.scaling must be a number from 1e-6 to 1e6, not {self.scaling}")
        if self.layout not in ("half", "interleaved"):
            raise CacheError(f'Rope.layout must be "half" or "interleaved", not {self.layout!r}')
        freq.flags.writeable = False
        object.__setattr__(self, "inv_freq", freq)
        object.__setattr__(self, "scaling", scaling)

    @classmethod
    def from_theta(cls, theta: float, dim: int) -> Rope:
        """The plain rotation of Llama: inv_freq[i] = theta ** (-2i / dim) for the `dim` turned channels."""
        if dim <= 0 or dim % 2:
            raise CacheError(f"Rope needs an even, positive number of channels, not {dim}")
        return cls((1.0 / theta ** (np.arange(0, dim, 2) / dim)).astype(np.float32))

    @property
    def rotary_dim(self) -> int:
        """How many leading channels of a head are turned."""
        return 2 * self.inv_freq.size

    def tables(self, positions: Any) -> tuple[Any, Any]:
        """Cosine and sine of the angle of each position and pair of channels, [tokens, rotary_dim / 2] float32, where
        positions [tokens] are: NumPy or CuPy."""
        xp = module_of(positions)
        # float64 angles: a float32 product is off by 0.004 radians at position 100,000
        angles = xp.asarray(positions, np.float64)[:, None] * xp.asarray(self.inv_freq, np.float64)
        return xp.cos(angles).astype(np.float32), xp.sin(angles).astype(np.float32)

    def pairs(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """First and second channel of each turned pair, [rotary_dim / 2] each."""
        count = self.inv_freq.size
        first = np.arange(count) if self.layout == "half" else 2 * np.arange(count)
        return first, first + (count if self.layout == "half" else 1)

    def apply(self, keys: NDArray[Any], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Turn `keys` [..., tokens, head_dim] to `positions` [tokens]; a new float32 array."""
        return self._turn(keys, positions, 1.0, self.scaling)

    def undo(self, keys: NDArray[Any], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Turn `keys` [..., tokens, head_dim] back from `positions` [tokens]; a new float32 array."""
        return self._turn(keys, positions, -1.0, 1.0 / self.scaling)

    def _turn(
        self, keys: NDArray[Any], positions: NDArray[Any], direction: float, factor: float
    ) -> NDArray[np.float32]:
        dim = self.rotary_dim
        if dim > keys.shape[-1]:
            raise CacheError(f"Rope turns {dim} channels, the keys have {keys.shape[-1]}")
        cos, sin = self.tables(positions)
        cos, sin = cos * np.float32(factor), sin * np.float32(factor * direction)
        first, second = self.pairs()
        out = np.array(keys, np.float32)
        a, b = keys[..., first], keys[..., second]
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
        return out

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values, exact."""
        freq = self.inv_freq.astype(self.inv_freq.dtype.newbyteorder("<"))
        return {
            "inv_freq": base64.b64encode(freq.tobytes()).decode("ascii"),
            "dtype": self.inv_freq.dtype.name,
            "scaling": self.scaling,
            "layout": self.layout,
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Rope:
        """The inverse of `to_dict`. CacheError if `state` is not what it wrote."""
        try:
            dtype = {"float32": "<f4", "float64": "<f8"}[state["dtype"]]
            freq = np.frombuffer(base64.b64decode(state["inv_freq"], validate=True), dtype).astype(state["dtype"])
            return cls(freq, state["scaling"], state["layout"])
        except (KeyError, TypeError, ValueError) as error:
            raise CacheError(f"not the description of a rotary embedding: {error!r}") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rope):
            return NotImplemented
        mine, its = self.inv_freq, other.inv_freq
        same = (self.scaling, self.layout, mine.dtype) == (other.scaling, other.layout, its.dtype)
        return same and mine.tobytes() == its.tobytes()

    def __hash__(self) -> int:
        return hash((self.inv_freq.tobytes(), self.scaling, self.layout))


class KVCache:
    """The keys and values that one sequence left in a transformer's attention layers.

    keys, values: one array [layers, kv_heads, tokens, head_dim] each, or a sequence with an array
        [kv_heads, tokens, head_dim] for each layer. NumPy, torch, CuPy, and anything with `__array__` or DLPack;
        float32, float16 or bfloat16, the same in all layers. The width of keys and values may differ, and so may head
        counts and widths between layers. Keys are taken as attention uses them, after the rotation.
    positions: [tokens] integers, strictly increasing, not negative: the position of each token, as the rotation
        counts it. 0, 1, 2, ... if not given.
    rope: how the keys were turned: one Rope for all layers, or a sequence with a Rope or None for each layer. None if
        they were not, or if it is not known; then only compression suffers.
    dtype: "float32", "float16" or "bfloat16": what the values are to be rounded to. The arrays' own dtype if not
        given.
    exact: also take NaN and infinity, which the lossless tier alone can code. Every bit of an array of this dtype is
        kept.

    Attributes:
        keys, values: lists of arrays [kv_heads, tokens, head_dim], an array for each layer, sharing memory with the
            arrays given where they can. In host memory NumPy arrays: float16 if dtype is "float16", else float32
            (NumPy has no bfloat16). Arrays given on a CUDA device stay there, as CuPy arrays: float16, float32, or
            uint16 with the bits of bfloat16.
        dtype: the name of the dtype that the values come from.
        positions: [tokens] int64, in host memory.
        rope: a list with a Rope or None for each layer.

    Raises CacheError for shapes that disagree, another dtype, NaN or infinity, no layers, no tokens, arrays of which
    some are on a device and some are not; DeviceError for arrays on a device if CuPy is not installed.
    """

    def __init__(
        self,
        keys: Any,
        values: Any,
        *,
        positions: Any = None,
        rope: Rope | Sequence[Rope | None] | None = None,
        dtype: str | None = None,
        exact: bool = False,
    ) -> None:
        self.keys, key_dtypes = _layers(keys, "keys")
        self.values, value_dtypes = _layers(values, "values")
        dtypes = sorted(key_dtypes | value_dtypes)
        _check_shapes(self.keys, self.values)
        if len(dtypes) != 1 or dtypes[0] not in ITEM_BYTES or (dtype is not None and dtype not in ITEM_BYTES):
            raise CacheError(
                f"a cache holds one of {', '.join(ITEM_BYTES)} in all layers, not {', '.join(dtypes)}"
                + ("" if dtype is None else f" as {dtype}")
            )
        if len({place_of(x) for x in self.keys + self.values}) != 1:
            raise CacheError("the arrays are on several devices, or some of them in host memory: move all to one place")
        if dtype is not None and dtype != dtypes[0]:
            self.keys = [_rounded(x, dtypes[0], dtype) for x in self.keys]
            self.values = [_rounded(x, dtypes[0], dtype) for x in self.values]
        self._finish(dtype or dtypes[0], positions, rope, exact)

    def _finish(
        self, dtype: str, positions: Any, rope: Rope | Sequence[Rope | None] | None, exact: bool = False
    ) -> None:
        self.dtype, self.exact = dtype, exact
        if not exact:
            self.check_finite()
        self.positions = _positions(positions, self.tokens)
        self.rope = _ropes(rope, self.keys)

    @classmethod
    def of_parts(
        cls,
        keys: list[Any],
        values: list[Any],
        dtype: str,
        positions: NDArray[np.int64],
        rope: Sequence[Rope | None],
        exact: bool = False,
    ) -> KVCache:
        """A cache of arrays that are already as its attributes have them."""
        kv = cls.__new__(cls)
        kv.keys, kv.values = keys, values
        kv._finish(dtype, positions, rope, exact)
        return kv

    def check_finite(self) -> None:
        """CacheError, with its place, if there is NaN or infinity."""
        _check_finite(self.keys, "keys")
        _check_finite(self.values, "values")

    @property
    def backend(self) -> Literal["cpu", "cuda"]:
        """Where the arrays are: "cuda" on a CUDA device, "cpu" in host memory."""
        return "cuda" if on_device(self.keys[0]) else "cpu"

    def to(self, backend: Literal["cpu", "cuda"]) -> KVCache:
        """This cache, or a copy of it on the host ("cpu") or on the current CUDA device ("cuda")."""
        if backend == self.backend:
            return self
        move = _to_device if backend == "cuda" else _to_host
        keys, values = ([move(x, self.dtype) for x in side] for side in (self.keys, self.values))
        return self.of_parts(keys, values, self.dtype, self.positions, self.rope, self.exact)

    @property
    def shape(self) -> tuple[tuple[int, int, int], ...]:
        """For each layer (kv_heads, key width, value width)."""
        return tuple((k.shape[0], k.shape[2], v.shape[2]) for k, v in zip(self.keys, self.values, strict=True))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.keys)

    @property
    def tokens(self) -> int:
        """Number of tokens, the same in all layers."""
        return self.keys[0].shape[1]

    @property
    def values_count(self) -> int:
        """How many numbers the cache holds, keys and values together."""
        return sum(x.size for x in self.keys) + sum(x.size for x in self.values)

    @property
    def nbytes(self) -> int:
        """Bytes that the cache takes in its own dtype (2 a number for bfloat16, though the arrays here are float32)."""
        return self.values_count * ITEM_BYTES[self.dtype]

    def digest(self) -> str:
        """xxh3_128 of dtype, positions, shapes and values, as 32 hexadecimal digits.

        Equal for caches that are equal bit for bit, whatever library, layout in memory or byte order they came in. It
        finds accidents, not forgeries. `rope` is not part of it.
        """
        state = xxhash.xxh3_128(self.dtype.encode())
        state.update(self.positions.astype("<i8").tobytes())
        for key, value in zip(self.keys, self.values, strict=True):
            for array in (key, value):
                state.update(np.array(array.shape, "<u8").tobytes())
                host = _to_host(array, self.dtype) if on_device(array) else array
                raw = (_bits(host) >> np.uint32(16)).astype(np.uint16) if self.dtype == "bfloat16" else host
                state.update(np.ascontiguousarray(raw, raw.dtype.newbyteorder("<")).view(np.uint8).data)
        return state.hexdigest()

    def __repr__(self) -> str:
        return f"KVCache(layers={self.layers}, tokens={self.tokens}, dtype={self.dtype}, nbytes={self.nbytes:,})"


def _layers(arrays: Any, side: str) -> tuple[list[Any], set[str]]:
    """The layers' arrays and the names of their dtypes."""
    if hasattr(arrays, "shape"):
        stacked, dtype = _taken(arrays)
        if stacked.ndim != 4:
            raise CacheError(f"{side}: expected [layers, kv_heads, tokens, head_dim], got shape {stacked.shape}")
        return list(stacked), {dtype}
    if not isinstance(arrays, Iterable):
        raise CacheError(f"{side}: expected an array, or one for each layer, not {type(arrays).__name__}")
    pairs = [_taken(array) for array in arrays]
    for layer, (array, _) in enumerate(pairs):
        if array.ndim != 3:
            raise CacheError(f"{side} of layer {layer}: expected [kv_heads, tokens, head_dim], got shape {array.shape}")
    return [array for array, _ in pairs], {dtype for _, dtype in pairs}


def _taken(array: Any) -> tuple[Any, str]:
    return to_cupy(array) if on_device(array) else to_numpy(array)


def _to_device(array: NDArray[Any], dtype: str) -> Any:
    return device.cupy().asarray(bfloat16_bits(array) if dtype == "bfloat16" else array)


def _to_host(array: Any, dtype: str) -> NDArray[Any]:
    host = to_numpy(array)[0]
    return from_bfloat16_bits(host) if dtype == "bfloat16" else host


def _check_shapes(keys: list[NDArray[Any]], values: list[NDArray[Any]]) -> None:
    if not keys and not values:
        raise CacheError("the cache is empty: it has no layers")
    if len(keys) != len(values):
        raise CacheError(f"keys have {len(keys)} layers, values {len(values)}")
    tokens = keys[0].shape[1]
    for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
        for side, array in (("keys", key), ("values", value)):
            if array.shape[1] != tokens:
                raise CacheError(f"{side} of layer {layer} hold {array.shape[1]} tokens, keys of layer 0 {tokens}")
            if array.size == 0:
                raise CacheError(f"the cache is empty: {side} of layer {layer} have shape {array.shape}")
        if key.shape[0] != value.shape[0]:
            raise CacheError(f"layer {layer}: keys have {key.shape[0]} heads, values {value.shape[0]}")


def _rounded(array: Any, given: str, dtype: str) -> Any:
    """Values of dtype `given` as those of another. NaN and infinity stay what they are, to be refused by name."""
    if given == "bfloat16" and on_device(array):
        array = from_bfloat16_bits(array)
    if dtype == "float16":
        with np.errstate(over="ignore"):  # too large becomes infinity, which is refused by name
            return array.astype(np.float16)
    wide, xp = array.astype(np.float32), module_of(array)
    if dtype == "float32":
        return wide
    if on_device(array):
        return xp.where(xp.isfinite(wide), bfloat16_bits(wide), np.uint16(_EXPONENT_16))
    # NaN stays NaN when its lowest bits go
    special = (_bits(wide) & np.uint32(0xFFFF0000)) | np.where(np.isnan(wide), np.uint32(0x400000), np.uint32(0))
    return np.where(np.isfinite(wide), round_to_bfloat16(wide), special.view(np.float32))


def _bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


_EXPONENT_16 = 0x7F80  # of bfloat16; all set for NaN and infinity


def _check_finite(arrays: list[Any], side: str) -> None:
    if on_device(arrays[0]) and not _any_not_finite(arrays):
        return
    for layer, array in enumerate(arrays):
        host = _to_host(array, "bfloat16" if array.dtype == np.uint16 else array.dtype.name)
        finite = np.isfinite(host)
        if not finite.all():
            head, token, channel = np.argwhere(~finite)[0]
            value = host[head, token, channel]
            raise CacheError(f"{side} of layer {layer}, token {token}: {value} in head {head}, channel {channel}")


def _any_not_finite(arrays: list[Any]) -> bool:
    from seqkv.cuda_kernels import elementwise  # needs Numba for CUDA

    with current(arrays[0]):
        found = device.cupy().zeros(1, np.int32)
        for array in arrays:
            elementwise.finite(array, found)
        return bool(found.get()[0])


def _positions(positions: Any, tokens: int) -> NDArray[np.int64]:
    if positions is None:
        return np.arange(tokens, dtype=np.int64)
    given = to_numpy(positions)[0]
    if given.shape != (tokens,) or given.dtype.kind not in "iu":
        raise CacheError(f"positions: expected {tokens} integers, got {given.dtype} of shape {given.shape}")
    out = given.astype(np.int64)
    if out[0] < 0 or (out[1:] <= out[:-1]).any():
        raise CacheError("positions must be strictly increasing and not negative")
    return out


def _ropes(rope: Rope | Sequence[Rope | None] | None, keys: list[NDArray[Any]]) -> list[Rope | None]:
    ropes = [rope] * len(keys) if rope is None or isinstance(rope, Rope) else list(rope)
    if len(ropes) != len(keys):
        raise CacheError(f"rope describes {len(ropes)} layers, the cache has {len(keys)}")
    for layer, (one, key) in enumerate(zip(ropes, keys, strict=True)):
        if one is not None and one.rotary_dim > key.shape[-1]:
            raise CacheError(f"layer {layer}: rope turns {one.rotary_dim} channels, the keys have {key.shape[-1]}")
    return ropes
